// SPDX-License-Identifier: Apache-2.0
/// Fuzzes what a weight delta's files hold: by the first byte the input is the stored bytes of a
/// tensor (xor or overwrite), a whole shard, the list of renames or of copies of a checkpoint
/// folder, the mark of a folder that is written to, or a journal. Nothing but an error, or new
/// bytes that match their checksum, may come of it.
#include <sys/stat.h>

#include "fastsafetensors/experimental.h"
#include "fuzz_files.h"
#include "fuzz_target.h"

#define TENSOR_BYTES 600
#define INDEX                                                                                      \
    "{\"metadata\":{\"version\":\"1\",\"base_version\":\"0\",\"delta_encoding\":\"%s\","           \
    "\"compression_format\":\"zstd\",\"checksum_format\":\"adler32\"},"                            \
    "\"weight_map\":{\"w\":\"a.safetensors\"}}"

static void put_model(const char *path, const char *json, const void *bytes, size_t size) {
    static unsigned char file[1 << 20];
    uint64_t length = strlen(json);
    if (8 + length + size > sizeof file) return;
    memcpy(file, &length, 8);
    memcpy(file + 8, json, length);
    if (size > 0) memcpy(file + 8 + length, bytes, size);
    fuzz_put(path, file, 8 + length + size);
}

/// Prepares the delta on memory; what it gives is committed.
static void try_delta(void) {
    const char *folder = ".";
    unsigned char bytes[TENSOR_BYTES] = {1};
    fst_delta_memory memory = {.name = "w", .data = bytes, .size_bytes = sizeof bytes};
    fst_delta_options options = FST_STRUCT_INIT(fst_delta_options);
    fst_delta *delta;
    fst_delta_change *change;
    fst_error error;
    options.thread_count = 1;
    if (fst_delta_open(&folder, 1, &delta, &error) != FST_OK) {
        fuzz_check_error(&error);
        return;
    }
    if (fst_delta_prepare(delta, &memory, 1, &options, &change, &error) == FST_OK)
        fst_delta_commit(change);
    else
        fuzz_check_error(&error);
    fst_delta_close(delta);
}

static void try_stored(const char *encoding, const uint8_t *data, size_t size) {
    char text[600];
    snprintf(text, sizeof text, INDEX, encoding);
    fuzz_put("model.safetensors.index.json", text, strlen(text));
    snprintf(text, sizeof text,
             "{\"__metadata__\":{\"w\":\"00010001\"},\"w\":{\"dtype\":\"U8\",\"shape\":[%zu],"
             "\"data_offsets\":[0,%zu]}}",
             size, size);
    put_model("a.safetensors", text, data, size);
    try_delta();
}

static void try_shard(const uint8_t *data, size_t size) {
    char text[600];
    snprintf(text, sizeof text, INDEX, "xor");
    fuzz_put("model.safetensors.index.json", text, strlen(text));
    fuzz_put("a.safetensors", data, size);
    try_delta();
}

/// Recovers with a file that another process left in the folder's .weight_sync.
static void try_recovery(const char *path, const uint8_t *data, size_t size) {
    fst_error error;
    mkdir(".weight_sync", 0700);
    fuzz_put("model.safetensors.delta-tmp", "new", 3);
    fuzz_put(path, data, size);
    if (fst_delta_recover(".", NULL, NULL, &error) != FST_OK) fuzz_check_error(&error);
}

/// Makes a delta in a folder with the mark of a killed call.
static void try_mark(const uint8_t *data, size_t size) {
    fst_error error;
    unsigned char bytes[4] = {1};
    fst_delta_memory memory = {.name = "w", .data = bytes, .size_bytes = sizeof bytes};
    fst_delta_make_options options = FST_STRUCT_INIT(fst_delta_make_options);
    options.version = "1";
    options.base_version = "0";
    options.tensors = &memory;
    options.tensor_count = 1;
    options.thread_count = 1;
    put_model("old.safetensors", "{\"w\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}",
              "abcd", 4);
    mkdir("out", 0700);
    fuzz_put("out/model-00000-of-00001.safetensors", "shard", 5);
    fuzz_put("out/making.tmp", data, size);
    if (fst_delta_make("old.safetensors", "out", &options, NULL, &error) != FST_OK)
        fuzz_check_error(&error);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0) return 0;
    if (!fuzz_enter("delta")) fuzz_clear();
    switch (data[0]) {
    case 'x': try_stored("xor", data + 1, size - 1); break;
    case 'o': try_stored("overwrite", data + 1, size - 1); break;
    case 's': try_shard(data + 1, size - 1); break;
    case 'r': try_recovery(".weight_sync/renames", data + 1, size - 1); break;
    case 'c': try_recovery(".weight_sync/copies", data + 1, size - 1); break;
    case 'm': try_mark(data + 1, size - 1); break;
    default: try_recovery(".weight_sync/journal", data + 1, size - 1); break;
    }
    return 0;
}
