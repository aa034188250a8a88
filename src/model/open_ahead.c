// SPDX-License-Identifier: Apache-2.0
/// Opens the files of a set at addresses together: each takes a round trip, or two.
#include <string.h>

#include "model.h"
#include "net/net.h"

/// So many are asked at a time, by as many threads that wait.
#define OPENER_COUNT_MAX 16u

typedef struct open_crew {
    fst_model *model;
    const char *const *paths;
    size_t count;
    uint32_t flags;
    atomic_size_t next;
    pthread_mutex_t lock; ///< for what follows
    size_t failed;        ///< the first file in order that could not be opened; `count`: none
    fst_status status;
    fst_error error;
} open_crew;

static void note_failure(open_crew *crew, size_t i, fst_status status, const fst_error *error) {
    pthread_mutex_lock(&crew->lock);
    if (i < crew->failed) {
        crew->failed = i;
        crew->status = status;
        crew->error = *error;
    }
    pthread_mutex_unlock(&crew->lock);
}

/// Whether a file before this one has failed: then this one is of no use.
static bool is_moot(open_crew *crew, size_t i) {
    pthread_mutex_lock(&crew->lock);
    bool moot = i > crew->failed;
    pthread_mutex_unlock(&crew->lock);
    return moot;
}

static void *open_some(void *context) {
    open_crew *crew = context;
    size_t i;
    while ((i = atomic_fetch_add(&crew->next, 1)) < crew->count && !is_moot(crew, i)) {
        fst_error error = {0};
        fst_status status = fsti_model_file_open(crew->model, crew->paths[i], crew->flags,
                                                 &crew->model->files[i], &error);
        if (status != FST_OK) note_failure(crew, i, status, &error);
    }
    return NULL;
}

bool fsti_model_opens_ahead(const char *const *paths, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (!fsti_net_is_url(paths[i])) return false;
    return count > 1;
}

fst_status fsti_model_open_ahead(fst_model *model, const char *const *paths, size_t count,
                                 uint32_t flags, fst_error *error) {
    pthread_t threads[OPENER_COUNT_MAX - 1];
    size_t started = 0, wanted = (size_t)fsti_min(count, OPENER_COUNT_MAX) - 1;
    open_crew crew = {
        .model = model, .paths = paths, .count = count, .flags = flags, .failed = count};
    pthread_mutex_init(&crew.lock, NULL);
    while (started < wanted && fsti_thread_start(&threads[started], open_some, &crew) == 0)
        started++;
    open_some(&crew); // so it goes on where no thread can be had
    for (size_t i = 0; i < started; i++) pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&crew.lock);
    model->file_count = count; // those that were not opened are empty
    if (crew.status != FST_OK && error != NULL) *error = crew.error;
    return crew.status;
}
