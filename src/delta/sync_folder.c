// SPDX-License-Identifier: Apache-2.0
/// Manages the lock, the version note and the paths of a checkpoint's .weight_sync folder.
#include "sync_folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "output/output.h"

#define NANOSECONDS 1000000000ull

fst_status fsti_sync_paths(const char *checkpoint, sync_folder *out, fst_error *error) {
    struct stat info;
    *out = (sync_folder){.checkpoint = checkpoint, .lock = -1};
    FST_TRY(fsti_location_require_file(
        checkpoint, "only a checkpoint in a local folder can be changed by a delta", error));
    if (stat(checkpoint, &info) != 0)
        return fsti_error_errno(error, errno, checkpoint, "looking for the checkpoint");
    if (!S_ISDIR(info.st_mode)) {
        fsti_error_location place = {.file = checkpoint, .byte_offset = FST_NO_OFFSET};
        return fsti_error_set(error, FST_E_ARGUMENT, place,
                              "a delta is applied to a checkpoint's folder, not to a file");
    }
    out->folder = fsti_location_join(checkpoint, "/.weight_sync");
    if (out->folder == NULL) return fsti_error_memory(error, strlen(checkpoint));
    out->state_path = fsti_location_join(out->folder, "/state.json");
    out->journal_path = fsti_location_join(out->folder, "/journal");
    out->undo_path = fsti_location_join(out->folder, "/undo");
    out->renames_path = fsti_location_join(out->folder, "/renames");
    out->copies_path = fsti_location_join(out->folder, "/copies");
    if (out->state_path == NULL || out->journal_path == NULL || out->undo_path == NULL ||
        out->renames_path == NULL || out->copies_path == NULL)
        return fsti_error_memory(error, strlen(checkpoint));
    if (lstat(out->folder, &info) != 0 || !S_ISLNK(info.st_mode)) return FST_OK;
    fsti_error_location place = {.file = out->folder, .byte_offset = FST_NO_OFFSET};
    return fsti_error_set(error, FST_E_UNSUPPORTED, place,
                          "it is a symbolic link, and its files would be another folder's; "
                          "remove the link");
}

/// Opens and locks the lock file. `may_create`: it is made if it is absent; else *lock is -1 then.
static fst_status open_lock(const char *path, bool may_create, int *lock, fst_error *error) {
    fsti_error_location place = {.file = path, .byte_offset = FST_NO_OFFSET};
    int flags = may_create ? O_RDWR | O_CREAT : O_RDONLY;
    struct stat info;
    // Without O_NONBLOCK a FIFO would wait for a writer.
    int fd = fsti_lockable_open(path, flags | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0 && errno == ENOENT && !may_create) return FST_OK;
    if (fd < 0) return fsti_error_errno(error, errno, path, "opening the lock");
    fst_status status = FST_OK;
    int failure = 0;
    if (fstat(fd, &info) != 0)
        status = fsti_error_errno(error, errno, path, "opening the lock");
    else if (!S_ISREG(info.st_mode))
        status = fsti_error_set(error, FST_E_NOT_REGULAR, place, "not a regular file");
    else if ((failure = fsti_lockable_lock(fd)) == EWOULDBLOCK)
        status = fsti_error_set(error, FST_E_TIMEOUT, place,
                                "another process is updating or reading this checkpoint; try "
                                "again when it has finished");
    else if (failure != 0)
        status = fsti_error_errno(error, failure, path, "locking");
    if (status == FST_OK)
        *lock = fd;
    else
        fsti_lockable_close(fd);
    return status;
}

static fst_status open_sync(const char *checkpoint, bool may_create, sync_folder *out,
                            fst_error *error) {
    FST_TRY(fsti_sync_paths(checkpoint, out, error));
    if (may_create && mkdir(out->folder, 0777) != 0 && errno != EEXIST)
        return fsti_error_errno(error, errno, out->folder, "making the folder");
    char *path = fsti_location_join(out->folder, "/lock");
    if (path == NULL) return fsti_error_memory(error, strlen(out->folder));
    fst_status status = open_lock(path, may_create, &out->lock, error);
    fsti_free(path);
    return status;
}

fst_status fsti_sync_open(const char *checkpoint, sync_folder *out, fst_error *error) {
    return open_sync(checkpoint, true, out, error);
}

fst_status fsti_sync_open_to_check(const char *checkpoint, sync_folder *out, fst_error *error) {
    return open_sync(checkpoint, false, out, error);
}

void fsti_sync_close(sync_folder *sync) {
    if (sync->lock >= 0) fsti_lockable_close(sync->lock);
    fsti_free(sync->folder);
    fsti_free(sync->state_path);
    fsti_free(sync->journal_path);
    fsti_free(sync->undo_path);
    fsti_free(sync->renames_path);
    fsti_free(sync->copies_path);
    *sync = (sync_folder){.lock = -1};
}

fst_status fsti_sync_read_note(const char *path, fsti_delta_state *out, fst_error *error) {
    char *bytes;
    size_t size;
    *out = (fsti_delta_state){0};
    FST_TRY(fsti_model_read_text(path, &bytes, &size, error));
    return fsti_delta_state_parse(bytes, size, path, out, error);
}

fst_status fsti_sync_read_state(const sync_folder *sync, fsti_delta_state *out, fst_error *error) {
    fst_error own;
    *out = (fsti_delta_state){0};
    if (access(sync->state_path, F_OK) != 0 && errno == ENOENT) return FST_OK;
    fst_status status = fsti_sync_read_note(sync->state_path, out, &own);
    // An update by another process has removed it meanwhile.
    if (status == FST_E_NOT_FOUND) return FST_OK;
    if (status != FST_OK && error != NULL) *error = own;
    return status;
}

static char *join_file(const sync_folder *sync, const char *name) {
    char *start = fsti_location_join(sync->checkpoint, "/");
    char *path = start == NULL ? NULL : fsti_location_join(start, name);
    fsti_free(start);
    return path;
}

uint64_t fsti_sync_modified_ns(const struct stat *info) {
    return (uint64_t)info->st_mtim.tv_sec * NANOSECONDS + (uint64_t)info->st_mtim.tv_nsec;
}

const char *fsti_sync_name(const sync_folder *sync, const char *path) {
    size_t size = strlen(sync->checkpoint);
    if (strncmp(path, sync->checkpoint, size) != 0) return fsti_path_name(path);
    path += size;
    while (path[0] == '/') path++;
    return path;
}

bool fsti_sync_is_same(const char *path, const fsti_delta_stamp *stamp) {
    struct stat info;
    return stat(path, &info) == 0 && (uint64_t)info.st_size == stamp->size_bytes &&
           fsti_sync_modified_ns(&info) == stamp->modified_ns;
}

fst_status fsti_sync_stamp(const char *path, fsti_delta_stamp *out, fst_error *error) {
    struct stat info;
    if (stat(path, &info) != 0) return fsti_error_errno(error, errno, path, "looking at it");
    out->size_bytes = (uint64_t)info.st_size;
    out->modified_ns = fsti_sync_modified_ns(&info);
    return FST_OK;
}

fst_status fsti_sync_check_files(const sync_folder *sync, const fsti_delta_state *state,
                                 fst_error *error) {
    for (size_t i = 0; i < state->file_count; i++) {
        const fsti_delta_stamp *stamp = &state->files[i];
        char *path = join_file(sync, stamp->name);
        if (path == NULL) return fsti_error_memory(error, 64);
        fst_status status = FST_OK;
        if (!fsti_sync_is_same(path, stamp)) {
            fsti_error_location place = {.file = path, .byte_offset = FST_NO_OFFSET};
            status = fsti_error_set(
                error, FST_E_FILE_CHANGED, place,
                "the file changed since version %s was applied: it was saved again, or copied "
                "without its times, which cp -a and rsync -t keep. Copy the checkpoint again, or "
                "delete .weight_sync/state.json if the file is known to be that version",
                state->version);
        }
        fsti_free(path);
        FST_TRY(status);
    }
    return FST_OK;
}

fst_status fsti_sync_expect(const char *checkpoint, const char *version, fst_error *error) {
    sync_folder sync;
    path_kind kind;
    fsti_delta_state state = {0};
    fsti_error_location place = {.file = checkpoint, .byte_offset = FST_NO_OFFSET};
    if (fsti_location_looks_like_url(checkpoint)) return FST_OK;
    FST_TRY(fsti_model_path_kind(checkpoint, &kind, error));
    if (kind != PATH_IS_FOLDER) return FST_OK;
    fst_status status = fsti_sync_paths(checkpoint, &sync, error);
    if (status == FST_OK &&
        (access(sync.journal_path, F_OK) == 0 || access(sync.renames_path, F_OK) == 0))
        status = fsti_error_set(error, FST_E_VERSION, place,
                                "an update by a delta was interrupted, so the files are of "
                                "two versions; run 'fastsafetensors delta recover' first");
    if (status == FST_OK && version != NULL) status = fsti_sync_read_state(&sync, &state, error);
    if (status == FST_OK && state.version != NULL &&
        fsti_version_compare(state.version, version) != FSTI_VERSION_SAME)
        status =
            fsti_error_set(error, FST_E_VERSION, place,
                           "the checkpoint has version %s according to its version note, not %s",
                           state.version, version);
    fsti_delta_state_clear(&state);
    fsti_sync_close(&sync);
    return status;
}

/// The lock is held, so no other process uses the temporary name.
fst_status fsti_sync_replace(const sync_folder *sync, const char *path, fsti_octets text,
                             bool durable, fst_error *error) {
    char *fresh = fsti_location_join(path, ".tmp");
    if (fresh == NULL) return fsti_error_memory(error, strlen(path));
    (void)unlink(fresh);
    int fd = open(fresh, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
    fst_status status = fd < 0 ? fsti_error_errno(error, errno, fresh, "making the file") : FST_OK;
    int failure = status == FST_OK ? fsti_write_at(fd, text.bytes, text.size, 0) : 0;
    if (failure != 0) status = fsti_error_errno(error, failure, fresh, "writing");
    if (status == FST_OK && durable && fd >= 0 && fsync(fd) != 0)
        status = fsti_error_errno(error, errno, fresh, "writing to the device");
    if (fd >= 0 && close(fd) != 0 && status == FST_OK)
        status = fsti_error_errno(error, errno, fresh, "closing");
    if (status == FST_OK && rename(fresh, path) != 0)
        status = fsti_error_errno(error, errno, path, "renaming");
    if (status != FST_OK && fd >= 0) (void)unlink(fresh);
    fsti_free(fresh);
    if (status == FST_OK && durable) status = fsti_folder_sync(sync->folder, error);
    return status;
}

/// The stamp of the file that was opened. Where another program replaced it, the path names a file
/// with another stamp, and the note does not vouch for that one.
static fst_status stamp_opened(const fsti_file *file, fsti_delta_stamp *out, fst_error *error) {
    struct stat info;
    if (fstat(fsti_file_identity(file), &info) != 0)
        return fsti_error_errno(error, errno, fsti_file_path(file), "examining the file");
    out->size_bytes = (uint64_t)info.st_size;
    out->modified_ns = fsti_sync_modified_ns(&info);
    return FST_OK;
}

fst_status fsti_sync_write_state(const sync_folder *sync, const char *version,
                                 const fst_model *model, bool durable, fst_error *error) {
    fsti_delta_state state = {.version = version, .file_count = model->file_count};
    char *text = NULL;
    size_t size;
    state.files = fsti_alloc_zeroed(model->file_count + 1, sizeof *state.files);
    if (state.files == NULL) return fsti_error_memory(error, model->file_count);
    fst_status status = FST_OK;
    for (size_t i = 0; i < model->file_count && status == FST_OK; i++) {
        const char *path = fsti_file_path(model->files[i].file);
        state.files[i].name = fsti_sync_name(sync, path);
        status = stamp_opened(model->files[i].file, &state.files[i], error);
    }
    if (status == FST_OK) status = fsti_delta_state_write(&state, &text, &size, error);
    if (status == FST_OK)
        status = fsti_sync_replace(sync, sync->state_path,
                                   (fsti_octets){(unsigned char *)text, size}, durable, error);
    fsti_free(text);
    fsti_free(state.files);
    return status;
}

bool fsti_sync_may_exist(const char *path) {
    return access(path, F_OK) == 0 || (errno != ENOENT && errno != ENOTDIR);
}

bool fsti_sync_is_updating(const sync_folder *sync) {
    return fsti_sync_may_exist(sync->journal_path) || fsti_sync_may_exist(sync->renames_path);
}

/// The FNV-1a hash of a version, as _deltas/delta_manifest.py computes it.
static uint64_t hash_version(const char *version) {
    version = fsti_version_plain(version);
    uint64_t hash = 0xcbf29ce484222325u;
    for (; *version != '\0'; version++) hash = (hash ^ (unsigned char)*version) * 0x100000001b3u;
    return hash;
}

fst_status fsti_sync_check_manifest(const sync_folder *sync, const char *version,
                                    fst_error *error) {
    char start[32];
    bool is_waiting = false;
    snprintf(start, sizeof start, "manifest-%016" PRIx64 "-", hash_version(version));
    DIR *folder = opendir(sync->folder);
    int fd = folder == NULL ? -1 : dirfd(folder);
    if (fd < 0) return fsti_error_errno(error, errno, sync->folder, "reading the folder");
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        struct stat info = {0};
        if (strncmp(entry->d_name, start, strlen(start)) == 0 &&
            fstatat(fd, entry->d_name, &info, AT_SYMLINK_NOFOLLOW) == 0)
            is_waiting = is_waiting || S_ISREG(info.st_mode);
    }
    closedir(folder);
    if (!is_waiting) return FST_OK;
    fsti_error_location place = {.file = sync->checkpoint, .byte_offset = FST_NO_OFFSET};
    return fsti_error_set(error, FST_E_VERSION, place,
                          "the files were not compared with the manifest of version %s yet, so no "
                          "other version is applied. Python's deltas.apply() compares them; or "
                          "delete .weight_sync/%s*",
                          version, start);
}

void fsti_sync_add_outcome(const char *outcome, fst_error *error) {
    if (error == NULL) return;
    size_t used = strlen(error->message);
    snprintf(error->message + used, sizeof error->message - used,
             ". The checkpoint %s: apply again, or run 'fastsafetensors delta recover'", outcome);
}

fst_status fsti_sync_remove(const char *path, fst_error *error) {
    if (unlink(path) == 0 || errno == ENOENT) return FST_OK;
    return fsti_error_errno(error, errno, path, "removing");
}
