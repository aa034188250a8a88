// SPDX-License-Identifier: Apache-2.0
/// Single items read during a load: before or after the stream returns them, and items of a map
/// that can't be views.
#include <errno.h>
#include <fastsafetensors.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"

#define COUNT 6
#define BYTES ((uint64_t)4 << 20)

static fst_load_options options_of(fst_load_mode mode) {
    return (fst_load_options){.struct_size = sizeof(fst_load_options), .mode = mode};
}

static int is_tensor(const fst_tensor *tensor, size_t index) {
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
    return fst_tensor_view_get(tensor, &view, NULL) == FST_OK && view.size_bytes == BYTES &&
           fixture_matches(view.data, index * BYTES, BYTES);
}

static fst_load_stats stats_of(const fst_loader *loader) {
    fst_load_stats stats = {.struct_size = sizeof stats};
    if (fst_loader_stats_get(loader, &stats, NULL) != FST_OK) abort();
    return stats;
}

/// A source with slow reads.
typedef struct slow_file {
    FILE *file;
    pthread_mutex_t lock;
    atomic_int delay_us;
    atomic_bool fails, waits;
    atomic_size_t most; ///< bytes that a call returns; 0: all
    atomic_size_t calls;
    atomic_uint_fast64_t bytes;
} slow_file;

static int64_t read_slowly(void *context, void *target, size_t size, uint64_t offset) {
    slow_file *slow = context;
    size_t most = atomic_load(&slow->most);
    if (most > 0 && size > most) size = most;
    atomic_fetch_add(&slow->calls, 1);
    usleep((useconds_t)atomic_load(&slow->delay_us));
    while (atomic_load(&slow->waits)) usleep(1000);
    pthread_mutex_lock(&slow->lock);
    bool good = !atomic_load(&slow->fails) && fseek(slow->file, (long)offset, SEEK_SET) == 0 &&
                fread(target, 1, size, slow->file) == size;
    pthread_mutex_unlock(&slow->lock);
    atomic_fetch_add(&slow->bytes, size);
    return good ? (int64_t)size : -EIO;
}

static fst_model *open_slow_file(slow_file *slow, const char *path) {
    *slow = (slow_file){.file = fopen(path, "rb")};
    pthread_mutex_init(&slow->lock, NULL);
    fst_source source = {.struct_size = sizeof source, .read = read_slowly, .context = slow};
    fst_model *model = NULL;
    if (slow->file == NULL || fseek(slow->file, 0, SEEK_END) != 0) abort();
    source.size_bytes = (uint64_t)ftell(slow->file);
    if (fst_model_open_source(&source, NULL, &model, NULL) != FST_OK) abort();
    return model;
}

static fst_model *open_slow(slow_file *slow) {
    return open_slow_file(slow, fixture_tensors("slow", COUNT, BYTES));
}

/// A load that frees tensors after its stream has returned them.
static fst_loader *open_limited(fst_model *model) {
    fst_load_options options = options_of(FST_MODE_LOAD);
    options.budget_bytes = 2 * BYTES + (4 << 20);
    fst_loader *loader;
    if (fst_loader_open(model, &options, &loader, NULL) != FST_OK) abort();
    return loader;
}

/// A load whose stream has ended, so that items are read again.
static fst_loader *open_streamed(slow_file *slow, size_t count, uint64_t size) {
    fst_model *model = open_slow_file(slow, fixture_tensors("again", count, size));
    fst_loader *loader = open_limited(model);
    fst_tensor *tensor;
    while (fst_loader_next(loader, -1, &tensor, NULL) == FST_OK) fst_tensor_unref(tensor);
    fst_model_close(model);
    return loader;
}

/// Takes an item by calls that wait 5 ms; how many, or 0 for a failure.
static int poll_item(fst_loader *loader, size_t index, fst_tensor **out) {
    for (int calls = 1; calls < 1000; calls++) {
        fst_status status = fst_loader_tensor_at(loader, index, 5, out, NULL);
        if (status != FST_E_TIMEOUT) return status == FST_OK ? calls : 0;
    }
    return 0;
}

TEST(item_read_continues_between_waits)
{
    slow_file slow;
    fst_loader *loader = open_streamed(&slow, COUNT, BYTES);
    fst_tensor *tensor;
    uint64_t before = atomic_load(&slow.bytes), counted = stats_of(loader).bytes_read;
    atomic_store(&slow.delay_us, 30000);
    CHECK(poll_item(loader, 0, &tensor) > 1);
    CHECK(is_tensor(tensor, 0));
    fst_tensor_unref(tensor);
    // One read, however often it was requested, and it is counted.
    CHECK_INT(atomic_load(&slow.bytes) - before, BYTES);
    CHECK_INT(stats_of(loader).bytes_read - counted, BYTES);
    // Items that are not waited for end with the load.
    CHECK_INT(fst_loader_tensor_at(loader, 1, 0, &tensor, NULL), FST_E_TIMEOUT);
    fst_loader_close(loader);
    fclose(slow.file);
}

/// More items than may be read at a time are polled one after the other; each one arrives.
TEST(many_polled_items_all_arrive)
{
    enum { MANY = 14, TURNS_MAX = 1000 };
    slow_file slow;
    fst_loader *loader = open_streamed(&slow, MANY, 100000);
    fst_tensor *taken[MANY] = {NULL};
    atomic_store(&slow.delay_us, 30000);
    size_t count = 0;
    for (int turn = 0; turn < TURNS_MAX && count < MANY; turn++)
        for (size_t i = 0; i < MANY; i++)
            if (taken[i] == NULL && fst_loader_tensor_at(loader, i, 1, &taken[i], NULL) == FST_OK)
                count++;
    CHECK_INT(count, MANY);
    for (size_t i = 0; i < MANY; i++) fst_tensor_unref(taken[i]);
    fst_loader_close(loader);
    fclose(slow.file);
}

/// No call waits for the source longer than its timeout, however many items are being read.
TEST(more_than_eight_item_reads_are_queued)
{
    enum { MANY = 12 };
    slow_file slow;
    fst_loader *loader = open_streamed(&slow, MANY, 1000);
    fst_tensor *tensor;
    atomic_store(&slow.waits, true);
    alarm(100); // a call that waits for the source would wait for ever
    for (size_t i = 0; i < MANY; i++)
        CHECK_INT(fst_loader_tensor_at(loader, i, 2, &tensor, NULL), FST_E_TIMEOUT);
    atomic_store(&slow.waits, false);
    for (size_t i = 0; i < MANY; i++) {
        CHECK_INT(fst_loader_tensor_at(loader, i, -1, &tensor, NULL), FST_OK);
        fst_tensor_unref(tensor);
    }
    alarm(0);
    fst_loader_close(loader);
    fclose(slow.file);
}

/// Eight complete reads that no call has fetched do not make a call with a limit wait for them.
TEST(timeout_does_not_slow_an_item_read)
{
    enum { MANY = 10 };
    slow_file slow;
    fst_loader *loader = open_streamed(&slow, MANY, 1000);
    fst_tensor *tensor;
    atomic_store(&slow.waits, true);
    for (size_t i = 0; i < 8; i++)
        CHECK_INT(fst_loader_tensor_at(loader, i, 0, &tensor, NULL), FST_E_TIMEOUT);
    atomic_store(&slow.waits, false);
    CHECK_INT(fst_loader_tensor_at(loader, 8, 3000, &tensor, NULL), FST_OK);
    fst_tensor_unref(tensor);
    CHECK_INT(fst_loader_tensor_at(loader, 9, 3000, &tensor, NULL), FST_OK);
    fst_tensor_unref(tensor);
    fst_loader_close(loader);
    fclose(slow.file);
}

static void *cancel_at_the_third(void *context) {
    void **both = context;
    slow_file *slow = both[0];
    while (atomic_load(&slow->calls) < 3) usleep(1000);
    fst_loader_cancel(both[1]);
    return NULL;
}

TEST(cancel_ends_a_small_item_read)
{
    slow_file slow;
    fst_loader *loader = open_streamed(&slow, 2, 60000);
    fst_tensor *tensor;
    pthread_t thread;
    void *both[] = {&slow, loader};
    atomic_store(&slow.delay_us, 20000);
    atomic_store(&slow.most, 500);
    atomic_store(&slow.calls, 0);
    pthread_create(&thread, NULL, cancel_at_the_third, both);
    CHECK_INT(fst_loader_tensor_at(loader, 1, -1, &tensor, NULL), FST_E_CANCELLED);
    pthread_join(thread, NULL);
    CHECK(atomic_load(&slow.calls) < 100); // of 120
    fst_loader_close(loader);
    fclose(slow.file);
}

/// Loaded items can still be returned, and reads are counted whether or not their item is used.
TEST(items_read_before_a_cancel_are_returned)
{
    slow_file slow;
    fst_loader *loader = open_streamed(&slow, 2, BYTES);
    fst_tensor *tensor;
    uint64_t before = atomic_load(&slow.bytes), counted = stats_of(loader).bytes_read;
    uint64_t waited_ns = stats_of(loader).wait_ns;
    atomic_store(&slow.waits, true);
    CHECK_INT(fst_loader_tensor_at(loader, 1, 20, &tensor, NULL), FST_E_TIMEOUT);
    CHECK(stats_of(loader).wait_ns >= waited_ns + 15000000);
    atomic_store(&slow.waits, false);
    for (int i = 0; i < 1000 && stats_of(loader).bytes_read == counted; i++) usleep(10000);
    CHECK_INT(stats_of(loader).bytes_read - counted, atomic_load(&slow.bytes) - before);
    usleep(300000); // from its last byte to its end
    fst_loader_cancel(loader);
    CHECK_INT(fst_loader_tensor_at(loader, 0, 0, &tensor, NULL), FST_E_CANCELLED);
    CHECK_INT(fst_loader_tensor_at(loader, 1, 0, &tensor, NULL), FST_OK);
    CHECK(is_tensor(tensor, 1));
    fst_tensor_unref(tensor);
    fst_loader_close(loader);
    fclose(slow.file);
}

TEST(small_item_read_keeps_its_timeout)
{
    slow_file slow;
    fst_loader *loader = open_streamed(&slow, 2, 1000);
    fst_tensor *tensor;
    atomic_store(&slow.delay_us, 200000);
    CHECK_INT(fst_loader_tensor_at(loader, 1, 0, &tensor, NULL), FST_E_TIMEOUT);
    CHECK_INT(fst_loader_tensor_at(loader, 1, -1, &tensor, NULL), FST_OK);
    fst_tensor_unref(tensor);
    fst_loader_close(loader);
    fclose(slow.file);
}

/// A cancelled load stays cancelled, even if a read had failed before.
TEST(cancel_of_a_failed_load)
{
    slow_file slow;
    fst_model *model = open_slow(&slow);
    fst_tensor *tensor;
    atomic_store(&slow.fails, true);
    fst_loader *loader = open_limited(model);
    CHECK_INT(fst_loader_next(loader, -1, &tensor, NULL), FST_E_IO);
    atomic_store(&slow.fails, false);
    CHECK_INT(fst_loader_tensor_at(loader, COUNT - 1, -1, &tensor, NULL), FST_OK);
    CHECK(is_tensor(tensor, COUNT - 1));
    fst_tensor_unref(tensor);
    fst_loader_cancel(loader);
    CHECK_INT(fst_loader_tensor_at(loader, COUNT - 1, -1, &tensor, NULL), FST_E_CANCELLED);
    fst_loader_close(loader);
    fst_model_close(model);
    fclose(slow.file);
}

TEST(destination_is_filled_without_a_wait)
{
    static char targets[COUNT][BYTES];
    slow_file slow;
    fst_model *model = open_slow(&slow);
    fst_part items[COUNT];
    for (size_t i = 0; i < COUNT; i++)
        items[i] = (fst_part){.struct_size = sizeof(fst_part),
                              .tensor_index = i,
                              .destination = i == COUNT - 1 ? targets[i] : NULL,
                              .destination_bytes = i == COUNT - 1 ? BYTES : 0};
    fst_load_options options = options_of(FST_MODE_LOAD);
    options.parts = items;
    options.part_count = COUNT;
    options.budget_bytes = 2 * BYTES + (4 << 20);
    fst_loader *loader;
    fst_tensor *tensor;
    atomic_store(&slow.delay_us, 20000);
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_tensor_at(loader, COUNT - 1, 1, &tensor, NULL), FST_E_TIMEOUT);
    for (size_t i = 0; i < COUNT; i++) {
        CHECK_INT(fst_loader_next(loader, -1, &tensor, NULL), FST_OK);
        CHECK(is_tensor(tensor, i));
        fst_tensor_unref(tensor);
    }
    // The library does not overwrite the caller's change.
    targets[COUNT - 1][0] ^= 1;
    CHECK_INT(fst_loader_tensor_at(loader, COUNT - 1, -1, &tensor, NULL), FST_OK);
    CHECK(!is_tensor(tensor, COUNT - 1));
    fst_tensor_unref(tensor);
    fst_loader_close(loader);
    fst_model_close(model);
    fclose(slow.file);
}

/// Items that were read early are also returned by the stream, with all their bytes.
TEST(item_read_early_is_also_streamed)
{
    for (int converts = 0; converts < 2; converts++) {
        slow_file slow;
        fst_model *model = open_slow(&slow);
        fst_load_options options = options_of(FST_MODE_LOAD);
        options.budget_bytes = (2 + 2 * (uint64_t)converts) * BYTES + (4 << 20);
        options.convert = converts;
        options.dtype = FST_DTYPE_I16; // of bytes: scattered, not linear
        fst_loader *loader;
        fst_tensor *tensor;
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
        for (size_t i = 0; i < COUNT; i++) {
            for (size_t k = i; k < COUNT; k++) { // ahead, again and again, before it is there
                CHECK_INT(fst_loader_tensor_at(loader, k, -1, &tensor, NULL), FST_OK);
                fst_tensor_unref(tensor);
            }
            atomic_store(&slow.delay_us, 2000);
            CHECK_INT(fst_loader_next(loader, -1, &tensor, NULL), FST_OK);
            CHECK_INT(fst_tensor_view_get(tensor, &view, NULL), FST_OK);
            if (!converts) CHECK(is_tensor(tensor, i));
            bool good = true;
            for (uint64_t at = 0; converts && at < BYTES; at++)
                good &= ((const int16_t *)view.data)[at] == fixture_byte(i * BYTES + at);
            CHECK(good);
            fst_tensor_unref(tensor);
        }
        fst_loader_close(loader);
        fst_model_close(model);
        fclose(slow.file);
    }
}

static void *take_last(void *loader) {
    fst_tensor *tensor;
    if (fst_loader_tensor_at(loader, COUNT - 1, -1, &tensor, NULL) != FST_OK) return loader;
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
    if (fst_tensor_view_get(tensor, &view, NULL) != FST_OK) return loader;
    // From now on the memory belongs to the program. Several threads may be here at once.
    __atomic_store_n((char *)view.data + 7, 99, __ATOMIC_RELAXED);
    fst_tensor_unref(tensor);
    return NULL;
}

TEST(destination_is_written_once_by_concurrent_readers)
{
    enum { WAITERS = 4 };
    static char target[BYTES];
    for (int turn = 0; turn < 5; turn++) {
        slow_file slow;
        fst_model *model = open_slow(&slow);
        fst_part items[COUNT];
        for (size_t i = 0; i < COUNT; i++)
            items[i] = (fst_part){.struct_size = sizeof(fst_part), .tensor_index = i};
        items[COUNT - 1].destination = target;
        items[COUNT - 1].destination_bytes = BYTES;
        fst_load_options options = options_of(FST_MODE_LOAD);
        options.parts = items;
        options.part_count = COUNT;
        options.budget_bytes = 2 * BYTES + (4 << 20);
        fst_loader *loader;
        pthread_t threads[WAITERS];
        void *failed;
        fst_tensor *tensor;
        CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
        atomic_store(&slow.delay_us, 5000);
        for (size_t i = 0; i < WAITERS; i++) pthread_create(&threads[i], NULL, take_last, loader);
        while (fst_loader_next(loader, -1, &tensor, NULL) == FST_OK) fst_tensor_unref(tensor);
        for (size_t i = 0; i < WAITERS; i++) {
            pthread_join(threads[i], &failed);
            CHECK(failed == NULL);
        }
        usleep(20000); // a second read would be running
        CHECK_INT(target[7], 99);
        fst_loader_close(loader);
        fst_model_close(model);
        CHECK_INT(target[7], 99);
        fclose(slow.file);
    }
}

static atomic_int inside, most_inside, allocated;

static void *allocate_slowly(void *context, size_t size, size_t alignment) {
    (void)context;
    int now = atomic_fetch_add(&inside, 1) + 1, most = atomic_load(&most_inside);
    while (now > most && !atomic_compare_exchange_weak(&most_inside, &most, now)) continue;
    atomic_fetch_add(&allocated, 1);
    usleep(2000);
    void *memory = NULL;
    if (posix_memalign(&memory, alignment, size) != 0) memory = NULL;
    atomic_fetch_sub(&inside, 1);
    return memory;
}

static void release_allocation(void *context, void *pointer, size_t size) {
    (void)context;
    (void)size;
    free(pointer);
}

static const fst_allocator slow_allocator = {.struct_size = sizeof slow_allocator,
                                             .allocate = allocate_slowly,
                                             .release = release_allocation};

static void *take_items(void *loader) {
    for (size_t i = 0; i < 4 * COUNT; i++) {
        fst_tensor *tensor;
        if (fst_loader_tensor_at(loader, i * 5 % COUNT, -1, &tensor, NULL) != FST_OK) return loader;
        fst_tensor_unref(tensor);
    }
    return NULL;
}

static fst_loader *asked_loader;
static int answers;

static void ask_and_release(void *context, void *pointer, size_t size) {
    fst_load_stats stats = {.struct_size = sizeof stats};
    if (fst_loader_stats_get(asked_loader, &stats, NULL) == FST_OK) answers++;
    release_allocation(context, pointer, size);
}

/// Memory that only the stream holds is given back by it, as the last tensor in the object is
/// empty.
TEST(allocator_release_is_called_without_locks)
{
    static const char json[] =
        "{\"a\":{\"dtype\":\"U8\",\"shape\":[1000],\"data_offsets\":[0,1000]},"
        "\"b\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[1000,1000]}}";
    const fst_allocator allocator = {
        .struct_size = sizeof allocator, .allocate = allocate_slowly, .release = ask_and_release};
    fst_model *model;
    CHECK_INT(fst_model_open(fixture_model("empty", json, 1000), NULL, &model, NULL), FST_OK);
    fst_load_options options = options_of(FST_MODE_LOAD);
    options.budget_bytes = 2 * BYTES;
    options.allocator = &allocator;
    fst_tensor *tensor;
    CHECK_INT(fst_loader_open(model, &options, &asked_loader, NULL), FST_OK);
    alarm(100); // the allocator's call would deadlock
    while (fst_loader_next(asked_loader, -1, &tensor, NULL) == FST_OK) fst_tensor_unref(tensor);
    alarm(0);
    CHECK_INT(answers, 1);
    fst_loader_close(asked_loader);
    fst_model_close(model);
}

TEST(allocator_calls_are_serialized)
{
    fst_model *model;
    CHECK_INT(fst_model_open(fixture_tensors("one", COUNT, BYTES), NULL, &model, NULL), FST_OK);
    fst_load_options options = options_of(FST_MODE_LOAD);
    options.budget_bytes = 2 * BYTES;
    options.allocator = &slow_allocator;
    fst_loader *loader;
    pthread_t threads[3];
    void *failed;
    atomic_store(&most_inside, 0);
    atomic_store(&allocated, 0);
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    for (size_t i = 0; i < 3; i++) pthread_create(&threads[i], NULL, take_items, loader);
    fst_tensor *tensor;
    while (fst_loader_next(loader, -1, &tensor, NULL) == FST_OK) fst_tensor_unref(tensor);
    for (size_t i = 0; i < 3; i++) {
        pthread_join(threads[i], &failed);
        CHECK(failed == NULL);
    }
    CHECK_INT(atomic_load(&most_inside), 1);
    // Statistics include all allocations, also those of repeated reads.
    CHECK(stats_of(loader).buffer_bytes >= (uint64_t)atomic_load(&allocated) * BYTES);
    fst_loader_close(loader);
    fst_model_close(model);
}

/// A file of F16 tensors at odd addresses.
static fst_model *open_odd(size_t count) {
    char json[COUNT * 100 + 16] = "{", *end = json + 1;
    uint64_t elements = BYTES / 2;
    for (size_t i = 0; i < count; i++)
        end += sprintf(
            end, "%s\"t%zu\":{\"dtype\":\"F16\",\"shape\":[%llu],\"data_offsets\":[%llu,%llu]}",
            i > 0 ? "," : "", i, (unsigned long long)elements, (unsigned long long)(i * BYTES),
            (unsigned long long)((i + 1) * BYTES));
    sprintf(end, "}%s", strlen(json) % 2 == 0 ? "" : " ");
    if ((8 + strlen(json)) % 2 == 0) abort();
    fst_model *model = NULL;
    if (fst_model_open(fixture_model("odd", json, count * BYTES), NULL, &model, NULL) != FST_OK)
        abort();
    return model;
}

TEST(unmappable_items_are_copied)
{
    fst_model *model = open_odd(COUNT);
    fst_load_options options = options_of(FST_MODE_MAP);
    fst_loader *loader;
    fst_tensor *tensors[COUNT];
    fst_memory_keep((uint64_t)1 << 30);
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    for (size_t i = 0; i < COUNT; i++) {
        CHECK_INT(fst_loader_next(loader, -1, &tensors[i], NULL), FST_OK);
        CHECK(is_tensor(tensors[i], i));
    }
    CHECK(stats_of(loader).buffer_bytes >= COUNT * BYTES);
    fst_loader_close(loader);
    for (size_t i = 0; i < COUNT; i++) fst_tensor_unref(tensors[i]);
    // All of its pages were in use, so all of them are released.
    CHECK(fst_memory_trim() >= COUNT * BYTES);
    fst_memory_keep(0);
    options.allocator = &slow_allocator;
    atomic_store(&allocated, 0);
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_tensor_at(loader, 1, -1, &tensors[0], NULL), FST_OK);
    CHECK(is_tensor(tensors[0], 1));
    fst_tensor_unref(tensors[0]);
    CHECK_INT(atomic_load(&allocated), 1);
    fst_loader_cancel(loader);
    CHECK_INT(fst_loader_tensor_at(loader, 2, -1, &tensors[0], NULL), FST_E_CANCELLED);
    fst_loader_close(loader);
    // The automatic mode does not map, because everything would be copied.
    options = options_of(FST_MODE_AUTO);
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
    CHECK_TEXT(stats_of(loader).mode, "load");
    CHECK_CONTAINS(stats_of(loader).reason, "can't be views");
    fst_loader_close(loader);
    fst_model_close(model);
}

TEST(converted_memory_is_released_entirely)
{
    fst_model *model = open_odd(COUNT);
    fst_load_options options = options_of(FST_MODE_LOAD);
    options.convert = 1;
    options.dtype = FST_DTYPE_F64;
    fst_loader *loader;
    fst_memory_keep((uint64_t)1 << 30);
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
    fst_loader_close(loader);
    CHECK(fst_memory_trim() >= 4 * COUNT * BYTES);
    fst_memory_keep(0);
    fst_model_close(model);
}

TEST(reading_a_view_of_a_file_that_shrinks_is_an_error)
{
    static char target[BYTES];
    fst_model *model;
    const char *path = fixture_tensors("shrinks", COUNT, BYTES);
    CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
    fst_load_options options = options_of(FST_MODE_MAP);
    fst_loader *loader;
    fst_tensor *tensor;
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_tensor_at(loader, COUNT - 1, -1, &tensor, NULL), FST_OK);
    CHECK_INT(fst_tensor_read(tensor, target, BYTES, NULL), FST_OK);
    CHECK(fixture_matches(target, (COUNT - 1) * BYTES, BYTES));
    CHECK_INT(truncate(path, 4096), 0);
    fst_error error;
    CHECK_INT(fst_tensor_read(tensor, target, BYTES, &error), FST_E_IO);
    CHECK_TEXT(error.tensor, "t5");
    fst_tensor_unref(tensor);
    fst_loader_close(loader);
    fst_model_close(model);
}
