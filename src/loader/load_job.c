// SPDX-License-Identifier: Apache-2.0
/// From what was decided of a load to its plan, and to the job of a pipeline.
#include "load.h"

/// Locked memory that loads to a GPU go through: enough to keep its bus busy.
#define RING_BYTES ((uint64_t)64 << 20)

/// The size of what digests are of, the same in all files; 0: there are none.
static uint32_t verify_bytes(const fst_loader *loader) {
    uint32_t bytes = 0;
    for (size_t i = 0; loader->digests != NULL && i < loader->model->file_count; i++)
        if (loader->digests[i]->kind != NULL) bytes = loader->digests[i]->chunk_bytes;
    return bytes;
}

fst_status fsti_loader_plan(const fst_loader *loader, const fsti_plan_want *wants, size_t count,
                            bool is_view, fsti_plan *out, fst_error *error) {
    const fst_load_options *options = &loader->options;
    fsti_plan_rules rules = {.order = options->order,
                             .batch_bytes_max = loader->policy.batch_bytes_max,
                             .gaps = loader->policy.gaps,
                             .chunk_bytes_max =
                                 loader->device != NULL ? FSTI_RING_CHUNK_BYTES_MAX : 0,
                             .to_device = loader->device != NULL,
                             .is_view = is_view,
                             .verify_bytes = verify_bytes(loader),
                             .file_bytes = loader->file_bytes,
                             .made_bytes = loader->made_bytes};
    return fsti_plan_make(loader->headers, wants, count, &rules, out, error);
}

/// A budget that is smaller than the ring's default makes the ring smaller, too.
static uint64_t ring_bytes(const fst_loader *loader) {
    uint64_t bytes = loader->tuning.staging_bytes, budget = loader->facts.budget_bytes;
    if (bytes == 0) bytes = RING_BYTES;
    if (budget != 0) bytes = fsti_min(bytes, budget / 4);
    return fsti_min(bytes, RING_BYTES);
}

fsti_job fsti_loader_job(fst_loader *loader, const fsti_plan *plan, const load_ways *ways) {
    const fst_load_options *options = &loader->options;
    return (fsti_job){.plan = plan,
                      .routes = ways->routes,
                      .threads = ways->threads,
                      .policy = &loader->policy,
                      .headers = loader->headers,
                      .files = loader->files,
                      .digests = loader->digests,
                      .mappings = loader->mappings,
                      .populate = options->map_populate != 0,
                      .allocator = options->allocator,
                      .allocator_lock = &loader->allocator_lock,
                      .device = loader->device,
                      .locks_memory = loader->locks_memory,
                      .stream = options->stream,
                      .ring_bytes = ring_bytes(loader),
                      // What goes straight to a device passes no processor that could digest it.
                      .gds = loader->digests == NULL ? options->gds : FST_GDS_OFF,
                      .ring = loader->tuning.ring,
                      .numa = loader->tuning.numa,
                      .budget_bytes = loader->facts.budget_bytes,
                      .room_bytes = loader->rooms.bytes,
                      .may_wait = true,
                      .guard_allowed = options->no_sigbus_guard == 0,
                      .progress = options->progress,
                      .progress_context = options->progress_context};
}
