// SPDX-License-Identifier: Apache-2.0
/// Views of cached bytes, without a load.
#include <fastsafetensors.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"

#define COUNT 4
#define BYTES ((uint64_t)500000)

static fst_model *open_model(const char *path) {
    fst_model *model = NULL;
    if (fst_model_open(path, NULL, &model, NULL) != FST_OK) abort();
    return model;
}

/// Whether the kernel reports what is cached; otherwise there are no views.
static int is_reported(fst_model *model) {
    fst_tensor *tensor;
    if (fst_cached_view(model, 0, 0, 1, &tensor, NULL) != FST_OK) abort();
    int known = tensor != NULL;
    fst_tensor_unref(tensor);
    return known;
}

TEST(cached_ranges_are_views_that_outlive_the_model)
{
    const char *path = fixture_tensors("cached", COUNT, BYTES);
    fst_model *model = open_model(path);
    if (!is_reported(model)) SKIP("the kernel does not report what is cached");
    fst_tensor *one, *other;
    CHECK_INT(fst_cached_view(model, 2, 1000, BYTES, &one, NULL), FST_OK);
    CHECK_INT(fst_cached_view(model, 2, 1000, BYTES, &other, NULL), FST_OK);
    fst_model_close(model);
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view),
                    same = FST_STRUCT_INIT(fst_tensor_view);
    CHECK_INT(fst_tensor_view_get(one, &view, NULL), FST_OK);
    CHECK_INT(fst_tensor_view_get(other, &same, NULL), FST_OK);
    CHECK(view.writable && view.size_bytes == BYTES);
    CHECK_INT(view.shape[0], BYTES);
    CHECK(fixture_matches(view.data, 2 * BYTES, BYTES));
    // What the program stores through one view is not seen through another.
    memset(view.data, 0, BYTES);
    CHECK(fixture_matches(same.data, 2 * BYTES, BYTES));
    fst_tensor_unref(one);
    fst_tensor_unref(other);
}

/// Whether another view is returned within a few attempts.
static int try_view(fst_model *model) {
    for (int tries = 0; tries < 20; tries++) {
        fst_tensor *tensor = NULL;
        fixture_warm(fixture_path("many"));
        if (fst_cached_view(model, 1, 0, BYTES, &tensor, NULL) != FST_OK) return -1;
        fst_tensor_unref(tensor);
        if (tensor != NULL) return 1;
    }
    return 0;
}

TEST(many_views_leave_mappings_for_the_program)
{
    enum { LIMIT = 16384 };
    static fst_tensor *tensors[LIMIT];
    if (CHECK_SANITIZED) SKIP("sanitizers use several mappings for each of the program's");
    fst_model *model = open_model(fixture_tensors("many", COUNT, BYTES));
    if (!is_reported(model)) SKIP("the kernel does not report what is cached");
    int made = 0;
    // Other programs may empty the page cache at any moment, so such a call is repeated.
    for (int tries = 0; tries < 10 * LIMIT && made < LIMIT; tries++) {
        CHECK_INT(fst_cached_view(model, 1, 0, BYTES, &tensors[made], NULL), FST_OK);
        made += tensors[made] != NULL;
        if (tries % 1000 == 999) fixture_warm(fixture_path("many"));
    }
    CHECK_INT(made, LIMIT);
    CHECK(try_view(model) == 0);
    fst_tensor_unref(tensors[0]);
    CHECK(try_view(model) == 1);
    for (int i = 1; i < LIMIT; i++) fst_tensor_unref(tensors[i]);
    fst_model_close(model);
}

TEST(absent_ranges_are_not_views)
{
    const char *path = fixture_tensors("absent", COUNT, BYTES);
    fst_model *model = open_model(path);
    if (!is_reported(model)) SKIP("the kernel does not report what is cached");
    int file = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(file >= 0 && fsync(file) == 0);
    CHECK_INT(posix_fadvise(file, (off_t)(2 * BYTES), (off_t)BYTES, POSIX_FADV_DONTNEED), 0);
    close(file);
    fst_tensor *tensor;
    CHECK_INT(fst_cached_view(model, 0, 0, BYTES, &tensor, NULL), FST_OK);
    CHECK(tensor != NULL);
    fst_tensor_unref(tensor);
    CHECK_INT(fst_cached_view(model, 2, 0, BYTES, &tensor, NULL), FST_OK);
    if (tensor != NULL) SKIP("the file system keeps pages that POSIX_FADV_DONTNEED should drop");
    fst_model_close(model);
}

TEST(ranges_that_cannot_be_views)
{
    const char *path =
        fixture_model("odd",
                      "{\"odd\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]},"
                      "\"late\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[3,19]},"
                      "\"none\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[19,19]}}",
                      19);
    fst_model *model = open_model(path);
    fst_tensor *tensor = NULL;
    CHECK_INT(fst_cached_view(model, 1, 0, 16, &tensor, NULL), FST_OK);
    CHECK(tensor == NULL);
    CHECK_INT(fst_cached_view(model, 2, 0, 0, &tensor, NULL), FST_OK);
    CHECK(tensor == NULL);
    CHECK_INT(fst_cached_view(model, 0, 2, 2, &tensor, NULL), FST_OK);
    CHECK(tensor == NULL);
    fst_model_close(model);
}

TEST(invalid_ranges_are_refused)
{
    const char *path = fixture_tensors("nonsense", COUNT, BYTES);
    fst_model *model = open_model(path);
    fst_tensor *tensor;
    fst_error error;
    CHECK_INT(fst_cached_view(model, 0, 0, BYTES + 1, &tensor, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_cached_view(model, 0, 2, 1, &tensor, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_cached_view(model, COUNT, 0, 1, &tensor, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_cached_view(NULL, 0, 0, 1, &tensor, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_cached_view(model, 0, 0, 1, NULL, NULL), FST_E_ARGUMENT);
    CHECK_INT(truncate(path, 100), 0);
    CHECK_INT(fst_cached_view(model, 0, 0, 1, &tensor, &error), FST_E_FILE_CHANGED);
    CHECK(tensor == NULL && strstr(error.file, "nonsense") != NULL);
    fst_model_close(model);
}
