// SPDX-License-Identifier: Apache-2.0
/// The version of a checkpoint, read without its lock.
#include <string.h>

#include "delta.h"
#include "sync_folder.h"

/// How often the version is read again while other processes update the folder.
#define VERSION_READS_MAX 50

/// Whether two notes have the same version and the same sizes and times of files.
static bool are_same(const fsti_delta_state *a, const fsti_delta_state *b) {
    if (a->file_count != b->file_count || (a->version == NULL) != (b->version == NULL))
        return false;
    for (size_t i = 0; i < a->file_count; i++)
        if (a->files[i].modified_ns != b->files[i].modified_ns ||
            a->files[i].size_bytes != b->files[i].size_bytes)
            return false;
    return a->version == NULL || strcmp(a->version, b->version) == 0;
}

/// Reads the version without the lock. *is_stable: no update began or ended meanwhile, so that what
/// was read belongs together.
static fst_status read_version(const sync_folder *sync, char *version, int *is_interrupted,
                               bool *is_stable, fst_error *error) {
    fsti_delta_state state = {0}, again = {0};
    version[0] = '\0';
    *is_interrupted = fsti_sync_is_updating(sync);
    fst_status status = fsti_sync_read_state(sync, &state, error);
    // A checkpoint that was saved again has another version than the note says.
    if (status == FST_OK && state.version != NULL && !*is_interrupted)
        status = fsti_sync_check_files(sync, &state, error);
    *is_stable = fsti_sync_is_updating(sync) == (*is_interrupted != 0) &&
                 fsti_sync_read_state(sync, &again, NULL) == FST_OK && are_same(&state, &again);
    if (status == FST_OK && state.version != NULL && !*is_interrupted) {
        strncpy(version, state.version, FST_DELTA_VERSION_BYTES - 1);
        version[FST_DELTA_VERSION_BYTES - 1] = '\0';
    }
    fsti_delta_state_clear(&state);
    fsti_delta_state_clear(&again);
    return status;
}

fst_status fsti_delta_version(const char *checkpoint, char *version, int *is_interrupted,
                              fst_error *error) {
    sync_folder sync;
    version[0] = '\0';
    *is_interrupted = 0;
    fst_status status = fsti_sync_paths(checkpoint, &sync, error);
    bool is_stable = status != FST_OK;
    for (int reads = 0; reads < VERSION_READS_MAX && !is_stable; reads++)
        status = read_version(&sync, version, is_interrupted, &is_stable, error);
    fsti_sync_close(&sync);
    return status;
}
