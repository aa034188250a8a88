// SPDX-License-Identifier: Apache-2.0
/// Compressed files: memory for decompression counts against the budget, is one buffer per thread
/// for any number of files, and is released with the last file.
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "memory/memory.h"
#include "packed_fixture.h"

#define THREADS 64u

/// The two numbers in the error of a budget that is too small.
static bool read_needs(const fst_error *error, uint64_t *batch, uint64_t *rooms) {
    const char *at = strstr(error->message, "the tensor needs ");
    return at != NULL &&
           sscanf(at, "the tensor needs %" SCNu64 " and threads that decompress %" SCNu64, batch,
                  rooms) == 2;
}

static fst_status load_within(fst_model *model, uint64_t budget, uint32_t threads,
                              const file_bytes *plain, fst_error *error) {
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    options.budget_bytes = budget;
    options.thread_count = threads;
    return load_and_compare(model, &options, plain, error);
}

TEST(budget_counts_decoder_memory)
{
    fst_error error;
    fst_model *model;
    if (make_packed() == NULL) return;
    file_bytes plain = read_bytes(make_plain());
    CHECK_INT(fst_model_open(make_packed(), NULL, &model, &error), FST_OK);
    uint64_t budget = 1, batch = 0, rooms = 0;
    fst_status status;
    // The error states each tensor's need in turn; one byte less is not enough.
    for (int i = 0; i < 100; i++) {
        status = load_within(model, budget, 1, &plain, &error);
        if (status == FST_OK) break;
        CHECK_INT(status, FST_E_BUDGET);
        CHECK(read_needs(&error, &batch, &rooms));
        CHECK(batch + rooms > budget);
        budget = batch + rooms;
        CHECK_INT(load_within(model, budget - 1, 1, &plain, &error), FST_E_BUDGET);
    }
    CHECK_INT(status, FST_OK);
    // A decoder, a chunk, and a group of stored ones.
    CHECK(rooms >= (uint64_t)4 << 20 && rooms <= (uint64_t)5 << 20);
    CHECK(batch >= (uint64_t)ROWS * COLUMNS * 2);
    fst_model_close(model);
    free(plain.bytes);
}

TEST(load_with_decoders_stays_within_its_budget)
{
    fst_model *model;
    if (make_packed() == NULL) return;
    for (uint32_t threads = 0; threads <= THREADS; threads += 8) {
        for (uint64_t budget = (uint64_t)12 << 20; budget <= (uint64_t)96 << 20; budget *= 2) {
            fst_loader *loader;
            fst_tensor *tensor;
            fst_load_options options = FST_STRUCT_INIT(fst_load_options);
            fst_load_stats stats = FST_STRUCT_INIT(fst_load_stats);
            options.budget_bytes = budget;
            options.thread_count = threads;
            CHECK_INT(fst_model_open(make_packed(), NULL, &model, NULL), FST_OK);
            CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
            while (fst_loader_next(loader, -1, &tensor, NULL) == FST_OK) fst_tensor_unref(tensor);
            CHECK_INT(fst_loader_stats_get(loader, &stats, NULL), FST_OK);
            CHECK_INT(stats.decoded_bytes, stats.bytes_requested);
            CHECK(stats.buffer_bytes_peak <= budget);
            CHECK(stats.buffer_bytes_peak > (uint64_t)4 << 20);
            fst_loader_close(loader);
            fst_model_close(model);
        }
    }
}

TEST(files_share_decoder_workspaces)
{
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    fst_model *models[4];
    if (make_packed() == NULL) return;
    file_bytes plain = read_bytes(make_plain());
    size_t count;
    uint64_t before, one = 0, live;
    fst_memory_keep(0);
    fsti_buffer_live(&count, &before);
    options.mode = FST_MODE_LOAD;
    options.thread_count = 1;
    for (size_t i = 0; i < 4; i++) {
        CHECK_INT(fst_model_open(make_packed(), NULL, &models[i], NULL), FST_OK);
        CHECK_INT(load_and_compare(models[i], &options, &plain, NULL), FST_OK);
        fsti_buffer_live(&count, &live);
        if (i == 0) one = live - before;
        CHECK_INT(live - before, one);
    }
    CHECK(one > 0);
    for (size_t i = 0; i < 4; i++) fst_model_close(models[i]);
    fsti_buffer_live(&count, &live);
    CHECK_INT(live, before);
    free(plain.bytes);
}

typedef struct shared_load {
    fst_model *model;
    const file_bytes *plain;
    fst_status status;
} shared_load;

static void *load_shared(void *context) {
    shared_load *shared = context;
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    options.mode = FST_MODE_LOAD;
    options.thread_count = 1;
    shared->status = load_and_compare(shared->model, &options, shared->plain, NULL);
    return NULL;
}

/// Half of them read one open file, the others a second one with the same bytes. A chunk that was
/// kept decoded for one is not used for the other.
TEST(sixty_four_threads_decompress_at_once)
{
    fst_model *models[2];
    pthread_t threads[THREADS];
    shared_load loads[THREADS];
    if (make_packed() == NULL) return;
    file_bytes plain = read_bytes(make_plain());
    for (size_t i = 0; i < 2; i++)
        CHECK_INT(fst_model_open(make_packed(), NULL, &models[i], NULL), FST_OK);
    for (size_t i = 0; i < THREADS; i++) {
        loads[i] = (shared_load){models[i % 2], &plain, FST_E_CANCELLED};
        if (pthread_create(&threads[i], NULL, load_shared, &loads[i]) != 0) abort();
    }
    for (size_t i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
        CHECK_INT(loads[i].status, FST_OK);
    }
    for (size_t i = 0; i < 2; i++) fst_model_close(models[i]);
    free(plain.bytes);
}
