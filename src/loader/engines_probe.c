// SPDX-License-Identifier: Apache-2.0
/// Lists engines that work on this machine or for one file, for users.
#include <stdio.h>

#include "gpu/gpu.h"
#include "io/io.h"
#include "load.h"
#include "transfer/transfer.h"

/// The default choice of a load, without options and into owned memory.
typedef struct own_choice {
    fsti_load_policy usual;
    fsti_file_route route; ///< for owned memory
} own_choice;

/// Asks the policy as a load would.
static fst_status choose(fsti_file *file, uint64_t bytes, own_choice *out, fst_error *error) {
    fsti_load_facts facts;
    fsti_loader_file_facts(file, bytes, &facts);
    fsti_policy_choose(&facts, &out->usual);
    facts.mode = FST_MODE_LOAD;
    fsti_load_policy owned;
    fsti_policy_choose(&facts, &owned);
    const load_route_request request = {.keeps_cache = owned.keeps_cache,
                                        .is_small = fsti_policy_is_small(bytes, false)};
    return fsti_loader_find_route(file, &request, &out->route, error);
}

static void describe_engine(fst_engine number, fsti_file *file, const own_choice *choice,
                            fst_engine_info *out) {
    const fsti_io_engine *engine = fsti_io_engine_get(number);
    *out = (fst_engine_info){.name = engine->name};
    out->usable = engine->usable(file, out->reason, sizeof out->reason);
    if (choice == NULL) return;
    bool reads_absent = fsti_route_engine(&choice->route, false) == engine;
    bool reads_cached = fsti_route_engine(&choice->route, true) == engine;
    bool is_mapped = choice->usual.mode == FST_MODE_MAP;
    bool makes_views = is_mapped && number == FST_ENGINE_MMAP;
    out->chosen = is_mapped ? makes_views : reads_absent || reads_cached;
    if (!out->chosen && !reads_absent && !reads_cached) return;
    char reason[sizeof out->reason];
    snprintf(reason, sizeof reason, "%s", out->reason);
    const char *chunks = !reads_absent   ? !reads_cached ? "no" : "cached"
                         : !reads_cached ? "absent"
                                         : "all";
    snprintf(out->reason, sizeof out->reason, "%.36s; %.120s%s%s chunks", reason,
             out->chosen ? choice->usual.reason : "of mode load",
             !is_mapped    ? ": "
             : out->chosen ? "; of mode load "
                           : " ",
             chunks);
}

/// Describes a driver: the number of devices, or why it cannot be used.
static bool describe_driver(fst_device_kind kind, fst_engine_info *out) {
    fst_device_info info = {.struct_size = sizeof info};
    fst_error error;
    *out = (fst_engine_info){.name = kind == FST_DEVICE_CUDA ? "cuda" : "hip"};
    out->usable = fsti_device_info((fst_device){kind, 0}, &info, &error) == FST_OK;
    if (!out->usable)
        snprintf(out->reason, sizeof out->reason, "%.190s", error.message);
    else
        snprintf(out->reason, sizeof out->reason,
                 "%d device(s), the first: %.40s, driver %d, %.95s%s", (int)fsti_device_count(kind),
                 info.name, (int)info.driver_version,
                 info.converts ? "converts on the GPU" : info.converts_reason,
                 info.unified ? ", shared memory" : "");
    return out->usable != 0;
}

/// Whether the first device of a kind can read files, or this one, by GPUDirect.
static void describe_gds(fst_device_kind kind, bool has_driver, fsti_file *file,
                         fst_engine_info *out) {
    fsti_device *device;
    fsti_buffer *scratch;
    fst_error error;
    bool is_hip = kind == FST_DEVICE_HIP;
    *out = (fst_engine_info){.name = is_hip ? "hipfile" : "cufile"};
    if (!has_driver) {
        snprintf(out->reason, sizeof out->reason, "no %s device", is_hip ? "hip" : "cuda");
        return;
    }
    out->usable = fsti_gds_usable(is_hip, false, out->reason, sizeof out->reason);
    if (!out->usable || file == NULL) return;
    out->usable = fsti_device_get((fst_device){kind, 0}, &device, &error) == FST_OK &&
                  fsti_buffer_device(device, FSTI_GDS_SCRATCH_BYTES, &scratch, &error) == FST_OK;
    if (!out->usable) {
        snprintf(out->reason, sizeof out->reason, "%.190s", error.message);
        return;
    }
    out->usable = fsti_device_enter(device, &error) == FST_OK;
    if (out->usable) {
        bool is_good;
        out->usable =
            fsti_gds_find_verdict(file, is_hip, &is_good, out->reason, sizeof out->reason)
                ? is_good
                : fsti_gds_probe(file, is_hip, scratch->data, out->reason, sizeof out->reason);
        out->chosen = out->usable;
        fsti_device_leave(device);
    }
    fsti_buffer_unref(scratch);
}

static void describe_devices(fsti_file *file, fst_engine_info *infos, size_t capacity,
                             size_t *count) {
    static const fst_device_kind kinds[] = {FST_DEVICE_CUDA, FST_DEVICE_HIP};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        fst_engine_info driver, gds;
        bool has_driver = describe_driver(kinds[i], &driver);
        describe_gds(kinds[i], has_driver, file, &gds);
        if (*count < capacity) infos[*count] = driver;
        ++*count;
        if (*count < capacity) infos[*count] = gds;
        ++*count;
    }
}

/// Opens the first file of a model, which represents all of them. Other paths are opened as files.
static fst_status open_first(const char *path, fsti_file **out, uint64_t *bytes, fst_error *error) {
    fst_model *model;
    const model_request request = {.flags = 0};
    *bytes = 0;
    fst_error cause;
    fst_status status = fsti_model_open(path, &request, &model, &cause);
    if (status != FST_OK) {
        // An error about a folder explains more than "not a file".
        fst_status opened = fsti_file_open(path, out, error);
        if (opened == FST_E_NOT_REGULAR && error != NULL) *error = cause;
        if (opened != FST_OK) return opened == FST_E_NOT_REGULAR ? status : opened;
        *bytes = fsti_file_size(*out);
        return FST_OK;
    }
    for (size_t i = 0; i < model->file_count; i++)
        *bytes += fsti_min(fsti_file_size(model->files[i].file), UINT64_MAX - *bytes);
    *out = fsti_file_ref(model->files[0].file);
    fsti_model_unref(model);
    return FST_OK;
}

fst_status fsti_loader_probe(const char *path, fst_engine_info *infos, size_t capacity,
                             size_t *count, fst_error *error) {
    fsti_file *file = NULL;
    own_choice choice;
    uint64_t bytes;
    if (path != NULL) {
        FST_TRY(open_first(path, &file, &bytes, error));
        fst_status status = choose(file, bytes, &choice, error);
        if (status != FST_OK) {
            fsti_file_unref(file);
            return status;
        }
    }
    *count = 0;
    for (unsigned number = 0; number < FSTI_ENGINE_COUNT; number++) {
        if (number == FST_ENGINE_AUTO || number == FSTI_ENGINE_GDS) continue;
        if (*count < capacity)
            describe_engine((fst_engine)number, file, file == NULL ? NULL : &choice,
                            &infos[*count]);
        ++*count;
    }
    describe_devices(file, infos, capacity, count);
    fsti_file_unref(file);
    return FST_OK;
}
