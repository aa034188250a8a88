// SPDX-License-Identifier: Apache-2.0
/// Loads into memory that the processes of a node share: makes the key that identifies the bytes of
/// a segment, and decides whether a load can use one.
#include <stdio.h>
#include <string.h>

#include "load.h"

/// The key: everything that determines the bytes of a segment and their positions. It has about 100
/// bytes per tensor. Numbers are in the CPU's byte order, because all users run on one node.
typedef struct key_text {
    char *bytes;
    size_t size, capacity;
    bool has_failed;
} key_text;

#define KEY_BYTES_MAX ((size_t)1 << 32)

static void add_bytes(key_text *key, const void *bytes, size_t size) {
    if (key->has_failed || size == 0) return;
    if (key->capacity - key->size < size) {
        size_t capacity = (key->size + size) * 2;
        char *grown = capacity < KEY_BYTES_MAX ? fsti_realloc(key->bytes, capacity) : NULL;
        key->has_failed = grown == NULL;
        if (grown == NULL) return;
        key->bytes = grown;
        key->capacity = capacity;
    }
    memcpy(key->bytes + key->size, bytes, size);
    key->size += size;
}

static void add_numbers(key_text *key, const uint64_t *numbers, size_t count) {
    add_bytes(key, numbers, count * sizeof *numbers);
}

/// Adds the digest of a header, which is in memory anyway: on some file systems, files of two
/// versions of a model have the same version.
static bool add_header(key_text *key, const fsti_header *header) {
    unsigned char digest[FSTI_DIGEST_BYTES_MAX];
    if (!fsti_digest_xxh3.hash(header->bytes, header->byte_count, digest)) return false;
    add_numbers(key, (uint64_t[]){header->byte_count, header->data_begin}, 2);
    add_bytes(key, digest, fsti_digest_xxh3.digest_bytes);
    return true;
}

/// Adds a file's version, its header, and the digests that its bytes were verified with. False if
/// nothing identifies the version.
static bool add_file(key_text *key, const fsti_job_file *file) {
    char version[4096];
    const fsti_digest_list *digests = file->digests;
    if (!fsti_file_version_text(file->file, version, sizeof version) ||
        fsti_file_check(file->file, NULL) != FST_OK || !add_header(key, file->header))
        return false;
    add_bytes(key, version, strlen(version) + 1);
    add_numbers(key, (uint64_t[]){fsti_file_size(file->file)}, 1);
    bool is_verified = digests != NULL && digests->kind != NULL;
    add_numbers(key, (uint64_t[]){is_verified, is_verified ? digests->chunk_bytes : 0}, 2);
    if (!is_verified) return true;
    uint64_t count = fsti_digest_chunk_count(digests->file_bytes, digests->chunk_bytes);
    add_bytes(key, digests->kind->name, strlen(digests->kind->name) + 1);
    add_bytes(key, digests->digests, (size_t)count * digests->kind->digest_bytes);
    return true;
}

/// Adds the tensors with their positions in the batches.
static void add_items(key_text *key, const fst_loader *loader) {
    const fsti_plan *plan = &loader->plan;
    for (size_t i = 0; i < plan->item_count; i++) {
        const fsti_plan_item *item = &plan->items[i];
        const fsti_plan_want *want = &loader->wants[i];
        const fsti_header *header = loader->files[item->file].header;
        uint32_t rank = header->tensors[item->tensor].rank;
        const uint64_t numbers[] = {item->file,
                                    item->tensor,
                                    item->batch,
                                    item->buffer_offset,
                                    item->size_bytes,
                                    want->dtype,
                                    item->is_converted,
                                    want->slice_begin != NULL,
                                    rank,
                                    item->file_offset};
        add_numbers(key, numbers, sizeof numbers / sizeof *numbers);
        if (want->slice_begin == NULL) continue;
        add_numbers(key, want->slice_begin, rank);
        add_numbers(key, want->slice_end, rank);
    }
}

/// Adds the pieces of work, so that chunks with the same number are the same in all processes.
static void add_chunks(key_text *key, const fsti_plan *plan) {
    for (size_t i = 0; i < plan->chunk_count; i++) {
        const fsti_plan_chunk *chunk = &plan->chunks[i];
        const fsti_plan_extent *extent = &plan->extents[chunk->extent];
        const uint64_t numbers[] = {chunk->begin,  chunk->end,     extent->file,
                                    extent->batch, extent->linear, extent->buffer_offset,
                                    extent->begin};
        add_numbers(key, numbers, sizeof numbers / sizeof *numbers);
    }
}

/// False, with the reason in `why`, if the load cannot be identified.
static bool make_key(const fst_loader *loader, key_text *key, char *why, size_t why_size) {
    static const char layout[] = "fastsafetensors segment 2";
    const fsti_plan *plan = &loader->plan;
    add_bytes(key, layout, sizeof layout);
    add_numbers(key,
                (uint64_t[]){loader->model->file_count, plan->item_count, plan->batch_count,
                             plan->chunk_count},
                4);
    for (size_t i = 0; i < loader->model->file_count; i++) {
        bool has_writer = fsti_file_has_writer(loader->files[i].file);
        if (!has_writer && add_file(key, &loader->files[i])) continue;
        snprintf(why, why_size, "%s",
                 has_writer ? "a process has a file open for writing"
                            : "nothing identifies the version of a file");
        return false;
    }
    add_items(key, loader);
    add_chunks(key, plan);
    if (key->has_failed) snprintf(why, why_size, "out of memory");
    return !key->has_failed;
}

/// Opens the segment for a key.
static void open_segment(fst_loader *loader, const key_text *key, char *why, size_t why_size) {
    const fsti_plan *plan = &loader->plan;
    char label[512];
    const char *path = fsti_file_path(loader->files[0].file);
    // The label is printed, and other processes of the user can read it, so a URL's secrets are
    // removed.
    if (fsti_url_scheme(path) != FSTI_SCHEME_NONE)
        fsti_url_redact(path, label, sizeof label);
    else
        snprintf(label, sizeof label, "%s", path);
    uint64_t *batch_bytes = fsti_alloc_zeroed(plan->batch_count, sizeof *batch_bytes);
    if (batch_bytes == NULL) {
        snprintf(why, why_size, "out of memory");
        return;
    }
    for (size_t i = 0; i < plan->batch_count; i++) batch_bytes[i] = plan->batches[i].buffer_bytes;
    const fsti_share_request request = {.key = key->bytes,
                                        .key_bytes = key->size,
                                        .label = label,
                                        .batch_bytes = batch_bytes,
                                        .batch_count = (uint32_t)plan->batch_count,
                                        .chunk_count = (uint32_t)plan->chunk_count,
                                        .grace_s = loader->options.share_grace_s};
    loader->share = fsti_share_open(&request, why, why_size);
    fsti_free(batch_bytes);
}

void fsti_loader_open_share(fst_loader *loader) {
    char why[128] = "";
    key_text key = {.bytes = NULL};
    if (loader->options.share == FST_SHARE_OFF) return;
    if (loader->mode == FST_MODE_MAP) {
        snprintf(loader->share_reason, sizeof loader->share_reason,
                 "shared through the page cache");
        return;
    }
    if (loader->plan.bytes_planned < FSTI_POLICY_CALLER_BYTES)
        snprintf(why, sizeof why, "it is small");
    else if (!fsti_loader_can_map_twice(loader))
        snprintf(why, sizeof why, "the address space is limited");
    else if (make_key(loader, &key, why, sizeof why))
        open_segment(loader, &key, why, sizeof why);
    fsti_free(key.bytes);
    snprintf(loader->share_reason, sizeof loader->share_reason, "%s%s",
             loader->share != NULL ? "in memory that the node's processes share"
                                   : "in memory of this process: ",
             loader->share != NULL ? "" : why);
}
