// SPDX-License-Identifier: Apache-2.0
/// Shared by tests of GPUs: hooks of the fake drivers, models of all kinds, and comparison with
/// loads to host memory.
#ifndef GPU_FIXTURE_H
#define GPU_FIXTURE_H

#include <fastsafetensors.h>
#include <fastsafetensors/experimental.h>
#include <stdbool.h>

#include "fake_gpu.h"

/// The hooks of a fake driver.
typedef struct gpu_fake {
    fst_device_kind kind;
    const char *name;
    fake_gpu_set_function set;
    fake_gpu_fail_function fail;
    fake_gpu_get_function get;
    fake_gpu_fill_function fill;
    fake_gpu_hold_function hold;
    fake_gpu_let_go_function let_go;
    fake_gpu_hold_copies_function hold_copies;
} gpu_fake;

/// 0: CUDA's, 1: HIP's.
const gpu_fake *gpu_fake_of(size_t index);
/// A function of a library, into the pointer at `function`.
void gpu_find_hook(void *handle, const char *name, void *function);

/// Without GPUDirect Storage.
fst_load_options gpu_options_on(fst_device_kind kind, int32_t index);
fst_tensor_view gpu_view_of(const fst_tensor *tensor);
/// The tensor as a request to save it from its own device.
fst_save_tensor gpu_save_row(const fst_tensor *tensor);
fst_model *gpu_open_model(const char *path);
/// A model of many dtypes, large and small, at misaligned offsets.
fst_model *gpu_mixed_model(void);

/// Tensors of 100 floats each, none of them aligned.
fst_model *gpu_small_model(size_t count);
/// Files, by number, of one dtype each: every pattern of 16 bits, which is every element of the
/// small types and the top of every float. Returns the path.
const char *gpu_all_patterns(size_t index);
extern const size_t gpu_pattern_count;

/// Runs this program again with another setting in its environment; true when that ended with 0, or
/// could not be done (then the test is marked as skipped). For drivers are loaded once a process.
bool gpu_restart_with(const char *name, const char *value);

/// True when both hold the same bytes; `far` lies on a device.
bool gpu_same_tensor(const fst_tensor *far, const fst_tensor *near);
/// Loads by the options and to ordinary memory, and compares; *stats (may be NULL) are the
/// former's.
bool gpu_same_load(fst_model *model, const fst_load_options *far, fst_load_stats *stats);
/// Loads the mixed model whole, in slices, with and without every conversion.
bool gpu_same_however(fst_model *model, const gpu_fake *driver);
/// Whether a load has released everything except the cached ring, and fst_memory_trim() also the
/// ring.
bool gpu_is_clean(const gpu_fake *driver);

#endif
