// SPDX-License-Identifier: Apache-2.0
/// Compression and decompression with faults: the target is complete or does not exist.
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "packed_fixture.h"

/// How a target is made of the packed or the plain file.
static fst_status rewrite_file(bool compress, const char *target, const fst_pack_options *options,
                               fst_error *error) {
    return compress ? fst_file_compress(make_plain(), target, options, NULL, error)
                    : fst_file_decompress(make_packed(), target, options, NULL, error);
}

/// Whether a target has the expected bytes, or (if allowed) does not exist.
static bool is_whole_or_absent(bool compress, const char *target, bool may_lack) {
    struct stat info;
    if (stat(target, &info) != 0) return may_lack;
    file_bytes one = read_bytes(target),
               other = read_bytes(compress ? make_packed() : make_plain());
    bool is_whole = one.size == other.size && memcmp(one.bytes, other.bytes, one.size) == 0;
    free(one.bytes);
    free(other.bytes);
    return is_whole;
}

TEST(compression_survives_every_failed_allocation)
{
    fst_pack_options options = FST_STRUCT_INIT(fst_pack_options);
    options.compress = FST_COMPRESS_ALL;
    options.thread_count = 1;
    options.promise = FST_SAVE_QUICK;
    if (make_packed() == NULL) return;
    char *target = strdup(fixture_path("swept"));
    for (int compress = 0; compress < 2; compress++) {
        long live = fsti_alloc_live(), n = 0;
        for (fst_status status = FST_E_NO_MEMORY; status != FST_OK; n = check_next(n)) {
            fst_error error = {.status = FST_OK};
            unlink(target);
            fsti_alloc_fail_after(n);
            status = rewrite_file(compress, target, &options, &error);
            fsti_alloc_fail_after(-1);
            if (status != FST_OK && status != FST_E_NO_MEMORY)
                printf("# %d, %ld: %s\n", compress, n, error.message);
            CHECK(status == FST_OK || status == FST_E_NO_MEMORY);
            CHECK(is_whole_or_absent(compress, target, status != FST_OK));
            CHECK_INT(fsti_alloc_live(), live);
        }
        CHECK(n > 20);
    }
    unlink(target);
    free(target);
}

static int cancel_after;

static int cancel_some(void *context, uint64_t bytes_done, uint64_t bytes_total,
                       size_t tensors_done, size_t tensors_total) {
    (void)context, (void)bytes_done, (void)bytes_total, (void)tensors_done, (void)tensors_total;
    return cancel_after-- == 0;
}

TEST(cancelled_compression_leaves_no_file)
{
    fst_pack_options options = FST_STRUCT_INIT(fst_pack_options);
    options.compress = FST_COMPRESS_ALL;
    options.promise = FST_SAVE_QUICK;
    options.progress = cancel_some;
    if (make_packed() == NULL) return;
    char *target = strdup(fixture_path("cancelled"));
    for (int i = 0; i < 8; i++) {
        fst_error error = {.status = FST_OK};
        cancel_after = i / 2;
        fst_status status = rewrite_file(i % 2 == 0, target, &options, &error);
        CHECK(status == FST_E_CANCELLED || (status == FST_OK && cancel_after >= 0));
        CHECK(is_whole_or_absent(i % 2 == 0, target, status != FST_OK));
        unlink(target);
    }
    free(target);
}

/// A source that is written to while it is read: its time changes after its first bytes were read.
static char *changing;

static int change_source(void *context, uint64_t bytes_done, uint64_t bytes_total,
                         size_t tensors_done, size_t tensors_total) {
    static const struct timespec times[2] = {{.tv_sec = 1000000000}, {.tv_sec = 1000000000}};
    (void)context, (void)bytes_done, (void)bytes_total, (void)tensors_done, (void)tensors_total;
    (void)utimensat(AT_FDCWD, changing, times, 0);
    return 0;
}

TEST(changed_source_is_an_error)
{
    fst_pack_options options = FST_STRUCT_INIT(fst_pack_options);
    options.compress = FST_COMPRESS_ALL;
    options.promise = FST_SAVE_QUICK;
    options.progress = change_source;
    if (make_packed() == NULL) return;
    char *target = strdup(fixture_path("of.changed"));
    changing = strdup(fixture_path("changing"));
    for (int compress = 0; compress < 2; compress++) {
        fst_error error = {.status = FST_OK};
        file_bytes source = read_bytes(compress ? make_plain() : make_packed());
        FILE *file = fopen(changing, "wb");
        if (file == NULL || fwrite(source.bytes, 1, source.size, file) != source.size) abort();
        fclose(file);
        free(source.bytes);
        CHECK_INT(compress ? fst_file_compress(changing, target, &options, NULL, &error)
                           : fst_file_decompress(changing, target, &options, NULL, &error),
                  FST_E_FILE_CHANGED);
        CHECK(access(target, F_OK) != 0);
    }
    free(changing);
    free(target);
}
