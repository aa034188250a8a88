// SPDX-License-Identifier: Apache-2.0
/// The messages for files of other formats.
#include <string.h>

#include "check.h"
#include "model/open_model.h"

typedef struct sample {
    const char *bytes;
    size_t size;
    const char *words; ///< NULL: no message
} sample;

#define S(text, words) {text, sizeof text - 1, words}

static const sample samples[] = {
    S("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 90868376\n",
      "git-lfs pointer for a file of 90868376 bytes"),
    S("version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git-lfs pointer. Run"),
    S("<!DOCTYPE html><html>", "web page"),
    S("\xef\xbb\xbf \r\n<HTML lang=\"en\">", "web page"),
    S("<?xml version=\"1.0\"?><Error><Code>AccessDenied</Code>", "XML"),
    S("{\"error\":\"Repository not found\"}", "server's JSON response"),
    S("{\"metadata\":{}, \"weight_map\":{\"a\":\"b\"}}", "index of shards"),
    S("{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", "without the 8-byte"),
    S("{\n  \"metadata\": {},\n  \"weight_map\": {}\n}", "index of shards"),
    S("\n {\r\n\t\"architectures\": [\"Bert\"]}", "JSON file"),
    S("{\"architectures\": [\"Bert\"]}", "JSON file"),
    S("GGUF\3\0\0\0", "GGUF"),
    S("PK\3\4\0\0\0\0archive/data.pkl", "torch.save"),
    S("PK\3\4\0\0\0\0weights.npy", ".npz"),
    S("PK\3\4\0\0\0\0something", "zip archive"),
    S("\x80\2}q\1(X", "pickle"),
    S("\x93NUMPY\1\0v\0", ".npy"),
    S("\x89HDF\r\n\x1a\n", "HDF5"),
    S("\x1f\x8b\x08\0\0\0\0\0\0\3", "gzip-compressed"),
    S("\x28\xb5\x2f\xfd\0\0\0\0", "zstd-compressed"),
    S("\xfd"
      "7zXZ\0\0\0",
      "xz-compressed"),
    S("\x7f"
      "ELF\2\1\1\0",
      "ELF"),
    S("\0\0\0\0\0\0\0\0\0\0\0\0", "zeros"),
    S("Entry not found", "a text file that begins with 'Entry not found'"),
    S("", "empty"),
    // No kind is recognised in a header with a fault, or in noise.
    S("\x10\0\0\0\0\0\0\0{\"a\":", NULL),
    S("\x1f\x8b\0\0\0\0\0\0{\"a\":", NULL),
    S("\x9a\x01\xff\xee\xdd\xcc\xbb\xaa\x99", NULL),
    S("short", NULL),
};

TEST(each_file_kind_is_recognized)
{
    for (size_t i = 0; i < sizeof samples / sizeof *samples; i++) {
        char text[200] = "";
        bool told = fsti_model_file_kind(samples[i].bytes, samples[i].size, samples[i].size, text,
                                         sizeof text);
        CHECK_TEXT(samples[i].words == NULL ? text : "", "");
        CHECK(told == (samples[i].words != NULL));
        if (told) CHECK_CONTAINS(text, samples[i].words);
    }
}

/// Every beginning of every sample, in memory of exactly that size.
TEST(file_kind_never_reads_past_the_buffer)
{
    for (size_t i = 0; i < sizeof samples / sizeof *samples; i++)
        for (size_t size = 0; size <= samples[i].size; size++) {
            char text[24], *bytes = malloc(size + 1);
            CHECK(bytes != NULL);
            memcpy(bytes, samples[i].bytes, size);
            if (fsti_model_file_kind(bytes, size, size, text, sizeof text))
                CHECK(strlen(text) < sizeof text);
            free(bytes);
        }
}
