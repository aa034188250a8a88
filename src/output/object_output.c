// SPDX-License-Identifier: Apache-2.0
/// Objects of stores as outputs: the differences to files.
#include <string.h>

#include "output_private.h"

bool fsti_output_is_object(const fsti_output *output) { return output->upload != NULL; }

bool fsti_output_may_replace(const fsti_output *output) { return output->target.may_replace; }

const fsti_precondition *fsti_output_mark(const fsti_output *output) {
    return fsti_upload_version(output->upload);
}

/// The existing object may be this output, or another save's.
static fst_status keep_unknown_object(const fsti_output *output, fst_error *error) {
    const fsti_target *target = &output->target;
    fsti_error_location where = FSTI_NO_LOCATION;
    where.file = target->path;
    if (target->leads)
        return fsti_error_set(error, FST_E_IO, where, "it is unknown whether this save wrote it");
    fsti_log(FST_LOG_WARNING, "%s: not deleted, because another save may have written it",
             target->path);
    return FST_OK;
}

fst_status fsti_output_displace(fsti_output *output, fst_error *error) {
    const fsti_target *target = &output->target;
    if (output->upload == NULL) return fsti_path_remove(target->path, error);
    bool is_ours = fsti_upload_is_committed(output->upload) == 1;
    fsti_http_watch watch = fsti_http_cleanup_watch(target->watch); // also after a cancellation
    if (is_ours)
        return fsti_store_remove(target->path, fsti_output_mark(output), &watch, NULL, error);
    return target->is_unique ? fsti_store_remove(target->path, NULL, &watch, NULL, error)
                             : keep_unknown_object(output, error);
}

void fsti_output_stop(fsti_output *output) {
    if (output->upload != NULL) fsti_upload_stop(output->upload);
}

void fsti_output_describe(fsti_output *output, char *text, size_t size) {
    text[0] = '\0';
    if (output->upload != NULL) fsti_upload_describe(output->upload, text, size);
}

void fsti_output_observe_parts(fsti_output *output, fsti_output_observer observer, void *context) {
    fsti_upload_observe_parts(output->upload, observer, context);
}

// ---- deleted objects, kept for rollback ----

#define KEPT_BYTES_MAX ((size_t)256 << 20)
/// How often an object that another save writes meanwhile is deleted as well.
#define HIDE_COUNT_MAX 4u

struct fsti_kept_object {
    size_t size;
    char text[];
};

static fst_status copy_kept(const char *text, size_t size, fsti_kept_object **kept,
                            fst_error *error) {
    *kept = fsti_alloc(sizeof **kept + size);
    if (*kept == NULL) return fsti_error_memory(error, size);
    (*kept)->size = size;
    memcpy((*kept)->text, text, size);
    return FST_OK;
}

/// Reads the object to delete into *kept; NULL: it does not exist.
static fst_status fetch_object(const char *address, const char *word, const fsti_http_watch *watch,
                               fsti_kept_object **kept, fsti_precondition *expected,
                               fst_error *error) {
    fsti_fetched found;
    size_t word_size = strlen(word);
    *kept = NULL;
    FST_TRY(fsti_store_fetch(address, watch, KEPT_BYTES_MAX, &found, error));
    fst_status status = FST_OK;
    if (found.is_large)
        fsti_log(FST_LOG_WARNING, "%s is not deleted: it is larger than its name states", address);
    if (found.text != NULL && found.size >= word_size && memcmp(found.text, word, word_size) == 0)
        status = copy_kept(found.text, found.size, kept, error);
    *expected = found.precondition;
    fsti_free(found.text);
    return status;
}

fst_status fsti_object_hide(const char *address, const char *word, const fsti_http_watch *watch,
                            fsti_kept_object **kept, fst_error *error) {
    fsti_error_location where = FSTI_NO_LOCATION;
    where.file = address;
    *kept = NULL;
    for (uint32_t i = 0; i < HIDE_COUNT_MAX; i++) {
        fsti_precondition expected;
        bool is_other = false;
        fsti_object_forget(*kept);
        FST_TRY(fetch_object(address, word, watch, kept, &expected, error));
        if (*kept == NULL) return FST_OK;
        FST_TRY(fsti_store_remove(address, &expected, watch, &is_other, error));
        if (!is_other) return FST_OK;
    }
    fsti_object_forget(*kept);
    *kept = NULL;
    return fsti_error_set(error, FST_E_FILE_CHANGED, where,
                          "another process keeps recreating the object");
}

fst_status fsti_object_restore(const char *address, const fsti_http_watch *watch,
                               const fsti_kept_object *kept, fst_error *error) {
    fsti_upload *upload;
    const fsti_precondition nothing = {.kind = FSTI_PRECONDITION_ABSENT};
    fsti_http_watch last = fsti_http_cleanup_watch(watch);
    FST_TRY(fsti_upload_open(address, kept->size, &last, &nothing, &upload, error));
    fst_status status = fsti_upload_write(upload, kept->text, kept->size, 0, error);
    if (status == FST_OK) status = fsti_upload_commit(upload, false, error);
    fsti_upload_close(upload);
    return status == FST_E_FILE_CHANGED ? FST_OK : status;
}

void fsti_object_forget(fsti_kept_object *kept) { fsti_free(kept); }
