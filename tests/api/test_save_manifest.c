// SPDX-License-Identifier: Apache-2.0
/// Manifests written by saves: the same text as fst_manifest_write() gives for the result, without
/// reading it again. Existing manifests that a save makes outdated.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"
#include "save_fixture.h"
#include "verify_fixture.h"

#define TENSORS 6u
#define TENSOR_BYTES ((uint64_t)1700003)

static const char *const names[TENSORS] = {"a", "b", "c", "d", "e", "f"};

/// Tensors of fixture_byte(), each at its offset in `data`, distributed over `file_count` files.
static void describe(fst_save_tensor *tensors, uint8_t *data, uint32_t file_count) {
    static const uint64_t shape[] = {TENSOR_BYTES};
    for (uint32_t i = 0; i < TENSORS; i++) {
        tensors[i] = save_tensor_of(names[i], FST_DTYPE_U8, shape, data + i * TENSOR_BYTES);
        tensors[i].file_index = file_count > 0 ? i % file_count : 0;
    }
}

static uint8_t *make_data(void) {
    uint8_t *data = malloc(TENSORS * TENSOR_BYTES);
    if (data == NULL) abort();
    for (uint64_t i = 0; i < TENSORS * TENSOR_BYTES; i++) data[i] = fixture_byte(i);
    return data;
}

static char *read_all(const char *path, size_t *size) {
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &info) != 0) return NULL;
    char *bytes = malloc((size_t)info.st_size + 1);
    *size = (size_t)info.st_size;
    if (bytes == NULL || read(fd, bytes, *size) != (ssize_t)*size) abort();
    close(fd);
    return bytes;
}

/// Whether the manifest is the text that fst_manifest_write() makes of the model, and a verified
/// load takes the model.
static int is_right(const char *model, const char *manifest, fst_digest digest) {
    char again[4200];
    size_t sizes[2] = {0, 0};
    fst_error error;
    fst_manifest_options options = FST_STRUCT_INIT(fst_manifest_options);
    options.digest = digest;
    snprintf(again, sizeof again, "%s.again", manifest);
    if (fst_manifest_write(model, again, &options, NULL, &error) != FST_OK) return 0;
    char *texts[2] = {read_all(manifest, &sizes[0]), read_all(again, &sizes[1])};
    int same = texts[0] != NULL && texts[1] != NULL && sizes[0] == sizes[1] &&
               memcmp(texts[0], texts[1], sizes[0]) == 0;
    free(texts[0]);
    free(texts[1]);
    unlink(again);
    int count = 0;
    if (count_differences(model, manifest, &count, NULL, &error) != FST_OK) return 0;
    fst_open_options opening = FST_STRUCT_INIT(fst_open_options);
    fst_model *opened;
    opening.manifest = manifest;
    if (fst_model_open(model, &opening, &opened, &error) != FST_OK) return 0;
    fst_loader *loader;
    size_t loaded = 0;
    if (fst_loader_open(opened, NULL, &loader, &error) == FST_OK) {
        for (fst_tensor *tensor; fst_loader_next(loader, -1, &tensor, &error) == FST_OK; loaded++)
            fst_tensor_unref(tensor);
        fst_loader_close(loader);
    }
    fst_model_close(opened);
    return same && loaded == TENSORS;
}

static const char *manifest_of(const char *path) {
    static char text[4200];
    snprintf(text, sizeof text, "%s.manifest", path);
    return text;
}

TEST(manifest_of_a_save_needs_no_reads)
{
    uint8_t *data = make_data();
    fst_save_tensor tensors[TENSORS];
    fst_error error = {0};
    const char *path = fixture_path("saved.safetensors");
    describe(tensors, data, 0);
    for (int way = 0; way < FST_DIGEST_XXH3_64 * FST_SAVE_PROMISE_COUNT * 2; way++) {
        fst_save_options options = save_options_of();
        fst_save_stats stats = FST_STRUCT_INIT(fst_save_stats);
        options.digest = (fst_digest)(way % FST_DIGEST_XXH3_64);
        options.promise = (fst_save_promise)(way / FST_DIGEST_XXH3_64 % 2);
        options.alignment_bytes =
            way / FST_DIGEST_XXH3_64 / 2 == 0 ? 0 : 4096; // with padding tensors
        options.manifest = "";
        fst_status status = fst_save(path, tensors, TENSORS, &options, &stats, &error);
        if (status == FST_E_UNSUPPORTED && options.digest == FST_DIGEST_SHA256) continue;
        CHECK_INT(status, FST_OK);
        CHECK_INT(stats.bytes_hashed, size_of(path));
        CHECK_INT(stats.bytes_read, 0);
        CHECK(is_right(path, manifest_of(path), options.digest));
    }
    free(data);
}

TEST(manifest_is_written_to_the_given_path)
{
    uint8_t *data = make_data();
    fst_save_tensor tensors[TENSORS];
    fst_save_options options = save_options_of();
    fst_error error;
    char path[4096], other[4200], taken[4096];
    describe(tensors, data, 0);
    snprintf(path, sizeof path, "%s", fixture_path("plain.safetensors"));
    CHECK_INT(mkdir(fixture_path("elsewhere"), 0700), 0);
    snprintf(other, sizeof other, "%s/my.manifest", fixture_path("elsewhere"));
    options.manifest = other;
    CHECK_INT(fst_save(path, tensors, TENSORS, &options, NULL, &error), FST_OK);
    CHECK(is_right(path, other, FST_DIGEST_XXH3_128));
    CHECK(access(manifest_of(path), F_OK) != 0);
    // The manifest may not replace the model, by any spelling of its path.
    snprintf(taken, sizeof taken, "%s", fixture_path("elsewhere/../plain.safetensors"));
    options.manifest = taken;
    CHECK_INT(fst_save(path, tensors, TENSORS, &options, NULL, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "overwrite the model");
    CHECK(is_right(path, other, FST_DIGEST_XXH3_128));
    free(data);
}

/// Writes every tensor in pieces, in order or backwards.
static fst_status stream(fst_writer *writer, const uint8_t *data, uint64_t piece, int backwards,
                         fst_error *error) {
    uint64_t count = (TENSOR_BYTES + piece - 1) / piece;
    for (size_t t = 0; t < TENSORS; t++)
        for (uint64_t i = 0; i < count; i++) {
            uint64_t at = (backwards ? count - 1 - i : i) * piece;
            uint64_t size = piece < TENSOR_BYTES - at ? piece : TENSOR_BYTES - at;
            fst_status status =
                fst_writer_write(writer, t, at, data + t * TENSOR_BYTES + at, size, error);
            if (status != FST_OK) return status;
        }
    return FST_OK;
}

TEST(ordered_stream_is_digested_during_the_write)
{
    uint8_t *data = make_data();
    fst_save_tensor tensors[TENSORS];
    fst_error error = {0};
    const char *path = fixture_path("streamed.safetensors");
    static const uint64_t pieces[] = {1000, 300000, 700001, TENSOR_BYTES};
    describe(tensors, data, 0);
    for (size_t i = 0; i < TENSORS; i++) tensors[i].data = NULL;
    for (int way = 0; way < 4 * FST_SAVE_PROMISE_COUNT * 2; way++) {
        int backwards = way / 8;
        fst_save_options options = save_options_of();
        fst_save_stats stats = FST_STRUCT_INIT(fst_save_stats);
        fst_writer *writer;
        options.promise = (fst_save_promise)(way / 4 % 2);
        options.manifest = "";
        CHECK_INT(fst_writer_open(path, tensors, TENSORS, &options, &writer, &error), FST_OK);
        CHECK_INT(stream(writer, data, pieces[way % 4], backwards, &error), FST_OK);
        CHECK_INT(fst_writer_commit(writer, &error), FST_OK);
        CHECK_INT(fst_writer_stats_get(writer, &stats, &error), FST_OK);
        fst_writer_close(writer);
        if (!backwards) CHECK_INT(stats.bytes_read, 0);
        if (backwards && pieces[way % 4] < TENSOR_BYTES) CHECK(stats.bytes_read > 0);
        CHECK_INT(stats.bytes_hashed, size_of(path));
        CHECK(is_right(path, manifest_of(path), FST_DIGEST_XXH3_128));
    }
    free(data);
}

TEST(mapped_tensor_is_read_once_for_its_digest)
{
    uint8_t *data = make_data();
    fst_save_tensor tensors[TENSORS];
    fst_save_options options = save_options_of();
    fst_save_stats stats = FST_STRUCT_INIT(fst_save_stats);
    fst_writer *writer;
    fst_error error;
    void *place;
    const char *path = fixture_path("mapped.safetensors");
    describe(tensors, data, 0);
    tensors[2].data = NULL;
    options.manifest = "";
    options.digest = FST_DIGEST_BLAKE3;
    CHECK_INT(fst_writer_open(path, tensors, TENSORS, &options, &writer, &error), FST_OK);
    CHECK_INT(fst_writer_map(writer, 2, &place, &error), FST_OK);
    memcpy(place, data + 2 * TENSOR_BYTES, TENSOR_BYTES);
    CHECK_INT(fst_writer_commit(writer, &error), FST_OK);
    CHECK_INT(fst_writer_stats_get(writer, &stats, &error), FST_OK);
    fst_writer_close(writer);
    CHECK(stats.bytes_read >= TENSOR_BYTES && stats.bytes_read <= TENSOR_BYTES + 2 * CHUNK);
    CHECK(is_right(path, manifest_of(path), FST_DIGEST_BLAKE3));
    free(data);
}

TEST(sharded_save_writes_one_manifest)
{
    uint8_t *data = make_data();
    fst_save_tensor tensors[TENSORS];
    fst_error error = {0};
    char folder[4096], manifest[4200];
    snprintf(folder, sizeof folder, "%s", fixture_path("set"));
    snprintf(manifest, sizeof manifest, "%s/model.manifest", folder);
    static const uint32_t counts[] = {3, 2, 1, 1, 4};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        fst_save_options options = save_options_of();
        fst_save_stats stats = FST_STRUCT_INIT(fst_save_stats);
        options.file_count = counts[i];
        options.manifest = "";
        options.promise = (fst_save_promise)(i % 2);
        describe(tensors, data, counts[i]);
        CHECK_INT(fst_save(folder, tensors, TENSORS, &options, &stats, &error), FST_OK);
        CHECK_INT(stats.bytes_read, 0);
        CHECK(is_right(folder, manifest, FST_DIGEST_XXH3_128));
        CHECK_INT(save_entry_count("set"), counts[i] == 1 ? 2 : (int)counts[i] + 2);
    }
    // Without a new manifest the old one is deleted, since it would report the new model as
    // damaged.
    fst_save_options options = save_options_of();
    options.file_count = 4;
    CHECK_INT(fst_save(folder, tensors, TENSORS, &options, NULL, &error), FST_OK);
    CHECK(access(manifest, F_OK) != 0);
    free(data);
}

TEST(compressed_file_is_read_once_for_its_manifest)
{
    fst_save_tensor tensors[TENSORS];
    fst_save_options options = save_options_of();
    fst_save_stats stats = FST_STRUCT_INIT(fst_save_stats);
    fst_error error;
    const char *path = fixture_path("packed.safetensors");
    static const uint64_t shape[] = {TENSOR_BYTES / 4};
    uint8_t *data = make_data();
    for (uint64_t i = 0; i < TENSOR_BYTES; i++) // numbers of one size
        if (i % 4 > 1) data[i] = 0x3f;
    for (uint32_t i = 0; i < TENSORS; i++)
        tensors[i] = save_tensor_of(names[i], FST_DTYPE_F32, shape, data);
    options.compress = FST_COMPRESS_ALL;
    options.manifest = "";
    fst_status status = fst_save(path, tensors, TENSORS, &options, &stats, &error);
    free(data);
    if (status == FST_E_UNSUPPORTED) SKIP("no libzstd");
    CHECK_INT(status, FST_OK);
    CHECK(stats.bytes_total < TENSORS * TENSOR_BYTES * 9 / 10);
    CHECK_INT(stats.bytes_read, size_of(path));
    CHECK(is_right(path, manifest_of(path), FST_DIGEST_XXH3_128));
}

TEST(stale_manifest_is_deleted_with_the_old_model)
{
    uint8_t *data = make_data();
    fst_save_tensor tensors[TENSORS];
    fst_save_options options = save_options_of();
    fst_error error;
    char path[4096], link[4096];
    snprintf(path, sizeof path, "%s", fixture_path("stale.safetensors"));
    snprintf(link, sizeof link, "%s", fixture_path("link.safetensors"));
    describe(tensors, data, 0);
    CHECK_INT(symlink("stale.safetensors", link), 0);
    for (int promise = 0; promise < FST_SAVE_PROMISE_COUNT; promise++) {
        options.promise = (fst_save_promise)promise;
        options.manifest = "";
        CHECK_INT(fst_save(path, tensors, TENSORS, &options, NULL, &error), FST_OK);
        CHECK(is_right(path, manifest_of(path), FST_DIGEST_XXH3_128));
        options.manifest = NULL;
        // A save through a link also finds the manifest next to the link's target.
        CHECK_INT(fst_save(promise == 0 ? path : link, tensors, TENSORS, &options, NULL, &error),
                  FST_OK);
        CHECK(access(manifest_of(path), F_OK) != 0);
    }
    // An edit makes it untrue as well.
    options.manifest = "";
    CHECK_INT(fst_save(path, tensors, TENSORS, &options, NULL, &error), FST_OK);
    fst_edit_options edit = FST_STRUCT_INIT(fst_edit_options);
    edit.clear_metadata = 1;
    CHECK_INT(fst_header_edit(path, NULL, &edit, NULL, &error), FST_OK);
    CHECK(access(manifest_of(path), F_OK) != 0);
    // A file that only has the name belongs to the user.
    CHECK(fixture_file("stale.safetensors.manifest", "my list", 7) != NULL);
    options.manifest = NULL;
    CHECK_INT(fst_save(path, tensors, TENSORS, &options, NULL, &error), FST_OK);
    CHECK(save_file_holds("stale.safetensors.manifest", "my list", 7));
    CHECK_INT(save_hidden_count("."), 0);
    free(data);
}

TEST(files_of_other_ranks_are_read_for_the_manifest)
{
    uint8_t *data = make_data();
    fst_save_tensor tensors[TENSORS];
    fst_save_options options = save_options_of();
    fst_save_stats stats = FST_STRUCT_INIT(fst_save_stats);
    fst_writer *writer, *part;
    fst_error error;
    const char *path = fixture_path("parts.safetensors");
    describe(tensors, data, 0);
    for (uint32_t i = 0; i < TENSORS; i++) tensors[i].data = NULL;
    options.manifest = "";
    options.digest = FST_DIGEST_BLAKE3;
    options.others_write = 1;
    CHECK_INT(fst_writer_open(path, tensors, TENSORS, &options, &writer, &error), FST_OK);
    CHECK_INT(fst_writer_hand_over(writer, &error), FST_OK);
    CHECK_INT(fst_writer_join(fst_writer_hidden_path(writer, 0), NULL, &part, &error), FST_OK);
    for (uint32_t i = 0; i < TENSORS; i++)
        CHECK_INT(fst_writer_write(part, i, 0, data + i * TENSOR_BYTES, TENSOR_BYTES, &error),
                  FST_OK);
    CHECK_INT(fst_writer_finish(part, &error), FST_OK);
    fst_writer_close(part);
    CHECK_INT(fst_writer_commit(writer, &error), FST_OK);
    CHECK_INT(fst_writer_stats_get(writer, &stats, &error), FST_OK);
    CHECK_INT(stats.bytes_hashed, size_of(path));
    CHECK_INT(stats.bytes_read, size_of(path));
    fst_writer_close(writer);
    CHECK(is_right(path, manifest_of(path), FST_DIGEST_BLAKE3));
    free(data);
}

TEST(files_never_handed_over_have_a_manifest_with_others_write)
{
    uint8_t *data = make_data();
    fst_save_tensor tensors[TENSORS];
    fst_save_options options = save_options_of();
    fst_writer *writer;
    fst_error error = {0};
    const char *path = fixture_path("unshared.safetensors");
    describe(tensors, data, 0);
    options.manifest = "";
    options.others_write = 1;
    CHECK_INT(fst_save(path, tensors, TENSORS, &options, NULL, &error), FST_OK);
    CHECK(is_right(path, manifest_of(path), FST_DIGEST_XXH3_128));
    tensors[1].data = NULL;
    CHECK_INT(fst_writer_open(path, tensors, TENSORS, &options, &writer, &error), FST_OK);
    CHECK_INT(fst_writer_write(writer, 1, 0, data + TENSOR_BYTES, TENSOR_BYTES, &error), FST_OK);
    CHECK_INT(fst_writer_commit(writer, &error), FST_OK);
    fst_writer_close(writer);
    CHECK(is_right(path, manifest_of(path), FST_DIGEST_XXH3_128));
    free(data);
}

/// Writes one file of a sharded model, with half of the tensors, and hands it over.
static fst_writer *hand_over(const char *name, fst_save_tensor *tensors) {
    fst_writer *writer;
    fst_save_options options = save_options_of();
    options.replace_link = 1;
    if (fst_writer_open(fixture_path(name), tensors, TENSORS / 2, &options, &writer, NULL) !=
        FST_OK)
        abort();
    if (fst_writer_hand_over(writer, NULL) != FST_OK) abort();
    return writer;
}

TEST(publishing_rank_writes_the_manifest)
{
    uint8_t *data = make_data();
    fst_save_tensor tensors[TENSORS];
    fst_publish_options options = FST_STRUCT_INIT(fst_publish_options);
    fst_error error;
    mkdir(fixture_path("published"), 0700);
    describe(tensors, data, 0);
    for (int is_first = 1; is_first >= 0; is_first--) {
        fst_writer *one = hand_over("published/model-00001-of-00002.safetensors", tensors);
        fst_writer *two = hand_over("published/model-00002-of-00002.safetensors", tensors + 3);
        const char *hidden[] = {fst_writer_hidden_path(one, 0), fst_writer_hidden_path(two, 0)};
        options.manifest = is_first ? "" : NULL;
        CHECK_INT(fst_set_publish(fixture_path("published"), hidden, 2, &options, NULL, &error),
                  FST_OK);
        fst_writer_close(one);
        fst_writer_close(two);
        const char *manifest = fixture_path("published/model.manifest");
        if (is_first)
            CHECK(is_right(fixture_path("published"), manifest, FST_DIGEST_XXH3_128));
        else // the manifest of the old model is deleted
            CHECK(access(fixture_path("published/model.manifest"), F_OK) != 0);
    }
    const char *none[] = {"x"};
    options.manifest = "";
    options.names_only = 1;
    CHECK_INT(fst_set_publish("x", none, 1, &options, NULL, &error), FST_E_ARGUMENT);
    options.names_only = 0;
    options.digest = FST_DIGEST_XXH3_64;
    CHECK_INT(fst_set_publish("x", none, 1, &options, NULL, &error), FST_E_ARGUMENT);
    free(data);
}

TEST(handed_over_files_get_no_manifest)
{
    uint8_t *data = make_data();
    fst_save_tensor tensors[TENSORS];
    fst_save_options options = save_options_of();
    fst_writer *writer;
    fst_error error;
    const char *path = fixture_path("shared.safetensors");
    describe(tensors, data, 0);
    options.manifest = "";
    CHECK_INT(fst_writer_open(path, tensors, TENSORS, &options, &writer, &error), FST_OK);
    CHECK_INT(fst_writer_hand_over(writer, &error), FST_E_UNSUPPORTED);
    fst_writer_close(writer);
    options.digest = FST_DIGEST_XXH3_64;
    CHECK_INT(fst_writer_open(path, tensors, TENSORS, &options, &writer, &error), FST_E_ARGUMENT);
    CHECK_INT(save_hidden_count("."), 0);
    free(data);
}

TEST(manifests_next_to_every_link_are_deleted)
{
    static const char *const links[] = {"chain-a.safetensors", "chain-b.safetensors",
                                        "chain-c.safetensors"};
    fst_save_tensor tensors[TENSORS];
    uint8_t *data = make_data();
    describe(tensors, data, 0);
    CHECK_INT(fst_save(fixture_path(links[2]), tensors, TENSORS, NULL, NULL, NULL), FST_OK);
    CHECK_INT(symlink(links[1], fixture_path(links[0])), 0);
    CHECK_INT(symlink(links[2], fixture_path(links[1])), 0);
    for (size_t i = 0; i < 3; i++)
        CHECK_INT(fst_manifest_write(fixture_path(links[i]), NULL, NULL, NULL, NULL), FST_OK);
    CHECK_INT(fst_save(fixture_path(links[0]), tensors, TENSORS, NULL, NULL, NULL), FST_OK);
    for (size_t i = 0; i < 3; i++) CHECK(access(manifest_of(fixture_path(links[i])), F_OK) != 0);
    CHECK_INT(save_hidden_count("."), 0);
    free(data);
}

TEST(no_manifest_replaces_another_model)
{
    fst_save_tensor tensors[TENSORS];
    uint8_t *data = make_data();
    char other[4096], index[4096], linked[4096];
    describe(tensors, data, 0);
    snprintf(other, sizeof other, "%s", fixture_file("other.safetensors", "a model", 7));
    snprintf(index, sizeof index, "%s", fixture_file("m.safetensors.index.json", "an index", 8));
    snprintf(linked, sizeof linked, "%s", fixture_path("linked-model"));
    CHECK_INT(symlink(other, linked), 0);
    const char *const targets[] = {other, index, linked};
    const char *path = fixture_path("never-saved.safetensors");
    for (size_t i = 0; i < sizeof targets / sizeof *targets; i++) {
        fst_save_options options = FST_STRUCT_INIT(fst_save_options);
        fst_error error = {0};
        options.manifest = targets[i];
        CHECK_INT(fst_save(path, tensors, TENSORS, &options, NULL, &error), FST_E_ARGUMENT);
        CHECK_CONTAINS(error.message, "would overwrite a model");
        CHECK(access(path, F_OK) != 0);
        fst_async_options background = FST_STRUCT_INIT(fst_async_options);
        fst_async_save *save = NULL;
        background.save = &options;
        fst_status status =
            fst_async_save_start(path, tensors, TENSORS, &background, &save, &error);
        if (status == FST_OK) status = fst_async_save_wait(save, -1, &error);
        fst_async_save_close(save);
        CHECK_INT(status, FST_E_ARGUMENT);
        CHECK(access(path, F_OK) != 0);
    }
    CHECK_INT(fst_save(path, tensors, TENSORS, NULL, NULL, NULL), FST_OK);
    // A model with another name is recognised by its beginning.
    const char *unnamed = fixture_path("unnamed");
    CHECK_INT(rename(path, unnamed), 0);
    fst_save_options options = FST_STRUCT_INIT(fst_save_options);
    options.manifest = unnamed;
    CHECK_INT(fst_save(path, tensors, TENSORS, &options, NULL, NULL), FST_E_ARGUMENT);
    // The save goes to where the link leads, and so would the manifest.
    unlink(linked);
    CHECK_INT(symlink("behind-link", linked), 0);
    options.manifest = fixture_path("behind-link");
    CHECK_INT(fst_save(linked, tensors, TENSORS, &options, NULL, NULL), FST_E_ARGUMENT);
    CHECK(access(options.manifest, F_OK) != 0);
    CHECK_INT(fst_save(path, tensors, TENSORS, NULL, NULL, NULL), FST_OK);
    fst_edit_options edit = FST_STRUCT_INIT(fst_edit_options);
    edit.manifest = other;
    CHECK_INT(fst_header_edit(path, NULL, &edit, NULL, NULL), FST_E_ARGUMENT);
    size_t size;
    char *bytes = read_all(other, &size);
    CHECK(size == 7 && memcmp(bytes, "a model", 7) == 0);
    free(bytes);
    unlink(linked);
    free(data);
}
