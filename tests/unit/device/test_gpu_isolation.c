// SPDX-License-Identifier: Apache-2.0
/// Loads and saves do not affect a program's other use of the GPU: its graphs, streams, current
/// device and memory stay unchanged.
#include <dlfcn.h>
#include <fastsafetensors.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/primitives.h"
#include "check.h"
#include "fixture.h"
#include "gpu/gpu.h"
#include "gpu_fixture.h"
#include "memory/memory.h"

/// A file whose data begin at `remainder` modulo 16, with a scalar of 4 bytes and odd sizes between
/// tensors of every width; big ones among them.
static fst_model *shifted_model(size_t remainder) {
    char json[1024];
    strcpy(json,
           "{\"scale\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[2000000,2000004]},"
           "\"odd\":{\"dtype\":\"U8\",\"shape\":[77],\"data_offsets\":[5000004,5000081]},"
           "\"a\":{\"dtype\":\"BF16\",\"shape\":[1000000],\"data_offsets\":[0,2000000]},"
           "\"b\":{\"dtype\":\"BF16\",\"shape\":[1500000],\"data_offsets\":[2000004,5000004]},"
           "\"c\":{\"dtype\":\"F8_E4M3\",\"shape\":[900000],"
           "\"data_offsets\":[5000081,5900081]},"
           "\"d\":{\"dtype\":\"F8_E4M3\",\"shape\":[100],\"data_offsets\":[5900081,5900181]}}");
    while ((strlen(json) + 8) % 16 != remainder) strcat(json, " ");
    return gpu_open_model(fixture_model("shifted", json, 5900181));
}

TEST(tensors_are_aligned_for_vectors)
{
    const gpu_fake *driver = gpu_fake_of(0);
    for (size_t remainder = 0; remainder < 16; remainder += 4) {
        fst_model *model = shifted_model(remainder);
        fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
        fst_load_stats stats;
        CHECK(gpu_same_load(model, &options, &stats)); // 16 bytes: compared there
        CHECK(stats.buffer_bytes <= 5900181 + 2 * 4096 + 6 * 256);
        // As many copies as chunks, except for the few bytes that cross chunks.
        CHECK(stats.device_copies + stats.device_launches <= stats.chunk_count + 12);
        fst_loader *loader;
        CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
        for (size_t i = 0; i < 6; i++) {
            fst_tensor *tensor;
            CHECK_INT(fst_loader_tensor_at(loader, i, -1, &tensor, NULL), FST_OK);
            fst_tensor_view view = gpu_view_of(tensor);
            // What lies elsewhere than in the file lies where allocators put things.
            if (strcmp(view.name, "c") == 0) CHECK_INT((uintptr_t)view.data % 256, 0);
            fst_tensor_unref(tensor);
        }
        fst_loader_close(loader);
        options.convert = 1;
        options.dtype = FST_DTYPE_F16;
        CHECK(gpu_same_load(model, &options, NULL));
        fst_model_close(model);
    }
    CHECK(gpu_is_clean(driver));
}

enum { BLOCK_BYTES = 4 << 20, BLOCK_COUNT = 8 };

/// A framework's allocator: a freed block is reused at once, while kernels that used it are queued
/// on the framework's stream.
typedef struct pool {
    const gpu_fake *driver;
    void *stream;
    char *blocks[BLOCK_COUNT];
    bool used[BLOCK_COUNT];
    size_t served;
} pool;

static void *pool_take(void *context, size_t size, size_t alignment) {
    pool *self = context;
    (void)alignment;
    for (size_t i = 0; i < BLOCK_COUNT && size <= BLOCK_BYTES; i++) {
        if (self->used[i]) continue;
        self->used[i] = true;
        self->served++;
        self->driver->fill(self->stream, 3000, self->blocks[i], 0x33, BLOCK_BYTES);
        return self->blocks[i];
    }
    return NULL;
}

static void pool_give(void *context, void *pointer, size_t size) {
    pool *self = context;
    (void)size;
    for (size_t i = 0; i < BLOCK_COUNT; i++)
        if (self->blocks[i] == pointer) self->used[i] = false;
}

/// Loads 12 tensors with a budget into memory whose last kernels are queued on `stream`.
static bool pool_load(const gpu_fake *driver, void *stream, uintptr_t handle) {
    fsti_device *device;
    fsti_buffer *memory;
    if (fsti_device_get((fst_device){driver->kind, 0}, &device, NULL) != FST_OK ||
        fsti_buffer_device(device, (uint64_t)BLOCK_COUNT * BLOCK_BYTES, &memory, NULL) != FST_OK)
        return false;
    pool self = {.driver = driver, .stream = stream};
    for (size_t i = 0; i < BLOCK_COUNT; i++) self.blocks[i] = memory->data + i * BLOCK_BYTES;
    fst_allocator allocator = {.struct_size = sizeof allocator,
                               .context = &self,
                               .allocate = pool_take,
                               .release = pool_give};
    fst_model *model = gpu_open_model(fixture_tensors("stream", 12, 3000000));
    fst_load_options options = gpu_options_on(driver->kind, 0);
    options.allocator = &allocator;
    options.stream = handle;
    options.budget_bytes = 16 << 20;
    bool good = gpu_same_load(model, &options, NULL) && self.served >= 8;
    fst_model_close(model);
    fsti_buffer_unref(memory);
    return good;
}

TEST(memory_is_ordered_with_its_stream_at_every_batch)
{
    const gpu_fake *driver = gpu_fake_of(0);
    void *handle = dlopen(driver->name, RTLD_NOW), *stream;
    int (*create)(void **, unsigned), (*destroy)(void *);
    gpu_find_hook(handle, "cuStreamCreate", &create);
    gpu_find_hook(handle, "cuStreamDestroy_v2", &destroy);
    fsti_device *device;
    CHECK_INT(fsti_device_get((fst_device){FST_DEVICE_CUDA, 0}, &device, NULL), FST_OK);
    CHECK_INT(fsti_device_enter(device, NULL), FST_OK);
    CHECK_INT(create(&stream, 1), 0);
    CHECK(pool_load(driver, stream, (uintptr_t)stream));
    CHECK_INT(destroy(stream), 0);
    fsti_device_leave(device);
    CHECK(gpu_is_clean(driver));
}

TEST(the_default_stream_is_followed)
{
    for (size_t k = 0; k < 2; k++) {
        const gpu_fake *driver = gpu_fake_of(k);
        CHECK(pool_load(driver, NULL, 1));
        CHECK(gpu_is_clean(driver));
    }
}

static bool save_one(fst_tensor *tensor) {
    fst_save_tensor row = gpu_save_row(tensor);
    fst_save_options save = {.struct_size = sizeof save};
    fst_writer *writer = NULL;
    bool good = fst_writer_open(fixture_path("saved"), &row, 1, &save, &writer, NULL) == FST_OK &&
                fst_writer_commit(writer, NULL) == FST_OK;
    fst_writer_close(writer);
    return good && gpu_same_tensor(tensor, tensor);
}

/// Loads, converts, drops and saves.
static bool do_everything(const gpu_fake *driver, int32_t index) {
    fst_model *model = gpu_open_model(fixture_tensors("all", 4, 3000000));
    fst_load_options options = gpu_options_on(driver->kind, index);
    options.convert = 1;
    options.dtype = FST_DTYPE_F16;
    fst_loader *loader = NULL;
    fst_tensor *tensor = NULL;
    bool good = fst_loader_open(model, &options, &loader, NULL) == FST_OK &&
                fst_loader_next(loader, -1, &tensor, NULL) == FST_OK && save_one(tensor);
    fst_tensor_unref(tensor);
    fst_loader_close(loader);
    fst_model_close(model);
    fst_memory_trim();
    return good;
}

TEST(graph_captures_continue)
{
    for (size_t k = 0; k < 2; k++) {
        const gpu_fake *driver = gpu_fake_of(k);
        driver->set("broken_captures", 0);
        driver->set("capturing", 1);
        bool good = do_everything(driver, 0);
        driver->set("capturing", 0);
        CHECK(good);
        CHECK_INT(driver->get("broken_captures"), 0);
        CHECK(gpu_is_clean(driver));
    }
}

TEST(current_device_is_restored)
{
    const gpu_fake *driver = gpu_fake_of(1);
    void *handle = dlopen(driver->name, RTLD_NOW);
    int (*get)(int *), device = -1;
    gpu_find_hook(handle, "hipGetDevice", &get);
    CHECK(get(&device) == 0 && device == 0);
    CHECK(do_everything(driver, 1));
    CHECK(get(&device) == 0 && device == 0);
    driver->fail("cuMemAlloc", 1, 2);
    CHECK(!do_everything(driver, 1));
    driver->fail(NULL, 0, 0);
    CHECK(get(&device) == 0 && device == 0);
    CHECK(gpu_is_clean(driver));
}

TEST(freeing_a_tensor_does_not_wait)
{
    const gpu_fake *driver = gpu_fake_of(0);
    fst_model *model = gpu_open_model(fixture_tensors("dropped", 4, 3000000));
    fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
    fst_loader *loader;
    fst_tensor *tensor;
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_next(loader, -1, &tensor, NULL), FST_OK);
    CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
    fst_loader_close(loader);
    alarm(250);
    driver->hold(NULL); // a kernel that runs until a flag is set
    fst_tensor_unref(tensor);
    driver->let_go();
    alarm(0);
    fst_model_close(model);
    CHECK(gpu_is_clean(driver)); // and then it is given back
}

TEST(freed_memory_is_available_to_the_next_load)
{
    const gpu_fake *driver = gpu_fake_of(0);
    fst_memory_trim();
    driver->set("memory", 16 << 20);
    driver->set("free_us", 20000);
    fst_model *model = gpu_open_model(fixture_tensors("again", 4, 3000000));
    fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
    for (int round = 0; round < 5; round++) CHECK(gpu_same_load(model, &options, NULL));
    fst_model_close(model);
    driver->set("free_us", 0);
    driver->set("memory", 1l << 32);
    CHECK(gpu_is_clean(driver));
}

TEST(staging_rings_are_reused)
{
    const gpu_fake *driver = gpu_fake_of(0);
    fst_memory_trim();
    long locks = driver->get("lock_calls"), streams = driver->get("stream_calls");
    fst_model *tiny = gpu_open_model(fixture_tensors("tiny", 2, 1000));
    fst_model *large = gpu_open_model(fixture_tensors("large", 20, 5000000));
    fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
    CHECK(gpu_same_load(tiny, &options, NULL));
    CHECK(gpu_same_load(large, &options, NULL));
    CHECK(gpu_same_load(tiny, &options, NULL));
    for (int round = 0; round < 5; round++) {
        fst_loader *loaders[2];
        for (int i = 0; i < 2; i++)
            CHECK_INT(fst_loader_open(large, &options, &loaders[i], NULL), FST_OK);
        for (int i = 0; i < 2; i++) CHECK_INT(fst_loader_wait(loaders[i], -1, NULL), FST_OK);
        for (int i = 0; i < 2; i++) fst_loader_close(loaders[i]);
    }
    // No more than the slots of two rings, however often. (How many of them one load uses, and so
    // locks, is a matter of time.)
    CHECK(driver->get("lock_calls") - locks <= 2 * 32);
    CHECK(driver->get("stream_calls") - streams <= 4);
    fst_model_close(tiny);
    fst_model_close(large);
    CHECK(gpu_is_clean(driver));
}

static struct {
    int calls, mode;
    unsigned long nodes;
    size_t size;
} preferred;

static long note_bind(void *address, size_t size, int mode, const unsigned long *nodes,
                      unsigned long node_max) {
    (void)address;
    (void)node_max;
    preferred.calls++;
    preferred.mode = mode;
    preferred.nodes = nodes == NULL ? 0 : nodes[0];
    preferred.size = size;
    return 0;
}

TEST(staging_rings_are_on_the_device_numa_node)
{
    enum { PREFERRED = 1 };
    const gpu_fake *driver = gpu_fake_of(0);
    char folder[512], device[512];
    snprintf(folder, sizeof folder, "%s", fixture_path("."));
    snprintf(device, sizeof device, "%s", fixture_path("0000:a1:00.0"));
    CHECK_INT(mkdir(device, 0700), 0);
    fixture_file("online", "0-1", 3);
    fixture_file("0000:a1:00.0/numa_node", "1\n", 2);
    fst_model *model = gpu_open_model(fixture_tensors("near", 2, 1000));
    fst_memory_trim();
    fsti_numa_fake(folder, note_bind);
    for (int32_t index = 0; index < 2; index++) { // of the first one the system does not say
        fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, index);
        CHECK(gpu_same_load(model, &options, NULL));
        CHECK_INT(preferred.calls > 0, index);
    }
    fsti_numa_fake(NULL, NULL);
    CHECK(preferred.mode == PREFERRED && preferred.nodes == 2 && preferred.size >= 32 << 20);
    fst_model_close(model);
    unlink(fixture_path("0000:a1:00.0/numa_node"));
    rmdir(device);
    CHECK(gpu_is_clean(driver));
}

TEST(saves_copy_blocks_through_pinned_memory)
{
    const gpu_fake *driver = gpu_fake_of(0);
    fst_memory_trim();
    CHECK(do_everything(driver, 0)); // the ring is trimmed again
    long streams = driver->get("stream_calls");
    fst_model *model = gpu_open_model(fixture_tensors("saving", 2, 30000000));
    fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
    fst_loader *loader;
    fst_tensor *tensors[2];
    fst_save_tensor rows[2];
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    for (int i = 0; i < 2; i++) {
        CHECK_INT(fst_loader_next(loader, -1, &tensors[i], NULL), FST_OK);
        rows[i] = gpu_save_row(tensors[i]);
    }
    fst_loader_close(loader);
    long pageable = driver->get("pageable"), out = driver->get("copied_out");
    long ahead = driver->get("out_ahead");
    driver->set("delay_us", 500);
    fst_save_options save = {.struct_size = sizeof save};
    fst_writer *writer;
    CHECK_INT(fst_writer_open(fixture_path("saved"), rows, 2, &save, &writer, NULL), FST_OK);
    CHECK_INT(fst_writer_commit(writer, NULL), FST_OK);
    fst_writer_close(writer);
    driver->set("delay_us", 0);
    CHECK(driver->get("copied_out") - out >= 28);
    CHECK(driver->get("out_ahead") > ahead); // one block is copied while the one before is written
    CHECK_INT(driver->get("pageable") - pageable, 0);
    CHECK(driver->get("stream_calls") - streams <= 2); // the save reuses the load's
    fst_model *saved = gpu_open_model(fixture_path("saved"));
    CHECK(gpu_same_load(saved, &options, NULL));
    for (int i = 0; i < 2; i++) fst_tensor_unref(tensors[i]);
    fst_model_close(saved);
    fst_model_close(model);
    CHECK(gpu_is_clean(driver));
}

// ---- the kernel ----

TEST(large_destinations_need_no_kernel)
{
    const gpu_fake *driver = gpu_fake_of(0);
    fsti_device *device;
    fsti_buffer *memory;
    fst_model *model = gpu_open_model(fixture_tensors("weights", 20, 2000000));
    CHECK_INT(fsti_device_get((fst_device){FST_DEVICE_CUDA, 1}, &device, NULL), FST_OK);
    CHECK_INT(fsti_buffer_device(device, 20 * 2000384, &memory, NULL), FST_OK);
    fst_part items[20];
    for (size_t i = 0; i < 20; i++)
        items[i] = (fst_part){.struct_size = sizeof(fst_part),
                              .tensor_index = i,
                              .destination = memory->data + i * 2000384,
                              .destination_bytes = 2000000};
    fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 1);
    options.parts = items;
    options.part_count = 20;
    long modules = driver->get("module_calls");
    fst_loader *loader;
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
    fst_loader_close(loader);
    for (size_t i = 0; i < 20; i++)
        CHECK(fixture_matches(memory->data + i * 2000384, i * 2000000, 2000000));
    CHECK_INT(driver->get("module_calls"), modules);
    fsti_buffer_unref(memory);
    fst_model_close(model);
    CHECK(gpu_is_clean(driver));
}

/// In its own process: the form of the kernel for each device.
static int meet_kernel(const char *expected) {
    const gpu_fake *driver = gpu_fake_of(0);
    fst_model *model = gpu_small_model(3000);
    fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
    fst_load_stats stats;
    bool good = gpu_same_load(model, &options, &stats) && stats.device_launches > 0;
    fst_model_close(model);
    bool is_binary = driver->get("binaries") > 0;
    return good && is_binary == (strcmp(expected, "binary") == 0) && gpu_is_clean(driver) ? 0 : 1;
}

__attribute__((constructor)) static void meet_if_asked(void) {
    const char *expected = getenv("MEET_KERNEL");
    if (expected != NULL) exit(meet_kernel(expected));
}

static bool meets(const char *name, const char *value, const char *expected) {
    setenv("MEET_KERNEL", expected, 1);
    bool met = gpu_restart_with(name, value);
    unsetenv("MEET_KERNEL");
    return met;
}

TEST(recent_devices_use_a_compiled_kernel)
{
    static const char *const current[] = {"75", "80", "86", "89", "90", "100", "103", "120", "121"};
    for (size_t i = 0; i < sizeof current / sizeof *current; i++)
        CHECK(meets("FAKE_GPU_CAPABILITY", current[i], "binary"));
    CHECK(meets("FAKE_GPU_CAPABILITY", "70", "ptx"));
    CHECK(meets("FAKE_GPU_CAPABILITY", "190", "ptx"));
    CHECK(meets("FAKE_GPU_NO_BINARIES", "1", "ptx")); // an older driver
}
