// SPDX-License-Identifier: Apache-2.0
/// Makes and checks lists like sha256sum, with all CPUs and the code that signatures use.
#include "sums_files.h"

#include <stdio.h>
#include <string.h>

#include "differences.h"
#include "file_tree.h"
#include "folder_files.h"
#include "manifest_text.h"
#include "model/open_model.h"

#define FOLDER_LIST "SHA256SUMS"
#define FILE_ENDING ".sha256"

// ---- writing ----

/// The default path of a list.
static char *default_target(const folder_files *files) {
    char name[300] = FOLDER_LIST;
    if (files->is_single) snprintf(name, sizeof name, "%.280s" FILE_ENDING, files->names[0]);
    return fsti_folder_join(files, name);
}

static fst_status list_files(const folder_files *files, file_tree *tree, fst_error *error) {
    FST_TRY(fsti_file_tree_begin(files->folder, tree, error));
    for (size_t i = 0; i < files->count; i++)
        FST_TRY(fsti_file_tree_push(tree, files->names[i], error));
    return FST_OK;
}

static fst_status publish_list(const file_tree *tree, folder_check *check, const char *target,
                               fst_error *error) {
    char *text;
    size_t size;
    fsti_signed_file *files;
    FST_TRY(fsti_file_tree_rows(tree, &files, error));
    fst_status status = fsti_sums_write(files, tree->count, &text, &size, error);
    fsti_free(files);
    FST_TRY(status);
    status = fsti_text_publish(target, text, size, fsti_folder_files_check, check, error);
    fsti_free(text);
    return status;
}

fst_status fsti_sums_make(const char *path, const char *target, const fst_manifest_options *options,
                          fst_manifest_stats *stats, fst_error *error) {
    fsti_check_progress progress = {options->progress, options->progress_context};
    uint64_t start_ns = fsti_now_ns();
    folder_files files;
    file_watch watch = {0};
    file_tree tree = {0};
    char *own = NULL;
    fst_status status = fsti_folder_files(path, &files, &watch, error);
    if (status == FST_OK && target == NULL) {
        target = own = default_target(&files);
        if (own == NULL) status = fsti_error_memory(error, strlen(path));
    }
    if (status == FST_OK) fsti_folder_files_omit(&files, target);
    if (status == FST_OK) status = list_files(&files, &tree, error);
    if (status == FST_OK) status = fsti_file_tree_hash(&tree, &progress, error);
    folder_check check = {path, &files, &watch};
    if (status == FST_OK) status = publish_list(&tree, &check, target, error);
    if (status == FST_OK) fsti_manifest_report_path(options, target);
    stats->file_count = tree.count;
    stats->bytes_read = stats->bytes_hashed = tree.bytes_read;
    stats->total_ns = fsti_now_ns() - start_ns;
    fsti_free(own);
    fsti_file_tree_clear(&tree);
    fsti_file_watch_clear(&watch);
    fsti_folder_files_clear(&files);
    return status;
}

// ---- checking ----

bool fsti_sums_is_list(const char *path) {
    char *bytes;
    size_t size;
    if (fsti_model_read_text(path, &bytes, &size, NULL) != FST_OK) return false;
    bool is_list = fsti_sums_peek(bytes, size);
    fsti_free(bytes);
    return is_list;
}

static fst_status read_list(const char *path, fsti_sums *out, fst_error *error) {
    char *bytes;
    size_t size;
    FST_TRY(fsti_model_read_text(path, &bytes, &size, error));
    return fsti_sums_parse(bytes, size, path, out, error);
}

/// The listed files, sorted by name, with their expected digests.
static fst_status list_known(const char *path, const fsti_sums *sums, file_tree *tree,
                             fst_error *error) {
    char *folder;
    FST_TRY(fsti_model_folder(path, &folder, error));
    fst_status status = fsti_file_tree_begin(folder, tree, error);
    fsti_free(folder);
    for (size_t i = 0; i < sums->file_count && status == FST_OK; i++) {
        status = fsti_file_tree_push(tree, sums->files[i].name, error);
        if (status == FST_OK) tree->files[i].known = &sums->files[i];
    }
    if (status == FST_OK) fsti_file_tree_sort(tree);
    return status;
}

static void compare_file(fsti_differences *differences, const tree_file *file) {
    const char *what = NULL;
    if (file->error.status != FST_OK)
        what = fsti_error_text(&file->error);
    else if (memcmp(file->digest, file->known->digest, sizeof file->digest) != 0)
        what = "its SHA-256 differs from the listed one";
    if (what != NULL) fsti_differences_report(differences, file->name, strlen(file->name), what);
}

/// Reports model files at the path that the list does not contain.
static fst_status report_unlisted(fsti_differences *differences, const char *path,
                                  const file_tree *tree, fst_error *error) {
    folder_files there;
    fst_status status = fsti_folder_models(path, &there, error);
    for (size_t i = 0; i < there.count && status == FST_OK; i++) {
        const char *name = there.names[i];
        fsti_signed_file wanted = {.name = name, .name_size = strlen(name)};
        bool is_model = fsti_name_leads_to_model(name) || there.is_single;
        if (is_model && fsti_file_tree_find(tree, &wanted) == NULL)
            fsti_differences_report(differences, name, strlen(name), "not listed");
    }
    fsti_folder_files_clear(&there);
    return status;
}

static fst_status check_tree(const char *path, fsti_differences *differences, file_tree *tree,
                             fst_error *error) {
    FST_TRY(fsti_file_tree_hash(tree, &differences->listener->progress, error));
    for (size_t i = 0; i < tree->count; i++) compare_file(differences, &tree->files[i]);
    FST_TRY(report_unlisted(differences, path, tree, error));
    return fsti_differences_end(differences, error);
}

fst_status fsti_sums_check(const char *path, const char *list_path,
                           const fsti_check_listener *listener, fst_manifest_stats *stats,
                           fst_error *error) {
    uint64_t start_ns = fsti_now_ns();
    fsti_differences differences = {.listener = listener};
    fsti_sums sums;
    file_tree tree = {0};
    FST_TRY(read_list(list_path, &sums, error));
    fst_status status = list_known(path, &sums, &tree, error);
    if (status == FST_OK) status = check_tree(path, &differences, &tree, error);
    stats->file_count = tree.count;
    stats->bytes_read = stats->bytes_hashed = tree.bytes_read;
    stats->total_ns = fsti_now_ns() - start_ns;
    fsti_file_tree_clear(&tree);
    fsti_sums_clear(&sums);
    return status;
}
