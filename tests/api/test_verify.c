// SPDX-License-Identifier: Apache-2.0
/// Manifests, and verified loads: the verified bytes are the returned ones.
#include <errno.h>
#include <fastsafetensors.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"
#include "verify_fixture.h"

static fst_status open_verified(const char *path, fst_model **model, fst_error *error) {
    fst_open_options options = FST_STRUCT_INIT(fst_open_options);
    options.flags = FST_OPEN_VERIFY;
    return fst_model_open(path, &options, model, error);
}

/// Loads everything and compares every returned tensor; *handed_out counts them.
static fst_status load_all(const char *path, const fst_load_options *wish, fst_load_stats *stats,
                           size_t *handed_out, fst_error *error) {
    fst_model *model;
    fst_loader *loader;
    *handed_out = 0;
    fst_status status = open_verified(path, &model, error);
    if (status != FST_OK) return status;
    status = fst_loader_open(model, wish, &loader, error);
    fst_model_close(model);
    if (status != FST_OK) return status;
    for (;;) {
        fst_tensor *tensor;
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        status = fst_loader_next(loader, -1, &tensor, error);
        if (status != FST_OK) break;
        if (fst_tensor_view_get(tensor, &view, NULL) != FST_OK) abort();
        uint64_t number = strtoull(view.name + 1, NULL, 10);
        if (!fixture_matches(view.data, number * BYTES, view.size_bytes)) status = FST_E_IO;
        fst_tensor_unref(tensor);
        if (status != FST_OK) break;
        ++*handed_out;
    }
    if (status == FST_END) status = FST_OK;
    if (stats != NULL && status == FST_OK) {
        *stats = FST_STRUCT_INIT(fst_load_stats);
        status = fst_loader_stats_get(loader, stats, error);
    }
    fst_loader_close(loader);
    return status;
}

static const fst_load_tuning tunings[] = {
    {.struct_size = sizeof(fst_load_tuning), .engine = FST_ENGINE_PREAD},
    {.struct_size = sizeof(fst_load_tuning), .engine = FST_ENGINE_DIRECT},
    {.struct_size = sizeof(fst_load_tuning), .engine = FST_ENGINE_URING},
    {.struct_size = sizeof(fst_load_tuning), .keep_sigbus_handler = 1},
};

static const fst_load_options ways[] = {
    {.struct_size = sizeof(fst_load_options)},
    {.struct_size = sizeof(fst_load_options), .mode = FST_MODE_MAP},
    {.struct_size = sizeof(fst_load_options), .tuning = &tunings[0]},
    {.struct_size = sizeof(fst_load_options), .tuning = &tunings[1]},
    {.struct_size = sizeof(fst_load_options), .tuning = &tunings[2]},
    {.struct_size = sizeof(fst_load_options), .cache = FST_CACHE_KEEP},
    {.struct_size = sizeof(fst_load_options), .budget_bytes = 4u << 20},
    {.struct_size = sizeof(fst_load_options), .thread_count = 1},
    {.struct_size = sizeof(fst_load_options), .mode = FST_MODE_MAP, .tuning = &tunings[3]},
};
#define WAY_COUNT (sizeof ways / sizeof *ways)

/// Engines that this machine does not have say so.
static bool is_missing(fst_status status, const fst_load_options *way) {
    return status == FST_E_UNSUPPORTED && way->tuning != NULL;
}

TEST(files_load_verified_by_every_engine_and_digest)
{
    for (int digest = 0; digest < FST_DIGEST_XXH3_64; digest++) {
        const char *path = make_listed("whole", (fst_digest)digest, digest == 1 ? 64u << 10 : 0);
        CHECK(path != NULL);
        for (size_t i = 0; i < WAY_COUNT; i++) {
            fst_load_stats stats;
            fst_error error = {0};
            size_t handed_out;
            if (i % 2 == 0) fixture_evict(path);
            fst_status status = load_all(path, &ways[i], &stats, &handed_out, &error);
            if (is_missing(status, &ways[i])) continue;
            CHECK_TEXT(error.message, "");
            CHECK_INT(status, FST_OK);
            CHECK_INT(handed_out, COUNT);
            // All of the file's chunks, the ones that two batches share twice.
            CHECK(stats.verified_bytes >= size_of(path));
            if (ways[i].budget_bytes == 0) CHECK(stats.verified_bytes <= size_of(path) + 2 * CHUNK);
        }
    }
}

TEST(batches_share_few_verified_chunks)
{
    // Batches of 64 MiB would hold one of these each, and read the chunk at each border twice.
    const char *path = fixture_tensors("shared", 5, (33u << 20) + 8);
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    fst_load_stats stats;
    fst_error error;
    options.mode = FST_MODE_LOAD;
    CHECK_INT(fst_manifest_write(path, NULL, NULL, NULL, &error), FST_OK);
    fst_model *model;
    fst_loader *loader;
    CHECK_INT(open_verified(path, &model, &error), FST_OK);
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_OK);
    CHECK_INT(fst_loader_wait(loader, -1, &error), FST_OK);
    stats = FST_STRUCT_INIT(fst_load_stats);
    CHECK_INT(fst_loader_stats_get(loader, &stats, &error), FST_OK);
    CHECK(stats.verified_bytes <= size_of(path) + CHUNK);
    fst_loader_close(loader);
    fst_model_close(model);
    unlink(path);
}

TEST(flipped_bit_is_refused_by_every_engine)
{
    const char *path = make_listed("flipped", FST_DIGEST_XXH3_128, 0);
    uint64_t bit = 8 * (size_of(path) - 5 * BYTES + 17);
    CHECK(path != NULL);
    flip(path, bit);
    for (size_t i = 0; i < WAY_COUNT; i++) {
        fst_error error = {0};
        size_t handed_out;
        if (i % 2 == 0) fixture_evict(path);
        fst_status status = load_all(path, &ways[i], NULL, &handed_out, &error);
        if (is_missing(status, &ways[i])) continue;
        CHECK_INT(status, FST_E_DIGEST);
        CHECK(handed_out <= 7);
        CHECK_CONTAINS(error.message, "chunk 4 of the file");
        CHECK_CONTAINS(error.message, "xxh3-128");
        CHECK_CONTAINS(error.file, "flipped");
        // The first in that chunk of those that were read together: t5, t6 and t7 touch it.
        CHECK(error.tensor[0] == 't' && error.tensor[1] >= '5' && error.tensor[1] <= '7');
    }
}

/// One tensor, or a part of it.
static fst_status load_item(const char *path, const fst_part *item, fst_load_stats *stats,
                            fst_error *error) {
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    fst_model *model;
    fst_loader *loader;
    options.parts = item;
    options.part_count = 1;
    fst_status status = open_verified(path, &model, error);
    if (status != FST_OK) return status;
    status = fst_loader_open(model, &options, &loader, error);
    fst_model_close(model);
    if (status != FST_OK) return status;
    status = fst_loader_wait(loader, -1, error);
    *stats = FST_STRUCT_INIT(fst_load_stats);
    if (status == FST_OK) status = fst_loader_stats_get(loader, stats, error);
    fst_loader_close(loader);
    return status;
}

TEST(only_what_is_loaded_is_verified)
{
    const char *path = make_listed("part", FST_DIGEST_BLAKE3, 0);
    const uint64_t begin[] = {1000}, end[] = {2000};
    fst_part item = {.struct_size = sizeof item, .tensor_index = 6, .begin = begin, .end = end};
    fst_load_stats stats;
    fst_error error;
    CHECK(path != NULL);
    flip(path, 8 * (size_of(path) - 100)); // in the last tensor
    CHECK_INT(load_item(path, &item, &stats, &error), FST_OK);
    CHECK_INT(stats.verified_bytes, CHUNK); // a slice needs its chunk, and no other
    CHECK_INT(stats.bytes_read, CHUNK);
    CHECK(stats.buffer_bytes < CHUNK); // what was read for the digest alone takes no memory
    item = (fst_part){.struct_size = sizeof(fst_part), .tensor_index = 7};
    CHECK_INT(load_item(path, &item, &stats, &error), FST_OK);
    CHECK_INT(stats.verified_bytes, 2 * CHUNK);
    item.tensor_index = 11;
    CHECK_INT(load_item(path, &item, &stats, &error), FST_E_DIGEST);
}

TEST(caller_memory_gets_verified_bytes)
{
    const char *path = make_listed("given", FST_DIGEST_SHA256, 64u << 10);
    char *place = malloc(BYTES);
    fst_part item = {.struct_size = sizeof item,
                     .tensor_index = 3,
                     .destination = place,
                     .destination_bytes = BYTES};
    fst_load_stats stats;
    fst_error error;
    CHECK(path != NULL && place != NULL);
    memset(place, 0x5a, BYTES);
    CHECK_INT(load_item(path, &item, &stats, &error), FST_OK);
    CHECK(fixture_matches(place, 3 * BYTES, BYTES));
    // No byte of a damaged chunk reaches the destination.
    memset(place, 0x5a, BYTES);
    flip(path, 8 * (size_of(path) - 9 * BYTES + 1) + 3);
    CHECK_INT(load_item(path, &item, &stats, &error), FST_E_DIGEST);
    for (uint64_t i = 0; i < 1000; i++) CHECK_INT(place[i], 0x5a);
    free(place);
}

TEST(converted_tensors_are_verified_first)
{
    const char *path = fixture_model(
        "convert.safetensors",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[600000],\"data_offsets\":[0,2400000]}}       ",
        2400000);
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    fst_model *model;
    fst_loader *loader;
    fst_error error;
    options.convert = 1;
    options.dtype = FST_DTYPE_BF16;
    CHECK_INT(fst_manifest_write(path, NULL, NULL, NULL, &error), FST_OK);
    for (int round = 0; round < 2; round++) {
        CHECK_INT(open_verified(path, &model, &error), FST_OK);
        CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_OK);
        fst_model_close(model);
        CHECK_INT(fst_loader_wait(loader, -1, &error), round == 0 ? FST_OK : FST_E_DIGEST);
        fst_loader_close(loader);
        flip(path, 8 * 1500000);
    }
}

TEST(a_misaligned_tensor_is_not_converted_while_it_is_verified)
{
    const char *path = fixture_model(
        "misaligned.safetensors",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[600000],\"data_offsets\":[0,2400000]}}        ",
        2400000);
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    size_t handed_out;
    fst_error error;
    options.convert = 1;
    options.dtype = FST_DTYPE_BF16;
    CHECK_INT(fst_manifest_write(path, NULL, NULL, NULL, &error), FST_OK);
    CHECK_INT(load_all(path, &options, NULL, &handed_out, &error), FST_E_UNSUPPORTED);
    CHECK_CONTAINS(error.message, "unaligned");
    CHECK_TEXT(error.tensor, "a");
}

TEST(header_is_verified_before_parsing)
{
    const char *path = make_listed("header", FST_DIGEST_XXH3_128, 0);
    fst_model *model;
    fst_error error;
    CHECK(path != NULL);
    flip(path, 8 * 8); // invalid JSON
    CHECK_INT(open_verified(path, &model, &error), FST_E_DIGEST);
    CHECK_CONTAINS(error.message, "header");
    CHECK_INT(fst_model_open(path, NULL, &model, &error), FST_E_INVALID_HEADER_JSON);
    flip(path, 8 * 8);
    CHECK_INT(truncate(path, (off_t)size_of(path) - 1), 0);
    CHECK_INT(open_verified(path, &model, &error), FST_E_DIGEST);
    CHECK_CONTAINS(error.message, "size");
}

/// Whether a flipped bit is refused before its tensor is returned. Restores the bit.
static bool refuses_flip(const char *path, const char *flipped, uint64_t bit, fst_error *error) {
    size_t handed_out;
    flip(flipped, bit);
    const fst_load_options *way = &ways[bit % 2];
    fst_status status = load_all(path, way, NULL, &handed_out, error);
    flip(flipped, bit);
    return status == FST_E_DIGEST || status == FST_E_MANIFEST;
}

TEST(a_thousand_flipped_bits_are_refused)
{
    const char *path = make_listed("thousand", FST_DIGEST_XXH3_128, 64u << 10);
    char manifest[4096];
    uint64_t state = 23;
    fst_error error;
    CHECK(path != NULL);
    snprintf(manifest, sizeof manifest, "%s.manifest", path);
    uint64_t header_bits = 8 * (size_of(path) - COUNT * BYTES);
    size_t rounds = CHECK_ROUNDS(1000);
    for (size_t i = 0; i < rounds; i++) {
        uint64_t random = fixture_random(&state);
        const char *flipped = i % 4 == 0 ? manifest : path;
        uint64_t bits = i % 4 == 1 ? header_bits : 8 * size_of(flipped);
        if (refuses_flip(path, flipped, random % bits, &error)) continue;
        check_fail(__FILE__, __LINE__, "bit %llu of %s was not refused",
                   (unsigned long long)(random % bits), flipped);
        return;
    }
    size_t handed_out;
    CHECK_INT(load_all(path, NULL, NULL, &handed_out, &error), FST_OK); // all bits were restored
}

TEST(nothing_to_verify_with_is_an_error)
{
    fst_model *model;
    fst_error error;
    const char *path = fixture_tensors("alone", 2, 100);
    CHECK_INT(open_verified(path, &model, &error), FST_E_NOT_FOUND);
    CHECK_CONTAINS(error.message, "no digests to verify against");
    fst_open_options options = FST_STRUCT_INIT(fst_open_options);
    options.manifest = path; // a file of another kind
    CHECK_INT(fst_model_open(path, &options, &model, &error), FST_E_MANIFEST);
    options.manifest = "/nowhere/at.all";
    CHECK_INT(fst_model_open(path, &options, &model, &error), FST_E_NOT_FOUND);
    // The manifest of another model does not list this one.
    char other[4096];
    snprintf(other, sizeof other, "%s.manifest", make_listed("other", FST_DIGEST_XXH3_128, 0));
    options.manifest = other;
    CHECK_INT(fst_model_open(path, &options, &model, &error), FST_E_DIGEST);
    CHECK_CONTAINS(error.message, "does not list");
}

TEST(verification_source_is_reported)
{
    const char *path = make_listed("told", FST_DIGEST_SHA256, 256u << 10);
    fst_verification found = FST_STRUCT_INIT(fst_verification);
    fst_model *model;
    fst_error error;
    CHECK(path != NULL);
    CHECK_INT(open_verified(path, &model, &error), FST_OK);
    CHECK_INT(fst_model_verification(model, &found, &error), FST_OK);
    CHECK_CONTAINS(found.manifest, "told.manifest");
    CHECK_TEXT(fst_digest_name(found.digest), "sha256");
    CHECK_INT(found.chunk_bytes, 256 << 10);
    CHECK_INT(found.file_count, 1);
    fst_model_close(model);
    CHECK_INT(fst_model_open(path, NULL, &model, &error), FST_OK);
    found = FST_STRUCT_INIT(fst_verification);
    CHECK_INT(fst_model_verification(model, &found, &error), FST_OK);
    CHECK(found.manifest == NULL);
    fst_model_close(model);
    CHECK_TEXT(fst_digest_name((fst_digest)77), "unknown");
}

TEST(unverifiable_requests_are_refused)
{
    const char *path = make_listed("ways", FST_DIGEST_XXH3_128, 0);
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    size_t handed_out;
    fst_error error;
    CHECK(path != NULL);
    options.tuning = fixture_engine(FST_ENGINE_MMAP);
    CHECK_INT(load_all(path, &options, NULL, &handed_out, &error), FST_E_UNSUPPORTED);
    CHECK_CONTAINS(error.message, "mmap");
    options.tuning = fixture_gds(FST_GDS_STRICT);
    CHECK_INT(load_all(path, &options, NULL, &handed_out, &error), FST_E_UNSUPPORTED);
    CHECK_CONTAINS(error.message, "gds");
    fst_open_options cut = FST_STRUCT_INIT(fst_open_options);
    fst_model *model;
    cut.flags = FST_OPEN_VERIFY | FST_OPEN_CUT;
    CHECK_INT(fst_model_open(path, &cut, &model, &error), FST_E_ARGUMENT);
}

TEST(forked_child_verifies_again)
{
    const char *path = make_listed("forked", FST_DIGEST_SHA256, 0);
    size_t handed_out;
    CHECK(path != NULL);
    CHECK_INT(load_all(path, NULL, NULL, &handed_out, NULL), FST_OK);
    pid_t child = fork();
    if (child == 0) _exit(load_all(path, NULL, NULL, &handed_out, NULL) == FST_OK ? 0 : 1);
    int code = -1;
    CHECK_INT(waitpid(child, &code, 0), child);
    CHECK_INT(code, 0);
}

TEST(manifest_needs_a_valid_signature)
{
    const char *path = make_listed("chain", FST_DIGEST_SHA256, 0);
    fst_bundle_files files = FST_STRUCT_INIT(fst_bundle_files);
    fst_open_options options = FST_STRUCT_INIT(fst_open_options);
    char key[3000], public_key[3000], bundle[3000], folder[2000], command[16384];
    fst_model *model;
    fst_error error = {0};
    CHECK(path != NULL);
    snprintf(folder, sizeof folder, "%.*s", (int)(strrchr(path, '/') - path), path);
    snprintf(key, sizeof key, "%s/chain.key", folder);
    snprintf(public_key, sizeof public_key, "%s/chain.pub", folder);
    snprintf(bundle, sizeof bundle, "%s/chain.sig", folder);
    snprintf(command, sizeof command,
             "openssl ecparam -name prime256v1 -genkey -noout -out '%s' 2>/dev/null && "
             "openssl ec -in '%s' -pubout -out '%s' 2>/dev/null",
             key, key, public_key);
    if (system(command) != 0) SKIP("no openssl command that makes keys");
    files.folder = folder;
    files.signature = bundle;
    files.key = key;
    CHECK_INT(fst_bundle_sign(&files, NULL, &error), FST_OK);
    options.flags = FST_OPEN_VERIFY;
    options.signature = bundle;
    CHECK_INT(fst_model_open(path, &options, &model, &error), FST_E_ARGUMENT);
    options.public_key = public_key;
    CHECK_INT(fst_model_open(path, &options, &model, &error), FST_OK);
    fst_model_close(model);
    // Another manifest of the same bytes is not the one that was signed, and XXH3 secures nothing.
    CHECK(make_listed("chain", FST_DIGEST_BLAKE3, 0) != NULL);
    CHECK_INT(fst_model_open(path, &options, &model, &error), FST_E_SIGNATURE);
    CHECK_CONTAINS(error.message, "does not cover this manifest");
    CHECK(make_listed("chain", FST_DIGEST_XXH3_128, 0) != NULL);
    CHECK_INT(fst_model_open(path, &options, &model, &error), FST_E_SIGNATURE);
    CHECK_CONTAINS(error.message, "xxh3-128");
    files.key = public_key;
    CHECK_INT(fst_bundle_check(&files, NULL, &error), FST_E_DIGEST);
    CHECK_INT(fst_bundle_check(NULL, NULL, &error), FST_E_ARGUMENT);
}

TEST(arguments_are_checked)
{
    fst_manifest_options options = FST_STRUCT_INIT(fst_manifest_options);
    fst_error error;
    CHECK_INT(fst_manifest_write(NULL, NULL, NULL, NULL, &error), FST_E_ARGUMENT);
    options.chunk_bytes = 100000;
    CHECK_INT(fst_manifest_write("x", NULL, &options, NULL, &error), FST_E_ARGUMENT);
    options.chunk_bytes = 0;
    options.digest = (fst_digest)9;
    CHECK_INT(fst_manifest_write("x", NULL, &options, NULL, &error), FST_E_ARGUMENT);
    options.digest = FST_DIGEST_BLAKE3;
    options.flags = 8;
    CHECK_INT(fst_manifest_write("x", NULL, &options, NULL, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_manifest_check(NULL, NULL, NULL, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_manifest_write("/nowhere/at.all", NULL, NULL, NULL, &error), FST_E_NOT_FOUND);
}
