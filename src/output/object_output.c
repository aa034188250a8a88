// SPDX-License-Identifier: Apache-2.0
/// Objects of stores being made, as files are: what differs is here.
#include <string.h>

#include "output_private.h"

bool fsti_output_is_object(const fsti_output *output) { return output->upload != NULL; }

bool fsti_output_had_object(const fsti_output *output) { return output->target.had_object; }

const fsti_seen *fsti_output_mark(const fsti_output *output) {
    return fsti_upload_mark(output->upload);
}

/// What lies there is this output, or another's.
static fst_status leave(const fsti_output *output, fst_error *error) {
    const fsti_target *target = &output->target;
    fsti_error_place where = FSTI_NOWHERE;
    where.file = target->path;
    if (target->leads)
        return fsti_error_set(error, FST_E_IO, where, "whether it is this save's is not known");
    fsti_log(FST_LOG_WARNING, "%s: if there is one, it stays: it may be another save's",
             target->path);
    return FST_OK;
}

fst_status fsti_output_displace(fsti_output *output, fst_error *error) {
    const fsti_target *target = &output->target;
    if (output->upload == NULL) return fsti_path_remove(target->path, error);
    bool is_ours = fsti_upload_is_committed(output->upload) == 1;
    fsti_net_watch watch = fsti_net_last_watch(target->watch); // also of a save that was ended
    if (is_ours)
        return fsti_net_remove(target->path, fsti_output_mark(output), &watch, NULL, error);
    return target->is_unique ? fsti_net_remove(target->path, NULL, &watch, NULL, error)
                             : leave(output, error);
}

void fsti_output_stop(fsti_output *output) {
    if (output->upload != NULL) fsti_upload_stop(output->upload);
}

void fsti_output_describe(fsti_output *output, char *text, size_t size) {
    text[0] = '\0';
    if (output->upload != NULL) fsti_upload_describe(output->upload, text, size);
}

fst_status fsti_output_refuse_object(const fsti_output *output, fst_error *error) {
    return fsti_address_refuse(
        output->target.path, "an object is sent as it comes, and can't be filled in place", error);
}

void fsti_output_give_parts(fsti_output *output, fsti_output_taker taker, void *context) {
    fsti_upload_give_parts(output->upload, taker, context);
}

// ---- objects that are taken away ----

#define KEPT_BYTES_MAX ((size_t)256 << 20)
/// So often an object that another save puts there meanwhile is taken away as well.
#define HIDE_COUNT_MAX 4u

struct fsti_kept_object {
    size_t size;
    char text[];
};

static fst_status keep(const char *text, size_t size, fsti_kept_object **kept, fst_error *error) {
    *kept = fsti_alloc(sizeof **kept + size);
    if (*kept == NULL) return fsti_error_memory(error, size);
    (*kept)->size = size;
    memcpy((*kept)->text, text, size);
    return FST_OK;
}

/// What is to be taken away, kept in *kept; NULL: there is none.
static fst_status find(const char *address, const char *word, const fsti_net_watch *watch,
                       fsti_kept_object **kept, fsti_seen *seen, fst_error *error) {
    fsti_fetched found;
    size_t word_size = strlen(word);
    *kept = NULL;
    FST_TRY(fsti_net_fetch(address, watch, KEPT_BYTES_MAX, &found, error));
    fst_status status = FST_OK;
    if (found.is_large)
        fsti_log(FST_LOG_WARNING, "%s is left alone: it is too large for what its name says",
                 address);
    if (found.text != NULL && found.size >= word_size && memcmp(found.text, word, word_size) == 0)
        status = keep(found.text, found.size, kept, error);
    *seen = found.seen;
    fsti_free(found.text);
    return status;
}

fst_status fsti_object_hide(const char *address, const char *word, const fsti_net_watch *watch,
                            fsti_kept_object **kept, fst_error *error) {
    fsti_error_place where = FSTI_NOWHERE;
    where.file = address;
    *kept = NULL;
    for (uint32_t i = 0; i < HIDE_COUNT_MAX; i++) {
        fsti_seen seen;
        bool is_other = false;
        fsti_object_forget(*kept);
        FST_TRY(find(address, word, watch, kept, &seen, error));
        if (*kept == NULL) return FST_OK;
        FST_TRY(fsti_net_remove(address, &seen, watch, &is_other, error));
        if (!is_other) return FST_OK;
    }
    fsti_object_forget(*kept);
    *kept = NULL;
    return fsti_error_set(error, FST_E_FILE_CHANGED, where,
                          "others put it there as often as it is taken away");
}

fst_status fsti_object_restore(const char *address, const fsti_net_watch *watch,
                               const fsti_kept_object *kept, fst_error *error) {
    fsti_upload *upload;
    const fsti_seen nothing = {.kind = FSTI_SEEN_NOTHING};
    fsti_net_watch last = fsti_net_last_watch(watch);
    FST_TRY(fsti_upload_open(address, kept->size, &last, &nothing, &upload, error));
    fst_status status = fsti_upload_write(upload, kept->text, kept->size, 0, error);
    if (status == FST_OK) status = fsti_upload_commit(upload, error);
    fsti_upload_close(upload);
    return status == FST_E_FILE_CHANGED ? FST_OK : status;
}

void fsti_object_forget(fsti_kept_object *kept) { fsti_free(kept); }
