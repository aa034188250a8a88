// SPDX-License-Identifier: Apache-2.0
/// The log lines of loads: one INFO line each, and warnings about retries and caches.
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "fastsafetensors.h"
#include "fixture.h"
#include "range_server.h"

#define TENSOR_COUNT 12
#define TENSOR_BYTES ((uint64_t)700001)

/// What the callback was given.
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int counts[3];
static char lines[3][1024]; ///< the last one of each level

static void take_line(void *context, fst_log_level level, const char *text) {
    (void)context;
    pthread_mutex_lock(&lock);
    counts[level]++;
    snprintf(lines[level], sizeof lines[level], "%s", text);
    pthread_mutex_unlock(&lock);
}

static void begin_log(fst_log_level level) {
    memset(counts, 0, sizeof counts);
    memset(lines, 0, sizeof lines);
    fst_log_set(take_line, NULL, level);
}

static bool says(fst_log_level level, const char *text) {
    return strstr(lines[level], text) != NULL;
}

static const char *make_model(void) { return fixture_tensors("model", TENSOR_COUNT, TENSOR_BYTES); }

/// Loads a model: by waiting for it, or tensor by tensor.
static fst_status load_with(const char *path, bool is_stream, const fst_load_options *options) {
    fst_model *model;
    fst_loader *loader = NULL;
    fst_tensor *tensor;
    fst_error error;
    fst_status status = fst_model_open(path, NULL, &model, &error);
    if (status != FST_OK) return status;
    status = fst_loader_open(model, options, &loader, &error);
    if (status == FST_OK && !is_stream) status = fst_loader_wait(loader, -1, &error);
    while (status == FST_OK && is_stream) {
        status = fst_loader_next(loader, -1, &tensor, &error);
        if (status == FST_OK) fst_tensor_unref(tensor);
    }
    fst_loader_close(loader);
    fst_model_close(model);
    return status == FST_END ? FST_OK : status;
}

static fst_status load(const char *path, bool is_stream, fst_load_mode mode) {
    fst_load_options options = {.struct_size = sizeof options, .mode = mode};
    return load_with(path, is_stream, &options);
}

TEST(each_load_logs_one_line_of_information)
{
    const char *path = make_model();
    for (int i = 0; i < 4; i++) {
        begin_log(FST_LOG_INFO);
        CHECK_INT(load(path, i % 2 == 1, i < 2 ? FST_MODE_LOAD : FST_MODE_MAP), FST_OK);
        CHECK_INT(counts[FST_LOG_INFO], 1);
        CHECK_INT(counts[FST_LOG_WARNING], 0);
        CHECK_INT(counts[FST_LOG_DEBUG], 0);
        CHECK(says(FST_LOG_INFO, path) && says(FST_LOG_INFO, "12 tensors, 8400012 bytes"));
        CHECK(says(FST_LOG_INFO, i < 2 ? "mode load, engine " : "mode map, engine mapping"));
    }
    begin_log(FST_LOG_DEBUG);
    CHECK_INT(load(path, false, FST_MODE_LOAD), FST_OK);
    CHECK_INT(counts[FST_LOG_INFO], 1);
    CHECK(counts[FST_LOG_DEBUG] >= 1 && says(FST_LOG_DEBUG, "loading "));
    begin_log(FST_LOG_WARNING);
    CHECK_INT(load(path, false, FST_MODE_LOAD), FST_OK);
    CHECK_INT(counts[FST_LOG_WARNING] + counts[FST_LOG_INFO] + counts[FST_LOG_DEBUG], 0);
}

TEST(a_load_of_a_part_of_the_model_is_logged_at_debug)
{
    fst_part item = {.struct_size = sizeof item, .tensor_index = 3};
    fst_load_options options = {
        .struct_size = sizeof options, .mode = FST_MODE_LOAD, .parts = &item, .part_count = 1};
    begin_log(FST_LOG_INFO);
    CHECK_INT(load_with(make_model(), false, &options), FST_OK);
    CHECK_INT(counts[FST_LOG_INFO], 0);
    begin_log(FST_LOG_DEBUG);
    CHECK_INT(load_with(make_model(), false, &options), FST_OK);
    CHECK_INT(counts[FST_LOG_INFO], 0);
    CHECK(counts[FST_LOG_DEBUG] >= 2 && says(FST_LOG_DEBUG, "loaded "));
}

TEST(a_load_that_fails_or_is_closed_early_logs_why)
{
    const char *path = make_model();
    fst_model *model;
    fst_loader *loader;
    begin_log(FST_LOG_INFO);
    CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
    CHECK_INT(truncate(path, 100000), 0);
    fst_load_options options = {.struct_size = sizeof options, .mode = FST_MODE_LOAD};
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_E_FILE_CHANGED);
    CHECK_INT(counts[FST_LOG_INFO], 1);
    CHECK(says(FST_LOG_INFO, "the load ended after ") && says(FST_LOG_INFO, "changed"));
    fst_loader_close(loader);
    fst_model_close(model);
    CHECK_INT(counts[FST_LOG_INFO], 1);
}

TEST(retries_of_a_load_are_one_warning_with_causes_and_host)
{
    if (!range_server_usable()) SKIP("libcurl is not installed");
    const char *url = range_server_begin(make_model());
    fst_remote_options remote = {.struct_size = sizeof remote, .retry_base_ms = 1};
    CHECK_INT(fst_remote_configure(&remote, NULL), FST_OK);
    for (int i = 0; i < 2; i++) {
        begin_log(FST_LOG_INFO);
        range_server_fail_next(3, 1);
        CHECK_INT(load(url, i == 1, FST_MODE_LOAD), FST_OK);
        CHECK_INT(counts[FST_LOG_WARNING], 1);
        CHECK_INT(counts[FST_LOG_INFO], 1);
        CHECK(says(FST_LOG_WARNING, "4 requests to http://127.0.0.1:"));
        CHECK(says(FST_LOG_WARNING, "1 after truncated responses"));
        CHECK(says(FST_LOG_WARNING, "3 after status 503"));
        CHECK(says(FST_LOG_WARNING, " s of waiting"));
        CHECK(says(FST_LOG_INFO, "(4 of them retries)"));
    }
    begin_log(FST_LOG_INFO);
    CHECK_INT(load(url, false, FST_MODE_LOAD), FST_OK);
    CHECK_INT(counts[FST_LOG_WARNING], 0);
    CHECK_INT(counts[FST_LOG_INFO], 1);
}

TEST(a_cache_folder_that_cannot_be_used_is_one_warning)
{
    if (!range_server_usable()) SKIP("libcurl is not installed");
    const char *url = range_server_begin(make_model()), *folder = fixture_path("shared_cache");
    CHECK_INT(mkdir(folder, 0700), 0);
    CHECK_INT(chmod(folder, 0777), 0);
    fst_remote_options remote = {.struct_size = sizeof remote, .cache_dir = folder};
    CHECK_INT(fst_remote_configure(&remote, NULL), FST_OK);
    begin_log(FST_LOG_INFO);
    for (int i = 0; i < 3; i++) CHECK_INT(load(url, false, FST_MODE_LOAD), FST_OK);
    CHECK_INT(counts[FST_LOG_WARNING], 1);
    CHECK_INT(counts[FST_LOG_INFO], 3);
    CHECK(says(FST_LOG_WARNING, folder) && says(FST_LOG_WARNING, "the cache folder is not used"));
    remote.cache_dir = "off";
    CHECK_INT(fst_remote_configure(&remote, NULL), FST_OK);
}
