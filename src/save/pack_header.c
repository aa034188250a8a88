// SPDX-License-Identifier: Apache-2.0
/// The header of a compressed file: the directory's entry, compressed tensors, others.
#include <string.h>

#include "pack_job.h"

typedef struct header_draft {
    const pack_job *job;
    bool is_draft;
    fsti_header_entry *entries;
    uint32_t *order;
    uint64_t *sizes;
    fst_metadata_entry *metadata;
    char *names, *name;
    size_t count, metadata_count;
    uint64_t at;
} header_draft;

static fst_status open_draft(header_draft *self) {
    const fsti_header *header = self->job->request->header;
    size_t count = header->tensor_count + 1, text_bytes = 1;
    for (size_t i = 0; i + 1 < count; i++)
        text_bytes += header->tensors[i].name_size + sizeof FSTI_PACKED_NAME;
    self->entries = fsti_alloc_zeroed(count, sizeof *self->entries);
    self->order = fsti_alloc_zeroed(count, sizeof *self->order);
    self->sizes = fsti_alloc_zeroed(count, sizeof *self->sizes);
    self->metadata = fsti_alloc_zeroed(header->metadata_count + 1, sizeof *self->metadata);
    self->names = self->name = fsti_alloc(text_bytes);
    if (self->entries != NULL && self->order != NULL && self->sizes != NULL &&
        self->metadata != NULL && self->names != NULL)
        return FST_OK;
    return fsti_error_memory(self->job->error, text_bytes);
}

static void close_draft(header_draft *self) {
    fsti_free(self->entries);
    fsti_free(self->order);
    fsti_free(self->sizes);
    fsti_free(self->metadata);
    fsti_free(self->names);
}

/// Places an entry after the previous ones.
static void place_entry(header_draft *self, fsti_header_entry *entry, uint64_t size_bytes) {
    entry->begin = self->at;
    entry->end = self->at += size_bytes;
    self->order[self->count] = (uint32_t)self->count;
    self->count++;
}

/// Adds a vector of bytes; a tensor's name gets the prefix.
static void add_vector(header_draft *self, const fsti_tensor *tensor, uint64_t size_bytes) {
    static const char prefix[] = FSTI_PACKED_NAME ".";
    fsti_header_entry *entry = &self->entries[self->count];
    self->sizes[self->count] = size_bytes;
    *entry = (fsti_header_entry){.name = FSTI_PACKED_NAME,
                                 .name_size = sizeof prefix - 2,
                                 .dtype = FST_DTYPE_U8,
                                 .rank = 1,
                                 .shape = &self->sizes[self->count]};
    if (tensor != NULL) {
        memcpy(self->name, prefix, sizeof prefix - 1);
        memcpy(self->name + sizeof prefix - 1, fsti_header_name(self->job->request->header, tensor),
               tensor->name_size);
        entry->name = self->name;
        entry->name_size = sizeof prefix - 1 + tensor->name_size;
        self->name += entry->name_size;
    }
    place_entry(self, entry, size_bytes);
}

/// Adds an uncompressed tensor. A draft uses the longest possible name and offsets.
static void add_tensor(header_draft *self, const fsti_tensor *tensor) {
    const fsti_header *header = self->job->request->header;
    if (self->is_draft) {
        add_vector(self, tensor, 0);
        self->count--;
        self->at = 2 * self->job->true_bytes;
    }
    fsti_header_entry *entry = &self->entries[self->count];
    if (!self->is_draft) {
        entry->name = fsti_header_name(header, tensor);
        entry->name_size = tensor->name_size;
    }
    entry->dtype = (fst_dtype)tensor->dtype;
    entry->rank = tensor->rank;
    entry->shape = fsti_header_shape(header, tensor);
    place_entry(self, entry, self->is_draft ? 0 : size_of(tensor));
}

/// Copies the original's metadata and adds the mark of a compressed file.
static void put_metadata(header_draft *self) {
    const fsti_header *header = self->job->request->header;
    size_t size = strlen(FSTI_PACKED_KEY);
    for (size_t i = 0; i < header->metadata_count; i++) {
        const fsti_metadata_pair *pair = &header->metadata[i];
        const char *key = header->bytes + pair->key.at;
        if (pair->key.size == size && memcmp(key, FSTI_PACKED_KEY, size) == 0) continue;
        self->metadata[self->metadata_count++] =
            (fst_metadata_entry){.key = key,
                                 .key_size = pair->key.size,
                                 .value = header->bytes + pair->value.at,
                                 .value_size = pair->value.size};
    }
    self->metadata[self->metadata_count++] = (fst_metadata_entry){
        .key = FSTI_PACKED_KEY, .key_size = size, .value = "1", .value_size = 1};
}

static void add_entries(header_draft *self) {
    const pack_job *job = self->job;
    add_vector(self, NULL, job->entry_bytes);
    for (uint32_t i = 0; !self->is_draft && i < job->packed_count; i++)
        add_vector(self, tensor_of(job, job->packed_tensors[i]), job->packed_bytes[i]);
    for (uint32_t i = 0; i < job->request->header->tensor_count; i++)
        if (self->is_draft || !job->is_packed[i]) add_tensor(self, tensor_of(job, i));
}

fst_status fsti_pack_header(const pack_job *job, bool is_draft, char **out, size_t *size_bytes) {
    header_draft self = {.job = job, .is_draft = is_draft};
    fst_status status = open_draft(&self);
    if (status == FST_OK) {
        add_entries(&self);
        put_metadata(&self);
        fsti_header_draft draft = {.entries = self.entries,
                                   .order = self.order,
                                   .entry_count = self.count,
                                   .metadata = self.metadata,
                                   .metadata_count = self.metadata_count,
                                   .has_metadata = true,
                                   .alignment_bytes =
                                       is_draft ? FSTI_PACKED_ALIGNMENT : job->header_bytes};
        status = fsti_header_write(&draft, out, size_bytes, job->error);
    }
    close_draft(&self);
    return status;
}
