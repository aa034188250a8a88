// SPDX-License-Identifier: Apache-2.0
/// Files that are written from a snapshot: what the snapshot is made of, and the blocks of it in
/// the order of the file.
#include "save_state.h"

/// The extents of a file: tensors and padding in its order, bytes that none has left out.
static size_t list_extents(const fst_writer *writer, uint32_t file_index, fsti_extent *out) {
    const save_file *file = &writer->files[file_index];
    const uint32_t *members = writer->members + writer->member_begin[file_index];
    size_t count = 0;
    for (size_t i = 0; i < file->layout.entry_count; i++) {
        uint32_t entry = file->layout.order[i];
        const fsti_header_entry *tensor = &file->layout.entries[entry];
        if (tensor->begin == tensor->end) continue;
        fsti_extent *extent = &out[count++];
        *extent = (fsti_extent){.begin = file->layout.header_bytes + tensor->begin,
                                .end = file->layout.header_bytes + tensor->end};
        if (entry >= file->layout.tensor_count) continue; // padding: zeros
        extent->data = writer->tensors[members[entry]].data;
        extent->device = writer->tensors[members[entry]].device;
    }
    return count;
}

fst_status fsti_writer_plan_snapshot(fst_writer *writer, const fsti_snapshot_options *options,
                                     fst_error *error) {
    size_t total = 1;
    for (uint32_t f = 0; f < writer->file_count; f++) total += writer->files[f].layout.entry_count;
    writer->extents = fsti_alloc(total * sizeof *writer->extents);
    writer->snapshot_files = fsti_alloc(writer->file_count * sizeof *writer->snapshot_files);
    if (writer->extents == NULL || writer->snapshot_files == NULL)
        return fsti_error_memory(error, total * sizeof *writer->extents);
    fsti_extent *next = writer->extents;
    for (uint32_t f = 0; f < writer->file_count; f++) {
        size_t count = list_extents(writer, f, next);
        writer->snapshot_files[f] = (fsti_snapshot_file){next, count};
        next += count;
    }
    return fsti_snapshot_open(writer->snapshot_files, writer->file_count, options,
                              &writer->snapshot, error);
}

void fsti_writer_drop_snapshot(fst_writer *writer) {
    fsti_snapshot_close(writer->snapshot);
    fsti_free(writer->extents);
    fsti_free(writer->snapshot_files);
    writer->snapshot = NULL;
    writer->extents = NULL;
    writer->snapshot_files = NULL;
}

/// The next block. While it is not there yet, writes in flight are waited for first: the copying
/// threads may be waiting for their memory.
static fst_status await_block(fst_writer *writer, uint32_t file_index, size_t block,
                              fsti_block_view *view, fst_error *error) {
    save_stage *stage = writer->files[file_index].stage;
    for (;;) {
        bool may_wait = !fsti_stage_is_busy(stage);
        FST_TRY(fsti_snapshot_take(writer->snapshot, file_index, block, may_wait, view, error));
        if (view->data != NULL) return FST_OK;
        FST_TRY(fsti_stage_reap(stage, error));
        fsti_snapshot_release(writer->snapshot, file_index, fsti_stage_settled(stage));
    }
}

/// Counts the tensors that end at or before `offset`.
static void count_tensors(fst_writer *writer, const fsti_snapshot_file *file, size_t *extent,
                          uint64_t offset) {
    size_t done = 0;
    for (; *extent < file->extent_count && file->extents[*extent].end <= offset; ++*extent)
        done += file->extents[*extent].data != NULL;
    pthread_mutex_lock(&writer->lock);
    writer->tensors_done += done;
    pthread_mutex_unlock(&writer->lock);
}

fst_status fsti_writer_put_snapshot(fst_writer *writer, uint32_t file_index, fst_error *error) {
    save_stage *stage = writer->files[file_index].stage;
    size_t count = fsti_snapshot_block_count(writer->snapshot, file_index), extent = 0;
    fsti_block_view view;
    for (size_t i = 0; i < count; i++) {
        FST_TRY(await_block(writer, file_index, i, &view, error));
        FST_TRY(fsti_stage_put(stage, view.offset, view.data, view.size_bytes, true, error));
        fsti_snapshot_release(writer->snapshot, file_index, fsti_stage_settled(stage));
        count_tensors(writer, &writer->snapshot_files[file_index], &extent,
                      view.offset + view.size_bytes);
    }
    return FST_OK;
}
