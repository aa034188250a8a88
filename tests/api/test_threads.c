// SPDX-License-Identifier: Apache-2.0
/// Threads of the program that are cancelled during a call, or have small stacks.
#include <fastsafetensors.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"

#define COUNT 3
#define BYTES ((uint64_t)300000)

// ---- a source whose reads block until they are released ----

typedef struct held_source {
    FILE *file;
    atomic_bool holds;
    atomic_int calls; ///< reads that are blocked
} held_source;

static int64_t read_held(void *context, void *buffer, size_t size, uint64_t offset) {
    held_source *source = context;
    if (atomic_load(&source->holds)) atomic_fetch_add(&source->calls, 1);
    while (atomic_load(&source->holds)) usleep(1000);
    return pread(fileno(source->file), buffer, size, (off_t)offset);
}

static fst_loader *open_held(held_source *held) {
    *held = (held_source){.file = fopen(fixture_tensors("held", COUNT, BYTES), "rb")};
    if (held->file == NULL || fseek(held->file, 0, SEEK_END) != 0) abort();
    fst_source source = {.struct_size = sizeof source,
                         .read = read_held,
                         .context = held,
                         .size_bytes = (uint64_t)ftell(held->file)};
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    fst_model *model;
    fst_loader *loader;
    options.mode = FST_MODE_LOAD;
    if (fst_model_open_source(&source, NULL, &model, NULL) != FST_OK) abort();
    atomic_store(&held->holds, true);
    if (fst_loader_open(model, &options, &loader, NULL) != FST_OK) abort();
    fst_model_close(model);
    return loader;
}

static void *take_next(void *loader) {
    fst_tensor *tensor;
    if (fst_loader_next(loader, -1, &tensor, NULL) == FST_OK) fst_tensor_unref(tensor);
    return NULL;
}

TEST(thread_cancelled_in_a_wait_leaves_the_loader_usable)
{
    held_source held;
    void *result;
    pthread_t thread;
    fst_tensor *tensor;
    fst_loader *loader = open_held(&held);
    alarm(100); // ends the test if a lock is never released
    CHECK_INT(pthread_create(&thread, NULL, take_next, loader), 0);
    while (atomic_load(&held.calls) == 0) usleep(1000);
    usleep(20000);
    CHECK_INT(pthread_cancel(thread), 0);
    usleep(20000);
    atomic_store(&held.holds, false);
    CHECK_INT(pthread_join(thread, &result), 0);
    for (int i = 1; i < COUNT; i++) {
        CHECK_INT(fst_loader_next(loader, -1, &tensor, NULL), FST_OK);
        fst_tensor_unref(tensor);
    }
    fst_loader_close(loader);
    alarm(0);
    fclose(held.file);
}

static void *load_and_save(void *context) {
    bool *done = context;
    fst_model *model;
    fst_loader *loader;
    fst_tensor *tensor;
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
    fst_save_options options = FST_STRUCT_INIT(fst_save_options);
    options.promise = FST_SAVE_DURABLE;
    options.manifest = "";
    const char *path = fixture_tensors("plain", COUNT, BYTES);
    for (int mode = FST_MODE_AUTO; mode <= FST_MODE_MAP; mode++) {
        fst_load_options load = FST_STRUCT_INIT(fst_load_options);
        load.mode = (fst_load_mode)mode;
        if (fst_model_open(path, NULL, &model, NULL) != FST_OK ||
            fst_loader_open(model, &load, &loader, NULL) != FST_OK ||
            fst_loader_next(loader, -1, &tensor, NULL) != FST_OK ||
            fst_tensor_view_get(tensor, &view, NULL) != FST_OK)
            return NULL;
        fst_save_tensor save = {.struct_size = sizeof save,
                                .name = "a",
                                .name_size = 1,
                                .dtype = view.dtype,
                                .rank = view.rank,
                                .shape = view.shape,
                                .data = view.data};
        if (fst_save(fixture_path("saved"), &save, 1, &options, NULL, NULL) != FST_OK) return NULL;
        fst_tensor_unref(tensor);
        fst_loader_close(loader);
        fst_model_close(model);
    }
    *done = true;
    return NULL;
}

TEST(a_stack_of_128_kib_is_enough)
{
    bool done = false;
    pthread_t thread;
    pthread_attr_t attributes;
    if (CHECK_SANITIZED) SKIP("sanitizers need larger stacks");
    CHECK_INT(pthread_attr_init(&attributes), 0);
    CHECK_INT(pthread_attr_setstacksize(&attributes, (size_t)128 << 10), 0);
    CHECK_INT(pthread_create(&thread, &attributes, load_and_save, &done), 0);
    CHECK_INT(pthread_join(thread, NULL), 0);
    CHECK(done);
    pthread_attr_destroy(&attributes);
}
