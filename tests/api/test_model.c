// SPDX-License-Identifier: Apache-2.0
/// Opening models through the public header: accepted files, and the error of each rejected one.
#include <fastsafetensors.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"

#define U8(name, begin, end)                                                                       \
    "\"" name "\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[" #begin "," #end "]}"

static fst_status open_path(const char *path, fst_model **model, fst_error *error) {
    return fst_model_open(path, NULL, model, error);
}

TEST(small_parts_are_copied_immediately)
{
    char bytes[64], got[24];
    for (int i = 0; i < 64; i++) bytes[i] = (char)i;
    const char *path =
        fixture_model("parts.safetensors",
                      "{\"a\":{\"dtype\":\"U8\",\"shape\":[4,4,3],\"data_offsets\":[0,48]},"
                      "\"h\":{\"dtype\":\"F4\",\"shape\":[2,8],\"data_offsets\":[48,56]},"
                      "\"z\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[56,64]}}",
                      64);
    FILE *stream = fopen(path, "r+e");
    CHECK(stream != NULL && fseek(stream, -64, SEEK_END) == 0);
    CHECK(fwrite(bytes, 1, 64, stream) == 64 && fclose(stream) == 0);
    static const uint64_t begin[] = {1, 1, 1}, end[] = {3, 4, 3}, far[] = {5, 4, 3};
    fst_part part = {.struct_size = sizeof part, .begin = begin, .end = end, .destination = got};
    part.destination_bytes = 12;
    fst_model *model;
    int copied = -1;
    CHECK_INT(open_path(path, &model, NULL), FST_OK);
    CHECK_INT(fst_part_copy(model, &part, &copied, NULL), FST_OK);
    if (copied == 0) SKIP("the kernel does not tell what is cached");
    for (int i = 0; i < 12; i++)
        CHECK_INT(got[i], (1 + i / 6) * 12 + (1 + i / 2 % 3) * 3 + 1 + i % 2);
    part.begin = (const uint64_t[]){2, 0, 0}; // one run
    part.destination_bytes = 12;
    CHECK_INT(fst_part_copy(model, &part, &copied, NULL), FST_OK);
    CHECK_INT(copied, 1);
    CHECK(memcmp(got, bytes + 24, 12) == 0);
    part.end = far;
    CHECK_INT(fst_part_copy(model, &part, &copied, NULL), FST_E_ARGUMENT);
    part.end = end;
    part.destination_bytes = 11;
    CHECK_INT(fst_part_copy(model, &part, &copied, NULL), FST_E_ARGUMENT);
    part = (fst_part){
        .struct_size = sizeof part, .tensor_index = 2, .destination = got, .destination_bytes = 8};
    CHECK_INT(fst_part_copy(model, &part, &copied, NULL), FST_OK);
    CHECK(copied == 1 && memcmp(got, bytes + 56, 8) == 0);
    part.begin = (const uint64_t[]){0, 0};
    part.end = (const uint64_t[]){2, 4};
    part.tensor_index = 1; // halves of bytes
    CHECK_INT(fst_part_copy(model, &part, &copied, NULL), FST_OK);
    CHECK_INT(copied, 0);
    part.tensor_index = 3;
    CHECK_INT(fst_part_copy(model, &part, &copied, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_part_copy(NULL, &part, &copied, NULL), FST_E_ARGUMENT);
    fst_model_close(model);
}

TEST(changed_files_are_reported)
{
    const char *path = fixture_model("changes.safetensors", "{" U8("a", 0, 2) "}", 2);
    fst_model *model;
    fst_error error;
    CHECK_INT(open_path(path, &model, NULL), FST_OK);
    CHECK_INT(fst_model_check(model, NULL), FST_OK);
    CHECK_INT(fst_model_check(NULL, NULL), FST_E_ARGUMENT);
    FILE *stream = fopen(path, "ae");
    CHECK(stream != NULL && fputc(0, stream) == 0 && fclose(stream) == 0);
    CHECK_INT(fst_model_check(model, &error), FST_E_FILE_CHANGED);
    CHECK(strstr(error.file, "changes.safetensors") != NULL);
    fst_model_close(model);
}

TEST(one_file)
{
    const char *path = fixture_model(
        "one.safetensors",
        "{\"__metadata__\":{\"format\":\"pt\"}," U8("b", 0, 2) "," U8("a", 2, 4) "}", 4);
    fst_model *model;
    fst_tensor_info tensor = FST_STRUCT_INIT(fst_tensor_info);
    fst_file_info file = FST_STRUCT_INIT(fst_file_info);
    fst_metadata_entry entry;
    size_t index;
    CHECK_INT(open_path(path, &model, NULL), FST_OK);
    CHECK_INT(fst_model_tensor_count(model), 2);
    CHECK_INT(fst_model_tensor_info(model, 0, &tensor, NULL), FST_OK);
    CHECK_TEXT(tensor.name, "b");
    CHECK_INT(tensor.element_count, 2);
    CHECK_INT(fst_model_find(model, "a", SIZE_MAX, &index, NULL), FST_OK);
    CHECK_INT(index, 1);
    CHECK_INT(fst_model_find(model, "c", 1, &index, NULL), FST_E_TENSOR_NOT_FOUND);
    CHECK_INT(fst_model_file_info(model, 0, &file, NULL), FST_OK);
    CHECK_INT(file.header_reads, 1);
    CHECK_INT(file.metadata_count, 1);
    CHECK_INT(tensor.file_offset, file.header_bytes);
    CHECK_INT(fst_model_metadata(model, 0, 0, &entry, NULL), FST_OK);
    CHECK_TEXT(entry.value, "pt");
    CHECK_INT(fst_model_metadata(model, 0, 1, &entry, NULL), FST_E_ARGUMENT);
    fst_model_close(model);
}

TEST(long_header_takes_two_reads)
{
    const char *path = fixture_tensors("long.safetensors", 3000, 1);
    fst_model *model;
    fst_file_info file = FST_STRUCT_INIT(fst_file_info);
    CHECK_INT(open_path(path, &model, NULL), FST_OK);
    CHECK_INT(fst_model_file_info(model, 0, &file, NULL), FST_OK);
    CHECK(file.header_bytes > 100000);
    CHECK_INT(file.header_reads, 2);
    fst_model_close(model);
}

TEST(not_files)
{
    fst_model *model;
    fst_error error;
    CHECK_INT(open_path(fixture_path("missing"), &model, &error), FST_E_NOT_FOUND);
    CHECK_CONTAINS(error.message, "missing");
    CHECK(model == NULL);
    mkdir(fixture_path("empty-folder"), 0700);
    CHECK_INT(open_path(fixture_path("empty-folder"), &model, &error), FST_E_NO_TENSORS);
    mkfifo(fixture_path("fifo"), 0600);
    CHECK_INT(open_path(fixture_path("fifo"), &model, &error), FST_E_NOT_REGULAR);
    CHECK_INT(open_path("/dev/null", &model, &error), FST_E_NOT_REGULAR);
    CHECK_INT(open_path(fixture_file("empty", "", 0), &model, &error), FST_E_HEADER_TOO_SMALL);
    CHECK_INT(open_path("", &model, &error), FST_E_NOT_FOUND);
    const char *secret = fixture_file("secret", "x", 1);
    chmod(secret, 0);
    // Root can read everything, so become another user for this test.
    uid_t user = geteuid();
    if (user != 0 || seteuid(65534) == 0) {
        CHECK_INT(open_path(secret, &model, &error), FST_E_PERMISSION);
        CHECK_INT(seteuid(user), 0);
    }
}

TEST(truncated_at_every_length)
{
    const char *path = fixture_model("whole", "{" U8("a", 0, 2) "}", 2);
    char bytes[256];
    FILE *stream = fopen(path, "re");
    size_t size = fread(bytes, 1, sizeof bytes, stream);
    fclose(stream);
    CHECK(size > 60);
    for (size_t cut = 0; cut < size; cut++) {
        fst_model *model;
        fst_error error;
        fst_status status = open_path(fixture_file("cut", bytes, cut), &model, &error);
        fst_status expected = cut < 8          ? FST_E_HEADER_TOO_SMALL
                              : cut < size - 2 ? FST_E_INVALID_HEADER_LENGTH
                                               : FST_E_METADATA_INCOMPLETE_BUFFER;
        CHECK_INT(status, expected);
        CHECK_INT(error.status, expected);
        CHECK_CONTAINS(error.message, "cut: ");
    }
}

TEST(lenient)
{
    const char *path = fixture_model("padded", "{" U8("a", 0, 2) "}", 100);
    fst_open_options options = {.struct_size = sizeof options, .flags = FST_OPEN_LENIENT};
    fst_model *model;
    CHECK_INT(fst_model_open(path, NULL, &model, NULL), FST_E_METADATA_INCOMPLETE_BUFFER);
    CHECK_INT(fst_model_open(path, &options, &model, NULL), FST_OK);
    fst_model_close(model);
}

/// The complete tensors of a truncated file can be found, described and loaded. Other tensors are
/// missing from it, and no other damage is accepted.
TEST(cut_off)
{
    const char *path =
        fixture_model("cut-off", "{" U8("c", 4, 6) "," U8("a", 0, 2) "," U8("b", 2, 4) "}", 5);
    fst_open_options options = {.struct_size = sizeof options, .flags = FST_OPEN_CUT};
    fst_model *model;
    fst_error error;
    size_t index;
    CHECK_INT(fst_model_open(path, NULL, &model, &error), FST_E_METADATA_INCOMPLETE_BUFFER);
    CHECK_CONTAINS(error.message, "1 of ");
    CHECK_CONTAINS(error.message, "2 of 3 tensors are complete");
    CHECK_INT(fst_model_open(path, &options, &model, NULL), FST_OK);
    CHECK_INT(fst_model_tensor_count(model), 2);
    CHECK_INT(fst_model_find(model, "b", SIZE_MAX, &index, NULL), FST_OK);
    CHECK_INT(fst_model_find(model, "c", SIZE_MAX, &index, NULL), FST_E_TENSOR_NOT_FOUND);
    fst_loader *loader;
    fst_tensor *tensor;
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
    CHECK_INT(fst_loader_open(model, NULL, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_tensor(loader, "b", SIZE_MAX, -1, &tensor, NULL), FST_OK);
    CHECK_INT(fst_tensor_view_get(tensor, &view, NULL), FST_OK);
    CHECK(fixture_matches(view.data, 2, 2));
    fst_tensor_unref(tensor);
    fst_loader_close(loader);
    fst_model_close(model);
    path = fixture_model("padded-cut", "{" U8("a", 0, 2) "}", 100);
    CHECK_INT(fst_model_open(path, &options, &model, NULL), FST_E_METADATA_INCOMPLETE_BUFFER);
}

static void make_shards(void) {
    mkdir(fixture_path("model"), 0700);
    fixture_model("model/x-2.safetensors", "{" U8("b", 0, 2) "," U8("shared", 2, 4) "}", 4);
    fixture_model("model/x-1.safetensors", "{" U8("a", 0, 2) "," U8("extra", 2, 4) "}", 4);
}

TEST(folder_is_opened_sorted)
{
    make_shards();
    fixture_file("model/.hidden.safetensors", "junk", 4);
    fst_model *model;
    fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
    fst_file_info file = FST_STRUCT_INIT(fst_file_info);
    CHECK_INT(open_path(fixture_path("model"), &model, NULL), FST_OK);
    CHECK_INT(fst_model_file_count(model), 2);
    CHECK_INT(fst_model_tensor_count(model), 4);
    CHECK_INT(fst_model_tensor_info(model, 0, &info, NULL), FST_OK);
    CHECK_TEXT(info.name, "a");
    CHECK_INT(fst_model_file_info(model, 0, &file, NULL), FST_OK);
    CHECK_CONTAINS(file.path, "x-1.safetensors");
    fst_model_close(model);
}

TEST(index_decides)
{
    make_shards();
    const char *index = "{\"weight_map\":{\"b\":\"x-2.safetensors\",\"a\":\"x-1.safetensors\"}}";
    const char *path = fixture_file("model/m.safetensors.index.json", index, strlen(index));
    for (int by_folder = 0; by_folder < 2; by_folder++) {
        fst_model *model;
        size_t found;
        CHECK_INT(open_path(by_folder ? fixture_path("model") : path, &model, NULL), FST_OK);
        CHECK_INT(fst_model_tensor_count(model), 2);
        CHECK_INT(fst_model_find(model, "extra", 5, &found, NULL), FST_E_TENSOR_NOT_FOUND);
        CHECK_INT(fst_model_find(model, "b", 1, &found, NULL), FST_OK);
        fst_model_close(model);
    }
    fst_model *model;
    fst_error error;
    index = "{\"weight_map\":{\"nope\":\"x-2.safetensors\"}}";
    fixture_file("model/m.safetensors.index.json", index, strlen(index));
    CHECK_INT(open_path(path, &model, &error), FST_E_TENSOR_NOT_FOUND);
    CHECK_TEXT(error.tensor, "nope");
    index = "{\"weight_map\":{\"a\":\"gone.safetensors\"}}";
    fixture_file("model/m.safetensors.index.json", index, strlen(index));
    CHECK_INT(open_path(path, &model, &error), FST_E_NOT_FOUND);
    index = "{\"weight_map\":{\"a\":\"../model/x-1.safetensors\"}}";
    fixture_file("model/m.safetensors.index.json", index, strlen(index));
    CHECK_INT(open_path(path, &model, &error), FST_E_PATH_ESCAPES);
    fixture_file("model/n.safetensors.index.json", "{}", 2);
    CHECK_INT(open_path(fixture_path("model"), &model, &error), FST_E_ARGUMENT);
    unlink(fixture_path("model/m.safetensors.index.json"));
    unlink(fixture_path("model/n.safetensors.index.json"));
}

TEST(name_in_two_files)
{
    make_shards();
    const char *again = fixture_model("again.safetensors", "{" U8("b", 0, 2) "}", 2);
    const char *paths[2] = {fixture_path("model/x-2.safetensors"), again};
    fst_model *model;
    fst_error error;
    CHECK_INT(fst_model_open_files(paths, 2, NULL, &model, &error), FST_E_DUPLICATE_TENSOR);
    CHECK_TEXT(error.tensor, "b");
    CHECK_CONTAINS(error.message, "again.safetensors");
}

TEST(invalid_arguments)
{
    fst_model *model;
    fst_error error;
    fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
    fst_file_info file = FST_STRUCT_INIT(fst_file_info);
    fst_metadata_entry entry;
    size_t index;
    const char *paths[2] = {"x", NULL};
    CHECK_INT(fst_model_open(NULL, NULL, &model, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_model_open("x", NULL, NULL, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_model_open_files(NULL, 1, NULL, &model, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_model_open_files(paths, 0, NULL, &model, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_model_open_files(paths, 2, NULL, &model, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_model_tensor_info(NULL, 0, &info, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_model_find(NULL, "a", 1, &index, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_model_file_info(NULL, 0, &file, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_model_metadata(NULL, 0, 0, &entry, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_model_tensor_count(NULL) + fst_model_file_count(NULL), 0);
    fst_model_close(NULL);
    fst_open_options options = {.struct_size = 3};
    CHECK_INT(fst_model_open("x", &options, &model, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "struct_size");
    // It would end within a pointer.
    options = (fst_open_options){.struct_size = offsetof(fst_open_options, manifest) + 4,
                                 .manifest = "manifest"};
    CHECK_INT(fst_model_open("x", &options, &model, &error), FST_E_ARGUMENT);
    CHECK_CONTAINS(error.message, "struct_size");
    options = (fst_open_options){.struct_size = sizeof options, .flags = 0x80};
    CHECK_INT(fst_model_open("x", &options, &model, &error), FST_E_ARGUMENT);
    struct {
        fst_open_options known;
        uint64_t later;
    } newer = {{.struct_size = sizeof newer}, 1};
    CHECK_INT(fst_model_open("x", &newer.known, &model, &error), FST_E_ARGUMENT);
    newer.later = 0;
    CHECK_INT(fst_model_open(fixture_path("missing"), &newer.known, &model, &error),
              FST_E_NOT_FOUND);
    CHECK_INT(open_path(fixture_tensors("n", 2, 2), &model, NULL), FST_OK);
    CHECK_INT(fst_model_tensor_info(model, 2, &info, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_model_tensor_info(model, 0, NULL, &error), FST_E_ARGUMENT);
    CHECK_INT(fst_model_find(model, NULL, 0, &index, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_model_file_info(model, 1, &file, &error), FST_E_ARGUMENT);
    fst_model_close(model);
    CHECK(fst_dtype_name((fst_dtype)99) == NULL);
    CHECK_INT(fst_dtype_bits((fst_dtype)99), 0);
    CHECK_TEXT(fst_status_name((fst_status)999), "Unknown");
    fst_memory_live(NULL, NULL);
    CHECK(fst_version()[0] != '\0');
}

TEST(index_text_is_escaped_for_terminals)
{
    static const char text[] = "{\"weight_map\":{\"a\":\"../\\u001b[31mX\"}}";
    const char *path = fixture_file("escape.safetensors.index.json", text, sizeof text - 1);
    fst_model *model;
    fst_error error;
    CHECK(open_path(path, &model, &error) != FST_OK);
    CHECK_CONTAINS(error.message, "[31mX");
    CHECK(strchr(error.message, 0x1b) == NULL);
}
