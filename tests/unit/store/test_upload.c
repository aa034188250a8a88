// SPDX-License-Identifier: Apache-2.0
/// Saves to a store, with each allocation failing in turn (all with LONG=1, otherwise a sample).
#include <fastsafetensors.h>
#include <string.h>
#include <unistd.h>

#include "base/primitives.h"
#include "check.h"
#include "store/store.h"
#include "small_store.h"

#define NTH_MAX 20000
#define FILE_PATH "/bucket/m.safetensors"
#define INDEX_PATH "/bucket/model.safetensors.index.json"

static char some[10 << 20];

typedef struct save_case {
    const char *address, *watched;
    uint64_t size_bytes; ///< of each of two tensors
    uint32_t file_count; ///< 0: one file
    bool has_manifest;
} save_case;

static const save_case cases[] = {
    {"s3://bucket/m.safetensors", FILE_PATH, 1000, 0, true},
    {"s3://bucket/m.safetensors", FILE_PATH, 5 << 20, 0, false},
    {"s3://bucket", INDEX_PATH, 1000, 2, true},
};

static fst_status save(const save_case *one, char seed, fst_error *error) {
    uint64_t shape[] = {one->size_bytes};
    memset(some, seed, sizeof some);
    fst_save_tensor tensors[2];
    for (size_t i = 0; i < 2; i++) {
        tensors[i] = FST_STRUCT_INIT(fst_save_tensor);
        tensors[i].name = i == 0 ? "a" : "b";
        tensors[i].name_size = 1;
        tensors[i].dtype = FST_DTYPE_U8;
        tensors[i].shape = shape;
        tensors[i].rank = 1;
        tensors[i].data = some;
        tensors[i].file_index = one->file_count > 0 ? (uint32_t)i : 0;
    }
    fst_save_options options = FST_STRUCT_INIT(fst_save_options);
    options.file_count = one->file_count;
    options.manifest = one->has_manifest ? "" : NULL;
    fst_writer *writer = NULL;
    fst_status status = fst_writer_open(one->address, tensors, 2, &options, &writer, error);
    if (status == FST_OK) status = fst_writer_commit(writer, error);
    fsti_alloc_fail_after(-1);
    fst_writer_close(writer);
    return status;
}

static bool begin(void) {
    char reason[160];
    if (!fsti_http_usable(reason, sizeof reason)) return false;
    fst_remote_options options = FST_STRUCT_INIT(fst_remote_options);
    options.endpoint = small_store_begin();
    options.anonymous = 1;
    options.retry_base_ms = 1;
    options.tries_max = 2;
    small_store_clear();
    return fst_remote_configure(&options, NULL) == FST_OK;
}

/// The module's threads free the memory of a request some moments after its end.
static long live_after(long before) {
    for (int i = 0; i < 60000 && fsti_alloc_live() != before; i++) usleep(2000);
    return fsti_alloc_live();
}

static void try_save(const save_case *one, long nth, fst_status *status) {
    fst_error error = {0};
    size_t size = 0, size_now = 0;
    // Without memory no upload is aborted, so each attempt starts with an empty store.
    small_store_clear();
    CHECK_INT(save(one, 1, NULL), FST_OK);
    long live = fsti_alloc_live();
    char *old = small_store_get(one->watched, &size);
    fsti_alloc_fail_after(nth);
    *status = save(one, 2, &error);
    if (*status != FST_OK && *status != FST_E_NO_MEMORY)
        fprintf(stderr, "allocation %ld: %s\n", nth, error.message);
    CHECK(*status == FST_OK || *status == FST_E_NO_MEMORY);
    CHECK_INT(live_after(live), live);
    char *now = small_store_get(one->watched, &size_now);
    bool is_same = now != NULL && size == size_now && memcmp(now, old, size) == 0;
    // An answer that there was no memory for says nothing.
    bool is_told = *status == FST_OK || strstr(error.message, "it is unknown") != NULL;
    if (!is_same && !is_told) fprintf(stderr, "allocation %ld: %s\n", nth, error.message);
    CHECK(is_same || is_told);
    free(old);
    free(now);
}

TEST(upload_survives_every_failed_allocation)
{
    if (!begin()) SKIP("no libcurl");
    long step = check_share() > 1 && CHECK_SANITIZED_THREADS ? 60 : (long)check_share();
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        fst_status status = FST_E_NO_MEMORY;
        small_store_clear();
        fst_error error = {0};
        if (save(&cases[c], 1, &error) != FST_OK) fprintf(stderr, "%s\n", error.message);
        CHECK(error.message[0] == '\0');
        CHECK_INT(small_store_upload_count(), 0);
        for (long nth = 0; status != FST_OK && !check_failed; nth += step) {
            try_save(&cases[c], nth, &status);
            CHECK(nth < NTH_MAX);
        }
        CHECK_INT(save(&cases[c], 3, NULL), FST_OK);
        CHECK_INT(small_store_count(), cases[c].file_count > 0 ? 4 : cases[c].has_manifest ? 2 : 1);
    }
}
