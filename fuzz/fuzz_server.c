// SPDX-License-Identifier: Apache-2.0
/// Fuzzes loads from servers and saves to them. The input is what is done, flags, and how the
/// server answers. A load may fail; whatever is loaded has the bytes of the model if every response
/// was correct.
#include "fuzz_files.h"
#include "fuzz_target.h"
#include "object_server.h"

#define TENSOR_BYTES ((size_t)150000)
#define LARGE_BYTES ((size_t)9 << 20) ///< two parts of an upload

static const char header[] = "{\"w\":{\"dtype\":\"U8\",\"shape\":[150000],\"data_offsets\":"
                             "[0,150000]}}       ";

enum { FLAG_SIGNED = 1, FLAG_CACHE = 2, FLAG_VERIFY = 4, FLAG_CREATE_ONLY = 8, FLAG_METADATA = 16 };

/// What can be done, with the URL after the server's, or whole.
typedef struct action {
    const char *url;
    bool is_save, is_large;
} action;

static const action actions[] = {
    {"/model.safetensors", false, false},
    {"/m/x.safetensors?sig=1", false, false},
    {"s3://box/m/model.safetensors", false, false},
    {"gs://box/m/model.safetensors", false, false},
    {"az://box/m/model.safetensors", false, false},
    {"hf://org/name/model.safetensors", false, false},
    {"s3://box/m/", false, false},
    {"gs://box/m/", false, false},
    {"az://box/m/", false, false},
    {"hf://org/name@main", false, false},
    {"s3://box/new.safetensors", true, false},
    {"gs://box/new.safetensors", true, false},
    {"az://box/new.safetensors", true, false},
    {"s3://box/new.safetensors", true, true},
    {"gs://box/new.safetensors", true, true},
    {"az://box/new.safetensors", true, true},
};

static const char *server;

/// Starts the server, and keeps the library away from the user's credentials. False without
/// libcurl.
static bool prepare(void) {
    static char model[8 + sizeof header - 1 + TENSOR_BYTES];
    static bool is_ready;
    if (!fuzz_enter("server")) {
        fuzz_clear();
        return server != NULL;
    }
    require(!is_ready);
    is_ready = true;
    uint64_t size = sizeof header - 1;
    memcpy(model, &size, 8);
    memcpy(model + 8, header, size);
    for (size_t i = 0; i < TENSOR_BYTES; i++) model[8 + size + i] = (char)(i * 7 + i / 256);
    server = object_server_begin(model, sizeof model);
    if (server == NULL) return false;
    char text[128];
    snprintf(text, sizeof text, "%s/credentials", server);
    setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", text, 1);
    setenv("AWS_EC2_METADATA_DISABLED", "true", 1);
    setenv("GCE_METADATA_HOST", server + strlen("http://"), 1);
    snprintf(text, sizeof text, "%s/token", server);
    setenv("IDENTITY_ENDPOINT", text, 1);
    setenv("IDENTITY_HEADER", "x", 1);
    setenv("HOME", fuzz_folder, 1);
    return true;
}

static void configure(uint8_t flags) {
    fst_remote_options options = {.struct_size = sizeof options,
                                  .endpoint = server,
                                  .region = "us-east-1",
                                  .account = "acct",
                                  .connect_ms = 500,
                                  .first_byte_ms = 300,
                                  .stall_ms = 300,
                                  .retry_base_ms = 1,
                                  .retry_cap_ms = 2,
                                  .tries_max = 2,
                                  .connections_max = 4};
    options.anonymous = (flags & (FLAG_SIGNED | FLAG_METADATA)) == 0;
    if ((flags & FLAG_SIGNED) != 0) {
        options.access_key = "AKID";
        options.secret_key = "secret";
        options.bearer_token = (flags & FLAG_METADATA) != 0 ? "token" : NULL;
        options.account_key = "a2V5";
    }
    options.cache_dir = (flags & FLAG_CACHE) != 0 ? "cache" : "off";
    options.create_only = (flags & FLAG_CREATE_ONLY) != 0;
    fst_error error;
    if (fst_remote_configure(&options, &error) != FST_OK) fuzz_check_error(&error);
}

static void save(const action *what) {
    static char *content;
    uint64_t shape = what->is_large ? LARGE_BYTES : 1000;
    if (content == NULL) content = calloc(LARGE_BYTES, 1);
    require(content != NULL);
    fst_save_tensor tensor = FST_STRUCT_INIT(fst_save_tensor);
    tensor.name = "w";
    tensor.name_size = 1;
    tensor.dtype = FST_DTYPE_U8;
    tensor.rank = 1;
    tensor.shape = &shape;
    tensor.data = content;
    fst_save_options options = FST_STRUCT_INIT(fst_save_options);
    fst_writer *writer = NULL;
    fst_error error;
    if (fst_writer_open(what->url, &tensor, 1, &options, &writer, &error) != FST_OK) {
        fuzz_check_error(&error);
        return;
    }
    if (fst_writer_commit(writer, &error) != FST_OK) fuzz_check_error(&error);
    fst_writer_close(writer);
}

static void load(const action *what, uint8_t flags) {
    char url[128];
    snprintf(url, sizeof url, "%s%s", what->url[0] == '/' ? server : "", what->url);
    int times = (flags & FLAG_CACHE) != 0 ? 2 : 1;
    for (int i = 0; i < times; i++)
        (void)fuzz_open(url, (flags & FLAG_VERIFY) != 0 ? FST_OPEN_VERIFY : 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fuzz_input input = {data, size};
    if (!prepare()) return 0;
    const action *what = &actions[fuzz_below(&input, sizeof actions / sizeof *actions)];
    uint8_t flags = fuzz_byte(&input);
    configure(flags);
    object_server_answer(input.data, input.size);
    if (what->is_save)
        save(what);
    else
        load(what, flags);
    object_server_end();
    return 0;
}
