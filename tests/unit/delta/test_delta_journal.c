// SPDX-License-Identifier: Apache-2.0
/// An application of a delta to files, disturbed by others: a file is replaced while it runs, or a
/// word of the journal is damaged after a kill. No file of others is changed, and the version note
/// names no version that the files do not have.
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/primitives.h"
#include "check.h"
#include "delta/apply_journal.h"
#include "delta_fixture.h"
#include "fixture.h"

static long due; ///< the write at which something happens; 0: none
static bool is_killed;
static bool is_torn = true; ///< the kill comes within the write, not after it
static atomic_long writes;
static char local[600], other[600];

/// Replaces a file of the checkpoint, as a save does.
static void replace_file(const char *name) {
    char from[700], to[700];
    snprintf(from, sizeof from, "%s/%s", other, name);
    snprintf(to, sizeof to, "%s/%s", local, name);
    if (rename(from, to) != 0) abort();
}

ssize_t __real_pwrite64(int fd, const void *bytes, size_t size, off_t at);
ssize_t __wrap_pwrite64(int fd, const void *bytes, size_t size, off_t at);
ssize_t __wrap_pwrite64(int fd, const void *bytes, size_t size, off_t at) {
    if (due == 0 || atomic_fetch_add(&writes, 1) + 1 != due)
        return __real_pwrite64(fd, bytes, size, at);
    if (is_killed) {
        (void)!__real_pwrite64(fd, bytes, is_torn ? size / 2 : size, at);
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
    replace_file("part0.safetensors");
    return __real_pwrite64(fd, bytes, size, at);
}

static fst_status apply(fst_delta_encoding encoding, long number, fst_error *error) {
    fst_delta *delta = delta_open_chain(encoding, FST_DIGEST_XXH3_128);
    fst_delta_options options = FST_STRUCT_INIT(fst_delta_options);
    options.thread_count = 2;
    options.version = "000000";
    atomic_store(&writes, 0);
    due = number;
    fst_status status = fst_delta_apply(delta, local, &options, NULL, error);
    due = 0;
    fst_delta_close(delta);
    return status;
}

/// The bytes of both files of a checkpoint.
static unsigned char *read_files(const char *folder, size_t *size) {
    unsigned char *bytes = malloc((size_t)32 << 20);
    if (bytes == NULL) abort();
    *size = 0;
    for (int i = 0; i < 2; i++) {
        char path[700];
        snprintf(path, sizeof path, "%s/part%d.safetensors", folder, i);
        FILE *file = fopen(path, "rb");
        if (file == NULL) abort();
        *size += fread(bytes + *size, 1, ((size_t)32 << 20) - *size, file);
        fclose(file);
    }
    return bytes;
}

/// Whether the files begin with these bytes.
static bool same_start(const char *folder, const unsigned char *expected, size_t size) {
    size_t got;
    unsigned char *bytes = read_files(folder, &got);
    bool is_same = got >= size && memcmp(bytes, expected, size) == 0;
    free(bytes);
    return is_same;
}

TEST(a_file_that_is_replaced_meanwhile_stays)
{
    snprintf(local, sizeof local, "%s", fixture_path("local"));
    snprintf(other, sizeof other, "%s", fixture_path("other"));
    is_killed = false;
    size_t first_file = delta_sizes[0] + delta_sizes[1], size;
    for (int encoding = 0; encoding < FST_DELTA_ENCODING_COUNT; encoding++)
        for (long number = 1; number < 50; number += 12) {
            char version[FST_DELTA_VERSION_BYTES];
            int is_interrupted;
            fst_error error;
            delta_write_checkpoint(local, 0);
            delta_write_checkpoint(other, 1);
            unsigned char *saved = read_files(other, &size);
            fst_status applied = apply((fst_delta_encoding)encoding, number, &error);
            CHECK_INT(applied, FST_E_FILE_CHANGED);
            CHECK_CONTAINS(error.message, "was replaced while a delta was applied");
            CHECK(same_start(local, saved, first_file));
            free(saved);
            fst_status status = fst_delta_version(local, version, &is_interrupted, &error);
            CHECK(status == FST_E_FILE_CHANGED || (status == FST_OK && version[0] == '\0'));
            CHECK(status != FST_OK || !is_interrupted);
        }
}

/// Kills an application at a write. False if it ended before.
static bool kill_in_block(fst_delta_encoding encoding, long number) {
    delta_write_checkpoint(local, 0);
    fst_delta_close(delta_open_chain(encoding, FST_DIGEST_XXH3_128)); // made before, once
    pid_t child = fork();
    if (child == 0) {
        is_killed = true;
        _exit(apply(encoding, number, NULL) == FST_OK ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFSIGNALED(status);
}

/// Flips a bit of the journal's word for a block that was being written. False without such a word.
static bool damage_word(int bit) {
    sync_folder sync;
    apply_journal journal;
    bool is_found = false;
    if (fsti_sync_paths(local, &sync, NULL) != FST_OK) abort();
    if (fsti_journal_open(&sync, &journal, NULL) != FST_OK || journal.map == NULL) abort();
    for (uint32_t i = 0; i < journal.head->slot_count && !is_found; i++) {
        uint64_t word = atomic_load(&journal.words[i * JOURNAL_WORD_STRIDE]);
        is_found = word != 0 && (word & 1) != 0;
        if (is_found)
            atomic_store(&journal.words[i * JOURNAL_WORD_STRIDE], word ^ (uint64_t)1 << bit);
    }
    fsti_journal_close(&journal);
    fsti_sync_close(&sync);
    return is_found;
}

static fst_status recover(bool backward, fst_error *error) {
    fst_delta_options options = FST_STRUCT_INIT(fst_delta_options);
    options.flags = backward ? FST_DELTA_ROLL_BACK : 0;
    return fst_delta_recover(local, &options, NULL, error);
}

TEST(a_damaged_word_of_the_journal_is_found)
{
    snprintf(local, sizeof local, "%s", fixture_path("damaged"));
    long refused = 0, tried = 0;
    for (int encoding = 0; encoding < FST_DELTA_ENCODING_COUNT; encoding++)
        for (int bit = 0; bit < 64; bit += CHECK_ROUNDS(8) > 1 ? 1 : 5)
            for (int backward = 0; backward < 2; backward++) {
                long number = 21 + bit % 7;
                fst_error error;
                size_t size, after;
                while (!kill_in_block((fst_delta_encoding)encoding, number) || !damage_word(bit))
                    number++;
                unsigned char *before = read_files(local, &size);
                fst_status status = recover(backward != 0, &error);
                unsigned char *now = read_files(local, &after);
                bool is_unchanged = size == after && memcmp(before, now, size) == 0;
                free(before);
                free(now);
                tried++;
                refused += status != FST_OK;
                if (status != FST_OK ? !is_unchanged : delta_find_state(local) < 0)
                    check_fail(__FILE__, __LINE__, "encoding %d, bit %d, backward %d: status %d",
                               encoding, bit, backward, (int)status);
            }
    printf("# %ld of %ld damaged journals were refused\n", refused, tried);
}

/// The block of the last write has its new bytes, and the journal still calls it unfinished.
TEST(a_kill_right_after_a_write_can_be_rolled_back)
{
    snprintf(local, sizeof local, "%s", fixture_path("after"));
    is_torn = false;
    long killed = 0;
    for (int encoding = 0; encoding < FST_DELTA_ENCODING_COUNT; encoding++)
        for (long number = 1; kill_in_block((fst_delta_encoding)encoding, number); number++) {
            fst_error error = {0};
            char version[FST_DELTA_VERSION_BYTES];
            int is_interrupted = 0;
            fst_status status = fst_delta_version(local, version, &is_interrupted, &error);
            if (status != FST_OK || !is_interrupted) continue; // not a write to a file of the model
            killed++;
            CHECK_INT(recover(true, &error), FST_OK);
            CHECK_INT(delta_find_state(local), 0);
        }
    CHECK(killed > 10);
    is_torn = true;
}
