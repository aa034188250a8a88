// SPDX-License-Identifier: Apache-2.0
/// Makes the plan of a load from its policy, and the pipeline job from the plan.
#include "load.h"

/// Pinned memory for loads to a GPU, enough to keep its bus busy.
#define RING_BYTES ((uint64_t)64 << 20)

/// The size of digested pieces, equal in all files; 0: not verified.
static uint32_t verify_bytes(const fst_loader *loader) {
    uint32_t bytes = 0;
    for (size_t i = 0; loader->verifies && i < loader->model->file_count; i++)
        if (loader->files[i].digests->kind != NULL) bytes = loader->files[i].digests->chunk_bytes;
    return bytes;
}

fst_status fsti_loader_plan(const fst_loader *loader, const fsti_plan_want *wants, size_t count,
                            bool is_view, fsti_plan *out, fst_error *error) {
    const fst_load_options *options = &loader->options;
    fsti_plan_rules rules = {.order = options->order,
                             .batch_bytes_max = loader->policy.batch_bytes_max,
                             .gaps = loader->policy.gaps,
                             .chunk_bytes_max =
                                 loader->device != NULL ? FSTI_STAGING_CHUNK_BYTES_MAX : 0,
                             .to_device = loader->device != NULL,
                             .is_view = is_view,
                             .verify_bytes = verify_bytes(loader)};
    return fsti_plan_make(loader->plan_files, wants, count, &rules, out, error);
}

/// A small budget also limits the staging ring.
static uint64_t staging_bytes(const fst_loader *loader) {
    uint64_t bytes = loader->tuning.staging_bytes, budget = loader->facts.budget_bytes;
    if (bytes == 0) bytes = RING_BYTES;
    if (budget != 0) bytes = fsti_min(bytes, budget / 4);
    return fsti_min(bytes, RING_BYTES);
}

fsti_job fsti_loader_job(fst_loader *loader, const fsti_plan *plan, const load_methods *methods) {
    const fst_load_options *options = &loader->options;
    return (fsti_job){.plan = plan,
                      .routes = methods->routes,
                      .threads = methods->threads,
                      .policy = &loader->policy,
                      .files = loader->files,
                      .verifies = loader->verifies,
                      .is_mapped = loader->mode == FST_MODE_MAP,
                      .populate = loader->tuning.map_populate != 0,
                      .allocator = options->allocator,
                      .allocator_lock = &loader->allocator_lock,
                      .device = loader->device,
                      .pins_memory = loader->pins_memory,
                      .stream = options->stream,
                      .staging_bytes = staging_bytes(loader),
                      // GPUDirect reads bypass the CPU, which could not digest them.
                      .gds = !loader->verifies ? loader->tuning.gds : FST_GDS_OFF,
                      .ring = loader->tuning.ring,
                      .numa = loader->tuning.numa,
                      .budget_bytes = loader->facts.budget_bytes,
                      .workspace_bytes = loader->workspaces.bytes,
                      .share_is_writable = true,
                      .may_wait = true,
                      .guard_allowed = loader->tuning.keep_sigbus_handler == 0,
                      .progress = options->progress,
                      .progress_context = options->progress_context};
}
