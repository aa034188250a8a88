// SPDX-License-Identifier: Apache-2.0
/// The statistics of a load.
#include <stdio.h>
#include <string.h>

#include "load.h"

/// Adds the cost of opening files and reading headers.
static void add_opening(const fst_loader *loader, fst_load_stats *stats) {
    for (size_t i = 0; i < loader->model->file_count; i++) {
        fsti_http_counts net;
        fsti_file_net_counts(loader->files[i].file, &net);
        fsti_stats_add_requests(stats, &net);
    }
}

/// Adds a note about the disk cache, which the engine does not show.
static void describe_cache(const fst_loader *loader, char *reason, size_t size) {
    size_t used = strlen(reason);
    const char *kept = NULL;
    int failure = 0;
    for (size_t i = 0; i < loader->model->file_count; i++) {
        if (fsti_file_is_disk_cached(loader->files[i].file))
            kept = fsti_file_origin_text(loader->files[i].file);
        if (failure == 0) failure = fsti_file_cache_failure(loader->files[i].file);
    }
    if (failure != 0)
        snprintf(reason + used, size - used, "; the disk cache is not written: %s",
                 strerror(failure));
    else if (kept != NULL)
        snprintf(reason + used, size - used, "; %s", kept);
}

/// Adds bytes of completely cached objects, which are read as local files.
static void add_cached(const fst_loader *loader, fst_load_stats *stats) {
    for (size_t i = 0; i < loader->plan.extent_count; i++) {
        const fsti_plan_extent *extent = &loader->plan.extents[i];
        if (fsti_file_is_disk_cached(loader->files[extent->file].file))
            stats->disk_cache_bytes += extent->end - extent->begin;
    }
}

fst_status fsti_loader_stats(fst_loader *loader, fst_load_stats *stats, fst_error *error) {
    FST_TRY(fsti_pipeline_check_owner(loader->pipeline, error));
    size_t struct_size = stats->struct_size;
    memset(stats, 0, sizeof *stats);
    stats->struct_size = struct_size;
    fsti_pipeline_stats(loader->pipeline, stats);
    char engine_reason[sizeof stats->reason];
    snprintf(engine_reason, sizeof engine_reason, "%s", stats->reason);
    bool map = loader->mode == FST_MODE_MAP;
    snprintf(stats->mode, sizeof stats->mode, "%s", map ? "map" : "load");
    if (map) snprintf(stats->engine, sizeof stats->engine, "mapping");
    snprintf(stats->reason, sizeof stats->reason, "%s", loader->policy.reason);
    // Drop the leading separator.
    if (engine_reason[0] != '\0' && engine_reason[0] != ',')
        fsti_append(stats->reason, sizeof stats->reason, "; ");
    fsti_append(stats->reason, sizeof stats->reason, engine_reason);
    stats->tensor_count = loader->plan.item_count;
    stats->bytes_requested = loader->plan.bytes_requested;
    stats->plan_ns = loader->plan_ns;
    add_opening(loader, stats);
    add_cached(loader, stats);
    describe_cache(loader, stats->reason, sizeof stats->reason);
    if (loader->share_reason[0] != '\0') {
        fsti_append(stats->reason, sizeof stats->reason, "; ");
        fsti_append(stats->reason, sizeof stats->reason, loader->share_reason);
    }
    pthread_mutex_lock(&loader->lock);
    stats->wait_ns = loader->wait_ns;
    fsti_loader_add_read_counts(loader, stats);
    pthread_mutex_unlock(&loader->lock);
    return FST_OK;
}
