// SPDX-License-Identifier: Apache-2.0
/// Views of what the page cache has, without a load.
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

static fst_range range_of(size_t index, uint64_t begin, uint64_t end) {
    return (fst_range){
        .struct_size = sizeof(fst_range), .index = index, .begin = begin, .end = end};
}

/// The kernel may not tell, and then there are no views.
static int tells(fst_model *model) {
    fst_tensor *tensor;
    fst_range range = range_of(0, 0, 1);
    if (fst_range_view(model, &range, &tensor, NULL) != FST_OK) abort();
    int known = tensor != NULL;
    fst_tensor_unref(tensor);
    return known;
}

TEST(cached_ranges_are_views_that_outlive_the_model)
{
    const char *path = fixture_tensors("cached", COUNT, BYTES);
    fst_model *model = open_model(path);
    if (!tells(model)) SKIP("the kernel does not tell what is cached");
    fst_range range = range_of(2, 1000, BYTES);
    fst_tensor *one, *other;
    CHECK_INT(fst_range_view(model, &range, &one, NULL), FST_OK);
    CHECK_INT(fst_range_view(model, &range, &other, NULL), FST_OK);
    fst_model_close(model);
    fst_tensor_view view = {0}, same = {0};
    CHECK_INT(fst_tensor_view_get(one, &view, NULL), FST_OK);
    CHECK_INT(fst_tensor_view_get(other, &same, NULL), FST_OK);
    CHECK(view.data == same.data && view.writable && view.size_bytes == BYTES);
    CHECK_INT(view.shape[0], BYTES);
    CHECK(fixture_matches(view.data, 2 * BYTES, BYTES));
    fst_tensor_unref(one);
    fst_tensor_unref(other);
}

TEST(absent_ranges_are_not)
{
    const char *path = fixture_tensors("absent", COUNT, BYTES);
    fst_model *model = open_model(path);
    if (!tells(model)) SKIP("the kernel does not tell what is cached");
    int file = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(file >= 0 && fsync(file) == 0);
    CHECK_INT(posix_fadvise(file, (off_t)(2 * BYTES), (off_t)BYTES, POSIX_FADV_DONTNEED), 0);
    close(file);
    fst_tensor *tensor;
    fst_range range = range_of(2, 0, BYTES), before = range_of(0, 0, BYTES);
    CHECK_INT(fst_range_view(model, &before, &tensor, NULL), FST_OK);
    CHECK(tensor != NULL);
    fst_tensor_unref(tensor);
    CHECK_INT(fst_range_view(model, &range, &tensor, NULL), FST_OK);
    if (tensor != NULL) SKIP("the file system keeps what it is told to drop");
    fst_model_close(model);
}

TEST(what_has_no_view)
{
    const char *path =
        fixture_model("odd",
                      "{\"odd\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]},"
                      "\"late\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[3,19]},"
                      "\"none\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[19,19]}}",
                      19);
    fst_model *model = open_model(path);
    fst_tensor *tensor = NULL;
    fst_range late = range_of(1, 0, 16), none = range_of(2, 0, 0), nothing = range_of(0, 2, 2);
    CHECK_INT(fst_range_view(model, &late, &tensor, NULL), FST_OK);
    CHECK(tensor == NULL);
    CHECK_INT(fst_range_view(model, &none, &tensor, NULL), FST_OK);
    CHECK(tensor == NULL);
    CHECK_INT(fst_range_view(model, &nothing, &tensor, NULL), FST_OK);
    CHECK(tensor == NULL);
    fst_model_close(model);
}

TEST(nonsense)
{
    const char *path = fixture_tensors("nonsense", COUNT, BYTES);
    fst_model *model = open_model(path);
    fst_tensor *tensor;
    fst_error error;
    fst_range beyond = range_of(0, 0, BYTES + 1), turned = range_of(0, 2, 1);
    fst_range far = range_of(COUNT, 0, 1), good = range_of(0, 0, 1);
    CHECK_INT(fst_range_view(model, &beyond, &tensor, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_range_view(model, &turned, &tensor, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_range_view(model, &far, &tensor, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_range_view(NULL, &good, &tensor, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_range_view(model, NULL, &tensor, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_range_view(model, &good, NULL, NULL), FST_E_ARGUMENT);
    CHECK_INT(truncate(path, 100), 0);
    CHECK_INT(fst_range_view(model, &good, &tensor, &error), FST_E_FILE_CHANGED);
    CHECK(tensor == NULL && strstr(error.file, "nonsense") != NULL);
    fst_model_close(model);
}
