// SPDX-License-Identifier: Apache-2.0
/// Fuzzes untrusted folders. The input is a flag byte, then entries: name, kind, two bytes of size,
/// content. The folder is opened as a model, by its files and its indexes, verified and cleaned,
/// and its subfolder "c" is used as a cache.
#include "fuzz_files.h"
#include "fastsafetensors/experimental.h"
#include "fuzz_target.h"

static const char *const names[] = {
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model-00001-of-00003.safetensors",
    "model.safetensors",
    "a.safetensors",
    "other.safetensors.index.json",
    "sub/model.safetensors",
    "sub/model.safetensors.index.json",
    "README.md",
    ".model.safetensors.1.tmp",
    "model.manifest",
    "model.safetensors.manifest",
    "SHA256SUMS",
    "model.safetensors.digest",
    "model.sig",
    "c/lock",
    "c/0123456789abcdef0123456789abcdef.map",
    "c/0123456789abcdef0123456789abcdef.part",
    "c/0123456789abcdef0123456789abcdef.data",
    "c/0123456789abcdef0123456789abcdef.ref",
    "http:/host/x.safetensors",
};
#define NAME_COUNT ((uint32_t)(sizeof names / sizeof *names))

enum {
    ENTRY_BYTES,
    ENTRY_MODEL,
    ENTRY_FOLDER,
    ENTRY_FIFO,
    ENTRY_LINK,
    ENTRY_TWIN,
    ENTRY_HUGE,
    ENTRY_COUNT
};
enum { FLAG_SWEEP = 16, FLAG_PRUNE = 32, FLAG_PRUNE_ALL = 64 };

/// Writes a header with its length field, and one data byte per trailing blank.
static void put_model(const char *name, const uint8_t *text, size_t size) {
    size_t data_bytes = 0;
    while (data_bytes < size && text[size - 1 - data_bytes] == ' ') data_bytes++;
    uint8_t *file = calloc(8 + size + data_bytes, 1);
    require(file != NULL);
    for (unsigned i = 0; i < 8; i++) file[i] = (uint8_t)((uint64_t)size >> 8 * i);
    memcpy(file + 8, text, size);
    fuzz_put(name, file, 8 + size + data_bytes);
    free(file);
}

static void put_link(const char *name, const uint8_t *text, size_t size) {
    char target[200];
    if (size == 0 || size >= sizeof target || text[0] == '/') return;
    memcpy(target, text, size);
    target[size] = '\0';
    (void)!symlink(target, name);
}

static void put_entry(const char *name, uint32_t kind, const uint8_t *bytes, size_t size) {
    switch (kind) {
    case ENTRY_MODEL: put_model(name, bytes, size); break;
    case ENTRY_FOLDER: (void)!mkdir(name, 0700); break;
    case ENTRY_FIFO: (void)!mkfifo(name, 0600); break;
    case ENTRY_LINK: put_link(name, bytes, size); break;
    case ENTRY_TWIN: (void)!link(names[size % NAME_COUNT], name); break;
    case ENTRY_HUGE:
        fuzz_put(name, bytes, size);
        (void)!truncate(name, (off_t)1 << 40);
        break;
    default: fuzz_put(name, bytes, size);
    }
}

static void put_entries(fuzz_input *input) {
    while (input->size >= 4) {
        const char *name = names[fuzz_below(input, NAME_COUNT)];
        uint32_t kind = fuzz_below(input, ENTRY_COUNT);
        size_t size = fuzz_byte(input);
        size |= (size_t)fuzz_byte(input) << 8;
        if (size > input->size) size = input->size;
        put_entry(name, kind, input->data, size);
        input->data += size;
        input->size -= size;
    }
}

static void see_leftover(void *context, const fst_leftover *leftover) {
    (void)context;
    require(leftover->path != NULL);
}

static void see_object(void *context, const fst_cache_object *object) {
    (void)context;
    require(object->address != NULL && strchr(object->address, '?') == NULL);
}

static void check_status(fst_status status, const fst_error *error) {
    if (status != FST_OK) fuzz_check_error(error);
}

static void use_folder(uint8_t flags) {
    fst_error error;
    fst_check_options check = FST_STRUCT_INIT(fst_check_options);
    fst_cache_pruned pruned = FST_STRUCT_INIT(fst_cache_pruned);
    size_t count;
    (void)fuzz_open(".", flags & (FST_OPEN_LENIENT | FST_OPEN_CUT));
    (void)fuzz_open(".", FST_OPEN_VERIFY);
    for (size_t i = 0; i < 7; i++) (void)fuzz_open(names[i], flags & 7);
    check_status(fst_manifest_check(".", &check, NULL, &error), &error);
    check_status(fst_leftovers_visit(".", see_leftover, NULL, &error), &error);
    if ((flags & FLAG_SWEEP) != 0)
        check_status(fst_leftovers_remove(".", &count, NULL, &error), &error);
    check_status(fst_cache_visit("c", see_object, NULL, &error), &error);
    uint64_t most = (flags & FLAG_PRUNE_ALL) != 0 ? 0 : 4096;
    if ((flags & FLAG_PRUNE) != 0)
        check_status(fst_cache_prune("c", most, &pruned, &error), &error);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const char *const folders[] = {"sub", "c", "http:", "http:/host"};
    fst_remote_options offline = {.struct_size = sizeof offline, .offline = 1};
    fuzz_input input = {data, size};
    if (fuzz_enter("folder")) require(fst_remote_configure(&offline, NULL) == FST_OK);
    fuzz_clear();
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++)
        require(mkdir(folders[i], 0700) == 0);
    uint8_t flags = fuzz_byte(&input);
    put_entries(&input);
    use_folder(flags);
    return 0;
}
