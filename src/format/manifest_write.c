// SPDX-License-Identifier: Apache-2.0
/// Writes manifests.
#include "format.h"
#include "text_out.h"

static void put_digest(text_out *text, const fsti_digest_kind *kind, const unsigned char *digest) {
    char digits[2 * FSTI_DIGEST_BYTES_MAX + 1];
    fsti_digest_print(digest, kind->digest_bytes, digits);
    fsti_text_puts(text, digits);
}

static void put_stamp(text_out *text, const fsti_file_stamp *stamp) {
    if (stamp->inode == 0) return;
    fsti_text_puts(text, "stamp ");
    fsti_text_put_number(text, stamp->modified_ns);
    fsti_text_puts(text, " ");
    fsti_text_put_number(text, stamp->changed_ns);
    fsti_text_puts(text, " ");
    fsti_text_put_number(text, stamp->inode);
    fsti_text_puts(text, "\n");
}

static void put_file(text_out *text, const fsti_manifest_draft *draft,
                     const fsti_manifest_file *file) {
    uint64_t count = fsti_digest_chunk_count(file->size_bytes, draft->chunk_bytes);
    fsti_text_puts(text, "file ");
    fsti_text_put_number(text, file->size_bytes);
    fsti_text_puts(text, " ");
    fsti_text_put_json(text, file->name, file->name_size);
    fsti_text_puts(text, "\n");
    put_stamp(text, &file->stamp);
    if (file->header_bytes > 0) {
        fsti_text_puts(text, "header ");
        fsti_text_put_number(text, file->header_bytes);
        fsti_text_puts(text, " ");
        put_digest(text, draft->kind, file->header);
        fsti_text_puts(text, "\n");
    }
    for (uint64_t i = 0; i < count; i++) {
        fsti_text_puts(text, "chunk ");
        put_digest(text, draft->kind, file->digests + i * draft->kind->digest_bytes);
        fsti_text_puts(text, "\n");
    }
    fsti_text_put(text, file->tensor_lines, file->tensor_lines_size);
}

static bool put_seal(text_out *text, const fsti_digest_kind *kind) {
    unsigned char digest[FSTI_DIGEST_BYTES_MAX];
    if (text->failed || !kind->hash(text->bytes, text->size, digest)) return false;
    fsti_text_puts(text, "seal ");
    put_digest(text, kind, digest);
    fsti_text_puts(text, "\n");
    return !text->failed;
}

/// Bytes of the lines of chunks, which are nearly all of a large manifest.
static uint64_t chunk_lines_bytes(const fsti_manifest_draft *draft) {
    uint64_t count = 0;
    for (size_t i = 0; i < draft->file_count; i++)
        count += fsti_digest_chunk_count(draft->files[i].size_bytes, draft->chunk_bytes);
    return count * (sizeof "chunk \n" - 1 + 2 * draft->kind->digest_bytes);
}

static fst_status refuse_size(uint64_t size_bytes, fst_error *error) {
    return fsti_error_set(
        error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
        "the manifest would have %llu bytes, more than readers accept, 1 GiB. Use "
        "larger chunks or shorter digests",
        (unsigned long long)size_bytes);
}

fst_status fsti_manifest_write(const fsti_manifest_draft *draft, char **out, size_t *size_bytes,
                               fst_error *error) {
    text_out text = {0};
    uint64_t lines_bytes = chunk_lines_bytes(draft);
    if (lines_bytes > FSTI_FORMAT_TEXT_BYTES_MAX) return refuse_size(lines_bytes, error);
    fsti_text_puts(&text, "fastsafetensors-manifest 1 ");
    fsti_text_puts(&text, draft->kind->name);
    fsti_text_puts(&text, " ");
    fsti_text_put_number(&text, draft->chunk_bytes);
    fsti_text_puts(&text, "\n");
    for (size_t i = 0; i < draft->file_count; i++) put_file(&text, draft, &draft->files[i]);
    if (!put_seal(&text, draft->kind)) {
        fsti_free(text.bytes);
        return fsti_error_memory(error, text.size);
    }
    if (text.size > FSTI_FORMAT_TEXT_BYTES_MAX) {
        fsti_free(text.bytes);
        return refuse_size(text.size, error);
    }
    *out = text.bytes;
    *size_bytes = text.size;
    return FST_OK;
}

bool fsti_manifest_put_tensor(const fsti_digest_kind *kind, const unsigned char *digest,
                              const fsti_header *header, const fsti_tensor *tensor,
                              fsti_lines *out) {
    text_out text = {.bytes = out->bytes, .size = out->size, .capacity = out->capacity};
    fsti_text_puts(&text, "tensor ");
    put_digest(&text, kind, digest);
    fsti_text_puts(&text, " ");
    fsti_text_put_json(&text, fsti_header_name(header, tensor), tensor->name_size);
    fsti_text_puts(&text, "\n");
    *out = (fsti_lines){.bytes = text.bytes, .size = text.size, .capacity = text.capacity};
    return !text.failed;
}
