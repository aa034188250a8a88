// SPDX-License-Identifier: Apache-2.0
/// Saving through the public header: layouts, streams, sets, promises, and rejected arguments.
#include <fastsafetensors.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"
#include "save_fixture.h"

/// No status: the bytes read are not those that were written.
#define WRONG_BYTES ((fst_status)999)

#define BIG_BYTES ((uint64_t)5000001)

static const uint64_t shape_3[] = {3}, shape_1[] = {1}, shape_big[] = {BIG_BYTES}, shape_0[] = {0};

static unsigned char *big_bytes(void) {
    static unsigned char *bytes;
    if (bytes != NULL) return bytes;
    bytes = malloc(BIG_BYTES);
    for (uint64_t i = 0; i < BIG_BYTES; i++) bytes[i] = fixture_byte(i);
    return bytes;
}

TEST(layout_equals_the_reference)
{
    static const float floats[3] = {1, 2, 3};
    fst_save_tensor tensors[] = {
        save_tensor_of("b", FST_DTYPE_U8, shape_3, "xyz"),
        save_tensor_of("z", FST_DTYPE_F32, shape_3, floats),
        save_tensor_of("a", FST_DTYPE_U8, shape_1, "w"),
        save_tensor_of("s", FST_DTYPE_F32, NULL, floats),
        save_tensor_of("e\n\"", FST_DTYPE_F32, shape_0, floats),
    };
    fst_metadata_entry metadata = save_entry_of("format", "pt\x01");
    fst_save_options options = save_options_of();
    options.metadata = &metadata;
    options.metadata_count = 1;
    CHECK_INT(fst_save(fixture_path("ref"), tensors, 5, &options, NULL, NULL), FST_OK);
    static const char expected[] =
        "\x40\x01\0\0\0\0\0\0{\"__metadata__\":{\"format\":\"pt\\u0001\"},"
        "\"e\\n\\\"\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]},"
        "\"s\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},"
        "\"z\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[4,16]},"
        "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[16,17]},"
        "\"b\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[17,20]}}";
    char bytes[400] = {0};
    int fd = open(fixture_path("ref"), O_RDONLY | O_CLOEXEC);
    ssize_t got = read(fd, bytes, sizeof bytes);
    close(fd);
    CHECK(memcmp(bytes + 8, expected + 8, sizeof expected - 9) == 0);
    uint64_t header = (unsigned char)bytes[0] | (uint64_t)(unsigned char)bytes[1] << 8;
    CHECK_INT(header % 8, 0);
    CHECK_INT(got, 8 + (long long)header + 20);
    CHECK(memcmp(bytes + 8 + header + 16, "wxyz", 4) == 0);
}

/// Saves one large tensor and a few small ones; FST_OK when the file reads back right.
static fst_status save_and_check(const char *name, const fst_save_options *options,
                                 fst_save_stats *stats) {
    fst_save_tensor tensors[] = {
        save_tensor_of("big", FST_DTYPE_U8, shape_big, big_bytes()),
        save_tensor_of("small", FST_DTYPE_U8, shape_3, big_bytes() + 7),
        save_tensor_of("none", FST_DTYPE_U8, shape_0, big_bytes()),
    };
    fst_status status = fst_save(fixture_path(name), tensors, 3, options, stats, NULL);
    if (status != FST_OK) return status;
    fst_model *model;
    fst_loader *loader;
    fst_tensor *tensor;
    if (fst_model_open(fixture_path(name), NULL, &model, NULL) != FST_OK) return WRONG_BYTES;
    if (fst_loader_open(model, NULL, &loader, NULL) != FST_OK) return WRONG_BYTES;
    int right = 1;
    for (size_t i = 0; i < 2; i++) {
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        if (fst_loader_tensor(loader, tensors[i].name, SIZE_MAX, -1, &tensor, NULL) != FST_OK ||
            fst_tensor_view_get(tensor, &view, NULL) != FST_OK)
            return WRONG_BYTES;
        right &= memcmp(view.data, tensors[i].data, tensors[i].shape[0]) == 0;
        fst_tensor_unref(tensor);
    }
    fst_loader_close(loader);
    fst_model_close(model);
    return right ? FST_OK : WRONG_BYTES;
}

TEST(every_engine_writes_the_same_bytes)
{
    for (int promise = 0; promise < FST_SAVE_PROMISE_COUNT; promise++)
        for (int engine = 0; engine < FST_SAVE_ENGINE_COUNT; engine++) {
            fst_save_options options = save_options_of();
            options.promise = (fst_save_promise)promise;
            options.engine = (fst_save_engine)engine;
            fst_save_stats stats = {.struct_size = sizeof stats};
            fst_status status = save_and_check("engines", &options, &stats);
            if (status == FST_E_UNSUPPORTED && engine >= FST_SAVE_ENGINE_DIRECT) continue;
            CHECK_INT(status, FST_OK);
            CHECK_INT(stats.bytes_written, stats.bytes_total);
            CHECK_INT(stats.sync_count, promise == FST_SAVE_DURABLE ? 2 : 0);
            CHECK(stats.stage_bytes <= (uint64_t)32 << 20);
            if (engine == FST_SAVE_ENGINE_BUFFERED) {
                CHECK_INT(stats.bytes_direct, 0);
                CHECK(stats.bytes_staged < 4096); // the large tensor is written from its place
            }
            if (engine >= FST_SAVE_ENGINE_DIRECT) CHECK(stats.bytes_direct + 8192 > BIG_BYTES);
        }
    CHECK_INT(save_hidden_count("."), 0);
}

TEST(aligned_memory_is_written_without_a_copy)
{
    fst_save_options options = save_options_of();
    options.engine = FST_SAVE_ENGINE_URING;
    options.alignment_bytes = 4096;
    void *memory = aligned_alloc(4096, (size_t)8 << 20);
    memset(memory, 7, (size_t)8 << 20);
    uint64_t shape[] = {(uint64_t)8 << 20};
    fst_save_tensor tensor = save_tensor_of("t", FST_DTYPE_U8, shape, memory);
    fst_save_stats stats = {.struct_size = sizeof stats};
    fst_status status = fst_save(fixture_path("place"), &tensor, 1, &options, &stats, NULL);
    free(memory);
    if (status == FST_E_UNSUPPORTED) SKIP("no direct writes in the temporary folder");
    CHECK_INT(status, FST_OK);
    CHECK_INT(stats.bytes_staged, 4096); // the header
    CHECK_INT(stats.bytes_direct, ((long long)8 << 20) + 4096);
    CHECK_INT(stats.write_count, 5);
}

TEST(alignment_uses_padding_tensors)
{
    fst_save_tensor tensors[] = {
        save_tensor_of("odd", FST_DTYPE_U8, shape_3, "abc"),
        save_tensor_of("odd2", FST_DTYPE_U8, shape_3, "def"),
        save_tensor_of("even", FST_DTYPE_U8, (const uint64_t[]){128}, big_bytes()),
    };
    fst_save_options options = save_options_of();
    options.alignment_bytes = 64;
    fst_save_stats stats = {.struct_size = sizeof stats};
    CHECK_INT(fst_save(fixture_path("aligned"), tensors, 3, &options, &stats, NULL), FST_OK);
    CHECK_INT(stats.padding_count, 1);
    fst_model *model;
    CHECK_INT(fst_model_open(fixture_path("aligned"), NULL, &model, NULL), FST_OK);
    CHECK_INT(fst_model_tensor_count(model), 3);
    fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
    for (size_t i = 0; i < 3; i++) {
        CHECK_INT(fst_model_tensor_info(model, i, &info, NULL), FST_OK);
        CHECK_INT(strncmp(info.name, "__padding__.", 12) == 0, 0);
        CHECK_INT(info.file_offset % 64, 0);
    }
    // The padding tensor can be found by its name.
    size_t index;
    CHECK_INT(fst_model_find(model, "__padding__.0", SIZE_MAX, &index, NULL), FST_OK);
    CHECK_INT(index, 3);
    CHECK_INT(fst_model_tensor_info(model, index, &info, NULL), FST_OK);
    CHECK_INT(info.size_bytes, 61);
    CHECK_INT(fst_model_tensor_info(model, 4, &info, NULL), FST_E_ARGUMENT);
    fst_file_info file = FST_STRUCT_INIT(fst_file_info);
    CHECK_INT(fst_model_file_info(model, 0, &file, NULL), FST_OK);
    CHECK_INT(file.tensor_count, 4);
    CHECK_INT(file.padding_count, 1);
    fst_model_close(model);
    fst_error error;
    tensors[0].name = "__padding__.x";
    CHECK_INT(fst_save(fixture_path("aligned"), tensors, 3, &options, NULL, &error),
              FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "__padding__.");
}

TEST(caller_chooses_order_and_metadata_position)
{
    fst_save_tensor tensors[] = {save_tensor_of("z", FST_DTYPE_U8, shape_1, "1"),
                                 save_tensor_of("a", FST_DTYPE_U8, shape_1, "2")};
    fst_save_options options = save_options_of();
    options.order = FST_SAVE_ORDER_GIVEN;
    options.has_metadata = options.metadata_last = 1;
    options.header_alignment_bytes = 256;
    fst_layout *layout;
    CHECK_INT(fst_layout_open(tensors, 2, &options, &layout, NULL), FST_OK);
    size_t size;
    const char *header = fst_layout_header(layout, &size);
    CHECK_INT(size, 256);
    static const char expected[] =
        "{\"z\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
        "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]},\"__metadata__\":{}}  ";
    CHECK(memcmp(header + 8, expected, sizeof expected - 1) == 0);
    CHECK_INT(fst_layout_file_bytes(layout), 258);
    uint64_t offset, bytes;
    CHECK_INT(fst_layout_tensor(layout, 1, &offset, &bytes, NULL), FST_OK);
    CHECK_INT(offset, 257);
    CHECK_INT(fst_layout_tensor(layout, 2, &offset, &bytes, NULL), FST_E_ARGUMENT);
    fst_layout_close(layout);
    options.order = FST_SAVE_ORDER_NAME;
    CHECK_INT(fst_layout_open(tensors, 2, &options, &layout, NULL), FST_OK);
    CHECK_INT(fst_layout_tensor(layout, 1, &offset, &bytes, NULL), FST_OK);
    CHECK_INT(offset, 256);
    fst_layout_close(layout);
}

TEST(unsavable_tensors_are_named)
{
    const struct {
        fst_save_tensor tensor;
        const char *words;
    } rows[] = {
        {save_tensor_of("__metadata__", FST_DTYPE_U8, shape_1, "x"), "reserved"},
        {save_tensor_of("bad\xff", FST_DTYPE_U8, shape_1, "x"), "UTF-8"},
        {save_tensor_of("four", FST_DTYPE_F4, shape_3, "xx"), "whole bytes"},
        {save_tensor_of("huge", FST_DTYPE_U64, (const uint64_t[]){UINT64_MAX / 8}, "x"),
         "overflow"},
        {save_tensor_of("t", FST_DTYPE_U8, shape_1, "x"), "duplicate tensor name"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        fst_save_tensor tensors[] = {save_tensor_of("t", FST_DTYPE_U8, shape_1, "x"),
                                     rows[i].tensor};
        fst_error error;
        CHECK_INT(fst_save(fixture_path("refused"), tensors, 2, NULL, NULL, &error),
                  FST_E_ARGUMENT);
        CHECK_CONTAINS(error.message, rows[i].words);
        CHECK(error.tensor[0] != '\0');
        CHECK(access(fixture_path("refused"), F_OK) != 0);
    }
    fst_metadata_entry metadata[] = {save_entry_of("k", "\xc0\x80"), save_entry_of("k", "v")};
    fst_save_options options = save_options_of();
    options.metadata = metadata;
    options.metadata_count = 2;
    CHECK_INT(fst_save(fixture_path("refused"), NULL, 0, &options, NULL, NULL), FST_E_ARGUMENT);
    metadata[0].value = "v";
    CHECK_INT(fst_save(fixture_path("refused"), NULL, 0, &options, NULL, NULL), FST_E_ARGUMENT);
}

TEST(invalid_writes_are_refused)
{
    fst_save_tensor tensor = save_tensor_of("t", FST_DTYPE_U8, shape_1, "x");
    fst_save_options options = save_options_of();
    const char *path = fixture_path("nonsense");
    fst_writer *writer;
    fst_metadata_entry many[64];
    for (int i = 0; i < 64; i++) many[i] = save_entry_of("k", "v");
    CHECK_INT(fst_save(NULL, &tensor, 1, NULL, NULL, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_save(path, NULL, 1, NULL, NULL, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_writer_open(path, &tensor, 1, NULL, NULL, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_writer_write(NULL, 0, 0, "x", 1, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_writer_map(NULL, 0, NULL, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_writer_finish(NULL, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_writer_commit(NULL, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_writer_stats_get(NULL, NULL, NULL), FST_E_ARGUMENT);
    CHECK(fst_writer_path(NULL, 0) == NULL);
    fst_writer_close(NULL);
    fst_layout_close(NULL);
    CHECK(fst_layout_header(NULL, NULL) == NULL);
    tensor.file_index = 1;
    CHECK_INT(fst_writer_open(path, &tensor, 1, NULL, &writer, NULL), FST_E_ARGUMENT);
    tensor.file_index = 0;
    tensor.dtype = (fst_dtype)99;
    CHECK_INT(fst_writer_open(path, &tensor, 1, NULL, &writer, NULL), FST_E_ARGUMENT);
    tensor.dtype = FST_DTYPE_U8;
    tensor.shape = NULL;
    CHECK_INT(fst_writer_open(path, &tensor, 1, NULL, &writer, NULL), FST_E_ARGUMENT);
    tensor.shape = shape_1;
    options.alignment_bytes = 48;
    CHECK_INT(fst_writer_open(path, &tensor, 1, &options, &writer, NULL), FST_E_ARGUMENT);
    options.alignment_bytes = 0;
    options.header_alignment_bytes = 12;
    CHECK_INT(fst_writer_open(path, &tensor, 1, &options, &writer, NULL), FST_E_ARGUMENT);
    options.header_alignment_bytes = 0;
    options.stem = "a/b";
    options.file_count = 1;
    CHECK_INT(fst_writer_open(path, &tensor, 1, &options, &writer, NULL), FST_E_ARGUMENT);
    options.metadata_count = SIZE_MAX / sizeof(fst_metadata_entry) + 2;
    options.metadata = many;
    CHECK_INT(fst_writer_open(path, &tensor, 1, &options, &writer, NULL), FST_E_ARGUMENT);
    options.metadata_count = 0;
    tensor.name_size = SIZE_MAX - 1;
    CHECK_INT(fst_writer_open(path, &tensor, 1, &options, &writer, NULL), FST_E_ARGUMENT);
    tensor.name_size = SIZE_MAX;
    options.file_count = 0; // a single file has no stem, so it is not read
    CHECK_INT(fst_save(path, &tensor, 1, &options, NULL, NULL), FST_OK);
    options.stem = NULL;
    options.engine = (fst_save_engine)9;
    CHECK_INT(fst_writer_open(path, &tensor, 1, &options, &writer, NULL), FST_E_ARGUMENT);
    CHECK(writer == NULL);
}

static void check_refused(const fst_save_options *options, fst_device device, const char *text) {
    fst_save_tensor tensor = save_tensor_of("t", FST_DTYPE_U8, shape_1, "x");
    tensor.device = device;
    fst_error error = {0};
    const char *path = fixture_path("refused");
    CHECK_INT(fst_save(path, &tensor, 1, options, NULL, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, text);
    CHECK(access(path, F_OK) != 0);
}

#define OPTIONS(...) (&(fst_save_options){.struct_size = sizeof(fst_save_options), __VA_ARGS__})

TEST(options_without_effect_are_refused)
{
    fst_device cpu = {FST_DEVICE_CPU, 0};
    check_refused(OPTIONS(.has_metadata = 2), cpu, "has_metadata is 2");
    check_refused(OPTIONS(.metadata_last = -1), cpu, "metadata_last is -1");
    check_refused(OPTIONS(.replace_link = 3), cpu, "replace_link is 3");
    check_refused(OPTIONS(.others_write = 2), cpu, "others_write is 2");
    check_refused(OPTIONS(.file_count = 0), (fst_device){FST_DEVICE_CPU, 5}, "device index 5");
    fst_error error = {0};
    fst_edit_options edit = FST_STRUCT_INIT(fst_edit_options);
    edit.clear_metadata = 2;
    CHECK_INT(fst_header_edit("x", NULL, &edit, NULL, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "clear_metadata is 2");
    fst_publish_options publish = FST_STRUCT_INIT(fst_publish_options);
    publish.names_only = 2;
    const char *paths[] = {"x"};
    CHECK_INT(fst_set_publish("y", paths, 1, &publish, NULL, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "names_only is 2");
}

TEST(stream_accepts_any_order_and_many_threads)
{
    for (int engine = 0; engine < FST_SAVE_ENGINE_COUNT; engine++) {
        fst_save_tensor tensors[] = {save_tensor_of("a", FST_DTYPE_U8, shape_big, NULL),
                                     save_tensor_of("b", FST_DTYPE_U8, shape_3, "xyz"),
                                     save_tensor_of("c", FST_DTYPE_U8, shape_big, NULL)};
        fst_save_options options = save_options_of();
        options.engine = (fst_save_engine)engine;
        fst_writer *writer;
        fst_error error;
        CHECK_INT(fst_writer_open(fixture_path("stream"), tensors, 3, &options, &writer, NULL),
                  FST_OK);
        fst_status first =
            fst_writer_write(writer, 2, 1000, big_bytes() + 1000, BIG_BYTES - 1000, NULL);
        if (first == FST_E_UNSUPPORTED) {
            fst_writer_close(writer);
            continue;
        }
        CHECK_INT(first, FST_OK);
        CHECK_INT(fst_writer_write(writer, 2, 0, big_bytes(), 1000, NULL), FST_OK);
        for (uint64_t at = 0; at < BIG_BYTES; at += 300000) {
            uint64_t size = BIG_BYTES - at < 300000 ? BIG_BYTES - at : 300000;
            unsigned char copy[300000]; // may be reused as soon as the call returns
            memcpy(copy, big_bytes() + at, size);
            CHECK_INT(fst_writer_write(writer, 0, at, copy, size, NULL), FST_OK);
            memset(copy, 0, sizeof copy);
        }
        CHECK_INT(fst_writer_write(writer, 1, 0, "x", 1, &error), FST_E_ARGUMENT);
        CHECK_INT(fst_writer_write(writer, 0, BIG_BYTES, "x", 1, &error), FST_E_ARGUMENT);
        CHECK_CONTAINS(error.message, "more bytes");
        CHECK_INT(fst_writer_commit(writer, &error), FST_OK);
        CHECK_INT(fst_writer_commit(writer, &error), FST_E_ARGUMENT);
        CHECK_INT(fst_writer_write(writer, 0, 0, "x", 1, &error), FST_E_ARGUMENT);
        fst_writer_close(writer);
        int fd = open(fixture_path("stream"), O_RDONLY | O_CLOEXEC);
        char *bytes = malloc(3 * BIG_BYTES);
        ssize_t got = read(fd, bytes, 3 * BIG_BYTES);
        close(fd);
        size_t header = (size_t)got - 2 * BIG_BYTES - 3;
        int right = memcmp(bytes + header, big_bytes(), BIG_BYTES) == 0 &&
                    memcmp(bytes + header + BIG_BYTES, "xyz", 3) == 0 &&
                    memcmp(bytes + header + BIG_BYTES + 3, big_bytes(), BIG_BYTES) == 0;
        free(bytes);
        CHECK(right);
    }
}

TEST(a_mapped_tensor_is_filled_in_place)
{
    fst_save_tensor tensors[] = {save_tensor_of("a", FST_DTYPE_U8, shape_3, NULL),
                                 save_tensor_of("b", FST_DTYPE_U8, shape_big, NULL)};
    fst_writer *writer;
    void *a, *b;
    CHECK_INT(fst_writer_open(fixture_path("mapped"), tensors, 2, NULL, &writer, NULL), FST_OK);
    CHECK_INT(fst_writer_map(writer, 0, &a, NULL), FST_OK);
    CHECK_INT(fst_writer_map(writer, 1, &b, NULL), FST_OK);
    memcpy(a, "abc", 3);
    memcpy(b, big_bytes(), BIG_BYTES);
    CHECK_INT(fst_writer_commit(writer, NULL), FST_OK);
    fst_writer_close(writer);
    fst_model *model;
    fst_loader *loader;
    fst_tensor *tensor;
    CHECK_INT(fst_model_open(fixture_path("mapped"), NULL, &model, NULL), FST_OK);
    CHECK_INT(fst_loader_open(model, NULL, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_tensor(loader, "b", SIZE_MAX, -1, &tensor, NULL), FST_OK);
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
    CHECK_INT(fst_tensor_view_get(tensor, &view, NULL), FST_OK);
    CHECK(memcmp(view.data, big_bytes(), BIG_BYTES) == 0);
    fst_tensor_unref(tensor);
    fst_loader_close(loader);
    fst_model_close(model);
}

TEST(an_incomplete_save_is_an_error_and_leaves_the_old_file)
{
    fixture_file("old", "old", 3);
    fst_save_tensor tensors[] = {save_tensor_of("a", FST_DTYPE_U8, shape_3, NULL)};
    fst_writer *writer;
    fst_error error;
    CHECK_INT(fst_writer_open(fixture_path("old"), tensors, 1, NULL, &writer, NULL), FST_OK);
    CHECK_INT(fst_writer_write(writer, 0, 0, "ab", 2, NULL), FST_OK);
    CHECK_INT(fst_writer_commit(writer, &error), FST_E_ARGUMENT);
    CHECK_TEXT(error.tensor, "a");
    CHECK_INT(fst_writer_commit(writer, &error), FST_E_ARGUMENT); // broken for good
    fst_writer_close(writer);
    CHECK(save_file_holds("old", "old", 3));
    CHECK_INT(save_hidden_count("."), 0);
}

static int stop_soon(void *context, uint64_t done, uint64_t total, size_t tensors_done,
                     size_t tensors_total) {
    (void)total;
    (void)tensors_done;
    (void)tensors_total;
    *(uint64_t *)context = done;
    return done > 3000000;
}

TEST(progress_may_cancel)
{
    fixture_file("cancelled", "old", 3);
    uint64_t done = 0;
    fst_save_options options = save_options_of();
    options.progress = stop_soon;
    options.progress_context = &done;
    options.engine = FST_SAVE_ENGINE_URING;
    fst_status status = save_and_check("cancelled", &options, NULL);
    if (status == FST_E_UNSUPPORTED) SKIP("no direct writes in the temporary folder");
    CHECK_INT(status, FST_E_CANCELLED);
    CHECK(done > 3000000);
    CHECK(save_file_holds("cancelled", "old", 3));
    CHECK_INT(save_hidden_count("."), 0);
}

TEST(permissions_are_kept_and_links_followed)
{
    const char *path = fixture_file("real", "old", 3);
    CHECK_INT(chmod(path, 0640), 0);
    unlink(fixture_path("link2"));
    CHECK_INT(symlink("link2", fixture_path("link1")), 0);
    CHECK_INT(symlink(fixture_path("real"), fixture_path("link2")), 0);
    CHECK_INT(save_and_check("link1", NULL, NULL), FST_OK);
    struct stat info;
    CHECK_INT(lstat(fixture_path("link1"), &info), 0);
    CHECK(S_ISLNK(info.st_mode));
    CHECK_INT(lstat(fixture_path("real"), &info), 0);
    CHECK(S_ISREG(info.st_mode));
    CHECK_INT(info.st_mode & 07777, 0640);
    CHECK(info.st_size > (off_t)BIG_BYTES);
    mode_t mask = umask(027);
    CHECK_INT(save_and_check("fresh", NULL, NULL), FST_OK);
    umask(mask);
    CHECK_INT(lstat(fixture_path("fresh"), &info), 0);
    CHECK_INT(info.st_mode & 07777, 0640);
    CHECK_INT(symlink("loop", fixture_path("loop")), 0);
    CHECK_INT(save_and_check("loop", NULL, NULL), FST_E_IO);
}

TEST(one_file_never_gets_the_name_of_an_index)
{
    static const char *const names[] = {"set/model.safetensors.index.json", "x.index.json",
                                        "x.safetensors.index.fp16.json", "leads-to-index"};
    fst_save_tensor tensors[] = {save_tensor_of("a", FST_DTYPE_U8, NULL, "1"),
                                 save_tensor_of("b", FST_DTYPE_U8, NULL, "1")};
    fst_save_options options = save_options_of();
    fst_error error;
    options.file_count = 2;
    tensors[1].file_index = 1;
    CHECK_INT(fst_save(fixture_path("set"), tensors, 2, &options, NULL, NULL), FST_OK);
    CHECK_INT(symlink(names[0], fixture_path("leads-to-index")), 0);
    char plain[4096];
    snprintf(plain, sizeof plain, "%s", fixture_tensors("plain", 1, 10));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *path = fixture_path(names[i]);
        CHECK_INT(fst_save(path, tensors, 1, NULL, NULL, &error), FST_E_ARGUMENT);
        CHECK_CONTAINS(error.message, "name of an index");
        CHECK_INT(fst_header_edit(plain, path, NULL, NULL, NULL), FST_E_ARGUMENT);
        CHECK_INT(fst_file_decompress(plain, path, NULL, NULL, NULL), FST_E_ARGUMENT);
        fst_async_options background = FST_STRUCT_INIT(fst_async_options);
        fst_async_save *save = NULL;
        fst_status status = fst_async_save_start(path, tensors, 1, &background, &save, NULL);
        if (status == FST_OK) status = fst_async_save_wait(save, -1, NULL);
        fst_async_save_close(save);
        CHECK_INT(status, FST_E_ARGUMENT);
    }
    CHECK_INT(save_set_value("set", 2), '1');
    CHECK_INT(fst_save("s3://box/x.index.json", tensors, 1, NULL, NULL, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "name of an index");
}

TEST(sizes_of_zero_mean_terminated_texts)
{
    const char *path = fixture_path("sizes");
    const uint64_t shape[] = {4};
    fst_save_tensor tensor = save_tensor_of("weight", FST_DTYPE_U8, shape, "abcd");
    const fst_metadata_entry entry = {.key = "format", .value = "pt"};
    fst_save_options options = save_options_of();
    fst_model *model = NULL;
    fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
    fst_metadata_entry found;
    tensor.name_size = 0;
    options.metadata = &entry;
    options.metadata_count = 1;
    CHECK_INT(fst_save(path, &tensor, 1, &options, NULL, NULL), FST_OK);
    CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_OK);
    CHECK_INT(fst_model_tensor_info(model, 0, &info, NULL), FST_OK);
    CHECK_TEXT(info.name, "weight");
    CHECK_INT(fst_model_metadata(model, 0, 0, &found, NULL), FST_OK);
    CHECK_TEXT(found.key, "format");
    CHECK_TEXT(found.value, "pt");
    fst_model_close(model);
}

TEST(irregular_targets_are_refused)
{
    fst_error error;
    CHECK_INT(mkdir(fixture_path("folder"), 0700), 0);
    CHECK_INT(mkfifo(fixture_path("fifo"), 0600), 0);
    CHECK_INT(fst_save(fixture_path("folder"), NULL, 0, NULL, NULL, &error), FST_E_NOT_REGULAR);
    CHECK_INT(fst_save(fixture_path("folder/"), NULL, 0, NULL, NULL, &error), FST_E_NOT_REGULAR);
    CHECK_INT(fst_save(fixture_path("fifo"), NULL, 0, NULL, NULL, &error), FST_E_NOT_REGULAR);
    CHECK_INT(fst_save("/dev/null", NULL, 0, NULL, NULL, &error), FST_E_NOT_REGULAR);
    CHECK_INT(fst_save(fixture_path("no/such/x"), NULL, 0, NULL, NULL, &error), FST_E_NOT_FOUND);
    CHECK_INT(fst_save("", NULL, 0, NULL, NULL, &error), FST_E_NOT_FOUND);
    if (geteuid() == 0) SKIP("root may write to read-only files");
    fixture_file("readonly", "old", 3);
    CHECK_INT(chmod(fixture_path("readonly"), 0400), 0);
    CHECK_INT(fst_save(fixture_path("readonly"), NULL, 0, NULL, NULL, &error), FST_E_PERMISSION);
}

TEST(a_full_disk_is_noticed_before_anything_is_written)
{
    fixture_file("full", "old", 3);
    struct rlimit old, limit;
    CHECK_INT(getrlimit(RLIMIT_FSIZE, &old), 0);
    limit = old;
    limit.rlim_cur = 1000000;
    CHECK_INT(setrlimit(RLIMIT_FSIZE, &limit), 0);
    fst_status status = save_and_check("full", NULL, NULL);
    CHECK_INT(setrlimit(RLIMIT_FSIZE, &old), 0);
    CHECK_INT(status, FST_E_NO_SPACE);
    CHECK(save_file_holds("full", "old", 3));
    // More bytes than any disk has.
    uint64_t shape[] = {(uint64_t)1 << 60};
    fst_save_tensor tensor = save_tensor_of("t", FST_DTYPE_U8, shape, NULL);
    fst_writer *writer;
    CHECK_INT(fst_writer_open(fixture_path("full"), &tensor, 1, NULL, &writer, NULL),
              FST_E_NO_SPACE);
    CHECK_INT(save_hidden_count("."), 0);
}
