// SPDX-License-Identifier: Apache-2.0
/// Loading through the public header: modes, streams, slices, destinations, lifetime, budgets.
#include <fastsafetensors.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"
#include "load_fixture.h"

TEST(tensors_outlive_everything)
{
    for (int mode = FST_MODE_LOAD; mode <= FST_MODE_MAP; mode++) {
        fst_model *model = open_tensors();
        fst_load_options options = options_of((fst_load_mode)mode);
        fst_loader *loader;
        fst_tensor *held[COUNT];
        CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
        fst_model_close(model);
        for (size_t i = 0; i < COUNT; i++)
            CHECK_INT(fst_loader_next(loader, -1, &held[i], NULL), FST_OK);
        fst_tensor *none;
        CHECK_INT(fst_loader_next(loader, -1, &none, NULL), FST_END);
        CHECK(none == NULL);
        fst_loader_close(loader);
        unlink(fixture_path("tensors"));
        for (size_t i = 0; i < COUNT; i++) {
            CHECK(is_tensor(held[i], i));
            ((char *)view_of(held[i]).data)[0] ^= 1; // owned memory is writable
            fst_tensor_unref(held[i]);
        }
        CHECK_INT(fixture_live_buffers(), 0);
    }
}

TEST(random_access_while_streaming_within_a_budget)
{
    fst_model *model = open_tensors();
    fst_load_options options = options_of(FST_MODE_LOAD);
    options.budget_bytes = 4 * BYTES;
    fst_loader *loader;
    fst_error error;
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_OK);
    CHECK_INT(fst_loader_wait(loader, -1, &error), FST_E_ARGUMENT);
    for (size_t i = 0; i < COUNT; i++) {
        fst_tensor *next, *other;
        CHECK_INT(fst_loader_next(loader, -1, &next, &error), FST_OK);
        CHECK(is_tensor(next, i));
        // A released item, one far ahead of the stream, and one by name.
        size_t any = i * 7 % COUNT;
        CHECK_INT(fst_loader_tensor_at(loader, any, -1, &other, &error), FST_OK);
        CHECK(is_tensor(other, any));
        fst_tensor_unref(other);
        CHECK_INT(fst_loader_tensor(loader, "t31", SIZE_MAX, -1, &other, &error), FST_OK);
        CHECK(is_tensor(other, 31));
        fst_tensor_unref(other);
        fst_tensor_unref(next);
    }
    fst_load_stats stats = {.struct_size = sizeof stats};
    CHECK_INT(fst_loader_stats_get(loader, &stats, NULL), FST_OK);
    CHECK(stats.buffer_bytes_peak <= 4 * BYTES);
    // The stream's reads, and one tensor for each repeated read.
    CHECK(stats.bytes_read > COUNT * BYTES && stats.bytes_read % BYTES == 0);
    CHECK(stats.bytes_read <= 3 * COUNT * BYTES);
    fst_loader_close(loader);
    options.budget_bytes = BYTES - 1;
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_E_BUDGET);
    CHECK(error.tensor[0] == 't');
    fst_model_close(model);
}

TEST(budget_counts_whole_huge_pages)
{
    fst_model *model = NULL;
    const uint64_t size = (2 << 20) + 4096, budget = 15 << 20;
    CHECK_INT(fst_model_open(fixture_tensors("pages", 24, size), NULL, &model, NULL), FST_OK);
    fst_load_options options = options_of(FST_MODE_LOAD);
    options.budget_bytes = budget;
    fst_loader *loader;
    fst_tensor *tensor;
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    for (uint64_t i = 0; i < 24; i++) {
        CHECK_INT(fst_loader_next(loader, -1, &tensor, NULL), FST_OK);
        CHECK(fixture_matches(view_of(tensor).data, i * size, size));
        fst_tensor_unref(tensor);
    }
    fst_load_stats stats = {.struct_size = sizeof stats};
    CHECK_INT(fst_loader_stats_get(loader, &stats, NULL), FST_OK);
    CHECK(stats.buffer_bytes_peak <= budget);
    CHECK(stats.buffer_bytes_peak > size); // more than one at a time
    fst_loader_close(loader);
    fst_model_close(model);
}

TEST(order_of_the_request)
{
    fst_model *model = open_tensors();
    fst_part items[COUNT];
    for (size_t i = 0; i < COUNT; i++) items[i] = FST_STRUCT_INIT(fst_part);
    for (size_t i = 0; i < COUNT; i++) items[i].tensor_index = (i * 5 + 3) % COUNT;
    fst_load_options options = options_of(FST_MODE_LOAD);
    options.parts = items;
    options.part_count = COUNT;
    options.order = FST_ORDER_REQUEST;
    fst_loader *loader;
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    for (size_t i = 0; i < COUNT; i++) {
        fst_tensor *tensor;
        CHECK_INT(fst_loader_next(loader, -1, &tensor, NULL), FST_OK);
        CHECK(is_tensor(tensor, items[i].tensor_index));
        fst_tensor_unref(tensor);
    }
    fst_loader_close(loader);
    fst_model_close(model);
}

TEST(load_into_caller_memory)
{
    static const fst_engine engines[] = {FST_ENGINE_AUTO, FST_ENGINE_PREAD, FST_ENGINE_DIRECT,
                                         FST_ENGINE_URING, FST_ENGINE_MMAP};
    for (size_t e = 0; e < 5; e++) {
        fst_model *model = open_tensors();
        char *memory = malloc(COUNT * BYTES + 3);
        fst_part items[COUNT];
        for (size_t i = 0; i < COUNT; i++)
            items[i] = (fst_part){.struct_size = sizeof(fst_part),
                                  .tensor_index = COUNT - 1 - i,
                                  .destination = memory + 3 + i * BYTES,
                                  .destination_bytes = BYTES};
        fst_load_options options = options_of(FST_MODE_AUTO);
        options.parts = items;
        options.part_count = COUNT;
        options.tuning = fixture_engine(engines[e]);
        fst_loader *loader;
        fst_status status = fst_loader_open(model, &options, &loader, NULL);
        fst_model_close(model);
        if (status != FST_E_UNSUPPORTED) {
            CHECK_INT(status, FST_OK);
            CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
            fst_load_stats stats = {.struct_size = sizeof stats};
            CHECK_INT(fst_loader_stats_get(loader, &stats, NULL), FST_OK);
            CHECK_INT(stats.buffer_bytes, 0); // no second copy of the model, ever
            fst_loader_close(loader);
            for (size_t i = 0; i < COUNT; i++)
                CHECK(fixture_matches(memory + 3 + i * BYTES, (COUNT - 1 - i) * BYTES, BYTES));
        }
        free(memory);
    }
}

TEST(slices)
{
    const char *path = fixture_model(
        "matrix",
        "{\"m\":{\"dtype\":\"I16\",\"shape\":[300,500],\"data_offsets\":[0,300000]},"
        "\"odd\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[300000,300003]},"
        "\"late\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[300003,300019]}}",
        300019);
    for (int mode = FST_MODE_AUTO; mode <= FST_MODE_MAP; mode++) {
        fst_model *model;
        CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
        uint64_t begin[2] = {10, 100}, end[2] = {20, 250};
        fst_part items[3] = {
            {.struct_size = sizeof *items, .tensor_index = 0, .begin = begin, .end = end},
            {.struct_size = sizeof *items, .tensor_index = 2},
            {.struct_size = sizeof *items, .tensor_index = 0},
        };
        fst_load_options options = options_of((fst_load_mode)mode);
        options.parts = items;
        options.part_count = 3;
        fst_loader *loader;
        fst_tensor *slice, *late, *whole;
        CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
        CHECK_INT(fst_loader_tensor_at(loader, 0, -1, &slice, NULL), FST_OK);
        CHECK_INT(fst_loader_tensor_at(loader, 1, -1, &late, NULL), FST_OK);
        CHECK_INT(fst_loader_tensor_at(loader, 2, -1, &whole, NULL), FST_OK);
        fst_loader_close(loader);
        fst_model_close(model);
        fst_tensor_view view = view_of(slice);
        CHECK_INT(view.shape[0], 10);
        CHECK_INT(view.shape[1], 150);
        for (uint64_t row = 0; row < 10; row++)
            CHECK(
                fixture_matches((char *)view.data + row * 300, ((10 + row) * 500 + 100) * 2, 300));
        view = view_of(late); // lies at an odd place of the file
        CHECK_INT((uintptr_t)view.data % 4, 0);
        CHECK(fixture_matches(view.data, 300003, 16));
        CHECK(fixture_matches(view_of(whole).data, 0, 300000));
        fst_tensor_unref(slice);
        fst_tensor_unref(late);
        fst_tensor_unref(whole);
    }
}

TEST(selection_by_glob)
{
    fst_model *model = open_tensors();
    static const char *const globs[] = {"t1?", "t5"};
    fst_load_options options = options_of(FST_MODE_LOAD);
    options.globs = globs;
    options.glob_count = 2;
    fst_loader *loader;
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_tensor_count(loader), 11);
    CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
    fst_load_stats stats = {.struct_size = sizeof stats};
    CHECK_INT(fst_loader_stats_get(loader, &stats, NULL), FST_OK);
    CHECK_INT(stats.bytes_read, 11 * BYTES); // nothing else was read
    fst_tensor *tensor;
    CHECK_INT(fst_loader_tensor(loader, "t5", 2, -1, &tensor, NULL), FST_OK);
    CHECK(is_tensor(tensor, 5));
    fst_tensor_unref(tensor);
    CHECK_INT(fst_loader_tensor(loader, "t6", 2, -1, &tensor, NULL), FST_E_TENSOR_NOT_FOUND);
    CHECK_INT(fst_loader_tensor(loader, "zz", 2, -1, &tensor, NULL), FST_E_TENSOR_NOT_FOUND);
    fst_loader_close(loader);
    fst_model_close(model);
}

typedef struct counting_allocator {
    size_t live, calls;
} counting_allocator;

static void *count_allocate(void *context, size_t size, size_t alignment) {
    counting_allocator *counter = context;
    counter->live++;
    counter->calls++;
    return aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

static void count_release(void *context, void *pointer, size_t size) {
    (void)size;
    ((counting_allocator *)context)->live--;
    free(pointer);
}

TEST(caller_allocator)
{
    fst_model *model = open_tensors();
    counting_allocator counter = {0, 0};
    fst_allocator allocator = {.struct_size = sizeof allocator,
                               .context = &counter,
                               .allocate = count_allocate,
                               .release = count_release};
    fst_load_options options = options_of(FST_MODE_AUTO);
    options.allocator = &allocator;
    fst_loader *loader;
    fst_tensor *tensor;
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_tensor_at(loader, 3, -1, &tensor, NULL), FST_OK);
    fst_loader_close(loader);
    fst_model_close(model);
    CHECK_INT(counter.calls, 1);
    CHECK_INT(counter.live, 1);
    CHECK(is_tensor(tensor, 3));
    fst_tensor_unref(tensor);
    CHECK_INT(counter.live, 0);
}

typedef struct progress_log {
    uint64_t bytes, total;
    size_t tensors, calls, stop_after;
} progress_log;

static int log_progress(void *context, uint64_t bytes_done, uint64_t bytes_total,
                        size_t tensors_done, size_t tensors_total) {
    progress_log *log = context;
    if (bytes_done < log->bytes || tensors_done < log->tensors || tensors_done > tensors_total)
        log->calls += 1000000; // must never go back
    log->bytes = bytes_done;
    log->total = bytes_total;
    log->tensors = tensors_done;
    log->calls++;
    return log->stop_after > 0 && log->calls >= log->stop_after;
}

TEST(progress_and_cancel)
{
    fst_model *model = open_tensors();
    progress_log log = {.stop_after = 0};
    fst_load_options options = options_of(FST_MODE_LOAD);
    options.progress = log_progress;
    options.progress_context = &log;
    fst_loader *loader;
    fst_error error;
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
    fst_loader_close(loader); // joins: the last call is over
    CHECK_INT(log.bytes, COUNT * BYTES);
    CHECK_INT(log.total, COUNT * BYTES);
    CHECK_INT(log.tensors, COUNT);
    CHECK(log.calls >= 2 && log.calls < 1000);
    log = (progress_log){.stop_after = 1};
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    fst_status status = fst_loader_wait(loader, -1, &error);
    CHECK(status == FST_E_CANCELLED || status == FST_OK);
    fst_tensor *tensor;
    fst_loader_cancel(loader);
    for (size_t i = 0; i < COUNT;
         i++) { // completed tensors are returned, and no call waits forever
        fst_status late = fst_loader_tensor_at(loader, i, -1, &tensor, &error);
        CHECK(late == FST_OK ? is_tensor(tensor, i) : late == FST_E_CANCELLED);
        fst_tensor_unref(tensor);
    }
    fst_loader_close(loader);
    fst_model_close(model);
}

static void *cancel_later(void *loader) {
    usleep(20000);
    fst_loader_cancel(loader);
    return NULL;
}

TEST(cancel_from_another_thread)
{
    fst_model *model = open_tensors();
    fst_load_options options = options_of(FST_MODE_LOAD);
    options.budget_bytes = 4 * BYTES; // no tensor is taken, so it never gets memory
    fst_loader *loader;
    fst_tensor *tensor[COUNT];
    fst_error error;
    pthread_t thread;
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(pthread_create(&thread, NULL, cancel_later, loader), 0);
    fst_status status = FST_OK;
    size_t count = 0;
    while (status == FST_OK && count < COUNT) {
        usleep(4000);
        status = fst_loader_next(loader, -1, &tensor[count], &error);
        count += status == FST_OK;
    }
    pthread_join(thread, NULL);
    CHECK_INT(status, FST_E_CANCELLED);
    fst_loader_close(loader);
    for (size_t i = 0; i < count; i++) {
        CHECK(is_tensor(tensor[i], i));
        fst_tensor_unref(tensor[i]);
    }
    fst_model_close(model);
}

TEST(empty_tensors_and_empty_selection)
{
    const char *path =
        fixture_model("zeros",
                      "{\"z\":{\"dtype\":\"F32\",\"shape\":[0,3],\"data_offsets\":[0,0]},"
                      "\"s\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}",
                      4);
    static const char *const none[] = {"nothing*"};
    for (int mode = FST_MODE_AUTO; mode <= FST_MODE_MAP; mode++) {
        fst_model *model;
        fst_loader *loader;
        fst_tensor *tensor;
        fst_load_options options = options_of((fst_load_mode)mode);
        CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
        CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
        CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
        CHECK_INT(fst_loader_tensor(loader, "z", 1, -1, &tensor, NULL), FST_OK);
        CHECK_INT(view_of(tensor).size_bytes, 0);
        fst_tensor_unref(tensor);
        CHECK_INT(fst_loader_tensor(loader, "s", 1, -1, &tensor, NULL), FST_OK);
        CHECK_INT(view_of(tensor).rank, 0);
        CHECK(fixture_matches(view_of(tensor).data, 0, 4));
        fst_tensor_unref(tensor);
        fst_loader_close(loader);
        options.globs = none;
        options.glob_count = 1;
        CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
        CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
        CHECK_INT(fst_loader_next(loader, -1, &tensor, NULL), FST_END);
        fst_loader_close(loader);
        fst_model_close(model);
    }
}

TEST(changed_file_is_an_error)
{
    fst_model *model = open_tensors();
    fst_loader *loader;
    fst_error error;
    FILE *stream = fopen(fixture_path("tensors"), "r+e");
    fseek(stream, 100000, SEEK_SET);
    fputc('x', stream);
    fclose(stream);
    for (int mode = FST_MODE_LOAD; mode <= FST_MODE_MAP; mode++) {
        fst_load_options options = options_of((fst_load_mode)mode);
        fst_status status = fst_loader_open(model, &options, &loader, &error);
        if (status == FST_OK) {
            status = fst_loader_wait(loader, -1, &error);
            fst_loader_close(loader);
        }
        CHECK_INT(status, FST_E_FILE_CHANGED);
        CHECK_CONTAINS(error.message, "tensors");
    }
    fst_model_close(model);
}

TEST(invalid_devices)
{
    fst_error error;
    char byte;
    fst_device device;
    fst_device_info device_info = {0};
    CHECK_INT(fst_device_parse(NULL, &device, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_device_parse("cpu", NULL, &error), FST_E_ARGUMENT);
    device = (fst_device){(fst_device_kind)99, 0};
    CHECK_INT(fst_device_info_get(device, NULL, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_device_info_get(device, &device_info, &error), FST_E_ARGUMENT);
    device_info.struct_size = sizeof device_info;
    CHECK_INT(fst_device_info_get(device, &device_info, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_device_count((fst_device_kind)-1), 0);
    CHECK_INT(fst_tensor_read(NULL, &byte, 1, &error), FST_E_ARGUMENT);
}

TEST(invalid_arguments)
{
    fst_model *model = open_tensors();
    fst_loader *loader;
    fst_tensor *tensor;
    fst_error error;
    fst_load_stats stats = {.struct_size = sizeof stats};
    fst_load_options options = options_of(FST_MODE_LOAD);
    size_t count;
    fst_engine_info infos[16] = {FST_STRUCT_INIT(fst_engine_info)};
    uint64_t number = 0;
    CHECK_INT(fst_loader_open(NULL, &options, &loader, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_loader_open(model, &options, NULL, &error), FST_E_ARGUMENT);
    options.mode = (fst_load_mode)77;
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_E_ARGUMENT);
    options = options_of(FST_MODE_LOAD);
    fst_load_tuning tuning = {.struct_size = sizeof tuning, .engine = (fst_engine)77};
    options.tuning = &tuning;
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_E_ARGUMENT);
    options = options_of(FST_MODE_LOAD);
    options.order = (fst_order)-1;
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_E_ARGUMENT);
    options = options_of(FST_MODE_LOAD);
    options.part_count = 1;
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_E_ARGUMENT);
    fst_part item = {.struct_size = sizeof item, .tensor_index = COUNT};
    options.parts = &item;
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_E_ARGUMENT);
    item = (fst_part){.struct_size = sizeof(fst_part), .begin = &number};
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_E_ARGUMENT);
    item =
        (fst_part){.struct_size = sizeof(fst_part), .destination = &number, .destination_bytes = 8};
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_E_ARGUMENT);
    CHECK_TEXT(error.tensor, "t0");
    options.mode = FST_MODE_MAP;
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_E_ARGUMENT);
    options = options_of(FST_MODE_LOAD);
    options.glob_count = 1;
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_E_ARGUMENT);
    fst_allocator allocator = FST_STRUCT_INIT(fst_allocator);
    options = options_of(FST_MODE_LOAD);
    options.allocator = &allocator;
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_loader_wait(NULL, 0, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_loader_next(NULL, 0, &tensor, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_loader_tensor_at(NULL, 0, -1, &tensor, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_loader_tensor(NULL, "a", 1, -1, &tensor, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_loader_stats_get(NULL, &stats, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_tensor_view_get(NULL, NULL, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_engines_probe(NULL, NULL, 1, &count, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_engines_probe("/nonexistent", infos, 8, &count, &error), FST_E_NOT_FOUND);
    CHECK_INT(fst_engines_probe(NULL, infos, 8, &count, &error), FST_OK);
    CHECK_INT(count, 9);
    CHECK_INT(fst_loader_tensor_count(NULL), 0);
    fst_loader_cancel(NULL);
    fst_loader_close(NULL);
    fst_tensor_unref(NULL);
    CHECK(fst_tensor_ref(NULL) == NULL);
    CHECK_INT(fst_loader_open(model, NULL, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_tensor_at(loader, COUNT, -1, &tensor, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_loader_next(loader, -1, NULL, &error), FST_E_ARGUMENT);
    stats.struct_size = 0;
    CHECK_INT(fst_loader_stats_get(loader, &stats, &error), FST_E_ARGUMENT);
    stats.struct_size = 24; // an older caller's: nothing beyond is written
    stats.tensor_count = 12345;
    CHECK_INT(fst_loader_stats_get(loader, &stats, &error), FST_OK);
    CHECK_INT(stats.tensor_count, 12345);
    fst_loader_close(loader);
    fst_model_close(model);
}

static void check_refused(fst_model *model, const fst_load_options *options,
                          const fst_load_tuning *tuning, const char *text) {
    bool is_gds = tuning != NULL && tuning->gds == FST_GDS_STRICT;
    fst_load_options own = *options;
    fst_loader *loader = NULL;
    fst_error error = {0};
    if (tuning != NULL) own.tuning = tuning;
    CHECK_INT(fst_loader_open(model, &own, &loader, &error),
              is_gds ? FST_E_UNSUPPORTED : FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, text);
    CHECK(loader == NULL);
    fst_loader_close(loader);
}

#define OPTIONS(...) (&(fst_load_options){.struct_size = sizeof(fst_load_options), __VA_ARGS__})
#define TUNING(...) (&(fst_load_tuning){.struct_size = sizeof(fst_load_tuning), __VA_ARGS__})

TEST(options_without_effect_are_refused)
{
    fst_model *model = open_tensors();
    check_refused(model, OPTIONS(.convert = 2, .dtype = FST_DTYPE_F16), NULL, "convert is 2");
    check_refused(model, OPTIONS(.convert = -1, .dtype = FST_DTYPE_F16), NULL, "convert is -1");
    check_refused(model, OPTIONS(.map_read_only = 7), NULL, "map_read_only is 7");
    check_refused(model, OPTIONS(.stream = 1), NULL, "no effect on the CPU");
    check_refused(model, OPTIONS(.device = {FST_DEVICE_CPU, 5}), NULL, "device index 5");
    check_refused(model, OPTIONS(.device = {FST_DEVICE_CPU, -9}), NULL, "device index -9");
    fst_part part = {.struct_size = sizeof part, .destination_bytes = 8};
    const char *globs[] = {"*"};
    check_refused(model, OPTIONS(.parts = &part, .globs = globs, .glob_count = 1), NULL,
                  "use one of them");
    check_refused(model, OPTIONS(.parts = &part, .part_count = 1), NULL, "destination is NULL");
    const fst_load_options *map = OPTIONS(.mode = FST_MODE_MAP);
    const fst_load_options *load = OPTIONS(.mode = FST_MODE_LOAD);
    check_refused(model, map, TUNING(.map_populate = 3), "map_populate is 3");
    check_refused(model, load, TUNING(.keep_sigbus_handler = 2), "keep_sigbus_handler is 2");
    check_refused(model, map, TUNING(.ring = FST_RING_SLOTS), "no effect");
    check_refused(model, map, TUNING(.numa = FST_NUMA_INTERLEAVE), "no effect");
    check_refused(model, load, TUNING(.gds = FST_GDS_STRICT), "gds needs a GPU");
    check_refused(model, load, TUNING(.unified = FST_UNIFIED_OFF), "is for GPUs");
    check_refused(model, load, TUNING(.staging_bytes = 1 << 20), "is for GPUs");
    check_refused(model, map, TUNING(.coalesce_gap_bytes = 4096), "no effect");
    check_refused(model, OPTIONS(.mode = FST_MODE_MAP, .budget_bytes = 1 << 20), NULL, "budget");
    check_refused(model, load, TUNING(.ring = FST_RING_SLOTS, .engine = FST_ENGINE_PREAD),
                  "ring has no effect");
    fst_loader *loader; // without `convert`, dtype is not read
    CHECK_INT(fst_loader_open(model, OPTIONS(.dtype = (fst_dtype)99), &loader, NULL), FST_OK);
    fst_loader_close(loader);
    fst_model_close(model);
}

TEST(slices_of_a_tensor_larger_than_the_budget_stream_within_it)
{
    enum { PIECES = 64, PIECE = 100000 };
    fst_model *model = NULL;
    CHECK_INT(
        fst_model_open(fixture_tensors("huge", 1, (uint64_t)PIECES * PIECE), NULL, &model, NULL),
        FST_OK);
    uint64_t begins[PIECES], ends[PIECES];
    fst_part items[PIECES];
    for (uint64_t i = 0; i < PIECES; i++) {
        begins[i] = i * PIECE;
        ends[i] = begins[i] + PIECE;
        items[i] =
            (fst_part){.struct_size = sizeof(fst_part), .begin = &begins[i], .end = &ends[i]};
    }
    fst_load_options options = options_of(FST_MODE_LOAD);
    options.parts = items;
    options.part_count = PIECES;
    options.order = FST_ORDER_REQUEST;
    options.budget_bytes = 1000000;
    fst_loader *loader;
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    fst_model_close(model);
    fst_tensor *tensor;
    for (uint64_t i = 0; i < PIECES; i++) {
        CHECK_INT(fst_loader_next(loader, -1, &tensor, NULL), FST_OK);
        CHECK(fixture_matches(view_of(tensor).data, i * PIECE, PIECE));
        fst_tensor_unref(tensor);
    }
    fst_load_stats stats = {.struct_size = sizeof stats};
    CHECK_INT(fst_loader_stats_get(loader, &stats, NULL), FST_OK);
    CHECK(stats.buffer_bytes_peak <= options.budget_bytes);
    fst_loader_close(loader);
}
