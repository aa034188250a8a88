// SPDX-License-Identifier: Apache-2.0
/// Devices: where the memory of tensors is.
///
///     fst_device device;
///     fst_device_info info = FST_STRUCT_INIT(fst_device_info);
///     if (fst_device_parse("cuda:0", &device, NULL) == FST_OK &&
///         fst_device_info_get(device, &info, NULL) == FST_OK)
///         printf("%s: %llu bytes free\n", info.name, (unsigned long long)info.memory_free);
#ifndef FASTSAFETENSORS_DEVICE_H
#define FASTSAFETENSORS_DEVICE_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/// Kinds of memory.
typedef enum fst_device_kind {
    FST_DEVICE_CPU = 0,    ///< ordinary memory
    FST_DEVICE_CUDA = 1,   ///< memory of an NVIDIA GPU (driver library libcuda.so.1)
    FST_DEVICE_HIP = 2,    ///< memory of an AMD GPU (runtime library libamdhip64.so)
    FST_DEVICE_PINNED = 3, ///< memory of the CPU that the GPU's driver has page-locked
} fst_device_kind;
#define FST_DEVICE_KIND_COUNT 4

/// A device; all zero is the CPU. Like DLPack's DLDevice, this struct never changes.
typedef struct fst_device {
    fst_device_kind kind;
    /// The driver's number (CUDA_VISIBLE_DEVICES applies); -1: the current device of the thread, or
    /// 0 if it has none.
    int32_t index;
} fst_device;

/// Parses "cpu", "cuda", "cuda:1", "hip:0", "pinned", or "gpu" (HIP if only its driver has a GPU,
/// or is installed, else CUDA; an index may follow). Does not check that the device exists. Other
/// text is FST_E_ARGUMENT.
FST_API FST_NODISCARD fst_status fst_device_parse(const char *text, fst_device *out,
                                                  fst_error *error);

/// Counts the devices of a kind that this process may use; 0 without a driver. Loads the driver
/// library but creates no context. From any thread.
FST_API int32_t fst_device_count(fst_device_kind kind);

/// Properties of a device, filled by fst_device_info_get().
typedef struct fst_device_info {
    size_t struct_size; ///< sizeof(fst_device_info)
    int32_t index;      ///< its number, also if the call was given -1
    char name[64];
    int32_t driver_version;   ///< the driver's own number: 12040 is CUDA 12.4
    int unified;              ///< 1: shares the CPU's memory, so that loads need no copy
    int converts;             ///< 1: dtypes are converted on the device; 0: on the CPU
    uint64_t memory_bytes;    ///< total
    uint64_t memory_free;     ///< now
    char converts_reason[96]; ///< why `converts` is 0
} fst_device_info;

/// Describes a device. Creates its primary context (which frameworks share) unless the process has
/// it. Errors: FST_E_UNSUPPORTED (no driver, a driver that is too old, or a child after fork()),
/// FST_E_ARGUMENT (no such device), FST_E_NO_MEMORY (the driver has none for a context),
/// FST_E_DEVICE (the driver reports another error).
FST_API FST_NODISCARD fst_status fst_device_info_get(fst_device device, fst_device_info *out,
                                                     fst_error *error);

#ifdef __cplusplus
}
#endif

#endif
