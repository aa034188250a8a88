// SPDX-License-Identifier: Apache-2.0
/// Manifests: creation, reuse, and checks of folders and several files.
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"
#include "verify_fixture.h"

TEST(check_reads_every_file_and_reports_all_differences)
{
    const char *path = make_listed("checked", FST_DIGEST_XXH3_128, 64u << 10);
    fst_manifest_stats stats = FST_STRUCT_INIT(fst_manifest_stats);
    fst_error error;
    int count = 0;
    CHECK(path != NULL);
    CHECK_INT(count_differences(path, NULL, &count, &stats, &error), FST_OK);
    CHECK_INT(count, 0);
    CHECK_INT(stats.bytes_read, size_of(path));
    flip(path, 8 * 100000);
    flip(path, 8 * 3000000);
    CHECK_INT(count_differences(path, NULL, &count, &stats, &error), FST_E_DIGEST);
    CHECK_INT(count, 2);
    char manifest[4096];
    snprintf(manifest, sizeof manifest, "%s.manifest", path);
    unlink(path);
    CHECK_INT(count_differences(path, manifest, &count, NULL, &error), FST_E_DIGEST);
    CHECK_INT(count, 3);
}

/// Makes `again` of the file, with `keep`; how many files were not read.
static uint64_t count_kept(const char *path, const char *keep, const char *again) {
    fst_manifest_options options = FST_STRUCT_INIT(fst_manifest_options);
    fst_manifest_stats stats = FST_STRUCT_INIT(fst_manifest_stats);
    options.digest = FST_DIGEST_BLAKE3;
    options.keep = keep;
    if (fst_manifest_write(path, again, &options, &stats, NULL) != FST_OK) return 1000;
    if (stats.bytes_read != (stats.files_kept == 1 ? 0 : size_of(path))) return 2000;
    return stats.files_kept;
}

TEST(unchanged_files_keep_their_digests)
{
    const char *path = make_listed("kept", FST_DIGEST_BLAKE3, 0);
    char manifest[4096], again[4200], other[4200];
    fst_error error;
    CHECK(path != NULL);
    snprintf(manifest, sizeof manifest, "%s.manifest", path);
    snprintf(again, sizeof again, "%s.again", path);
    snprintf(other, sizeof other, "%s.other", path);
    // Written within one tick of the manifest's time: the order is unknown.
    for (time_t begun = 0;
         time(NULL) - begun > 1;) { // repeated, because the machine may have paused in between
        begun = time(NULL);
        CHECK(utimensat(AT_FDCWD, path, NULL, 0) == 0);
        CHECK_INT(count_kept(path, NULL, manifest), 0);
    }
    CHECK_INT(count_kept(path, manifest, again), 0);
    sleep(4);
    CHECK_INT(count_kept(path, manifest, manifest), 0); // now with a stamp
    CHECK_INT(count_kept(path, manifest, again), 1);
    CHECK_INT(count_kept(path, again, again), 1); // the stamp is handed on
    fst_open_options opening = FST_STRUCT_INIT(fst_open_options);
    fst_model *model;
    opening.manifest = again;
    CHECK_INT(fst_model_open(path, &opening, &model, &error), FST_OK);
    fst_model_close(model);
    fst_manifest_options options = FST_STRUCT_INIT(fst_manifest_options);
    options.digest = FST_DIGEST_SHA256; // digests of another kind cannot be reused
    options.keep = manifest;
    CHECK_INT(fst_manifest_write(path, again, &options, NULL, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "blake3 with chunks of 1048576 bytes");
    // A bit flips and the mtime is restored: the ctime reveals it, whatever the manifest's own time
    // is.
    flip(path, 8 * 100000);
    const struct timespec later[2] = {{.tv_sec = 4000000000}, {.tv_sec = 4000000000}};
    CHECK_INT(utimensat(AT_FDCWD, manifest, later, 0), 0);
    CHECK_INT(count_kept(path, manifest, again), 0);
    // An older file of the same size behind a link that was swapped.
    CHECK_INT(rename(path, other), 0);
    CHECK_INT(symlink(other, path), 0);
    CHECK_INT(count_kept(path, manifest, again), 0);
}

TEST(folder_with_more_files_than_descriptors)
{
    char folder[4000], path[4200];
    struct rlimit before, few = {.rlim_cur = 96, .rlim_max = 96};
    fst_manifest_stats stats = FST_STRUCT_INIT(fst_manifest_stats);
    fst_error error;
    int count = 0;
    snprintf(folder, sizeof folder, "%s", fixture_path("many"));
    CHECK_INT(mkdir(folder, 0700), 0);
    fixture_tensors("many/model.safetensors", 2, 1000);
    for (int i = 0; i < 300; i++) {
        snprintf(path, sizeof path, "%s/note-%d.txt", folder, i);
        int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
        if (fd < 0 || write(fd, path, 20) != 20 || close(fd) != 0) abort();
    }
    CHECK_INT(getrlimit(RLIMIT_NOFILE, &before), 0);
    few.rlim_max = before.rlim_max;
    CHECK_INT(setrlimit(RLIMIT_NOFILE, &few), 0);
    CHECK_INT(fst_manifest_write(folder, NULL, NULL, &stats, &error), FST_OK);
    CHECK_INT(stats.file_count, 301);
    CHECK_INT(count_differences(folder, NULL, &count, &stats, &error), FST_OK);
    CHECK_INT(stats.bytes_read, size_of(strcat(folder, "/model.safetensors")) + 300 * 20);
    *strrchr(folder, '/') = '\0';
    // If no file is left, it is an error and not a difference.
    few.rlim_cur = 4;
    CHECK_INT(setrlimit(RLIMIT_NOFILE, &few), 0);
    fst_status status = count_differences(folder, NULL, &count, NULL, &error);
    CHECK_INT(setrlimit(RLIMIT_NOFILE, &before), 0);
    CHECK(status != FST_OK && status != FST_E_DIGEST);
    CHECK_INT(count, 0);
    flip(path, 8);
    CHECK_INT(count_differences(folder, NULL, &count, NULL, &error), FST_E_DIGEST);
    CHECK_INT(count, 1);
}

TEST(unlisted_file_is_a_difference)
{
    const char *path = make_listed("listed", FST_DIGEST_XXH3_128, 0);
    char other[4096], manifest[4200];
    fst_error error;
    int count = 0;
    CHECK(path != NULL);
    snprintf(other, sizeof other, "%s-other", path);
    snprintf(manifest, sizeof manifest, "%s.manifest", path);
    CHECK_INT(link(path, other), 0);
    CHECK_INT(count_differences(other, manifest, &count, NULL, &error), FST_E_DIGEST);
    CHECK_CONTAINS(error.message, "does not list");
    CHECK_INT(count, 1);
}

TEST(each_of_several_files_has_a_manifest)
{
    char first[4096], second[4096];
    fst_manifest_options wish = FST_STRUCT_INIT(fst_manifest_options);
    fst_open_options options = FST_STRUCT_INIT(fst_open_options);
    fst_verification found = FST_STRUCT_INIT(fst_verification);
    fst_model *model;
    fst_loader *loader;
    fst_error error;
    snprintf(first, sizeof first, "%s", make_listed("first.safetensors", FST_DIGEST_BLAKE3, 0));
    snprintf(second, sizeof second, "%s",
             fixture_model("second.safetensors",
                           "{\"b\":{\"dtype\":\"U8\",\"shape\":[9000],\"data_offsets\":[0,9000]}}",
                           9000));
    const char *const paths[] = {first, second};
    options.flags = FST_OPEN_VERIFY;
    CHECK_INT(fst_model_open_files(paths, 2, &options, &model, &error), FST_E_NOT_FOUND);
    CHECK_CONTAINS(error.file, "second");
    wish.chunk_bytes = 64u << 10;
    CHECK_INT(fst_manifest_write(second, NULL, &wish, NULL, &error), FST_OK);
    CHECK_INT(fst_model_open_files(paths, 2, &options, &model, &error), FST_E_UNSUPPORTED);
    wish.chunk_bytes = 0;
    CHECK_INT(fst_manifest_write(second, NULL, &wish, NULL, &error), FST_OK); // another digest
    for (int round = 0; round < 2; round++) {
        CHECK_INT(fst_model_open_files(paths, 2, &options, &model, &error), FST_OK);
        CHECK_INT(fst_model_verification(model, &found, &error), FST_OK);
        CHECK_CONTAINS(found.manifest, "first.safetensors.manifest");
        CHECK_INT(found.file_count, 2);
        CHECK_INT(fst_loader_open(model, NULL, &loader, &error), FST_OK);
        fst_model_close(model);
        CHECK_INT(fst_loader_wait(loader, -1, &error), round == 0 ? FST_OK : FST_E_DIGEST);
        fst_loader_close(loader);
        flip(second, 8 * (size_of(second) - 100));
    }
    CHECK_CONTAINS(error.file, "second");
}

/// The arguments of a progress callback.
typedef struct told_progress {
    uint64_t calls, done, total, cancel_at; ///< 0: never
    int went_back;
} told_progress;

static int note_progress(void *context, uint64_t bytes_done, uint64_t bytes_total,
                         size_t tensors_done, size_t tensors_total) {
    told_progress *told = context;
    if (bytes_done < told->done || tensors_done + tensors_total != 0) told->went_back = 1;
    told->done = bytes_done;
    told->total = bytes_total;
    return ++told->calls == told->cancel_at;
}

/// Creates or checks the manifest of `path` with a progress callback.
static fst_status work(const char *path, int is_check, told_progress *told) {
    fst_error error;
    fst_check_options check = {
        .struct_size = sizeof check, .progress = note_progress, .progress_context = told};
    fst_manifest_options make = FST_STRUCT_INIT(fst_manifest_options);
    make.progress = note_progress;
    make.progress_context = told;
    return is_check ? fst_manifest_check(path, &check, NULL, &error)
                    : fst_manifest_write(path, NULL, &make, NULL, &error);
}

TEST(progress_is_reported_and_can_cancel)
{
    const char *path = make_listed("progress", FST_DIGEST_XXH3_128, 64u << 10);
    char manifest[4200];
    CHECK(path != NULL);
    snprintf(manifest, sizeof manifest, "%s.manifest", path);
    for (int is_check = 0; is_check < 2; is_check++) {
        told_progress told = {0};
        CHECK_INT(work(path, is_check, &told), FST_OK);
        CHECK_INT(told.done, size_of(path));
        CHECK_INT(told.total, size_of(path));
        CHECK_INT(told.went_back, 0);
        CHECK(told.calls > 1);
        told_progress cancelled = {.cancel_at = 1};
        uint64_t before = size_of(manifest);
        CHECK_INT(work(path, is_check, &cancelled), FST_E_CANCELLED);
        CHECK_INT(cancelled.calls, 1); // and never again
        CHECK_INT(size_of(manifest), before);
    }
}

/// Truncates the file of that path in the second half of the work: the file has been read once.
static int truncate_halfway(void *context, uint64_t bytes_done, uint64_t bytes_total,
                            size_t tensors_done, size_t tensors_total) {
    (void)tensors_done, (void)tensors_total;
    if (2 * bytes_done > bytes_total && truncate(context, 1 << 20) != 0) return 1;
    return 0;
}

TEST(a_file_that_becomes_shorter_is_named)
{
    char path[4096];
    snprintf(path, sizeof path, "%s", fixture_tensors("shorter", COUNT, BYTES));
    fst_manifest_options options = FST_STRUCT_INIT(fst_manifest_options);
    fst_error error;
    options.flags = FST_MANIFEST_TENSORS;
    options.thread_count = 1;
    options.progress = truncate_halfway;
    options.progress_context = path;
    CHECK_INT(fst_manifest_write(path, NULL, &options, NULL, &error), FST_E_SHORT_READ);
    CHECK_TEXT(error.file, path);
    CHECK_INT(error.byte_offset, 1 << 20);
    CHECK_CONTAINS(error.message, "the file became shorter while it was read");
}

/// Ends a digest; the first bytes as a number.
static uint64_t end_digest(fst_digest_state *state, size_t *size) {
    unsigned char digest[FST_DIGEST_BYTES_MAX];
    uint64_t value = 0;
    if (fst_digest_end(state, digest, size, NULL) != FST_OK) return 0;
    for (size_t i = 0; i < 8; i++) value = value << 8 | digest[i];
    return value;
}

TEST(digests_of_pieces)
{
    // Of "abc", published with each function.
    static const struct {
        fst_digest digest;
        size_t size;
        uint64_t begins;
    } known[] = {{FST_DIGEST_XXH3_64, 8, 0x78af5f94892f3950},
                 {FST_DIGEST_XXH3_128, 16, 0x06b05ab6733a6185},
                 {FST_DIGEST_BLAKE3, 32, 0x6437b3ac38465133},
                 {FST_DIGEST_SHA256, 32, 0xba7816bf8f01cfea}};
    fst_error error;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        fst_digest_state *state = NULL;
        size_t size = 0;
        fst_status status = fst_digest_begin(known[i].digest, &state, &error);
        if (status == FST_E_UNSUPPORTED) continue; // no libcrypto
        CHECK_INT(status, FST_OK);
        CHECK_INT(fst_digest_update(state, "a", 1, &error), FST_OK);
        CHECK_INT(fst_digest_update(state, NULL, 0, &error), FST_OK);
        CHECK_INT(fst_digest_update(state, "bc", 2, &error), FST_OK);
        CHECK_INT(end_digest(state, &size), known[i].begins);
        CHECK_INT(size, known[i].size);
        CHECK_INT(fst_digest_begin(known[i].digest, &state, &error), FST_OK);
        fst_digest_drop(state);
    }
    CHECK_INT(fst_digest_begin((fst_digest)9, &(fst_digest_state *){NULL}, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_digest_begin(FST_DIGEST_BLAKE3, NULL, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_digest_update(NULL, "a", 1, &error), FST_E_ARGUMENT);
    fst_digest_drop(NULL);
    unsigned char digest[FST_DIGEST_BYTES_MAX];
    CHECK_INT(fst_digest_end(NULL, digest, NULL, &error), FST_E_ARGUMENT);
}

/// Whether the file's first bytes are still those of a model or key.
static bool starts_with(const char *path, const char *bytes, size_t size) {
    char got[16] = "";
    FILE *file = fopen(path, "re");
    bool is_same =
        file != NULL && fread(got, 1, size, file) == size && memcmp(got, bytes, size) == 0;
    if (file != NULL) fclose(file);
    return is_same;
}

TEST(no_text_replaces_a_model_or_a_key)
{
    const char *path = make_listed("kept", FST_DIGEST_XXH3_128, 64u << 10);
    CHECK(path != NULL);
    char other[4096], linked[4096], folder[4096], key[4096], head[8];
    snprintf(other, sizeof other, "%s/other.safetensors", fixture_path("."));
    snprintf(linked, sizeof linked, "%s/linked", fixture_path("."));
    snprintf(folder, sizeof folder, "%s", fixture_path("."));
    snprintf(key, sizeof key, "%s", fixture_file("key.pem", "-----BEGIN", 10));
    FILE *file = fopen(path, "re");
    CHECK(file != NULL);
    size_t size = fread(head, 1, sizeof head, file);
    fclose(file);
    CHECK_INT(size, sizeof head);
    unlink(other);
    unlink(linked);
    CHECK_INT(link(path, other), 0);
    CHECK_INT(symlink(other, linked), 0);
    fst_error error;
    fst_manifest_options sums = FST_STRUCT_INIT(fst_manifest_options);
    sums.flags = FST_MANIFEST_SUMS;
    sums.digest = FST_DIGEST_SHA256;
    const char *const targets[] = {path, other, linked};
    for (size_t i = 0; i < sizeof targets / sizeof *targets; i++) {
        CHECK_INT(fst_manifest_write(path, targets[i], NULL, NULL, &error), FST_E_ARGUMENT);
        CHECK(strstr(error.message, "overwrite") != NULL);
        CHECK_INT(fst_manifest_write(path, targets[i], &sums, NULL, &error), FST_E_ARGUMENT);
        fst_bundle_files bundle = FST_STRUCT_INIT(fst_bundle_files);
        bundle.folder = folder;
        bundle.key = key;
        bundle.signature = targets[i];
        CHECK_INT(fst_bundle_sign(&bundle, NULL, &error), FST_E_ARGUMENT);
        bundle.signature = key;
        CHECK_INT(fst_bundle_sign(&bundle, NULL, &error), FST_E_ARGUMENT);
        CHECK(strstr(error.message, "overwrite") != NULL);
        CHECK(starts_with(targets[i], head, sizeof head));
    }
    CHECK(starts_with(key, "-----BEGIN", 10));
    // The usual path of a signature, which the library chooses, is the key's.
    fst_bundle_files usual = FST_STRUCT_INIT(fst_bundle_files);
    char signature[4200];
    snprintf(signature, sizeof signature, "%s/model.sig", folder);
    CHECK_INT(rename(key, signature), 0);
    usual.folder = folder;
    usual.key = signature;
    CHECK_INT(fst_bundle_sign(&usual, NULL, &error), FST_E_ARGUMENT);
    CHECK(starts_with(signature, "-----BEGIN", 10));
    unlink(signature);
    // And the usual path of a manifest is that of a model with an unusual name.
    char listed[4200];
    snprintf(listed, sizeof listed, "%s.manifest", path);
    unlink(listed);
    CHECK_INT(link(path, listed), 0);
    CHECK_INT(fst_manifest_write(path, NULL, NULL, NULL, &error), FST_E_ARGUMENT);
    CHECK(starts_with(listed, head, sizeof head));
    unlink(listed);
    unlink(linked);
    unlink(other);
}

/// A manifest with the name of a model would be opened as one, and a second index makes a folder
/// ambiguous.
TEST(no_text_takes_the_name_of_a_model)
{
    static const char *const names[] = {"absent.safetensors", "absent.safetensors.index.json",
                                        "absent.index.json"};
    const char *path = make_listed("names", FST_DIGEST_XXH3_128, 64u << 10);
    char folder[4096], key[4096];
    fst_error error;
    CHECK(path != NULL);
    snprintf(folder, sizeof folder, "%s", fixture_path("."));
    snprintf(key, sizeof key, "%s", fixture_file("names-key.pem", "-----BEGIN", 10));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *target = fixture_path(names[i]);
        fst_bundle_files bundle = FST_STRUCT_INIT(fst_bundle_files);
        bundle.folder = folder;
        bundle.key = key;
        bundle.signature = target;
        CHECK_INT(fst_manifest_write(path, target, NULL, NULL, &error), FST_E_ARGUMENT);
        CHECK_CONTAINS(error.message, "the name of a model or an index");
        CHECK_INT(fst_bundle_sign(&bundle, NULL, &error), FST_E_ARGUMENT);
        CHECK_CONTAINS(error.message, "the name of a model or an index");
        CHECK(access(target, F_OK) != 0);
    }
}

/// An index without its usual name (as in the Hub's cache, where links have the names), and a file
/// that may not be read and could be a model.
TEST(no_text_replaces_an_index_or_what_it_cannot_examine)
{
    static const char index[] = "{\"metadata\": {}, \"weight_map\": {\"a\": \"x.safetensors\"}}";
    const char *path = make_listed("examined", FST_DIGEST_XXH3_128, 64u << 10);
    const char *blob = fixture_file("blob", index, sizeof index - 1);
    fst_error error;
    CHECK_INT(fst_manifest_write(path, blob, NULL, NULL, &error), FST_E_ARGUMENT);
    CHECK(starts_with(blob, "{\"metadata", 10));
    if (geteuid() == 0) return; // root may read everything
    CHECK_INT(chmod(blob, 0), 0);
    CHECK_INT(fst_manifest_write(path, blob, NULL, NULL, &error), FST_E_ARGUMENT);
    unlink(blob);
}

TEST(an_index_is_recognised_behind_other_content)
{
    static char text[80000];
    char path[4096];
    size_t size = 0;
    snprintf(path, sizeof path, "%s", make_listed("before", FST_DIGEST_XXH3_128, 64u << 10));
    fst_error error;
    for (size_t before = 0; before < 40000; before = before * 2 + 1) {
        size = (size_t)snprintf(text, sizeof text, "%s{\"metadata\": {\"x\": \"%*s\"}, %s}",
                                before % 4 == 3 ? "\xef\xbb\xbf" : " \n", (int)before, "",
                                "\"weight_map\": {\"a\": \"x.safetensors\"}");
        const char *blob = fixture_file("blob", text, size);
        CHECK_INT(fst_manifest_write(path, blob, NULL, NULL, &error), FST_E_ARGUMENT);
        // Other JSON files are replaced.
        memcpy(strstr(text, "weight_map"), "weight-map", 10);
        blob = fixture_file("blob", text, size);
        CHECK_INT(fst_manifest_write(path, blob, NULL, NULL, &error), FST_OK);
    }
    // The key lies across the blocks that are read.
    for (int before = 16384 - 40; before < 16384; before++) {
        size =
            (size_t)snprintf(text, sizeof text, "{\"x\": \"%*s\", \"weight_map\": {}}", before, "");
        const char *blob = fixture_file("blob", text, size);
        CHECK_INT(fst_manifest_write(path, blob, NULL, NULL, &error), FST_E_ARGUMENT);
    }
}

TEST(file_names_that_are_not_utf8_are_refused)
{
    char folder[4096], path[4096], text[4200], command[12400];
    snprintf(folder, sizeof folder, "%s", fixture_path("odd"));
    snprintf(path, sizeof path, "%s", fixture_path("odd/x\xff.safetensors"));
    CHECK_INT(mkdir(folder, 0700), 0);
    CHECK_INT(rename(fixture_tensors("plain", 1, 100), path), 0);
    fst_manifest_options sums = FST_STRUCT_INIT(fst_manifest_options);
    fst_error error = {0};
    const char *const sources[] = {folder, path};
    for (size_t i = 0; i < 2; i++) {
        CHECK_INT(fst_manifest_write(sources[i], NULL, NULL, NULL, &error), FST_E_ARGUMENT);
        CHECK_CONTAINS(error.message, "safetensors: the file name is not UTF-8");
    }
    // A save refuses before it writes.
    fst_save_options options = FST_STRUCT_INIT(fst_save_options);
    options.manifest = "";
    snprintf(text, sizeof text, "%s", fixture_path("odd/y\xff.safetensors"));
    CHECK_INT(fst_save(text, NULL, 0, &options, NULL, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "not UTF-8");
    CHECK(access(text, F_OK) != 0);
    // Lists as sha256sum writes them may have any name.
    sums.flags = FST_MANIFEST_SUMS;
    sums.digest = FST_DIGEST_SHA256;
    fst_status status = fst_manifest_write(folder, NULL, &sums, NULL, &error);
    CHECK(status == FST_OK || status == FST_E_UNSUPPORTED); // without libcrypto
    fst_bundle_files files = FST_STRUCT_INIT(fst_bundle_files);
    files.folder = folder;
    files.key = text;
    snprintf(text, sizeof text, "%s.key", folder);
    snprintf(command, sizeof command,
             "openssl ecparam -name prime256v1 -genkey -noout -out '%s' 2>/dev/null", text);
    if (status != FST_OK || system(command) != 0) SKIP("no libcrypto or no openssl command");
    CHECK_INT(fst_bundle_sign(&files, NULL, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "safetensors: the file name is not UTF-8");
    CHECK(access(fixture_path("odd/model.sig"), F_OK) != 0);
    // The subject is the folder's name, which is cut where it is not UTF-8.
    CHECK_INT(rename(path, fixture_path("odd/x.safetensors")), 0);
    CHECK_INT(rename(folder, fixture_path("f\xff")), 0);
    snprintf(folder, sizeof folder, "%s", fixture_path("f\xff"));
    CHECK_INT(fst_bundle_sign(&files, NULL, &error), FST_OK);
}

/// Otherwise a folder with the name of the scheme would be made, or expected.
TEST(texts_are_written_to_files_only)
{
    static const char *const urls[] = {"s3://bucket/m.manifest", "https://host/m.manifest",
                                       "ftp://user:secret@host/m.manifest?key=secret"};
    const char *path = make_listed("files-only", FST_DIGEST_XXH3_128, 64u << 10);
    fst_error error;
    for (size_t i = 0; i < sizeof urls / sizeof *urls; i++) {
        CHECK_INT(fst_manifest_write(path, urls[i], NULL, NULL, &error), FST_E_UNSUPPORTED);
        CHECK(strstr(error.message, "secret") == NULL);
    }
    CHECK_INT(fst_manifest_write("s3://bucket/model.safetensors", NULL, NULL, NULL, &error),
              FST_E_UNSUPPORTED);
    CHECK_CONTAINS(error.message, "needs a target");
}

/// A rename would replace a device, even /dev/null, by a file.
TEST(devices_and_fifos_are_not_replaced)
{
    const char *path = make_listed("listed", FST_DIGEST_XXH3_128, 64u << 10);
    char fifo[4096], folder[4096];
    fst_error error;
    struct stat info;
    CHECK(path != NULL);
    snprintf(fifo, sizeof fifo, "%s/fifo", fixture_path("."));
    snprintf(folder, sizeof folder, "%s/subfolder", fixture_path("."));
    unlink(fifo);
    CHECK_INT(mkfifo(fifo, 0600), 0);
    CHECK_INT(mkdir(folder, 0700), 0);
    CHECK_INT(fst_manifest_write(path, fifo, NULL, NULL, &error), FST_E_NOT_REGULAR);
    CHECK(stat(fifo, &info) == 0 && S_ISFIFO(info.st_mode));
    CHECK_INT(fst_manifest_write(path, folder, NULL, NULL, &error), FST_E_NOT_REGULAR);
    CHECK(stat("/dev/null", &info) == 0 && S_ISCHR(info.st_mode));
    unlink(fifo);
    rmdir(folder);
}

/// A progress callback that points the link to the second folder.
static int swing(void *link, uint64_t bytes_done, uint64_t bytes_total, size_t tensors_done,
                 size_t tensors_total) {
    char new_link[520];
    (void)bytes_done, (void)bytes_total, (void)tensors_done, (void)tensors_total;
    snprintf(new_link, sizeof new_link, "%s.new", (const char *)link);
    return symlink("swung2", new_link) != 0 || rename(new_link, link) != 0;
}

TEST(link_that_changes_does_not_mix_two_folders)
{
    char link[512], list[2][600];
    fst_manifest_options options = FST_STRUCT_INIT(fst_manifest_options);
    fst_check_options check = FST_STRUCT_INIT(fst_check_options);
    snprintf(link, sizeof link, "%s", fixture_path("now"));
    fst_error error;
    options.progress = check.progress = swing;
    options.progress_context = check.progress_context = link;
    for (int sums = 0; sums < 2; sums++) {
        const char *name = sums ? "SHA256SUMS" : "model.manifest";
        options.flags = sums ? FST_MANIFEST_SUMS : 0;
        options.digest = sums ? FST_DIGEST_SHA256 : FST_DIGEST_XXH3_128;
        for (int i = 0; i < 2; i++) {
            char folder[40];
            snprintf(folder, sizeof folder, "swung%d", i + 1);
            CHECK(sums || mkdir(fixture_path(folder), 0700) == 0);
            strcat(folder, "/");
            snprintf(list[i], sizeof list[i], "%s%s", fixture_path(folder), name);
            // Other tensors, so that one folder's list does not match the other's files.
            strcat(folder, "model.safetensors");
            fixture_tensors(folder, (size_t)i + 1, 1000);
        }
        unlink(link);
        CHECK_INT(symlink("swung1", link), 0);
        CHECK_INT(fst_manifest_write(link, NULL, &options, NULL, &error), FST_OK);
        CHECK_INT(access(list[0], F_OK), 0);
        CHECK(access(list[1], F_OK) != 0);
        unlink(link);
        CHECK_INT(symlink("swung1", link), 0);
        CHECK_INT(fst_manifest_check(link, &check, NULL, &error), FST_OK);
        unlink(list[0]);
    }
}
