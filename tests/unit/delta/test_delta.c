// SPDX-License-Identifier: Apache-2.0
/// Opening, applying, preparing and making weight deltas through the public interface.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "delta_fixture.h"
#include "fixture.h"
#include "io/io.h"

TEST(a_chain_is_applied_in_one_pass)
{
    char local[600];
    fst_error error;
    snprintf(local, sizeof local, "%s", fixture_path("local"));
    for (int encoding = 0; encoding < FST_DELTA_ENCODING_COUNT; encoding++) {
        fst_delta *delta = delta_open_chain((fst_delta_encoding)encoding, FST_DIGEST_ADLER32);
        fst_delta_stats stats = FST_STRUCT_INIT(fst_delta_stats);
        uint64_t whole = delta_sizes[0] + delta_sizes[1] + delta_sizes[2];
        delta_write_checkpoint(local, 0);
        CHECK_INT(fst_delta_apply(delta, local, NULL, &stats, &error), FST_OK);
        CHECK_INT(delta_find_state(local), 2);
        CHECK_INT(stats.tensor_count, 3); // the fourth one did not change
        CHECK_INT(stats.bytes_read, whole);
        CHECK_INT(stats.bytes_hashed, whole);
        CHECK(stats.bytes_written <= whole);
        fst_delta_close(delta);
    }
}

/// A check first, a check alone, and two passes, as versions of both encodings need.
TEST(each_changed_tensor_is_counted_once)
{
    char local[600];
    fst_error error;
    fst_delta *delta;
    snprintf(local, sizeof local, "%s", fixture_path("local"));
    const char *folders[] = {delta_make_version(1, FST_DELTA_XOR, FST_DIGEST_ADLER32),
                             delta_make_version(2, FST_DELTA_OVERWRITE, FST_DIGEST_ADLER32)};
    uint64_t whole = delta_sizes[0] + delta_sizes[1] + delta_sizes[2];
    static const uint32_t flags[] = {0, FST_DELTA_CHECK_FIRST, FST_DELTA_CHECK_ONLY};
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        fst_delta_stats stats = FST_STRUCT_INIT(fst_delta_stats);
        fst_delta_options options = FST_STRUCT_INIT(fst_delta_options);
        options.flags = flags[i];
        delta_write_checkpoint(local, 0);
        bool is_mixed = flags[i] == 0;
        CHECK_INT(fst_delta_open(folders, is_mixed ? 2 : 1, &delta, &error), FST_OK);
        CHECK_INT(fst_delta_apply(delta, local, &options, &stats, &error), FST_OK);
        CHECK_INT(stats.tensor_count, 3);
        CHECK_INT(stats.tensor_bytes, whole);
        fst_delta_close(delta);
    }
}

TEST(arguments_that_are_nonsense_are_errors)
{
    fst_error error;
    fst_delta *delta = NULL;
    fst_delta_change *change = NULL;
    fst_delta_patch patch = FST_STRUCT_INIT(fst_delta_patch);
    fst_delta_info info = FST_STRUCT_INIT(fst_delta_info);
    fst_delta_make_options make = FST_STRUCT_INIT(fst_delta_make_options);
    fst_delta_options options = FST_STRUCT_INIT(fst_delta_options);
    const char *none[] = {NULL}, *empty[] = {""};
    char version[FST_DELTA_VERSION_BYTES];
    int is_interrupted;
    CHECK_INT(fst_delta_open(NULL, 1, &delta, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_delta_open(none, 1, &delta, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_delta_open(none, 0, &delta, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_delta_open(empty, 1, &delta, &error), FST_E_NOT_FOUND);
    CHECK_INT(fst_delta_open(empty, 1, NULL, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_delta_info_get(NULL, &info, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_delta_apply(NULL, "x", NULL, NULL, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_delta_recover(NULL, NULL, NULL, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_delta_version(NULL, version, &is_interrupted, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_delta_prepare(NULL, NULL, 0, NULL, &change, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_delta_patch_make(NULL, 0, NULL, &patch, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_delta_make(NULL, "x", &make, NULL, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_delta_make("x", "y", &make, NULL, &error), FST_E_ARGUMENT);
    fst_delta_close(NULL);
    fst_delta_commit(NULL);
    fst_delta_drop(NULL);
    fst_delta_patch_clear(NULL);

    delta = delta_open_chain(FST_DELTA_XOR, FST_DIGEST_XXH3_128);
    options.flags = 1u << 20;
    CHECK_INT(fst_delta_apply(delta, "x", &options, NULL, &error), FST_E_ARGUMENT);
    options.flags = FST_DELTA_ROLL_BACK;
    CHECK_INT(fst_delta_apply(delta, "x", &options, NULL, &error), FST_E_ARGUMENT);
    options.flags = FST_DELTA_CHECK_ONLY;
    CHECK_INT(fst_delta_recover("x", &options, NULL, &error), FST_E_ARGUMENT);
    options = (fst_delta_options){.struct_size = 3};
    CHECK_INT(fst_delta_apply(delta, "x", &options, NULL, &error), FST_E_ARGUMENT);
    options = FST_STRUCT_INIT(fst_delta_options);
    options.version = "";
    CHECK_INT(fst_delta_apply(delta, "x", &options, NULL, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "version is empty");
    CHECK_INT(fst_delta_apply(delta, "nowhere", NULL, NULL, &error), FST_E_NOT_FOUND);
    fst_delta_tensor tensor = FST_STRUCT_INIT(fst_delta_tensor);
    CHECK_INT(fst_delta_tensor_get(delta, 3, &tensor, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_delta_tensor_get(delta, 0, &tensor, &error), FST_OK);
    CHECK_TEXT(tensor.name, "big");
    CHECK_INT(tensor.version_count, 2);
    fst_delta_memory twice[2] = {{.name = "big"}, {.name = "big"}};
    CHECK_INT(fst_delta_prepare(delta, twice, 2, NULL, &change, &error), FST_E_DUPLICATE_TENSOR);
    twice[0].size_bytes = 5;
    CHECK_INT(fst_delta_prepare(delta, twice, 1, NULL, &change, &error), FST_E_ARGUMENT);
    fst_delta_close(delta);
}

/// The versions of a delta that is made of another one: readers refuse a version that is not newer
/// than its base.
TEST(versions_that_readers_refuse_are_not_written)
{
    static const struct {
        const char *base, *version, *words;
        int from; ///< 1: of one version; 0: of the chain of two
    } cases[] = {{"0", "0", "version '0' must be newer than base_version '0'", 0},
                 {"3", "03", "version '03' must be newer", 0},
                 {"9", "7", "version '7' must be newer", 1},
                 {"1", "3", "must be base_version + 1", 1},
                 {"", "1", "base_version is empty", 1},
                 {"1", "", "version is empty", 1}};
    fst_error error;
    const char *one[] = {delta_make_version(1, FST_DELTA_XOR, FST_DIGEST_ADLER32)};
    fst_delta *sources[2] = {delta_open_chain(FST_DELTA_XOR, FST_DIGEST_ADLER32)};
    CHECK_INT(fst_delta_open(one, 1, &sources[1], &error), FST_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fst_delta_make_options make = FST_STRUCT_INIT(fst_delta_make_options);
        make.base_version = cases[i].base;
        make.version = cases[i].version;
        make.delta = sources[cases[i].from];
        CHECK_INT(fst_delta_make("nowhere", "unused", &make, NULL, &error), FST_E_ARGUMENT);
        CHECK_CONTAINS(error.message, cases[i].words);
    }
    fst_delta_close(sources[0]);
    fst_delta_close(sources[1]);
}

TEST(a_patch_has_the_changed_elements)
{
    fst_error error;
    fst_delta *delta = delta_open_chain(FST_DELTA_XOR, FST_DIGEST_XXH3_128);
    fst_delta_patch patch = FST_STRUCT_INIT(fst_delta_patch);
    fst_delta_patch_options old = FST_STRUCT_INIT(fst_delta_patch_options);
    old.old = delta_states[0][0];
    old.size_bytes = delta_sizes[0];
    old.element_bytes = 3;
    old.index_bytes = 4;
    CHECK_INT(fst_delta_patch_make(delta, 0, &old, &patch, &error), FST_E_ARGUMENT);
    old.element_bytes = 1;
    old.index_bytes = 5;
    CHECK_INT(fst_delta_patch_make(delta, 0, &old, &patch, &error), FST_E_ARGUMENT);
    old.index_bytes = 8;
    old.dense = 2;
    CHECK_INT(fst_delta_patch_make(delta, 0, &old, &patch, &error), FST_E_ARGUMENT);
    old.dense = 0;
    CHECK_INT(fst_delta_patch_make(delta, 9, &old, &patch, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_delta_patch_make(delta, 0, &old, &patch, &error), FST_OK);
    const int64_t *indices = patch.indices;
    const unsigned char *values = patch.values;
    for (uint64_t i = 0; i < patch.element_count; i++)
        CHECK_INT(values[i], delta_states[2][0][indices[i]]);
    fst_delta_patch_clear(&patch);
    fst_delta_close(delta);
}

/// Files are compared in their mappings. Here the new state is the program's own mapping of a file
/// that became empty, so that reading it raises SIGBUS.
TEST(a_file_that_shrinks_while_a_delta_is_made_is_an_error)
{
    char old[600], folder[600];
    fst_error error;
    fst_delta_memory memory[DELTA_TENSORS];
    fst_delta_make_options options = FST_STRUCT_INIT(fst_delta_make_options);
    snprintf(old, sizeof old, "%s", fixture_path("shrink-old"));
    snprintf(folder, sizeof folder, "%s", fixture_path("shrink-delta"));
    delta_write_checkpoint(old, 0);
    int fd = open(fixture_path("shrink-memory"), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    CHECK(fd >= 0 && ftruncate(fd, (off_t)delta_sizes[0]) == 0);
    void *mapped = mmap(NULL, delta_sizes[0], PROT_READ, MAP_SHARED, fd, 0);
    CHECK(mapped != MAP_FAILED && ftruncate(fd, 0) == 0);
    close(fd);
    for (int i = 0; i < DELTA_TENSORS; i++)
        memory[i] = (fst_delta_memory){.name = delta_names[i],
                                       .data = i == 0 ? mapped : delta_states[1][i],
                                       .size_bytes = delta_sizes[i]};
    options.tensors = memory;
    options.tensor_count = DELTA_TENSORS;
    options.base_version = "0";
    options.version = "1";
    for (int encoding = 0; encoding < FST_DELTA_ENCODING_COUNT; encoding++) {
        options.encoding = (fst_delta_encoding)encoding;
        CHECK_INT(fst_delta_make(old, folder, &options, NULL, &error), FST_E_IO);
        CHECK_CONTAINS(error.message, "became shorter");
        CHECK(strcmp(error.tensor, delta_names[0]) == 0 && access(folder, F_OK) != 0);
    }
    munmap(mapped, delta_sizes[0]);
}

TEST(positions_of_an_overwrite_delta_end_at_4_gib)
{
    uint64_t size = (uint64_t)UINT32_MAX + 1;
    fst_error error;
    fst_delta_change *change;
    fst_delta_memory memory[DELTA_TENSORS];
    fst_delta_patch patch = FST_STRUCT_INIT(fst_delta_patch);
    fst_delta_patch_options options = FST_STRUCT_INIT(fst_delta_patch_options);
    fst_delta *delta = delta_open_chain(FST_DELTA_OVERWRITE, FST_DIGEST_ADLER32);
    void *large = mmap(NULL, size, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (large == MAP_FAILED) SKIP("the address space is limited");
    for (int i = 0; i < DELTA_TENSORS; i++)
        memory[i] = (fst_delta_memory){delta_names[i], large, size};
    CHECK_INT(fst_delta_prepare(delta, memory, DELTA_TENSORS, NULL, &change, &error),
              FST_E_UNSUPPORTED);
    CHECK_CONTAINS(error.message, "4 GiB");
    options.old = large;
    options.size_bytes = size;
    options.element_bytes = 2;
    options.index_bytes = 8;
    CHECK_INT(fst_delta_patch_make(delta, 0, &options, &patch, &error), FST_E_UNSUPPORTED);
    munmap(large, size);
    fst_delta_close(delta);
}

/// Otherwise two calls that write to one folder at once would mix their shards.
TEST(a_folder_that_another_call_writes_to_is_refused)
{
    char old[600], made[600], folder[600];
    fst_error error;
    fst_delta_make_options options = FST_STRUCT_INIT(fst_delta_make_options);
    snprintf(old, sizeof old, "%s", fixture_path("lock-old"));
    snprintf(made, sizeof made, "%s", fixture_path("lock-new"));
    snprintf(folder, sizeof folder, "%s", fixture_path("lock-delta"));
    delta_write_checkpoint(old, 0);
    delta_write_checkpoint(made, 1);
    options.checkpoint = made;
    options.base_version = "0";
    options.version = "1";
    delta_remove(folder);
    CHECK(mkdir(folder, 0777) == 0);
    int lock = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK(lock >= 0 && flock(lock, LOCK_EX) == 0);
    fsti_io_test_disable(FSTI_TEST_NO_LOCK_WAIT);
    CHECK_INT(fst_delta_make(old, folder, &options, NULL, &error), FST_E_TIMEOUT);
    close(lock);
    CHECK_INT(fst_delta_make(old, folder, &options, NULL, &error), FST_OK);
    CHECK_INT(fst_delta_make(old, folder, &options, NULL, &error), FST_E_ARGUMENT);
    fsti_io_test_disable(0);
    CHECK_CONTAINS(error.message, "holds a version already");
}

/// A second index would make the folder ambiguous for every program that opens it.
TEST(a_folder_with_another_index_is_refused)
{
    char old[600], made[600], folder[600], index[700];
    fst_error error;
    fst_delta_make_options options = FST_STRUCT_INIT(fst_delta_make_options);
    snprintf(old, sizeof old, "%s", fixture_path("index-old"));
    snprintf(made, sizeof made, "%s", fixture_path("index-new"));
    snprintf(folder, sizeof folder, "%s", fixture_path("index-delta"));
    snprintf(index, sizeof index, "%s/other.safetensors.index.json", folder);
    delta_write_checkpoint(old, 0);
    delta_write_checkpoint(made, 1);
    options.checkpoint = made;
    options.base_version = "0";
    options.version = "1";
    delta_remove(folder);
    CHECK(mkdir(folder, 0777) == 0);
    int file = open(index, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    CHECK(file >= 0 && close(file) == 0);
    CHECK_INT(fst_delta_make(old, folder, &options, NULL, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "holds files of a model");
    unlink(index);
    CHECK_INT(fst_delta_make(old, folder, &options, NULL, &error), FST_OK);
}

/// The mark of an attempt that was killed does not make a model's files part of it.
TEST(a_mark_does_not_hide_a_model)
{
    char old[600], made[600], folder[600], mark[700], model[700];
    fst_error error;
    fst_delta_make_options options = FST_STRUCT_INIT(fst_delta_make_options);
    snprintf(old, sizeof old, "%s", fixture_path("mark-old"));
    snprintf(made, sizeof made, "%s", fixture_path("mark-new"));
    snprintf(folder, sizeof folder, "%s", fixture_path("mark-delta"));
    snprintf(mark, sizeof mark, "%s/making.tmp", folder);
    snprintf(model, sizeof model, "%s/mine.safetensors", folder);
    delta_write_checkpoint(old, 0);
    delta_write_checkpoint(made, 1);
    options.checkpoint = made;
    options.base_version = "0";
    options.version = "1";
    delta_remove(folder);
    CHECK(mkdir(folder, 0777) == 0);
    CHECK(close(open(mark, O_WRONLY | O_CREAT | O_CLOEXEC, 0666)) == 0);
    CHECK(close(open(model, O_WRONLY | O_CREAT | O_CLOEXEC, 0666)) == 0);
    CHECK_INT(fst_delta_make(old, folder, &options, NULL, &error), FST_E_ARGUMENT);
    CHECK(access(model, F_OK) == 0);
    unlink(model);
    CHECK_INT(fst_delta_make(old, folder, &options, NULL, &error), FST_OK);
    CHECK(access(mark, F_OK) != 0);
}

TEST(a_check_and_a_needless_recovery_make_nothing)
{
    char local[600], sync[700];
    fst_error error;
    fst_delta_options options = FST_STRUCT_INIT(fst_delta_options);
    snprintf(local, sizeof local, "%s", fixture_path("check-only"));
    snprintf(sync, sizeof sync, "%s/.weight_sync", local);
    delta_write_checkpoint(local, 0);
    fst_delta *delta = delta_open_chain(FST_DELTA_XOR, FST_DIGEST_ADLER32);
    options.flags = FST_DELTA_CHECK_ONLY;
    CHECK_INT(fst_delta_apply(delta, local, &options, NULL, &error), FST_OK);
    CHECK(access(sync, F_OK) != 0);
    CHECK_INT(fst_delta_recover(local, NULL, NULL, &error), FST_OK);
    CHECK(access(sync, F_OK) != 0);
    CHECK_INT(delta_find_state(local), 0);
    fst_delta_close(delta);
}

/// Removing the files of a failed call needs no memory.
TEST(a_delta_that_fails_for_lack_of_memory_leaves_an_empty_folder)
{
    char old[600], made[600], folder[600];
    fst_error error;
    fst_delta_make_options options = FST_STRUCT_INIT(fst_delta_make_options);
    snprintf(old, sizeof old, "%s", fixture_path("memory-old"));
    snprintf(made, sizeof made, "%s", fixture_path("memory-new"));
    snprintf(folder, sizeof folder, "%s", fixture_path("memory-delta"));
    delta_write_checkpoint(old, 0);
    delta_write_checkpoint(made, 1);
    options.checkpoint = made;
    options.base_version = "0";
    options.version = "1";
    fst_status status = FST_E_NO_MEMORY;
    for (long n = 0; status == FST_E_NO_MEMORY; n = check_next(n)) {
        delta_remove(folder);
        fsti_alloc_fail_after(n);
        status = fst_delta_make(old, folder, &options, NULL, &error);
        fsti_alloc_fail_after(-1);
        if (status == FST_E_NO_MEMORY) CHECK(rmdir(folder) == 0 || errno == ENOENT);
        CHECK(n < 10000);
    }
    CHECK_INT(status, FST_OK);
}

/// The frame states its size, so the error can name both sizes before anything is decoded.
TEST(a_live_tensor_of_another_size_is_refused)
{
    fst_error error = {0};
    fst_delta_change *change = NULL;
    fst_delta *delta = delta_open_chain(FST_DELTA_XOR, FST_DIGEST_ADLER32);
    fst_delta_memory memory[DELTA_TENSORS] = {{0}};
    for (int i = 0; i < DELTA_TENSORS; i++) // only read: fst_delta_commit() is not reached
        memory[i] = (fst_delta_memory){
            .name = delta_names[i], .data = delta_states[0][i], .size_bytes = delta_sizes[i]};
    memory[0].size_bytes -= 2;
    CHECK_INT(fst_delta_prepare(delta, memory, DELTA_TENSORS, NULL, &change, &error),
              FST_E_CORRUPT);
    CHECK_CONTAINS(error.message, "another dtype or shape");
    memory[0].size_bytes = delta_sizes[0] / 2;
    CHECK_INT(fst_delta_prepare(delta, memory, DELTA_TENSORS, NULL, &change, &error),
              FST_E_TENSOR_INVALID_INFO);
    CHECK(change == NULL && strcmp(error.tensor, delta_names[0]) == 0);
    fst_delta_close(delta);
}

TEST(a_change_is_committed_or_dropped)
{
    fst_error error;
    fst_delta *delta = delta_open_chain(FST_DELTA_OVERWRITE, FST_DIGEST_BLAKE3);
    fst_delta_memory memory[DELTA_TENSORS] = {{0}};
    unsigned char *copies[DELTA_TENSORS];
    fst_delta_change *change;
    for (int i = 0; i < DELTA_TENSORS; i++) {
        copies[i] = malloc(delta_sizes[i] + 1);
        // An odd address: parts of lines are copied, too.
        memcpy(copies[i] + 1, delta_states[0][i], delta_sizes[i]);
        memory[i] = (fst_delta_memory){
            .name = delta_names[i], .data = copies[i] + 1, .size_bytes = delta_sizes[i]};
    }
    CHECK_INT(fst_delta_prepare(delta, memory, DELTA_TENSORS, NULL, &change, &error), FST_OK);
    fst_delta_drop(change);
    CHECK_INT(fst_delta_prepare(delta, memory, DELTA_TENSORS, NULL, &change, &error), FST_OK);
    fst_delta_close(delta); // the change stays valid
    for (int i = 0; i < DELTA_TENSORS; i++)
        CHECK(memcmp(copies[i] + 1, delta_states[0][i], delta_sizes[i]) == 0);
    fst_delta_commit(change);
    for (int i = 0; i < DELTA_TENSORS; i++) {
        CHECK(memcmp(copies[i] + 1, delta_states[2][i], delta_sizes[i]) == 0);
        memset(copies[i] + 1, 0, delta_sizes[i]);
    }
    fst_delta_commit(change); // does nothing
    for (int i = 0; i < DELTA_TENSORS; i++) {
        for (size_t k = 1; k <= delta_sizes[i]; k++) CHECK_INT(copies[i][k], 0);
        free(copies[i]);
    }
    fst_delta_drop(change);
}

TEST(adler32_is_zlibs)
{
    // Known values, and a run long enough for every reduction.
    static const struct {
        const char *text;
        unsigned char digest[4];
    } known[] = {
        {"", {0, 0, 0, 1}}, {"abc", {2, 0x4d, 1, 0x27}}, {"Wikipedia", {0x11, 0xe6, 3, 0x98}}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        fst_digest_state *state;
        unsigned char digest[FST_DIGEST_BYTES_MAX];
        size_t size;
        CHECK_INT(fst_digest_begin(FST_DIGEST_ADLER32, &state, NULL), FST_OK);
        CHECK_INT(fst_digest_update(state, known[i].text, strlen(known[i].text), NULL), FST_OK);
        CHECK_INT(fst_digest_end(state, digest, &size, NULL), FST_OK);
        CHECK_INT(size, 4);
        CHECK(memcmp(digest, known[i].digest, 4) == 0);
    }
    unsigned char *bytes = malloc(100003);
    memset(bytes, 0xff, 100003);
    uint32_t first = 1, second = 0;
    for (size_t i = 0; i < 100003; i++) {
        first = (first + bytes[i]) % 65521;
        second = (second + first) % 65521;
    }
    fst_digest_state *state;
    unsigned char digest[FST_DIGEST_BYTES_MAX];
    size_t size;
    CHECK_INT(fst_digest_begin(FST_DIGEST_ADLER32, &state, NULL), FST_OK);
    CHECK_INT(fst_digest_update(state, bytes, 3, NULL), FST_OK);
    CHECK_INT(fst_digest_update(state, bytes + 3, 100000, NULL), FST_OK);
    CHECK_INT(fst_digest_end(state, digest, &size, NULL), FST_OK);
    free(bytes);
    CHECK_INT((uint32_t)digest[0] << 8 | digest[1], second);
    CHECK_INT((uint32_t)digest[2] << 8 | digest[3], first);
}
