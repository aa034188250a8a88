// SPDX-License-Identifier: Apache-2.0
/// Index files of sharded models.
#include "check.h"
#include "format/format.h"

static fst_status parse(const char *json, fsti_index *out, fst_error *error) {
    size_t size = strlen(json);
    char *bytes = fsti_alloc_zeroed(size + FSTI_FORMAT_PADDING_BYTES, 1);
    if (bytes == NULL) return FST_E_NO_MEMORY;
    memcpy(bytes, json, size);
    return fsti_index_parse(bytes, size, "i.json", 7, out, error);
}

TEST(files_are_unique_and_in_order)
{
    fsti_index index;
    CHECK_INT(
        parse("{\"metadata\":{\"total_size\":12.5},\"weight_map\":{\"a\":\"x\\u002esafetensors\","
              "\"b\":\"y.safetensors\",\"c\":\"x.safetensors\"}} ",
              &index, NULL),
        FST_OK);
    CHECK_INT(index.entry_count, 3);
    CHECK_INT(index.file_count, 2);
    CHECK_TEXT(index.bytes + index.files[0].at, "x.safetensors");
    CHECK_TEXT(index.bytes + index.entries[2].name.at, "c");
    CHECK_INT(index.entries[2].file, 0);
    CHECK_INT(index.entries[1].file, 1);
    fsti_index_clear(&index);
}

TEST(manifest_beyond_the_limit_is_refused)
{
    const fsti_digest_kind *kind = fsti_digest_of_stored_name("blake3", 6);
    fsti_manifest_file file = {.name = "m.safetensors", .name_size = 13};
    fsti_manifest_draft draft = {
        .kind = kind, .chunk_bytes = 64 << 10, .files = &file, .file_count = 1};
    char *text = NULL;
    size_t size;
    fst_error error = {0};
    file.size_bytes = (uint64_t)1 << 40; // its digests are not read
    CHECK_INT(fsti_manifest_write(&draft, &text, &size, &error), FST_E_UNSUPPORTED);
    CHECK(strstr(error.message, "more than readers accept, 1 GiB") != NULL);
    CHECK(text == NULL);
}

TEST(paths_outside_the_folder_are_refused)
{
    static const char *const bad[] = {"/etc/passwd", "../x", "a/../../x", "..",
                                      "a/..",        "",     "x\\u0000y", "./../x"};
    static const char *const good[] = {"x", "sub/x", "..x", "x..", "./x", "..."};
    char json[100];
    fsti_index index;
    fst_error error;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        snprintf(json, sizeof json, "{\"weight_map\":{\"a\":\"%s\"}}", bad[i]);
        CHECK_INT(parse(json, &index, &error), FST_E_PATH_ESCAPES);
        CHECK_CONTAINS(error.message, "outside the model's folder");
    }
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        snprintf(json, sizeof json, "{\"weight_map\":{\"a\":\"%s\"}}", good[i]);
        CHECK_INT(parse(json, &index, NULL), FST_OK);
        fsti_index_clear(&index);
    }
}

TEST(faults)
{
    static const char *const bad[] = {
        "",
        "[]",
        "{}",
        "{\"weight_map\":[]}",
        "{\"weight_map\":{\"a\":1}}",
        "{\"weight_map\":{},\"weight_map\":{}}",
        "{\"weight_map\":{\"a\":\"b\"}",
        "{\"weight_map\":{\"a\":\"b\"}}x",
        "{\"weight_map\":{\"a\":\"\xff\"}}",
        "{\"weight_map\":{\"a\":\"b\",}}",
    };
    long live = fsti_alloc_live();
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        fsti_index index;
        fst_error error;
        CHECK_INT(parse(bad[i], &index, &error), FST_E_INDEX_JSON);
        CHECK_CONTAINS(error.message, "invalid index file: ");
        CHECK(error.byte_offset <= strlen(bad[i]));
    }
    CHECK_INT(fsti_alloc_live(), live);
}

TEST(every_allocation_may_fail)
{
    long live = fsti_alloc_live(), n = 0;
    fst_status status;
    do {
        fsti_index index = {0};
        fsti_alloc_fail_after(n++);
        status = parse("{\"weight_map\":{\"a\":\"x\",\"b\":\"y\"}}", &index, NULL);
        fsti_alloc_fail_after(-1);
        CHECK(status == FST_OK || status == FST_E_NO_MEMORY);
        if (status == FST_OK) fsti_index_clear(&index);
        CHECK_INT(fsti_alloc_live(), live);
    } while (status != FST_OK);
    CHECK(n > 3);
}
