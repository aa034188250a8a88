// SPDX-License-Identifier: Apache-2.0
/// Opens a model twice: if both are the same, then the second one has just these files open,
/// because it was opened in between.
#include "steady_model.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/// How often a model is opened while saves replace it.
#define OPEN_COUNT_MAX 8

static bool add(fst_digest_state *state, const void *bytes, size_t size) {
    return fst_digest_update(state, bytes, size, NULL) == FST_OK;
}

/// Adds the path of a file, and what it leads to.
static bool add_file(fst_digest_state *state, const fst_model *model, size_t file) {
    fst_file_info info = FST_STRUCT_INIT(fst_file_info);
    struct stat found;
    uint64_t numbers[5] = {0};
    if (fst_model_file_info(model, file, &info, NULL) != FST_OK) return false;
    if (stat(info.path, &found) == 0) {
        numbers[0] = (uint64_t)found.st_dev;
        numbers[1] = (uint64_t)found.st_ino;
        numbers[2] = (uint64_t)found.st_size;
        numbers[3] = (uint64_t)found.st_mtim.tv_sec;
        numbers[4] = (uint64_t)found.st_mtim.tv_nsec;
    }
    return add(state, info.path, strlen(info.path) + 1) && add(state, numbers, sizeof numbers);
}

/// Adds which tensor it is. An index that is replaced may choose others from the same files.
static bool add_tensor(fst_digest_state *state, const fst_model *model, size_t tensor) {
    fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
    if (fst_model_tensor_info(model, tensor, &info, NULL) != FST_OK) return false;
    uint64_t numbers[] = {info.name_size, info.file_index, info.file_offset};
    return add(state, numbers, sizeof numbers) && add(state, info.name, info.name_size);
}

/// Computes the model's identity. False without memory.
static bool identify(const fst_model *model, steady_identity *out) {
    fst_digest_state *state;
    size_t size;
    if (fst_digest_begin(FST_DIGEST_XXH3_128, &state, NULL) != FST_OK) return false;
    bool good = true;
    for (size_t i = 0; good && i < fst_model_file_count(model); i++)
        good = add_file(state, model, i);
    for (size_t i = 0; good && i < fst_model_tensor_count(model); i++)
        good = add_tensor(state, model, i);
    if (good) return fst_digest_end(state, out->bytes, &size, NULL) == FST_OK;
    fst_digest_drop(state);
    return false;
}

/// Whether it is a name .NAME.<16 hexadecimal digits>.tmp.
static bool is_hidden(const char *name) {
    size_t size = strlen(name), tail = sizeof ".0123456789abcdef.tmp" - 1;
    if (name[0] != '.' || size < tail + 2 || strcmp(name + size - 4, ".tmp") != 0) return false;
    const char *number = name + size - tail;
    return number[0] == '.' && strspn(number + 1, "0123456789abcdef") == 16;
}

/// Whether a file has the temporary name that saves give it while they publish a model.
static bool has_hidden_file(const fst_model *model) {
    for (size_t i = 0; i < fst_model_file_count(model); i++) {
        fst_file_info info = FST_STRUCT_INIT(fst_file_info);
        if (fst_model_file_info(model, i, &info, NULL) != FST_OK) continue;
        const char *slash = strrchr(info.path, '/'), *name = slash == NULL ? info.path : slash + 1;
        if (is_hidden(name)) return true;
    }
    return false;
}

static bool is_same(const steady_identity *one, const steady_identity *other) {
    return memcmp(one->bytes, other->bytes, sizeof one->bytes) == 0;
}

int steady_refuse(const char *path) {
    return cli_refuse(EXIT_UNREADABLE, "FileChanged",
                      "%s was replaced or changed while it was read. Try again", path);
}

int steady_open(const char *path, fst_model **model, steady_identity *identity) {
    fst_error error;
    steady_identity before;
    *model = NULL;
    for (int tries = 0; tries < OPEN_COUNT_MAX; tries++) {
        fst_model *opened;
        memset(identity, 0, sizeof *identity);
        if (fst_model_open(path, NULL, &opened, &error) != FST_OK) return cli_fail(&error);
        bool good = identify(opened, identity);
        bool is_steady = good && tries > 0 && is_same(&before, identity);
        bool is_published = is_steady && !has_hidden_file(opened);
        if (is_published) {
            *model = opened;
            return EXIT_OK;
        }
        fst_model_close(opened);
        if (is_steady)
            return cli_refuse(
                EXIT_UNREADABLE, "FileChanged",
                "%s: a save that publishes it runs, or was killed. Try again, or save "
                "it again",
                path);
        if (!good) return cli_no_memory();
        before = *identity;
    }
    return steady_refuse(path);
}

int steady_check(const char *path, const steady_identity *identity) {
    fst_model *model;
    steady_identity now = {{0}};
    if (fst_model_open(path, NULL, &model, NULL) != FST_OK) return steady_refuse(path);
    bool good = identify(model, &now);
    fst_model_close(model);
    if (!good) return cli_no_memory();
    return is_same(identity, &now) ? EXIT_OK : steady_refuse(path);
}
