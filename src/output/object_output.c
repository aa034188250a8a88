// SPDX-License-Identifier: Apache-2.0
/// Objects of stores being made, as files are: what differs is here.
#include <string.h>

#include "output_private.h"

bool fsti_output_is_object(const fsti_output *output) { return output->upload != NULL; }

bool fsti_output_had_object(const fsti_output *output) { return output->target.had_object; }

const fsti_seen *fsti_output_mark(const fsti_output *output) {
    return fsti_upload_mark(output->upload);
}

fst_status fsti_output_displace(fsti_output *output, fst_error *error) {
    const char *path = output->target.path;
    return output->upload == NULL ? fsti_path_remove(path, error)
                                  : fsti_net_remove(path, fsti_output_mark(output), error);
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

#define KEPT_BYTES_MAX ((size_t)64 << 20)

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

fst_status fsti_object_hide(const char *address, const char *word, const fsti_net_watch *watch,
                            fsti_kept_object **kept, fst_error *error) {
    fsti_fetched found;
    size_t word_size = strlen(word);
    *kept = NULL;
    FST_TRY(fsti_net_fetch(address, watch, KEPT_BYTES_MAX, &found, error));
    fst_status status = FST_OK;
    if (found.text != NULL && found.size >= word_size && memcmp(found.text, word, word_size) == 0)
        status = keep(found.text, found.size, kept, error);
    fsti_free(found.text);
    if (status != FST_OK || *kept == NULL) return status;
    return fsti_net_remove(address, &found.seen, error);
}

fst_status fsti_object_restore(const char *address, const fsti_kept_object *kept,
                               fst_error *error) {
    fsti_upload *upload;
    const fsti_seen nothing = {.kind = FSTI_SEEN_NOTHING};
    FST_TRY(fsti_upload_open(address, kept->size, NULL, &nothing, &upload, error));
    fst_status status = fsti_upload_write(upload, kept->text, kept->size, 0, error);
    if (status == FST_OK) status = fsti_upload_commit(upload, error);
    fsti_upload_close(upload);
    return status == FST_E_FILE_CHANGED ? FST_OK : status;
}

void fsti_object_forget(fsti_kept_object *kept) { fsti_free(kept); }
