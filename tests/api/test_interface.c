// SPDX-License-Identifier: Apache-2.0
/// Parts of the interface that belong to no single module: versions, dtypes, reserved fields, the
/// log.
#include <fastsafetensors.h>
#include <fastsafetensors/experimental.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"
#include "save_fixture.h"

static const uint64_t shape_3[] = {3};

TEST(version_as_a_number)
{
    char text[32];
    CHECK_INT(fst_version_number(), FST_VERSION_NUMBER);
    uint32_t number = fst_version_number();
    snprintf(text, sizeof text, "%u.%u.%u", number / 10000, number / 100 % 100, number % 100);
    CHECK_TEXT(fst_version(), text);
}

/// Checks that a call was refused because the path of that name is empty.
static void check_empty(fst_status status, const fst_error *error, const char *name) {
    CHECK_INT(status, FST_E_NOT_FOUND);
    char text[64];
    snprintf(text, sizeof text, "%s is an empty path", name);
    CHECK_TEXT(error->message, text);
}

TEST(empty_paths_are_named)
{
    fst_error e;
    fst_model *model = NULL;
    fst_writer *writer = NULL;
    fst_async_save *save = NULL;
    fst_delta *delta = NULL;
    const char *paths[] = {""};
    size_t count;
    check_empty(fst_model_open("", NULL, &model, &e), &e, "path");
    check_empty(fst_model_open_files(paths, 1, NULL, &model, &e), &e, "a path of the list");
    check_empty(fst_save("", NULL, 0, NULL, NULL, &e), &e, "path");
    check_empty(fst_writer_open("", NULL, 0, NULL, &writer, &e), &e, "path");
    check_empty(fst_writer_join("", NULL, &writer, &e), &e, "path");
    check_empty(fst_set_publish("", paths, 1, NULL, NULL, &e), &e, "folder");
    check_empty(fst_set_publish("f", paths, 1, NULL, NULL, &e), &e, "a path of the list");
    check_empty(fst_async_save_start("", NULL, 0, NULL, &save, &e), &e, "path");
    check_empty(fst_file_compress("", "a", NULL, NULL, &e), &e, "path");
    check_empty(fst_file_compress("a", "", NULL, NULL, &e), &e, "target");
    check_empty(fst_file_decompress("", "a", NULL, NULL, &e), &e, "path");
    check_empty(fst_engines_probe("", NULL, 0, &count, &e), &e, "path");
    check_empty(fst_delta_open(paths, 1, &delta, &e), &e, "a folder");
    fst_check_options check = {.struct_size = sizeof check, .manifest = ""};
    check_empty(fst_manifest_check("a", &check, NULL, &e), &e, "manifest");
    fst_delta_make_options make = {.struct_size = sizeof make,
                                   .checkpoint = "",
                                   .version = "000001",
                                   .base_version = "000000",
                                   .digest = FST_DIGEST_ADLER32};
    check_empty(fst_delta_make("a", "b", &make, NULL, &e), &e, "checkpoint");
    fst_remote_options remote = {.struct_size = sizeof remote, .ca_file = ""};
    check_empty(fst_remote_configure(&remote, &e), &e, "ca_file");
}

TEST(dtypes_by_name)
{
    fst_error error;
    fst_dtype dtype;
    for (int i = 0; i < FST_DTYPE_COUNT; i++) {
        CHECK_INT(fst_dtype_from_name(fst_dtype_name((fst_dtype)i), SIZE_MAX, &dtype, NULL),
                  FST_OK);
        CHECK_INT(dtype, i);
    }
    CHECK_INT(fst_dtype_from_name("BF16x", 4, &dtype, NULL), FST_OK);
    CHECK_INT(dtype, FST_DTYPE_BF16);
    CHECK_INT(fst_dtype_from_name("bf16", SIZE_MAX, &dtype, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "BF16");
    CHECK_INT(fst_dtype_from_name(NULL, 0, &dtype, NULL), FST_E_ARGUMENT);
    CHECK(fst_dtype_name((fst_dtype)FST_DTYPE_COUNT) == NULL);
}

TEST(convertible_dtype_pairs)
{
    CHECK(fst_dtype_convertible(FST_DTYPE_F32, FST_DTYPE_BF16));
    CHECK(fst_dtype_convertible(FST_DTYPE_U8, FST_DTYPE_I16));
    CHECK(fst_dtype_convertible(FST_DTYPE_C64, FST_DTYPE_C64));
    CHECK(!fst_dtype_convertible(FST_DTYPE_F32, FST_DTYPE_I32));
    CHECK(!fst_dtype_convertible(FST_DTYPE_I64, FST_DTYPE_I32));
    CHECK(!fst_dtype_convertible((fst_dtype)99, (fst_dtype)99));
}

TEST(bytes_of_a_shape)
{
    uint64_t bytes;
    CHECK_INT(fst_dtype_tensor_bytes(FST_DTYPE_F32, shape_3, 1, &bytes, NULL), FST_OK);
    CHECK_INT(bytes, 12);
    CHECK_INT(fst_dtype_tensor_bytes(FST_DTYPE_F32, NULL, 0, &bytes, NULL), FST_OK);
    CHECK_INT(bytes, 4);
    CHECK_INT(fst_dtype_tensor_bytes(FST_DTYPE_F4, shape_3, 1, &bytes, NULL),
              FST_E_MISALIGNED_SLICE);
    CHECK_INT(
        fst_dtype_tensor_bytes(FST_DTYPE_F64, (const uint64_t[]){UINT64_MAX}, 1, &bytes, NULL),
        FST_E_VALIDATION_OVERFLOW);
    CHECK_INT(fst_dtype_tensor_bytes((fst_dtype)99, shape_3, 1, &bytes, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_dtype_tensor_bytes(FST_DTYPE_F32, NULL, 1, &bytes, NULL), FST_E_ARGUMENT);
}

static void *allocate_nothing(void *context, size_t size_bytes, size_t alignment) {
    (void)context, (void)size_bytes, (void)alignment;
    return NULL;
}

static void release_nothing(void *context, void *pointer, size_t size_bytes) {
    (void)context, (void)pointer, (void)size_bytes;
}

/// A struct of a newer program may be longer if what it adds is zero; one of an older program is
/// shorter; and every element of an array has the size of the first.
TEST(struct_sizes_of_other_versions)
{
    struct {
        fst_part known;
        uint64_t added;
    } parts[2] = {{.known = {.struct_size = sizeof parts[0], .tensor_index = 1}},
                  {.known = {.struct_size = sizeof parts[0], .tensor_index = 0}}};
    fst_model *model;
    fst_loader *loader;
    fst_error error;
    CHECK_INT(fst_model_open(fixture_tensors("sizes", 2, 64), NULL, &model, NULL), FST_OK);
    fst_load_options load = FST_STRUCT_INIT(fst_load_options);
    load.parts = &parts[0].known;
    load.part_count = 2;
    CHECK_INT(fst_loader_open(model, &load, &loader, &error), FST_OK);
    CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
    fst_tensor *tensor;
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
    CHECK_INT(fst_loader_tensor_at(loader, 0, -1, &tensor, NULL), FST_OK);
    CHECK_INT(fst_tensor_view_get(tensor, &view, NULL), FST_OK);
    CHECK(fixture_matches(view.data, 64, 64));
    fst_tensor_unref(tensor);
    fst_loader_close(loader);
    parts[1].added = 1;
    CHECK_INT(fst_loader_open(model, &load, &loader, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "a field is set that this version");
    parts[1].known.struct_size = sizeof(fst_part);
    CHECK_INT(fst_loader_open(model, &load, &loader, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "another struct_size");
    load = FST_STRUCT_INIT(fst_load_options);
    fst_load_tuning tuning = {.struct_size = 3};
    load.tuning = &tuning;
    CHECK_INT(fst_loader_open(model, &load, &loader, &error), FST_E_ARGUMENT);
    load = FST_STRUCT_INIT(fst_load_options);
    fst_allocator allocator = {.allocate = allocate_nothing, .release = release_nothing};
    load.allocator = &allocator;
    CHECK_INT(fst_loader_open(model, &load, &loader, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "struct_size");
    fst_model_close(model);
    fst_save_tensor tensors[2] = {save_tensor_of("t", FST_DTYPE_U8, shape_3, "xyz"),
                                  save_tensor_of("u", FST_DTYPE_U8, shape_3, "xyz")};
    tensors[1].struct_size = 0;
    CHECK_INT(fst_save(fixture_path("r"), tensors, 2, NULL, NULL, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "another struct_size");
}

static atomic_int lines, saves;
static char last_line[1024];

static void note_line(void *context, fst_log_level level, const char *text) {
    (void)context;
    atomic_fetch_add(&lines, 1);
    if (level == FST_LOG_INFO && strncmp(text, "saved ", 6) == 0) {
        atomic_fetch_add(&saves, 1);
        snprintf(last_line, sizeof last_line, "%s", text);
    }
}

TEST(decisions_are_logged)
{
    fst_save_tensor tensor = save_tensor_of("t", FST_DTYPE_U8, shape_3, "xyz");
    fst_log_set(note_line, NULL, FST_LOG_INFO);
    CHECK_INT(fst_save(fixture_path("log\x1b[31m"), &tensor, 1, NULL, NULL, NULL), FST_OK);
    CHECK_INT(saves, 1);
    CHECK_CONTAINS(last_line, "1 tensors");
    CHECK(strchr(last_line, 0x1b) == NULL);
    int before = lines;
    fst_log_set(note_line, NULL, FST_LOG_DEBUG);
    CHECK_INT(fst_save(fixture_path("log"), &tensor, 1, NULL, NULL, NULL), FST_OK);
    CHECK(lines >= before + 2); // the step, and the end
    fst_log_set(NULL, NULL, FST_LOG_DEBUG);
    before = lines;
    CHECK_INT(fst_save(fixture_path("log"), &tensor, 1, NULL, NULL, NULL), FST_OK);
    CHECK_INT(lines, before);
}

static void *change_log(void *stop) {
    while (!atomic_load((atomic_int *)stop)) {
        fst_log_set(note_line, NULL, FST_LOG_DEBUG);
        fst_log_set(NULL, NULL, FST_LOG_WARNING);
    }
    return NULL;
}

TEST(log_callback_can_be_replaced_during_logging)
{
    fst_save_tensor tensor = save_tensor_of("t", FST_DTYPE_U8, shape_3, "xyz");
    atomic_int stop = 0;
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) CHECK_INT(pthread_create(&threads[i], NULL, change_log, &stop), 0);
    for (int i = 0; i < 50; i++)
        CHECK_INT(fst_save(fixture_path("log"), &tensor, 1, NULL, NULL, NULL), FST_OK);
    atomic_store(&stop, 1);
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    fst_log_set(NULL, NULL, FST_LOG_WARNING);
}

TEST(statistics_unknown_to_the_library_are_zero)
{
    struct {
        fst_load_stats known;
        unsigned char more[64];
    } newer;
    fst_model *model = NULL;
    fst_loader *loader = NULL;
    fst_load_options options = {.struct_size = sizeof options, .mode = FST_MODE_LOAD};
    CHECK_INT(fst_model_open(fixture_tensors("newer", 2, 100), NULL, &model, NULL), FST_OK);
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    fst_model_close(model);
    memset(&newer, 0xff, sizeof newer);
    newer.known.struct_size = sizeof newer;
    CHECK_INT(fst_loader_stats_get(loader, &newer.known, NULL), FST_OK);
    CHECK_INT(newer.known.struct_size, sizeof newer);
    CHECK_INT(newer.known.tensor_count, 2);
    for (size_t i = 0; i < sizeof newer.more; i++) CHECK_INT(newer.more[i], 0);
    fst_loader_close(loader);
}

TEST(text_step_needs_no_pointers)
{
    CHECK_INT(fst_text_step(NULL, 5, NULL, NULL), 0);
    CHECK_INT(fst_text_step("a", 0, NULL, NULL), 0);
    CHECK_INT(fst_text_step("\xe5\xb1\x82x", 4, NULL, NULL), 3);
    CHECK_INT(fst_text_step("\xe5\xb1\x82x", 2, NULL, NULL), 1); // truncated: not a character
    uint32_t code;
    int columns;
    CHECK_INT(fst_text_step("\xe2\x80\xae", 3, &code, &columns), 3);
    CHECK(code == 0x202e && columns == -1);
}

static void check_remote_refused(const fst_remote_options *options, fst_status expected,
                                 const char *text) {
    fst_error error = {0};
    CHECK_INT(fst_remote_configure(options, &error), expected);
    CHECK_CONTAINS(error.message, text);
}

#define REMOTE(...) (&(fst_remote_options){.struct_size = sizeof(fst_remote_options), __VA_ARGS__})

TEST(remote_settings_are_checked_when_they_are_given)
{
    check_remote_refused(REMOTE(.anonymous = 2), FST_E_ARGUMENT, "anonymous is 2");
    check_remote_refused(REMOTE(.cache_required = 2), FST_E_ARGUMENT, "cache_required is 2");
    check_remote_refused(REMOTE(.create_only = 2), FST_E_ARGUMENT, "create_only is 2");
    check_remote_refused(REMOTE(.offline = -1), FST_E_ARGUMENT, "offline is -1");
    check_remote_refused(REMOTE(.private_redirects = 5), FST_E_ARGUMENT, "private_redirects is 5");
    check_remote_refused(REMOTE(.cache_dir = "off", .cache_required = 1), FST_E_ARGUMENT,
                         "cache_required needs a cache");
    check_remote_refused(REMOTE(.cache_dir = ""), FST_E_ARGUMENT, "cache_dir is empty");
    check_remote_refused(REMOTE(.ca_file = "/nonexistent/ca.pem"), FST_E_NOT_FOUND,
                         "/nonexistent/ca.pem: reading ca_file");
    check_remote_refused(REMOTE(.ca_file = "/"), FST_E_ARGUMENT, "PEM format");
    check_remote_refused(REMOTE(.ca_file = "/dev/null"), FST_E_ARGUMENT, "PEM format");
    check_remote_refused(REMOTE(.access_key = "key"), FST_E_ARGUMENT, "must be given together");
    check_remote_refused(REMOTE(.access_key = "key", .secret_key = ""), FST_E_ARGUMENT,
                         "must be given together");
    check_remote_refused(REMOTE(.endpoint = "ftp://host"), FST_E_ARGUMENT, "neither http://");
}

static atomic_bool forks_done;

static void ignore_object(void *context, const fst_cache_object *object) {
    (void)context;
    (void)object;
}

/// Uses the settings of URLs and of the cache until the forks are done.
static void *use_settings(void *folder) {
    fst_error error;
    while (!atomic_load(&forks_done)) {
        fst_model *model = NULL;
        if (fst_cache_visit(folder, ignore_object, NULL, &error) != FST_OK) break;
        if (fst_model_open("http://127.0.0.1:9/m", NULL, &model, &error) == FST_OK) break;
    }
    return NULL;
}

TEST(forks_beside_threads_that_use_remote_settings)
{
    if (CHECK_SANITIZED) SKIP("a sanitizer's allocator may stay locked in the child of a fork");
    char folder[4096];
    snprintf(folder, sizeof folder, "%s", fixture_path("cache"));
    CHECK(mkdir(folder, 0700) == 0);
    for (int is_configured = 0; is_configured < 2; is_configured++) {
        pthread_t thread;
        if (is_configured)
            CHECK_INT(fst_remote_configure(REMOTE(.offline = 1), NULL), FST_OK);
        else
            setenv("FASTSAFETENSORS_OFFLINE", "1", 1);
        atomic_store(&forks_done, false);
        CHECK_INT(pthread_create(&thread, NULL, use_settings, folder), 0);
        for (int i = 0; i < 300; i++) {
            alarm(30); // ends the test after a deadlock
            pid_t child = fork();
            if (child == 0) {
                fst_model *model = NULL;
                alarm(30);
                fst_status status = fst_model_open("http://127.0.0.1:9/m", NULL, &model, NULL);
                _exit(status == FST_OK ? 1 : 0);
            }
            int status = -1;
            CHECK_INT(waitpid(child, &status, 0), child);
            CHECK_INT(status, 0);
        }
        alarm(0);
        atomic_store(&forks_done, true);
        pthread_join(thread, NULL);
        unsetenv("FASTSAFETENSORS_OFFLINE");
    }
    CHECK_INT(fst_remote_configure(NULL, NULL), FST_OK);
}
