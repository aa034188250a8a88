// SPDX-License-Identifier: Apache-2.0
/// Verifies a folder against a signed bundle: every listed file, and no other files.
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "differences.h"
#include "file_tree.h"
#include "model/open_model.h"
#include "output/output.h"
#include "folder_check.h"

typedef struct bundle_job {
    const fsti_bundle_paths *paths;
    const char *own_name; ///< the bundle's name in the folder; NULL: it is elsewhere
    signed_bundle signed_by;
    file_tree tree;
    fsti_differences differences;
} bundle_job;

static bool is_name(const char *text, size_t size, const char *name) {
    return strlen(name) == size && memcmp(text, name, size) == 0;
}

/// Ignores names that the bundle excludes, and the bundle itself.
static bool ignores_name(const void *context, const char *name) {
    const bundle_job *job = context;
    const fsti_statement *statement = &job->signed_by.statement;
    if (job->own_name != NULL && strcmp(name, job->own_name) == 0) return true;
    for (size_t i = 0; i < statement->ignored_count; i++)
        if (is_name(statement->ignored[i], statement->ignored_size[i], name)) return true;
    return false;
}

static void compare_listed(bundle_job *job, const fsti_signed_file *listed) {
    tree_file *file = fsti_file_tree_find(&job->tree, listed);
    const char *what = NULL;
    if (file != NULL) file->is_listed = true;
    if (file == NULL)
        what = "signed, but missing";
    else if (file->error.status != FST_OK)
        what = fsti_error_text(&file->error);
    else if (listed->is_listed_otherwise)
        what = "signed with a digest other than sha256, which is not supported";
    else if (memcmp(file->digest, listed->digest, sizeof listed->digest) != 0)
        what = "its bytes differ from the signed ones";
    if (what != NULL)
        fsti_differences_report(&job->differences, listed->name, listed->name_size, what);
}

static void report_others(bundle_job *job) {
    for (size_t i = 0; i < job->tree.count; i++) {
        const tree_file *file = &job->tree.files[i];
        char what[160] = "not signed";
        if (file->is_listed) continue;
        bool is_odd = file->error.status != FST_OK && file->error.file[0] == '\0';
        if (is_odd) snprintf(what, sizeof what, "not signed: %.100s", file->error.message);
        fsti_differences_report(&job->differences, file->name, strlen(file->name), what);
    }
}

static fst_status compare_all(bundle_job *job, fst_error *error) {
    const fsti_statement *statement = &job->signed_by.statement;
    FST_TRY(fsti_file_tree_list(job->paths->folder, ignores_name, job, &job->tree, error));
    FST_TRY(fsti_file_tree_hash(&job->tree, &job->paths->listener.progress, error));
    for (size_t i = 0; i < statement->file_count; i++) compare_listed(job, &statement->files[i]);
    report_others(job);
    return fsti_differences_end(&job->differences, error);
}

fst_status fsti_bundle_check(const fsti_bundle_paths *paths, fst_manifest_stats *stats,
                             fst_error *error) {
    uint64_t start_ns = fsti_now_ns();
    char default_bundle[PATH_MAX], settled[2][PATH_MAX];
    fsti_bundle_paths full = *paths;
    bundle_job job = {.paths = &full, .differences = {.listener = &paths->listener}};
    full.folder = fsti_path_settle(paths->folder, settled[0]);
    snprintf(default_bundle, sizeof default_bundle, "%.4000s/model.sig", full.folder);
    full.bundle = paths->bundle == NULL ? default_bundle
                                        : fsti_path_settle_inside(paths->bundle, paths->folder,
                                                                  full.folder, settled[1]);
    job.own_name = fsti_file_tree_name_inside(full.folder, full.bundle);
    FST_TRY(fsti_signed_bundle_open(full.bundle, full.key, &job.signed_by, error));
    fst_status status = compare_all(&job, error);
    stats->file_count = job.tree.count;
    stats->bytes_read = stats->bytes_hashed = job.tree.bytes_read;
    stats->total_ns = fsti_now_ns() - start_ns;
    fsti_file_tree_clear(&job.tree);
    fsti_signed_bundle_close(&job.signed_by);
    return status;
}
