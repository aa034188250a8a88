// SPDX-License-Identifier: Apache-2.0
/// References to asynchronous saves, their places, ownership and cancellation.
#include <limits.h>
#include <string.h>
#include <unistd.h>

#include "async_state.h"

/// Finds where a path leads. `follows`: through a link that it is itself.
static fst_status resolve_place(const fsti_target_kind *kind, const char *path, bool follows,
                                save_place *out, fst_error *error) {
    char resolved[PATH_MAX];
    *out = (save_place){.path = fsti_string_copy(path, strlen(path))};
    if (out->path == NULL) return fsti_error_memory(error, strlen(path));
    if (!kind->resolve(path, follows, resolved)) return FST_OK;
    out->target = fsti_string_copy(resolved, strlen(resolved));
    return out->target == NULL ? fsti_error_memory(error, sizeof resolved) : FST_OK;
}

fst_status fsti_async_find_place(const fst_writer *writer, save_place *out, fst_error *error) {
    const char *path = writer->target.published[0];
    bool follows = writer->target.folder == NULL && writer->options.replace_link == 0;
    fst_status status = resolve_place(writer->target.kind, path, follows, out, error);
    out->is_set = writer->contents.file_count > 1;
    return status;
}

fst_status fsti_async_find_file(const char *path, save_place *out, fst_error *error) {
    const fsti_target_kind *kind =
        fsti_location_is_url(path) ? &fsti_target_objects : &fsti_target_files;
    return resolve_place(kind, path, true, out, error);
}

void fsti_async_clear_place(save_place *place) {
    fsti_free(place->path);
    fsti_free(place->target);
}

/// A loop, because a chain of saves may be longer than a stack is deep.
void fsti_async_unref(fst_async_save *save) {
    while (save != NULL && fsti_refcount_unref(&save->refs)) {
        fst_async_save *previous = save->previous;
        fsti_staging_pool_unref(save->pool);
        pthread_mutex_destroy(&save->lock);
        pthread_cond_destroy(&save->changed);
        fsti_async_clear_place(&save->place);
        fsti_free(save->manifest);
        fsti_free(save);
        save = previous;
    }
}

fst_status fsti_async_check_owner(const fst_async_save *save, fst_error *error) {
    if (save->owner == getpid()) return FST_OK;
    return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
                          "the save was started before fork(): it belongs to the parent");
}

bool fsti_async_is_unheard(const fst_async_save *save) {
    return save->is_ended && save->is_closed && !save->is_told && save->status != FST_OK &&
           save->status != FST_E_CANCELLED;
}

void fsti_async_log_unheard(const fst_async_save *save) {
    fsti_log(FST_LOG_WARNING, "an asynchronous save failed, and its result was never requested: %s",
             save->error.message);
}

fst_async_save *fsti_async_make(const fsti_async_request *request) {
    fst_async_save *save = fsti_alloc_zeroed(1, sizeof *save);
    pthread_condattr_t attributes;
    if (save == NULL) return NULL;
    fsti_refcount_init(&save->refs);
    save->owner = getpid();
    save->start_ns = fsti_now_ns();
    save->options = request->options;
    save->options.save = NULL;
    pthread_mutex_init(&save->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&save->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    return save;
}

void fsti_async_save_cancel(fst_async_save *save) {
    fst_error why;
    if (save->owner != getpid()) return;
    fsti_error_set(&why, FST_E_CANCELLED, FSTI_NO_LOCATION, "cancelled");
    atomic_store(&save->is_cancelled, true);
    pthread_mutex_lock(&save->lock);
    if (!save->is_ending) {
        fsti_snapshot_stop(save->writer->source.snapshot, FST_E_CANCELLED, &why);
        if (save->is_created)
            fsti_writer_cancel(save->writer);
        else
            atomic_store(&save->writer->progress.is_cancelled, true);
    }
    pthread_mutex_unlock(&save->lock);
}
