// SPDX-License-Identifier: Apache-2.0
/// Signs a folder according to OpenSSF model signing.
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "file_tree.h"
#include "file_watch.h"
#include "manifest_text.h"
#include "model/open_model.h"
#include "output/output.h"
#include "folder_check.h"

/// Names that model_signing ignores as well.
static const char *const ignored_names[] = {".git", ".gitattributes", ".github", ".gitignore"};
#define IGNORED_COUNT (sizeof ignored_names / sizeof *ignored_names)

static bool ignores_name(const void *context, const char *name) {
    for (size_t i = 0; i < IGNORED_COUNT; i++)
        if (strcmp(name, ignored_names[i]) == 0) return true;
    return context != NULL && strcmp(name, context) == 0;
}

static fst_status read_private_key(const char *path, fsti_key **out, fst_error *error) {
    char *text;
    size_t size;
    FST_TRY(fsti_model_read_text(path, &text, &size, error));
    fst_status status = fsti_key_read(text, path, true, out, error);
    memset(text, 0, size);
    fsti_free(text);
    return status;
}

/// The subject's name, which is the folder's, without bytes that are not UTF-8 and what follows.
static const char *subject_of(const char *folder, char *text, size_t size) {
    char real[PATH_MAX];
    const char *path = realpath(folder, real) == NULL ? folder : real;
    const char *slash = strrchr(path, '/');
    snprintf(text, size, "%.250s", slash == NULL || slash[1] == '\0' ? path : slash + 1);
    size_t fault_at;
    if (!fsti_utf8_valid((const unsigned char *)text, strlen(text), &fault_at))
        snprintf(text + fault_at, size - fault_at, "%s", fault_at == 0 ? "model" : "");
    return text;
}

/// Signs the statement and wraps it in an envelope.
static fst_status make_bundle(const fsti_statement_draft *draft, const fsti_key *key,
                              fsti_octets *out, fst_error *error) {
    char *payload = NULL, hint[FSTI_KEY_HINT_BYTES];
    size_t payload_size = 0, size;
    fsti_octets signature = {NULL, 0};
    FST_TRY(fsti_key_hint(key, hint, error));
    FST_TRY(fsti_statement_write(draft, &payload, &payload_size, error));
    char *text = fsti_bundle_signed_text(payload, payload_size, &size);
    fst_status status = text == NULL ? fsti_error_memory(error, payload_size)
                                     : fsti_key_sign(key, text, size, &signature, error);
    fsti_free(text);
    if (status == FST_OK) {
        status = fsti_bundle_write(payload, payload_size, hint, &signature, out, error);
        fsti_free(signature.bytes);
    }
    fsti_free(payload);
    return status;
}

static fst_status sign_tree(const file_tree *tree, const fsti_bundle_paths *paths,
                            const fsti_key *key, const char *target, fst_error *error) {
    char subject[256];
    fsti_signed_file *files = NULL;
    fsti_octets bundle = {NULL, 0};
    FST_TRY(fsti_file_tree_rows(tree, &files, error));
    fsti_statement_draft draft = {.subject = subject_of(paths->folder, subject, sizeof subject),
                                  .files = files,
                                  .file_count = tree->count,
                                  .allows_links = tree->has_links,
                                  .ignored = ignored_names,
                                  .ignored_count = IGNORED_COUNT};
    fst_status status = make_bundle(&draft, key, &bundle, error);
    fsti_free(files);
    FST_TRY(status);
    status = fsti_text_publish(target, (char *)bundle.bytes, bundle.size, NULL, NULL, error);
    fsti_free(bundle.bytes);
    return status;
}

/// Digests the files. Digests of an older bundle, if it was signed with this key, are reused for
/// files that have not changed since.
static fst_status hash_tree(file_tree *tree, const fsti_bundle_paths *paths, const fsti_key *key,
                            fst_error *error) {
    signed_bundle old;
    const fsti_check_progress *progress = &paths->listener.progress;
    if (paths->keep == NULL) return fsti_file_tree_hash(tree, progress, error);
    FST_TRY(fsti_signed_bundle_read(paths->keep, key, &old, error));
    for (size_t i = 0; i < old.statement.file_count; i++) {
        tree_file *file = fsti_file_tree_find(tree, &old.statement.files[i]);
        if (file != NULL) file->known = &old.statement.files[i];
    }
    fst_status status = fsti_file_tree_hash(tree, progress, error);
    fsti_signed_bundle_close(&old);
    return status;
}

static fst_status check_names(const file_tree *tree, fst_error *error) {
    for (size_t i = 0; i < tree->count; i++) {
        char path[PATH_MAX];
        snprintf(path, sizeof path, "%s%s", tree->folder, tree->files[i].name);
        FST_TRY(fsti_utf8_require_name(tree->files[i].name, path, error));
    }
    return FST_OK;
}

/// A folder that a save is writing to would be signed with files that vanish.
static fst_status check_no_save(const file_tree *tree, fst_error *error) {
    for (size_t i = 0; i < tree->count; i++) {
        const char *slash = strrchr(tree->files[i].name, '/');
        if (!fsti_hidden_is(slash == NULL ? tree->files[i].name : slash + 1)) continue;
        fsti_error_location location = {.file = tree->files[i].name, .byte_offset = FST_NO_OFFSET};
        return fsti_error_set(error, FST_E_FILE_CHANGED, location,
                              "a save is running or was killed. Wait for it, or delete the file by "
                              "`fastsafetensors clean`");
    }
    return FST_OK;
}

static fst_status check_folder(const char *folder, fst_error *error) {
    fsti_error_location location = {.file = folder, .byte_offset = FST_NO_OFFSET};
    path_kind kind;
    FST_TRY(fsti_model_path_kind(folder, &kind, error));
    if (kind == PATH_IS_FOLDER) return FST_OK;
    if (kind == PATH_IS_ABSENT)
        return fsti_error_errno(error, ENOENT, folder, "opening the folder");
    return fsti_error_set(error, FST_E_ARGUMENT, location,
                          "not a folder. All files of a folder are signed together");
}

/// Lists the files that are to be signed. *watch: NULL, or to notice later changes.
static fst_status list_tree(const char *folder, const char *target, file_tree *tree,
                            file_watch *watch, fst_error *error) {
    fsti_error_location location = {.file = folder, .byte_offset = FST_NO_OFFSET};
    FST_TRY(check_folder(folder, error));
    FST_TRY(fsti_file_tree_list(folder, ignores_name, fsti_file_tree_name_inside(folder, target),
                                tree, error));
    if (tree->count == 0)
        return fsti_error_set(error, FST_E_ARGUMENT, location, "the folder has no file to sign");
    for (size_t i = 0; watch != NULL && i < tree->count; i++)
        FST_TRY(fsti_file_watch_add(watch, tree->folder, tree->files[i].name, error));
    return check_no_save(tree, error);
}

/// Whether the digests are those of one state of the folder.
static fst_status check_tree(const char *folder, const char *target, const file_watch *watch,
                             fst_error *error) {
    file_tree again = {0};
    fst_status status = list_tree(folder, target, &again, NULL, error);
    fsti_file_tree_clear(&again);
    return status == FST_OK ? fsti_file_watch_check(watch, NULL, error) : status;
}

static uint64_t count_kept(const file_tree *tree) {
    uint64_t count = 0;
    for (size_t i = 0; i < tree->count; i++) count += tree->files[i].is_kept;
    return count;
}

fst_status fsti_bundle_sign(const fsti_bundle_paths *paths, fst_manifest_stats *stats,
                            fst_error *error) {
    char target[PATH_MAX], settled[2][PATH_MAX];
    uint64_t start_ns = fsti_now_ns();
    fsti_bundle_paths full = *paths;
    full.folder = fsti_path_settle(paths->folder, settled[0]);
    if (paths->bundle != NULL)
        full.bundle =
            fsti_path_settle_inside(paths->bundle, paths->folder, full.folder, settled[1]);
    paths = &full;
    file_tree tree = {0};
    file_watch watch = {0};
    fsti_key *key;
    int size = paths->bundle == NULL
                   ? snprintf(target, sizeof target, "%s/model.sig", paths->folder)
                   : snprintf(target, sizeof target, "%s", paths->bundle);
    if (size < 0 || (size_t)size >= sizeof target)
        return fsti_error_errno(error, ENAMETOOLONG, paths->folder, "writing the signature");
    FST_TRY(fsti_text_check_target(target, paths->key, error));
    FST_TRY(read_private_key(paths->key, &key, error));
    fst_status status = list_tree(paths->folder, target, &tree, &watch, error);
    if (status == FST_OK) status = check_names(&tree, error);
    if (status == FST_OK) status = hash_tree(&tree, paths, key, error);
    if (status == FST_OK) status = check_tree(paths->folder, target, &watch, error);
    if (status == FST_OK) status = sign_tree(&tree, paths, key, target, error);
    stats->file_count = tree.count;
    stats->files_kept = count_kept(&tree);
    stats->bytes_read = stats->bytes_hashed = tree.bytes_read;
    stats->total_ns = fsti_now_ns() - start_ns;
    fsti_key_free(key);
    fsti_file_watch_clear(&watch);
    fsti_file_tree_clear(&tree);
    return status;
}
