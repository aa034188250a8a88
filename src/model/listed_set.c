// SPDX-License-Identifier: Apache-2.0
/// Checks the files of a set against a list of files, because a deleted file is a difference as
/// well.
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "location/location.h"
#include "file_digests_scan.h"

/// A name of a list; `size` 0: not relevant here.
typedef struct listed_name {
    const char *name;
    size_t size;
} listed_name;

static size_t count_names(const model_verification *verification) {
    const file_digests *expected = verification->expected;
    if (expected == NULL) return verification->manifest.file_count;
    return expected->has_bundle ? expected->bundle.statement.file_count : expected->sums.file_count;
}

static listed_name get_name(const model_verification *verification, size_t index) {
    const file_digests *expected = verification->expected;
    if (expected == NULL) {
        const fsti_manifest_file *file = &verification->manifest.files[index];
        return (listed_name){file->name, file->name_size};
    }
    const fsti_signed_file *files =
        expected->has_bundle ? expected->bundle.statement.files : expected->sums.files;
    return (listed_name){files[index].name, files[index].name_size};
}

static bool ends_with(listed_name name, const char *ending) {
    size_t size = strlen(ending);
    return name.size > size && memcmp(name.name + name.size - size, ending, size) == 0;
}

/// Whether opening the folder would include the file: not in a subfolder, and not hidden.
static bool belongs(listed_name name) {
    return name.size > 0 && name.name[0] != '.' && memchr(name.name, '/', name.size) == NULL &&
           (ends_with(name, ".safetensors") || ends_with(name, ".safetensors.index.json"));
}

static bool is_opened(const model_paths *paths, listed_name name) {
    for (size_t i = 0; i < paths->count; i++) {
        char text[PATH_MAX];
        const char *base = fsti_location_name(paths->paths[i], text, sizeof text);
        if (strlen(base) == name.size && memcmp(base, name.name, name.size) == 0) return true;
    }
    return false;
}

/// Whether a file was opened whose digest is looked up under just this name.
static bool is_looked_up(const model_verification *verification, const model_paths *paths,
                         listed_name name) {
    for (size_t i = 0; i < paths->count; i++) {
        char text[2 * PATH_MAX];
        const char *wanted = fsti_verification_name(verification, paths->paths[i], text);
        if (strlen(wanted) == name.size && memcmp(wanted, name.name, name.size) == 0) return true;
    }
    return false;
}

/// A .digest file lists just the files of its model, also those with other names.
static bool lists_only_its_model(const model_verification *verification) {
    return verification->expected != NULL &&
           verification->expected->source == FST_VERIFIED_BY_SIDECAR;
}

fst_status fsti_verification_check_set(const model_verification *verification,
                                       const model_paths *paths, fst_error *error) {
    char text[2 * PATH_MAX];
    if (verification == NULL || paths->count == 0) return FST_OK;
    // Names in a bundle are relative to its own folder, which may be a parent of the model's.
    const char *first = fsti_verification_name(verification, paths->paths[0], text);
    const char *slash = strrchr(first, '/');
    size_t prefix = slash == NULL ? 0 : (size_t)(slash - first) + 1;
    // Names in a .digest file are relative to the model's folder.
    if (lists_only_its_model(verification)) prefix = 0;
    for (size_t i = 0; i < count_names(verification); i++) {
        listed_name name = get_name(verification, i);
        if (name.size <= prefix || memcmp(name.name, first, prefix) != 0) continue;
        name = (listed_name){name.name + prefix, name.size - prefix};
        bool is_exact = lists_only_its_model(verification);
        if (is_exact ? is_looked_up(verification, paths, name)
                     : !belongs(name) || is_opened(paths, name))
            continue;
        fsti_error_location location = FSTI_NO_LOCATION;
        location.file = verification->path;
        return fsti_error_set(error, FST_E_DIGEST, location, "it lists %.*s, which is missing",
                              (int)fsti_min(name.size, 200), name.name);
    }
    return FST_OK;
}

fst_status fsti_verification_check_index(const model_verification *verification,
                                         const model_paths *paths, fst_error *error) {
    if (verification == NULL || !lists_only_its_model(verification)) return FST_OK;
    return fsti_verification_check_set(verification, paths, error);
}
