// SPDX-License-Identifier: Apache-2.0
/// I/O routes of real files: the probed facts, and the policy's decision.
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

#include "check.h"
#include "fastsafetensors.h"
#include "fixture.h"
#include "loader/load.h"

static fsti_file *open_file(void) {
    fsti_file *file = NULL;
    if (fsti_file_open(fixture_tensors("choice", 3, 100000), &file, NULL) != FST_OK) abort();
    return file;
}

TEST(routes_fall_back_step_by_step)
{
    static const struct {
        unsigned hidden;
        const fsti_io_engine *absent;
    } cases[] = {
        {0, &fsti_io_engine_uring},
        {FSTI_TEST_NO_URING, &fsti_io_engine_direct},
        {FSTI_TEST_NO_URING | FSTI_TEST_NO_DIRECT, &fsti_io_engine_pread},
    };
    char reason[200];
    fsti_file *file = open_file();
    bool all = fsti_io_engine_uring.usable(file, reason, sizeof reason);
    fsti_file_unref(file);
    if (!all) SKIP("io_uring or O_DIRECT does not work here");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        fsti_file_route route;
        load_route_request request = {.no_mapping = NULL};
        fsti_io_test_disable(cases[i].hidden);
        file = open_file(); // probes are kept per file
        CHECK_INT(fsti_loader_find_route(file, &request, &route, NULL), FST_OK);
        CHECK(fsti_route_engine(&route, false) == cases[i].absent);
        CHECK(fsti_route_engine(&route, true) == &fsti_io_engine_mmap);
        CHECK(route.reason[0] != '\0');
        fst_error error;
        if (cases[i].hidden != 0) {
            request.engine = FST_ENGINE_URING;
            CHECK_INT(fsti_loader_find_route(file, &request, &route, &error), FST_E_UNSUPPORTED);
            CHECK_CONTAINS(error.message, "uring");
        }
        fsti_file_unref(file);
    }
    fsti_io_test_disable(0);
}

TEST(routes_follow_the_request)
{
    fsti_file_route route;
    fsti_file *file = open_file();
    load_route_request request = {.no_mapping = "a reason"};
    CHECK_INT(fsti_loader_find_route(file, &request, &route, NULL), FST_OK);
    CHECK(fsti_route_engine(&route, true) == &fsti_io_engine_pread); // no guard, no mapping
    request = (load_route_request){.keeps_cache = true};
    CHECK_INT(fsti_loader_find_route(file, &request, &route, NULL), FST_OK);
    CHECK(fsti_route_engine(&route, false) == &fsti_io_engine_mmap);
    CHECK_CONTAINS(route.reason, "kept in the page cache");
    request.no_mapping = "a reason";
    CHECK_INT(fsti_loader_find_route(file, &request, &route, NULL), FST_OK);
    CHECK(fsti_route_engine(&route, false) == &fsti_io_engine_pread);
    request = (load_route_request){.is_small = true};
    CHECK_INT(fsti_loader_find_route(file, &request, &route, NULL), FST_OK);
    CHECK(fsti_route_engine(&route, false) == &fsti_io_engine_pread);
    request = (load_route_request){.engine = FST_ENGINE_MMAP};
    CHECK_INT(fsti_loader_find_route(file, &request, &route, NULL), FST_OK);
    CHECK(fsti_route_engine(&route, false) == &fsti_io_engine_mmap);
    request.no_mapping = "a reason";
    fst_error error;
    CHECK_INT(fsti_loader_find_route(file, &request, &route, &error), FST_E_UNSUPPORTED);
    CHECK_CONTAINS(error.message, "engine mmap can't be used: a reason");
    fsti_file_unref(file);
}

#define FAR_BYTES ((uint64_t)3000001)
#define HEADER_BYTES 96
static atomic_int direct_reads[2]; ///< of the file on a disk, and of the one in memory

static void count_direct(fsti_io_op *op) {
    bool is_direct = op->engine == FST_ENGINE_DIRECT || op->engine == FST_ENGINE_URING;
    bool in_memory = strstr(fsti_file_path(op->file), "/dev/shm/") != NULL;
    if (is_direct) atomic_fetch_add(&direct_reads[in_memory], 1);
}

/// A file of one tensor "m" on tmpfs; false without one.
static bool make_in_memory(char *path, size_t size) {
    static char bytes[8 + HEADER_BYTES + FAR_BYTES];
    const uint64_t length = HEADER_BYTES;
    snprintf(path, size, "/dev/shm/fst-route-%d.safetensors", (int)getpid());
    memcpy(bytes, &length, sizeof length);
    memset(bytes + 8, ' ', HEADER_BYTES);
    static const char json[] =
        "{\"m\":{\"dtype\":\"U8\",\"shape\":[3000001],\"data_offsets\":[0,3000001]}}";
    memcpy(bytes + 8, json, sizeof json - 1);
    for (uint64_t i = 0; i < FAR_BYTES; i++) bytes[8 + HEADER_BYTES + i] = (char)fixture_byte(i);
    FILE *file = fopen(path, "wb");
    bool is_made = file != NULL && fwrite(bytes, 1, sizeof bytes, file) == sizeof bytes;
    return file != NULL && fclose(file) == 0 && is_made;
}

/// Loads both files with direct I/O; 9999 for a wrong byte.
static fst_status load_both(const char *const paths[2]) {
    fst_load_options options = {
        .struct_size = sizeof options, .mode = FST_MODE_LOAD, .cache = FST_CACHE_BYPASS};
    fst_model *model = NULL;
    fst_loader *loader = NULL;
    fst_tensor *tensor;
    fst_status status = fst_model_open_files(paths, 2, NULL, &model, NULL);
    if (status == FST_OK) status = fst_loader_open(model, &options, &loader, NULL);
    while (status == FST_OK && (status = fst_loader_next(loader, -1, &tensor, NULL)) == FST_OK) {
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        if (fst_tensor_view_get(tensor, &view, NULL) != FST_OK ||
            !fixture_matches(view.data, 0, FAR_BYTES))
            status = (fst_status)9999;
        fst_tensor_unref(tensor);
    }
    fst_loader_close(loader);
    fst_model_close(model);
    return status == FST_END ? FST_OK : status;
}

TEST(each_file_system_has_its_own_route)
{
    char in_memory[64];
    const char *on_disk = fixture_tensors("disk", 1, FAR_BYTES);
    fsti_file *file = open_file();
    char reason[200];
    bool is_direct = fsti_io_engine_direct.usable(file, reason, sizeof reason);
    fsti_file_unref(file);
    if (!is_direct) SKIP("O_DIRECT does not work here");
    if (!make_in_memory(in_memory, sizeof in_memory)) SKIP("nothing can be written to /dev/shm");
    fst_status status[2];
    int of_disk[2], of_memory[2];
    for (int first = 0; first < 2; first++) {
        const char *const paths[] = {first ? in_memory : on_disk, first ? on_disk : in_memory};
        fixture_evict(on_disk);
        atomic_store(&direct_reads[0], 0);
        atomic_store(&direct_reads[1], 0);
        fsti_io_fault_hook_set(count_direct);
        status[first] = load_both(paths);
        fsti_io_fault_hook_set(NULL);
        of_disk[first] = atomic_load(&direct_reads[0]);
        of_memory[first] = atomic_load(&direct_reads[1]);
    }
    unlink(in_memory);
    for (int first = 0; first < 2; first++) {
        CHECK_INT(status[first], FST_OK);
        CHECK(of_disk[first] > 0);
        CHECK_INT(of_memory[first], 0);
    }
}
