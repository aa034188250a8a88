// SPDX-License-Identifier: Apache-2.0
/// Bytes from the tensors' own memory, on the CPU or on devices. Tensors without data were written
/// by the caller.
#include "device_reader.h"
#include "save_state.h"

/// Writes the zeros of padding tensors, so that bytes reach the stage in order.
static fst_status write_padding(save_file *file, const fsti_header_entry *entry, fst_error *error) {
    static const char zeros[4096];
    for (uint64_t at = entry->begin; at < entry->end;) {
        uint64_t size = fsti_min(entry->end - at, sizeof zeros);
        FST_TRY(
            fsti_stage_put(file->stage, file->layout.header_bytes + at, zeros, size, true, error));
        at += size;
    }
    return FST_OK;
}

/// Writes a device tensor block by block, without a complete copy in CPU memory.
static fst_status write_device_tensor(save_file *file, const save_tensor *tensor,
                                      device_reader *reader, fst_error *error) {
    const char *data;
    uint64_t size;
    for (uint64_t done = 0; done < tensor->size_bytes; done += size) {
        FST_TRY(fsti_device_reader_next(reader, &data, &size, error));
        FST_TRY(fsti_stage_put(file->stage, tensor->offset + done, data, size, false, error));
    }
    return FST_OK;
}

static fst_status write_tensors(fst_writer *writer, uint32_t file_index, device_reader *reader,
                                fst_error *error) {
    save_file *file = &writer->contents.files[file_index];
    const uint32_t *members = fsti_contents_members(&writer->contents, file_index);
    for (size_t i = 0; i < file->layout.entry_count; i++) {
        uint32_t entry = file->layout.order[i];
        if (entry >= file->layout.tensor_count) {
            FST_TRY(write_padding(file, &file->layout.entries[entry], error));
            continue;
        }
        const save_tensor *tensor = &writer->contents.tensors[members[entry]];
        if (tensor->data == NULL || tensor->size_bytes == 0) continue;
        FST_TRY(fsti_save_is_on_device(tensor)
                    ? write_device_tensor(file, tensor, reader, error)
                    : fsti_stage_put(file->stage, tensor->offset, tensor->data, tensor->size_bytes,
                                     true, error));
        fsti_progress_add_tensors(&writer->progress, 1);
    }
    return FST_OK;
}

static fst_status put_tensors(fst_writer *writer, uint32_t file_index, fst_error *error) {
    device_reader reader = {.writer = writer, .file_index = file_index};
    fst_status status = write_tensors(writer, file_index, &reader, error);
    fsti_device_reader_close(&reader);
    return status;
}

fst_status fsti_writer_check_complete(const fst_writer *writer, fst_error *error) {
    for (size_t i = 0; i < writer->contents.tensor_count; i++) {
        const save_tensor *tensor = &writer->contents.tensors[i];
        byte_range gap;
        if (tensor->data != NULL ||
            !fsti_coverage_gap(&writer->stream.coverage[i].claimed, tensor->size_bytes, &gap))
            continue;
        return fsti_tensor_refuse_range(tensor, gap, "were never written", error);
    }
    return FST_OK;
}

/// Bytes that other processes write may come until the commit.
static fst_status check_ready(const fst_writer *writer, fst_error *error) {
    return writer->options.others_write != 0 ? FST_OK : fsti_writer_check_complete(writer, error);
}

static fst_status fill_file(fst_writer *writer, uint32_t file_index, fst_error *error) {
    return fsti_writer_fill_staged(writer, file_index, put_tensors, error);
}

const fsti_source_kind fsti_source_memory = {.fill = fill_file, .ready = check_ready};
