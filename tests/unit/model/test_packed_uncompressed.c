// SPDX-License-Identifier: Apache-2.0
/// Tensors stored uncompressed in compressed files are read like those of plain files: with or
/// without the page cache, and many small ones at once.
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "packed_fixture.h"

#define SMALL_COUNT 300u
#define SMALL_BYTES 1000u
#define LARGE_BYTES ((size_t)32 << 20)
#define PACKED_BYTES ((size_t)1 << 20)

/// One matrix that is compressed, before and behind it small tensors that are not, at last a large
/// one of noise. The plain file; *packed: the compressed one, NULL without libzstd.
static const char *make_mixed(const char **packed) {
    static const uint64_t small[] = {SMALL_BYTES}, large[] = {LARGE_BYTES};
    static const uint64_t matrix[] = {PACKED_BYTES / 2};
    static char names[SMALL_COUNT][16];
    static const char *plain, *made;
    fst_save_tensor tensors[SMALL_COUNT + 2];
    unsigned char *noise = malloc(LARGE_BYTES), *weights = malloc(PACKED_BYTES);
    uint64_t state = 5;
    *packed = make_packed() == NULL ? NULL : made;
    if (plain != NULL || make_packed() == NULL) goto out;
    for (size_t i = 0; i < LARGE_BYTES; i++)
        noise[i] = (unsigned char)(fixture_random(&state) >> 9);
    for (size_t i = 0; i < PACKED_BYTES; i++)
        weights[i] = (unsigned char)(i % 2 == 0 ? noise[i] : 0x3c | (noise[i] & 0x81));
    for (size_t i = 0; i < SMALL_COUNT; i++) {
        snprintf(names[i], sizeof names[i], "small.%zu", i);
        tensors[i] = (fst_save_tensor){.struct_size = sizeof(fst_save_tensor),
                                       .name = names[i],
                                       .name_size = SIZE_MAX,
                                       .dtype = FST_DTYPE_U8,
                                       .rank = 1,
                                       .shape = small,
                                       .data = noise + i * SMALL_BYTES};
    }
    tensors[SMALL_COUNT] = (fst_save_tensor){.struct_size = sizeof(fst_save_tensor),
                                             .name = "large",
                                             .name_size = SIZE_MAX,
                                             .dtype = FST_DTYPE_U8,
                                             .rank = 1,
                                             .shape = large,
                                             .data = noise};
    tensors[SMALL_COUNT + 1] = (fst_save_tensor){.struct_size = sizeof(fst_save_tensor),
                                                 .name = "matrix",
                                                 .name_size = SIZE_MAX,
                                                 .dtype = FST_DTYPE_BF16,
                                                 .rank = 1,
                                                 .shape = matrix,
                                                 .data = weights};
    const char *path = strdup(fixture_path("mixed.plain")),
               *target = strdup(fixture_path("mixed.packed"));
    if (fst_save(path, tensors, SMALL_COUNT + 2, NULL, NULL, NULL) != FST_OK ||
        fst_file_compress(path, target, NULL, NULL, NULL) != FST_OK)
        abort();
    plain = path;
    *packed = made = target;
out:
    free(noise);
    free(weights);
    return plain;
}

static atomic_uint_fast64_t bytes_around, bytes_through, reads_through;

/// Counts bytes read with direct I/O, and through the page cache.
static void watch_reads(fsti_io_op *op) {
    if (op->is_write || op->result <= 0) return;
    if (op->engine == FST_ENGINE_DIRECT) atomic_fetch_add(&bytes_around, (uint64_t)op->result);
    if (op->engine != FST_ENGINE_AUTO) return;
    atomic_fetch_add(&bytes_through, (uint64_t)op->result);
    atomic_fetch_add(&reads_through, 1);
}

/// Loads the compressed file, which is absent from the page cache where `is_cold`.
static fst_status load_mixed(const char *path, fst_cache cache, bool is_cold) {
    const char *packed;
    file_bytes plain = read_bytes(make_mixed(&packed));
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    fst_model *model;
    fst_error error = {.status = FST_OK};
    options.mode = FST_MODE_LOAD;
    options.cache = cache;
    if (is_cold) fixture_evict(path);
    fst_status status = fst_model_open(path, NULL, &model, &error);
    atomic_store(&bytes_around, 0);
    atomic_store(&bytes_through, 0);
    atomic_store(&reads_through, 0);
    fsti_io_fault_hook_set(watch_reads);
    if (status == FST_OK) {
        status = load_and_compare(model, &options, &plain, &error);
        fst_model_close(model);
    }
    fsti_io_fault_hook_set(NULL);
    if (status != FST_OK) printf("# %s\n", error.message);
    free(plain.bytes);
    return status;
}

/// Whether the system does what the test looks at.
static bool reads_around(const char *path) {
    fsti_file *file;
    fsti_io_facts facts;
    uint64_t resident;
    fixture_evict(path);
    if (fsti_file_open(path, &file, NULL) != FST_OK) return false;
    fsti_io_probe(file, &(fsti_io_request){.no_mapping = NULL}, &facts);
    bool can = facts.has_direct && fsti_file_resident(file, 0, fsti_file_size(file), &resident) &&
               resident == 0;
    fsti_file_unref(file);
    return can;
}

TEST(large_uncompressed_tensors_bypass_the_page_cache)
{
    const char *packed;
    (void)make_mixed(&packed);
    if (packed == NULL) return;
    bool can = reads_around(packed);
    CHECK_INT(load_mixed(packed, FST_CACHE_BYPASS, true), FST_OK);
    // Readahead of buffered reads may load some MiB of the following data, and a busy kernel may
    // keep pages that it was asked to drop.
    for (int turn = 0; can && atomic_load(&bytes_around) < LARGE_BYTES / 2 && turn < 5; turn++)
        CHECK_INT(load_mixed(packed, FST_CACHE_BYPASS, true), FST_OK);
    if (can) CHECK(atomic_load(&bytes_around) >= LARGE_BYTES / 2);
    CHECK(atomic_load(&bytes_around) <= LARGE_BYTES + PACKED_BYTES + ((uint64_t)1 << 20));
    CHECK_INT(load_mixed(packed, FST_CACHE_KEEP, true), FST_OK);
    CHECK_INT(atomic_load(&bytes_around), 0);
}

TEST(small_uncompressed_tensors_are_read_together)
{
    const char *packed;
    (void)make_mixed(&packed);
    if (packed == NULL) return;
    CHECK_INT(load_mixed(packed, FST_CACHE_KEEP, false), FST_OK);
    CHECK(atomic_load(&bytes_through) >= LARGE_BYTES + SMALL_COUNT * SMALL_BYTES);
    CHECK(atomic_load(&reads_through) < SMALL_COUNT);
}
