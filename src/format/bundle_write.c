// SPDX-License-Identifier: Apache-2.0
/// Writes bundles and statements.
#include "bundle.h"

#include <stdio.h>
#include <string.h>

#include "text_out.h"

#define PAYLOAD_TYPE "application/vnd.in-toto+json"

char *fsti_bundle_signed_text(const char *payload, size_t payload_size, size_t *size) {
    char head[96];
    int head_size = snprintf(head, sizeof head, "DSSEv1 %zu " PAYLOAD_TYPE " %zu ",
                             strlen(PAYLOAD_TYPE), payload_size);
    char *text = fsti_alloc((size_t)head_size + payload_size);
    if (text == NULL) return NULL;
    memcpy(text, head, (size_t)head_size);
    memcpy(text + head_size, payload, payload_size);
    *size = (size_t)head_size + payload_size;
    return text;
}

static void put_base64(text_out *text, const unsigned char *bytes, size_t size) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < size; i += 3) {
        size_t count = size - i < 3 ? size - i : 3;
        uint32_t group = 0;
        for (size_t j = 0; j < 3; j++) group = group << 8 | (j < count ? bytes[i + j] : 0u);
        char out[4];
        for (size_t j = 0; j < 4; j++)
            out[j] = j <= count ? digits[group >> (18 - 6 * j) & 63] : '=';
        fsti_text_put(text, out, 4);
    }
}

static fst_status finish_text(const text_out *text, char **out, size_t *size, fst_error *error) {
    if (text->failed) {
        fsti_free(text->bytes);
        return fsti_error_memory(error, text->size);
    }
    *out = text->bytes;
    *size = text->size;
    return FST_OK;
}

static void put_digest(text_out *text, const unsigned char *digest) {
    char digits[65];
    fsti_digest_print(digest, 32, digits);
    fsti_text_puts(text, "\"");
    fsti_text_puts(text, digits);
    fsti_text_puts(text, "\"");
}

/// The digest over all files' digests, in order.
static bool digest_all(const fsti_statement_draft *draft, unsigned char *digest) {
    void *state = fsti_digest_sha256.begin();
    bool good = state != NULL;
    for (size_t i = 0; i < draft->file_count && good; i++)
        good = fsti_digest_sha256.update(state, draft->files[i].digest, 32);
    return state != NULL && fsti_digest_sha256.end(state, digest) && good;
}

/// Adds a member that model_signing ignores, with which unchanged files are recognised when signing
/// again.
static void put_stamp(text_out *text, const fsti_signed_file *file) {
    const uint64_t numbers[] = {file->size_bytes, file->stamp.modified_ns, file->stamp.changed_ns,
                                file->stamp.inode};
    if (file->stamp.inode == 0) return;
    // As a string, because not all JSON readers keep 64-bit numbers.
    fsti_text_puts(text, ", \"stamp\": \"");
    for (size_t i = 0; i < 4; i++) {
        fsti_text_puts(text, i == 0 ? "" : " ");
        fsti_text_put_number(text, numbers[i]);
    }
    fsti_text_puts(text, "\"");
}

static void put_resources(text_out *text, const fsti_statement_draft *draft) {
    for (size_t i = 0; i < draft->file_count; i++) {
        fsti_text_puts(text, i == 0 ? "\n      {" : ",\n      {");
        fsti_text_puts(text, "\"algorithm\": \"sha256\", \"name\": ");
        fsti_text_put_json(text, draft->files[i].name, draft->files[i].name_size);
        fsti_text_puts(text, ", \"digest\": ");
        put_digest(text, draft->files[i].digest);
        put_stamp(text, &draft->files[i]);
        fsti_text_puts(text, "}");
    }
}

fst_status fsti_statement_write(const fsti_statement_draft *draft, char **out, size_t *size,
                                fst_error *error) {
    unsigned char digest[FSTI_DIGEST_BYTES_MAX];
    text_out text = {0};
    if (!digest_all(draft, digest)) return fsti_error_memory(error, 64);
    fsti_text_puts(&text, "{\n  \"_type\": \"https://in-toto.io/Statement/v1\",\n  \"subject\": "
                          "[{\"name\": ");
    fsti_text_put_json(&text, draft->subject, strlen(draft->subject));
    fsti_text_puts(&text, ", \"digest\": {\"sha256\": ");
    put_digest(&text, digest);
    fsti_text_puts(&text, "}}],\n  \"predicateType\": \"https://model_signing/signature/v1.0\",\n"
                          "  \"predicate\": {\n    \"resources\": [");
    put_resources(&text, draft);
    fsti_text_puts(&text, "\n    ],\n    \"serialization\": {\"method\": \"files\", \"hash_type\": "
                          "\"sha256\", \"allow_symlinks\": ");
    fsti_text_puts(&text, draft->allows_links ? "true" : "false");
    fsti_text_puts(&text, ", \"ignore_paths\": [");
    for (size_t i = 0; i < draft->ignored_count; i++) {
        fsti_text_puts(&text, i == 0 ? "" : ", ");
        fsti_text_put_json(&text, draft->ignored[i], strlen(draft->ignored[i]));
    }
    fsti_text_puts(&text, "]}\n  }\n}");
    return finish_text(&text, out, size, error);
}

fst_status fsti_bundle_write(const char *payload, size_t payload_size, const char *hint,
                             const fsti_octets *signature, fsti_octets *out, fst_error *error) {
    text_out text = {0};
    char *bytes = NULL;
    fsti_text_puts(&text, "{\"mediaType\":\"application/vnd.dev.sigstore.bundle.v0.3+json\","
                          "\"verificationMaterial\":{\"publicKey\":{\"hint\":\"");
    fsti_text_puts(&text, hint);
    fsti_text_puts(&text, "\"},\"tlogEntries\":[]},\"dsseEnvelope\":{\"payload\":\"");
    put_base64(&text, (const unsigned char *)payload, payload_size);
    fsti_text_puts(&text, "\",\"payloadType\":\"" PAYLOAD_TYPE "\",\"signatures\":[{\"sig\":\"");
    put_base64(&text, signature->bytes, signature->size);
    fsti_text_puts(&text, "\",\"keyid\":\"\"}]}}");
    FST_TRY(finish_text(&text, &bytes, &out->size, error));
    out->bytes = (unsigned char *)bytes;
    return FST_OK;
}
