// SPDX-License-Identifier: Apache-2.0
/// The files that a save may replace or delete, and whether those of two saves may be the same.
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "async_state.h"

static bool is_url(const char *path) { return fsti_location_is_url(path); }

/// Adds a path. Its folder is one without links; `follows`: so is its last part.
static fst_status add_name(save_place *place, const char *path, bool follows, fst_error *error) {
    char resolved[PATH_MAX];
    const fsti_target_kind *kind = is_url(path) ? &fsti_target_objects : &fsti_target_files;
    place_name *name = &place->names[place->count];
    if (kind->resolve(path, follows, resolved)) path = resolved; // otherwise it is too long
    name->path = fsti_string_copy(path, strlen(path));
    if (name->path != NULL) name->folder = fsti_location_folder(name->path, false);
    place->count++;
    if (name->folder == NULL) return fsti_error_memory(error, strlen(path));
    struct stat info;
    if (is_url(path) || stat(name->folder, &info) != 0) return FST_OK;
    name->device = info.st_dev; // a folder may have several paths, by bind mounts
    name->inode = info.st_ino;
    return FST_OK;
}

/// Adds a path, and what it is a link to.
static fst_status add_link(save_place *place, const char *path, fst_error *error) {
    FST_TRY(add_name(place, path, false, error));
    return is_url(path) ? FST_OK : add_name(place, path, true, error);
}

/// Adds the names of a set in the folder of a path; `stem` NULL: every name.
static fst_status add_set(save_place *place, const char *path, const char *stem, fst_error *error) {
    FST_TRY(add_name(place, path, false, error));
    place_name *name = &place->names[place->count - 1];
    fsti_free(name->path);
    name->path = NULL;
    if (stem == NULL) return FST_OK;
    name->stem = fsti_string_copy(stem, strlen(stem));
    return name->stem == NULL ? fsti_error_memory(error, strlen(stem)) : FST_OK;
}

/// Adds a path, and what it was a link to when the writer followed it.
static fst_status add_followed(save_place *place, const fst_writer *writer, fst_error *error) {
    const char *path = writer->target.published[0], *target = writer->contents.files[0].target.path;
    if (target == NULL || is_url(path)) return add_link(place, path, error);
    FST_TRY(add_name(place, path, false, error));
    return add_name(place, target, false, error);
}

/// The usual manifest: an old one is deleted.
static fst_status add_usual_manifest(save_place *place, const fst_writer *writer,
                                     fst_error *error) {
    char *usual = fsti_save_manifest_usual(writer);
    if (usual == NULL) return fsti_error_memory(error, 64);
    fst_status status = add_name(place, usual, false, error);
    const char *own = writer->options.manifest;
    place_name *name = &place->names[place->count - 1];
    name->is_manifest = true;
    name->is_removed = own == NULL || own[0] != '\0';
    fsti_free(usual);
    return status;
}

/// The path of a manifest of another name than the model's; NULL: none.
static const char *manifest_of(const fst_writer *writer) {
    const char *found = writer->publication.manifest.target.path; // once the writer has its files
    if (found == NULL) found = writer->options.manifest;
    return found == NULL || found[0] == '\0' ? NULL : found;
}

fst_status fsti_async_find_place(const fst_writer *writer, save_place *out, fst_error *error) {
    const char *path = writer->target.published[0];
    *out = (save_place){.path = fsti_string_copy(path, strlen(path))};
    if (out->path == NULL) return fsti_error_memory(error, strlen(path));
    if (writer->target.folder != NULL) // old files of the set are deleted
        FST_TRY(add_set(out, path, writer->target.stem, error));
    else if (writer->options.replace_link != 0)
        FST_TRY(add_name(out, path, false, error));
    else
        FST_TRY(add_followed(out, writer, error));
    if (out->count == 2 && strcmp(out->names[0].path, out->names[1].path) != 0)
        out->link = out->names[1].path;
    FST_TRY(add_usual_manifest(out, writer, error));
    const char *manifest = manifest_of(writer);
    size_t begin = out->count;
    fst_status status = manifest == NULL ? FST_OK : add_link(out, manifest, error);
    for (size_t i = begin; i < out->count; i++) out->names[i].is_manifest = true;
    return status;
}

fst_status fsti_async_find_file(const char *path, save_place *out, fst_error *error) {
    struct stat info;
    *out = (save_place){.path = fsti_string_copy(path, strlen(path))};
    if (out->path == NULL) return fsti_error_memory(error, strlen(path));
    FST_TRY(add_link(out, path, error));
    if (is_url(path) || (stat(path, &info) == 0 && !S_ISDIR(info.st_mode))) return FST_OK;
    // The model of a folder, perhaps of one that a save will create.
    char *inside = fsti_location_join(path, "/model");
    if (inside == NULL) return fsti_error_memory(error, strlen(path));
    fst_status status = add_set(out, inside, NULL, error);
    fsti_free(inside);
    return status;
}

fst_status fsti_async_find_link(const fst_writer *writer, save_place *out, fst_error *error) {
    struct stat info;
    const char *path = writer->target.published[0];
    *out = (save_place){.is_link = true};
    if (writer->target.folder != NULL || writer->options.replace_link != 0 || is_url(path) ||
        lstat(path, &info) != 0 || !S_ISLNK(info.st_mode))
        return FST_OK;
    return add_name(out, path, false, error);
}

static bool are_same_folder(const place_name *one, const place_name *other) {
    if (one->inode != 0 && one->inode == other->inode && one->device == other->device) return true;
    return fsti_location_is_same(one->folder, other->folder);
}

/// Whether a file is one of a set's, or describes one of them.
static bool is_in_set(const char *path, const char *stem) {
    static const char *const endings[] = {".manifest", ".digest"};
    const char *name = path + strlen(path);
    while (name > path && name[-1] != '/') name--;
    size_t size = strlen(name);
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
        size_t ending = strlen(endings[i]);
        if (size > ending && memcmp(name + size - ending, endings[i], ending) == 0) size -= ending;
    }
    return fsti_save_is_shard(name, size, stem) || fsti_save_is_single(name, size, stem) ||
           fsti_save_is_index(name, size, stem);
}

/// Whether the single file of one stem is a file of the other's sets.
static bool is_file_of(const char *stem, const char *other) {
    char name[NAME_MAX + sizeof ".safetensors"];
    int size = snprintf(name, sizeof name, "%s.safetensors", stem);
    return size < (int)sizeof name && is_in_set(name, other);
}

/// Whether two names in one folder may be of one file.
static bool may_meet(const place_name *one, const place_name *other) {
    if (one->path != NULL && other->path != NULL)
        return strcmp(fsti_path_name(one->path), fsti_path_name(other->path)) == 0 ||
               fsti_location_is_same(one->path, other->path);
    if (one->path == NULL && other->path == NULL)
        return one->stem == NULL || other->stem == NULL || strcmp(one->stem, other->stem) == 0 ||
               is_file_of(one->stem, other->stem) || is_file_of(other->stem, one->stem);
    const place_name *file = one->path != NULL ? one : other, *set = file == one ? other : one;
    return set->stem == NULL || is_in_set(file->path, set->stem);
}

static bool are_same_name(const place_name *one, const place_name *other) {
    return are_same_folder(one, other) && may_meet(one, other);
}

static bool have_same_name(const save_place *one, const save_place *other, bool of_models) {
    size_t followed = other->is_link && one->link != NULL; // the first name is the link's
    for (size_t i = followed; i < one->count; i++)
        for (size_t j = 0; j < other->count; j++) {
            const place_name *first = &one->names[i], *second = &other->names[j];
            bool are_manifests = first->is_manifest && second->is_manifest;
            bool are_removed = first->is_removed && second->is_removed;
            if (are_removed || (of_models && are_manifests)) continue;
            if (are_same_name(first, second)) return true;
        }
    return false;
}

bool fsti_async_are_same_place(const save_place *one, const save_place *other) {
    return have_same_name(one, other, false);
}

bool fsti_async_are_same_model(const save_place *one, const save_place *other) {
    return have_same_name(one, other, true);
}

static void clear_name(place_name *name) {
    fsti_free(name->folder);
    fsti_free(name->path);
    fsti_free(name->stem);
}

void fsti_async_forget_link(save_place *place) {
    clear_name(&place->names[0]);
    memmove(place->names, place->names + 1, (place->count - 1) * sizeof *place->names);
    place->count--;
    place->link = NULL;
}

void fsti_async_clear_place(save_place *place) {
    fsti_free(place->path);
    for (size_t i = 0; i < place->count; i++) clear_name(&place->names[i]);
}
