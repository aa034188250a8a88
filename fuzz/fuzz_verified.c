// SPDX-License-Identifier: Apache-2.0
/// Fuzzes verified loads and checks. The input selects a kind of list, changes a small model, and
/// gives the list. Manifests get a matching checksum line and statements a valid signature, so that
/// mutations get past both. The bytes that a verified load returns must have a digest in the list.
#include "digest/digest.h"
#include "format/bundle.h"
#include "format/format.h"
#include "fuzz_files.h"
#include "fuzz_keys.h"
#include "fuzz_target.h"

#define TENSOR_BYTES 64u
#define FILE_BYTES_MAX 256u

enum { LIST_MANIFEST, LIST_SUMS, LIST_SIDECAR, LIST_STATEMENT, LIST_COUNT };

static const char header[] =
    "{\"w\":{\"dtype\":\"U8\",\"shape\":[64],\"data_offsets\":[0,64]}}     ";

static fsti_key *key; ///< NULL: libcrypto is not there, and nothing is signed
static uint8_t file[FILE_BYTES_MAX];
static size_t file_size;

static void make_file(fuzz_input *input) {
    uint64_t header_bytes = strlen(header);
    file_size = 8 + (size_t)header_bytes + TENSOR_BYTES;
    memset(file, 0, sizeof file);
    memcpy(file, &header_bytes, 8);
    memcpy(file + 8, header, (size_t)header_bytes);
    for (uint32_t i = 0; i < TENSOR_BYTES; i++) file[8 + header_bytes + i] = (uint8_t)(i * 7);
    for (uint32_t left = fuzz_byte(input) % 4; left > 0; left--) {
        size_t at = fuzz_below(input, (uint32_t)file_size);
        file[at] = fuzz_byte(input);
    }
    fuzz_put("m/model.safetensors", file, file_size);
}

/// Writes the text, with a matching last line for a manifest.
static void put_manifest(const char *text, size_t size) {
    char algorithm[32] = "";
    unsigned char digest[FSTI_DIGEST_BYTES_MAX];
    char hex[2 * FSTI_DIGEST_BYTES_MAX + 1], *whole = malloc(size + sizeof hex + 16);
    require(whole != NULL);
    memcpy(whole, text, size);
    whole[size] = '\0';
    if (sscanf(whole, "fastsafetensors-manifest 1 %31s", algorithm) != 1) algorithm[0] = '\0';
    const fsti_digest_kind *kind = fsti_digest_find(algorithm, strlen(algorithm));
    if (kind == NULL) kind = &fsti_digest_sha256;
    if (kind->ready(NULL) == FST_OK && kind->hash(text, size, digest)) {
        fsti_digest_print(digest, kind->digest_bytes, hex);
        size += (size_t)sprintf(whole + size, "seal %s\n", hex);
    }
    fuzz_put("m/model.manifest", whole, size);
    free(whole);
}

static void put_bundle(const char *text, size_t size) {
    char hint[FSTI_KEY_HINT_BYTES];
    fsti_octets signature = {NULL, 0}, bundle = {NULL, 0};
    size_t signed_size;
    if (key == NULL || fsti_key_hint(key, hint, NULL) != FST_OK) return;
    char *whole = fsti_bundle_signed_text(text, size, &signed_size);
    if (whole != NULL && fsti_key_sign(key, whole, signed_size, &signature, NULL) == FST_OK &&
        fsti_bundle_write(text, size, hint, &signature, &bundle, NULL) == FST_OK)
        fuzz_put("m/model.sig", bundle.bytes, bundle.size);
    fsti_free(whole);
    fsti_free(signature.bytes);
    fsti_free(bundle.bytes);
}

/// Whether the list has a digest, by any function, of these bytes.
static bool lists_digest(const char *list, size_t size, const void *bytes, size_t byte_count) {
    static const fsti_digest_kind *const kinds[] = {&fsti_digest_sha256, &fsti_digest_blake3,
                                                    &fsti_digest_xxh3, &fsti_digest_xxh3_64};
    unsigned char digest[FSTI_DIGEST_BYTES_MAX];
    char hex[2 * FSTI_DIGEST_BYTES_MAX + 1];
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (kinds[i]->ready(NULL) != FST_OK || !kinds[i]->hash(bytes, byte_count, digest)) continue;
        fsti_digest_print(digest, kinds[i]->digest_bytes, hex);
        size_t hex_size = strlen(hex);
        for (size_t at = 0; at + hex_size <= size; at++)
            if (strncasecmp(list + at, hex, hex_size) == 0) return true;
    }
    return false;
}

/// A verified load: the list must have a digest of the file whose bytes it returns.
static void load_verified(const fst_open_options *options, const char *list, size_t size) {
    fst_model *model;
    fst_error error;
    uint8_t tensor[TENSOR_BYTES];
    if (fst_model_open("m/model.safetensors", options, &model, &error) != FST_OK) {
        fuzz_check_error(&error);
        return;
    }
    (void)fuzz_look(model);
    size_t loaded = fuzz_load(model, tensor, sizeof tensor);
    fst_model_close(model);
    if (loaded == 0) return;
    require(lists_digest(list, size, file, file_size) ||
            lists_digest(list, size, tensor, sizeof tensor)); // of kept digests of tensors
    require(loaded <= file_size && memcmp(tensor, file + file_size - TENSOR_BYTES, loaded) == 0);
}

static void see_difference(void *context, const fst_error *difference) {
    (void)context;
    fuzz_check_error(difference);
}

static void check_lists(bool is_signed) {
    fst_error error;
    fst_check_options check = FST_STRUCT_INIT(fst_check_options);
    fst_bundle_files files = FST_STRUCT_INIT(fst_bundle_files);
    check.callback = files.callback = see_difference;
    files.folder = "m";
    files.key = "public.pem";
    fst_status status = is_signed ? fst_bundle_check(&files, NULL, &error)
                                  : fst_manifest_check("m", &check, NULL, &error);
    if (status != FST_OK) fuzz_check_error(&error);
    if (status == FST_OK && !is_signed) (void)fuzz_open("m", FST_OPEN_VERIFY);
}

static void begin(void) {
    if (!fuzz_enter("verified")) return;
    if (fsti_key_read(private_pem, "key", true, &key, NULL) != FST_OK) key = NULL;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const lists[] = {"m/model.manifest", "m/SHA256SUMS",
                                        "m/model.safetensors.digest", "m/model.sig"};
    fuzz_input input = {data, size};
    fst_open_options options = FST_STRUCT_INIT(fst_open_options);
    begin();
    fuzz_clear();
    require(mkdir("m", 0700) == 0);
    fuzz_put("public.pem", public_pem, strlen(public_pem));
    uint32_t kind = fuzz_below(&input, LIST_COUNT);
    make_file(&input);
    const char *text = (const char *)input.data;
    options.flags = FST_OPEN_VERIFY;
    if (kind == LIST_MANIFEST) put_manifest(text, input.size);
    if (kind == LIST_STATEMENT) put_bundle(text, input.size);
    if (kind == LIST_SUMS || kind == LIST_SIDECAR) fuzz_put(lists[kind], text, input.size);
    if (access(lists[kind], R_OK) != 0) return 0; // without libcrypto
    if (kind == LIST_STATEMENT) {
        options.signature = lists[kind];
        options.public_key = "public.pem";
    }
    load_verified(&options, text, input.size);
    check_lists(kind == LIST_STATEMENT);
    return 0;
}
