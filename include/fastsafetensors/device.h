// SPDX-License-Identifier: Apache-2.0
/// Devices: where tensors can be loaded to. Drivers are found when they are asked for; a program
/// without a GPU never notices them.
#ifndef FASTSAFETENSORS_DEVICE_H
#define FASTSAFETENSORS_DEVICE_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/// Kinds of memory.
typedef enum fst_device_kind {
    FST_DEVICE_CPU = 0,    ///< ordinary memory
    FST_DEVICE_CUDA = 1,   ///< of an NVIDIA GPU, by the driver (libcuda.so.1)
    FST_DEVICE_HIP = 2,    ///< of an AMD GPU, by the HIP runtime (libamdhip64.so)
    FST_DEVICE_PINNED = 3, ///< the processors' memory, page-locked by the GPU's driver
} fst_device_kind;
#define FST_DEVICE_KIND_COUNT 4

/// A device; all zero is the CPU. As fixed as DLPack's DLDevice: it never grows.
typedef struct fst_device {
    fst_device_kind kind;
    int32_t
        index; ///< as the driver counts (CUDA_VISIBLE_DEVICES applies); -1: the thread's current
} fst_device;

/// Reads "cpu", "cuda", "cuda:1", "hip:0", "gpu" (whichever driver has a GPU; index as for cuda) or
/// "pinned". Only the words are looked at, except for "gpu". Else FST_E_ARGUMENT.
FST_API FST_NODISCARD fst_status fst_device_parse(const char *text, fst_device *out,
                                                  fst_error *error);

/// How many devices of a kind this process may use; 0 without a driver. Loads the driver library,
/// but makes no context. From any thread.
FST_API int32_t fst_device_count(fst_device_kind kind);

/// What a device is.
typedef struct fst_device_info {
    size_t struct_size; ///< sizeof(fst_device_info), set by the caller
    int32_t index;      ///< its own, also where -1 was asked for
    char name[64];
    int32_t driver_version;   ///< as the driver says it: 12040 is CUDA 12.4
    int unified;              ///< 1: shares the processors' memory (loads then need no copy)
    int converts;             ///< 1: conversions are done by it; 0: by the processors
    uint64_t memory_bytes;    ///< in all
    uint64_t memory_free;     ///< now
    char converts_reason[96]; ///< why `converts` is 0
} fst_device_info;

/// Opens the device, as a load would: it makes the context of that device (the primary one, which
/// frameworks share) unless the process has it, and no other. Errors: FST_E_UNSUPPORTED (no driver,
/// or too old, or after fork()), FST_E_ARGUMENT (no such device), FST_E_DEVICE.
FST_API FST_NODISCARD fst_status fst_device_info_get(fst_device device, fst_device_info *out,
                                                     fst_error *error);

#ifdef __cplusplus
}
#endif

#endif
