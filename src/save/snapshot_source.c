// SPDX-License-Identifier: Apache-2.0
/// Files that are written from a snapshot: what the snapshot is made of, and the blocks of it in
/// the order of the file.
#include "save_state.h"

/// The extents of a file: tensors and padding in its order, bytes that none has left out.
static size_t list_extents(const save_contents *contents, uint32_t file_index, fsti_extent *out) {
    const save_file *file = &contents->files[file_index];
    const uint32_t *members = fsti_contents_members(contents, file_index);
    size_t count = 0;
    for (size_t i = 0; i < file->layout.entry_count; i++) {
        uint32_t entry = file->layout.order[i];
        const fsti_header_entry *tensor = &file->layout.entries[entry];
        if (tensor->begin == tensor->end) continue;
        fsti_extent *extent = &out[count++];
        *extent = (fsti_extent){.begin = file->layout.header_bytes + tensor->begin,
                                .end = file->layout.header_bytes + tensor->end};
        if (entry >= file->layout.tensor_count) continue; // padding: zeros
        extent->data = contents->tensors[members[entry]].data;
        extent->device = contents->tensors[members[entry]].device;
    }
    return count;
}

fst_status fsti_snapshot_source_open(fst_writer *writer, const fsti_snapshot_options *options,
                                     fst_error *error) {
    const save_contents *contents = &writer->contents;
    save_source *source = &writer->source;
    size_t total = 1;
    for (uint32_t f = 0; f < contents->file_count; f++)
        total += contents->files[f].layout.entry_count;
    source->extents = fsti_alloc(total * sizeof *source->extents);
    source->snapshot_files = fsti_alloc(contents->file_count * sizeof *source->snapshot_files);
    if (source->extents == NULL || source->snapshot_files == NULL)
        return fsti_error_memory(error, total * sizeof *source->extents);
    fsti_extent *next = source->extents;
    for (uint32_t f = 0; f < contents->file_count; f++) {
        size_t count = list_extents(contents, f, next);
        source->snapshot_files[f] = (fsti_snapshot_file){next, count};
        next += count;
    }
    return fsti_snapshot_open(source->snapshot_files, contents->file_count, options,
                              &source->snapshot, error);
}

void fsti_snapshot_source_close(save_source *source) {
    fsti_snapshot_close(source->snapshot);
    fsti_free(source->extents);
    fsti_free(source->snapshot_files);
    source->snapshot = NULL;
    source->extents = NULL;
    source->snapshot_files = NULL;
}

/// The next block. While it is not there yet, writes in flight are waited for first: the copying
/// threads may be waiting for their memory.
static fst_status await_block(fst_writer *writer, uint32_t file_index, size_t block,
                              fsti_block_view *view, fst_error *error) {
    save_stage *stage = writer->contents.files[file_index].stage;
    for (;;) {
        bool may_wait = !fsti_stage_is_busy(stage);
        FST_TRY(
            fsti_snapshot_take(writer->source.snapshot, file_index, block, may_wait, view, error));
        if (view->data != NULL) return FST_OK;
        FST_TRY(fsti_stage_reap(stage, error));
        fsti_snapshot_release(writer->source.snapshot, file_index, fsti_stage_settled(stage));
    }
}

/// Counts the tensors that end at or before `offset`.
static void count_tensors(fst_writer *writer, const fsti_snapshot_file *file, size_t *extent,
                          uint64_t offset) {
    size_t done = 0;
    for (; *extent < file->extent_count && file->extents[*extent].end <= offset; ++*extent)
        done += file->extents[*extent].data != NULL;
    fsti_progress_add_tensors(&writer->progress, done);
}

static fst_status put_blocks(fst_writer *writer, uint32_t file_index, fst_error *error) {
    save_stage *stage = writer->contents.files[file_index].stage;
    size_t count = fsti_snapshot_block_count(writer->source.snapshot, file_index), extent = 0;
    fsti_block_view view;
    for (size_t i = 0; i < count; i++) {
        FST_TRY(await_block(writer, file_index, i, &view, error));
        FST_TRY(fsti_stage_put(stage, view.offset, view.data, view.size_bytes, true, error));
        fsti_snapshot_release(writer->source.snapshot, file_index, fsti_stage_settled(stage));
        count_tensors(writer, &writer->source.snapshot_files[file_index], &extent,
                      view.offset + view.size_bytes);
    }
    return FST_OK;
}

static fst_status fill_file(fst_writer *writer, uint32_t file_index, fst_error *error) {
    fst_status status = fsti_writer_fill_staged(writer, file_index, put_blocks, error);
    fsti_snapshot_release(writer->source.snapshot, file_index, UINT64_MAX);
    return status;
}

const fsti_source_kind fsti_source_snapshot = {.fill = fill_file};
