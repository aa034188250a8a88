// SPDX-License-Identifier: Apache-2.0
/// The work of a load to a GPU before its first copy: little, and independent of the model's size.
/// Queries of the page cache are counted by the linker's --wrap=syscall.
#include <dlfcn.h>
#include <fastsafetensors.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"
#include "gpu_fixture.h"

#define CACHESTAT 451
enum { FILE_COUNT = 8, FILE_BYTES = 128 << 20, SLOT_COUNT = 32 };

static atomic_long questions, questions_at_first_copy;

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);
long __wrap_syscall(long number, ...) {
    long a[6];
    va_list arguments;
    va_start(arguments, number);
    fixture_syscall_arguments(number, arguments, a);
    va_end(arguments);
    if (number == CACHESTAT) atomic_fetch_add(&questions, 1);
    return __real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

static void note_first_copy(void) {
    atomic_store(&questions_at_first_copy, atomic_load(&questions));
}

/// Files with holes for data.
static fst_model *large_model(void) {
    char folder[600], json[200];
    snprintf(folder, sizeof folder, "%s", fixture_path("set"));
    mkdir(folder, 0700);
    for (int i = 0; i < FILE_COUNT; i++) {
        snprintf(json, sizeof json,
                 "{\"t%d\":{\"dtype\":\"U8\",\"shape\":[%d],\"data_offsets\":[0,%d]}}", i,
                 FILE_BYTES, FILE_BYTES);
        char name[64];
        snprintf(name, sizeof name, "set/%d.safetensors", i);
        const char *path = fixture_model(name, json, 0);
        struct stat info;
        if (stat(path, &info) != 0 || truncate(path, info.st_size + FILE_BYTES) != 0) abort();
    }
    return gpu_open_model(folder);
}

TEST(first_copy_is_early)
{
    const gpu_fake *driver = gpu_fake_of(0);
    void (*on_first_copy)(void (*hook)(void));
    gpu_find_hook(dlopen(driver->name, RTLD_NOW), "fake_gpu_on_first_copy", &on_first_copy);
    driver->set("no_bytes", 1);
    on_first_copy(note_first_copy);
    fst_model *model = large_model();
    for (int round = 0; round < 2; round++) {
        fst_load_options options = gpu_options_on(FST_DEVICE_CUDA, 0);
        fst_loader *loader;
        driver->set("copies", 0);
        driver->set("alloc_calls", 0);
        atomic_store(&questions, 0);
        CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
        CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
        fst_loader_close(loader);
        CHECK_INT(driver->get("alloc_calls"), FILE_COUNT);
        CHECK(driver->get("first_copy_allocs") <= 2);
        CHECK(atomic_load(&questions_at_first_copy) <= SLOT_COUNT + 16);
    }
    on_first_copy(NULL);
    fst_model_close(model);
    driver->set("no_bytes", 0);
    CHECK(gpu_is_clean(driver));
}
