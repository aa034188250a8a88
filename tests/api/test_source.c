// SPDX-License-Identifier: Apache-2.0
/// Models without a path: from memory, a descriptor, or a function of the program.
#include <errno.h>
#include <fastsafetensors.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"

#ifdef O_DIRECT
#define DIRECT O_DIRECT
#else
#define DIRECT __O_DIRECT // without _GNU_SOURCE
#endif
#define COUNT 12u
#define BYTES ((uint64_t)700001)

typedef struct given_file {
    char *bytes;
    size_t size;
    atomic_int reads, released;
    atomic_int fail_at; ///< the n-th read fails, from 1
    size_t most;        ///< bytes that a read gives at most; 0: all
} given_file;

static given_file *read_given(void) {
    static given_file given;
    struct stat info;
    int fd = open(fixture_tensors("given", COUNT, BYTES), O_RDONLY | O_CLOEXEC);
    if (given.bytes == NULL && fstat(fd, &info) == 0) {
        given.size = (size_t)info.st_size;
        given.bytes = malloc(given.size);
        for (size_t at = 0; at < given.size;) {
            ssize_t got = read(fd, given.bytes + at, given.size - at);
            if (got <= 0) abort();
            at += (size_t)got;
        }
    }
    close(fd);
    atomic_store(&given.reads, 0);
    atomic_store(&given.released, 0);
    atomic_store(&given.fail_at, 0);
    given.most = 0;
    return &given;
}

static int64_t give(void *context, void *target, size_t size_bytes, uint64_t offset) {
    given_file *given = context;
    if (atomic_fetch_add(&given->reads, 1) + 1 == atomic_load(&given->fail_at)) return -EIO;
    if (offset >= given->size) return 0;
    size_t size = given->size - offset < size_bytes ? given->size - (size_t)offset : size_bytes;
    if (given->most != 0 && size > given->most) size = given->most;
    memcpy(target, given->bytes + offset, size);
    return (int64_t)size;
}

static void note_release(void *context) { atomic_fetch_add(&((given_file *)context)->released, 1); }

static fst_source memory_source(given_file *given) {
    fst_source source = FST_STRUCT_INIT(fst_source);
    source.data = given->bytes;
    source.size_bytes = given->size;
    source.context = given;
    source.release = note_release;
    return source;
}

static fst_source function_source(given_file *given) {
    fst_source source = memory_source(given);
    source.data = NULL;
    source.read = give;
    source.name = "bucket/model";
    return source;
}

/// Loads all tensors by the options; the first that is not FST_OK, or 999 for wrong bytes. Tensors
/// are read after model and loader are closed.
static fst_status load_right(fst_model *model, const fst_load_options *options, fst_error *error) {
    fst_loader *loader;
    fst_tensor *tensors[COUNT] = {0};
    fst_status status = fst_loader_open(model, options, &loader, error);
    fst_model_close(model);
    if (status != FST_OK) return status;
    for (size_t i = 0; i < COUNT && status == FST_OK; i++)
        status = fst_loader_tensor_at(loader, i, -1, &tensors[i], error);
    fst_loader_close(loader);
    for (size_t i = 0; i < COUNT; i++) {
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        if (status == FST_OK && (fst_tensor_view_get(tensors[i], &view, NULL) != FST_OK ||
                                 !fixture_matches(view.data, i * BYTES, BYTES)))
            status = (fst_status)999;
        fst_tensor_unref(tensors[i]);
    }
    return status;
}

static const fst_engine engines[] = {FST_ENGINE_AUTO, FST_ENGINE_PREAD, FST_ENGINE_DIRECT,
                                     FST_ENGINE_URING, FST_ENGINE_MMAP};

TEST(memory_source_is_loaded_by_supported_engines)
{
    given_file *given = read_given();
    for (size_t e = 0; e < sizeof engines / sizeof *engines; e++)
        for (int mode = 0; mode < FST_MODE_COUNT; mode++) {
            given = read_given();
            fst_source source = memory_source(given);
            fst_load_options options = FST_STRUCT_INIT(fst_load_options);
            options.mode = (fst_load_mode)mode;
            if (mode != FST_MODE_MAP) options.tuning = fixture_engine(engines[e]);
            fst_model *model;
            CHECK_INT(fst_model_open_source(&source, NULL, &model, NULL), FST_OK);
            fst_status status = load_right(model, &options, NULL);
            bool past_cache = engines[e] == FST_ENGINE_DIRECT || engines[e] == FST_ENGINE_URING;
            if (mode == FST_MODE_MAP)
                CHECK(status == FST_E_IO || status == FST_OK);
            else if (past_cache && mode == FST_MODE_LOAD)
                CHECK_INT(status, FST_E_UNSUPPORTED);
            else
                CHECK(status == FST_OK || (past_cache && status == FST_E_UNSUPPORTED));
            CHECK_INT(given->released, 1);
        }
    // The program's memory is unchanged.
    CHECK(fixture_matches(given->bytes + given->size - COUNT * BYTES, 0, COUNT * BYTES));
}

TEST(read_callback_source)
{
    for (size_t most = 0; most < 3; most++) {
        given_file *given = read_given();
        given->most = most * 100003;
        fst_source source = function_source(given);
        fst_load_options options = FST_STRUCT_INIT(fst_load_options);
        options.budget_bytes = most == 1 ? 2 * BYTES : 0;
        fst_model *model;
        fst_file_info info = FST_STRUCT_INIT(fst_file_info);
        CHECK_INT(fst_model_open_source(&source, NULL, &model, NULL), FST_OK);
        CHECK_INT(fst_model_file_info(model, 0, &info, NULL), FST_OK);
        CHECK_TEXT(info.path, "bucket/model");
        CHECK_INT(load_right(model, &options, NULL), FST_OK);
        CHECK(given->reads >= 2);
        CHECK_INT(given->released, 1);
    }
}

TEST(failing_read_callback_is_an_error)
{
    fst_error error = {0};
    fst_status status = FST_E_IO;
    int nth;
    for (nth = 1; nth < 50 && status != FST_OK; nth++) {
        given_file *given = read_given();
        fst_source source = function_source(given);
        atomic_store(&given->fail_at, nth);
        fst_model *model;
        status = fst_model_open_source(&source, NULL, &model, &error);
        if (status == FST_OK) status = load_right(model, NULL, &error);
        if (status != FST_OK) {
            CHECK_INT(status, FST_E_IO);
            CHECK_INT(error.os_errno, EIO);
            CHECK_TEXT(error.file, "bucket/model");
        }
        CHECK_INT(given->released, 1);
    }
    CHECK(nth > 3);
    // A source that ends before its size.
    given_file *given = read_given();
    fst_source source = function_source(given);
    source.size_bytes += 1;
    fst_model *model;
    CHECK(fst_model_open_source(&source, NULL, &model, &error) != FST_OK);
    CHECK_INT(given->released, 1);
}

TEST(direct_descriptor_is_reopened)
{
    fst_source source = FST_STRUCT_INIT(fst_source);
    source.descriptor =
        open(fixture_tensors("around", COUNT, BYTES), O_RDONLY | O_CLOEXEC | DIRECT);
    if (source.descriptor < 0) SKIP("this file system has no O_DIRECT");
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    fst_model *model;
    CHECK_INT(fst_model_open_source(&source, NULL, &model, NULL), FST_OK);
    close(source.descriptor);
    CHECK_INT(load_right(model, &options, NULL), FST_OK);
}

TEST(descriptor_can_be_closed_after_open)
{
    const char *path = fixture_tensors("given", COUNT, BYTES);
    for (int mode = 0; mode < FST_MODE_COUNT; mode++) {
        fst_source source = FST_STRUCT_INIT(fst_source);
        source.descriptor = open(path, O_RDONLY | O_CLOEXEC);
        CHECK_INT(lseek(source.descriptor, 1234, SEEK_SET), 1234);
        fst_load_options options = FST_STRUCT_INIT(fst_load_options);
        options.mode = (fst_load_mode)mode;
        fst_model *model;
        CHECK_INT(fst_model_open_source(&source, NULL, &model, NULL), FST_OK);
        CHECK_INT(lseek(source.descriptor, 0, SEEK_CUR), 1234);
        close(source.descriptor);
        CHECK_INT(load_right(model, &options, NULL), FST_OK);
    }
}

TEST(invalid_sources_are_refused)
{
    given_file *given = read_given();
    fst_source source = memory_source(given);
    fst_model *model;
    source.read = give;
    CHECK_INT(fst_model_open_source(&source, NULL, &model, NULL), FST_E_ARGUMENT);
    CHECK_INT(given->released, 1);
    source = memory_source(given);
    source.size_bytes = 100; // shorter than its header says
    CHECK(fst_model_open_source(&source, NULL, &model, NULL) != FST_OK);
    CHECK_INT(given->released, 2);
    source = FST_STRUCT_INIT(fst_source);
    source.descriptor = -1;
    CHECK_INT(fst_model_open_source(&source, NULL, &model, NULL), FST_E_ARGUMENT);
    int ends[2];
    CHECK_INT(pipe(ends), 0);
    source.descriptor = ends[0];
    CHECK_INT(fst_model_open_source(&source, NULL, &model, NULL), FST_E_NOT_REGULAR);
    source.descriptor = open(fixture_path("written"), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    CHECK(fst_model_open_source(&source, NULL, &model, NULL) != FST_OK);
    source.descriptor = 987;
    CHECK_INT(fst_model_open_source(&source, NULL, &model, NULL), FST_E_IO);
    CHECK_INT(fst_model_open_source(NULL, NULL, &model, NULL), FST_E_ARGUMENT);
    CHECK(model == NULL);
}
