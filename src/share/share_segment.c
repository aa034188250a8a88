// SPDX-License-Identifier: Apache-2.0
/// Opens, creates and closes segments of shared memory.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "digest/digest.h"
#include "share_private.h"

/// The name of a segment: a digest of its key.
static void make_name(const fsti_share_request *request, char name[SHARE_NAME_BYTES]) {
    unsigned char digest[FSTI_DIGEST_BYTES_MAX];
    fsti_digest_blake3.hash(request->key, request->key_bytes, digest);
    fsti_digest_print(digest, (SHARE_NAME_BYTES - 1) / 2, name);
}

/// Fills batch_at. False if the sizes are too large.
static bool lay_out(fsti_share *share, const fsti_share_request *request, share_header *head) {
    uint64_t states = (uint64_t)request->chunk_count + request->batch_count;
    head->control_bytes = fsti_align_up(SHARE_HEADER_BYTES + states, SHARE_PAGE_BYTES);
    head->chunk_count = request->chunk_count;
    head->batch_count = request->batch_count;
    for (uint32_t i = 0; i < request->batch_count; i++) {
        share->batch_at[i] = head->control_bytes + head->data_bytes;
        if (request->batch_bytes[i] > SHARE_DATA_BYTES_MAX) return false;
        head->data_bytes += fsti_align_up(request->batch_bytes[i], SHARE_PAGE_BYTES);
        if (head->data_bytes > SHARE_DATA_BYTES_MAX) return false;
    }
    share->file_bytes = share->batch_at[request->batch_count] =
        head->control_bytes + head->data_bytes;
    memcpy(head->name, share->name, sizeof head->name);
    snprintf(head->label, sizeof head->label, "%s", request->label);
    fsti_share_header_make(head);
    return request->chunk_count <= SHARE_CHUNK_COUNT_MAX &&
           request->batch_count <= SHARE_CHUNK_COUNT_MAX;
}

/// Whether the file still has memory for the control pages and all reserved batches. A file that
/// was truncated and extended again has holes, which read as zeros.
static bool has_its_memory(const fsti_share *share) {
    uint64_t bytes = share->batch_at[0];
    struct stat stamp;
    for (uint32_t i = 0; i < share->batch_count; i++)
        if (fsti_share_is_reserved(share, i)) bytes += share->batch_at[i + 1] - share->batch_at[i];
    // After the sum, because other processes go on reserving: the file may have more memory than
    // was summed up, but not less.
    return fstat(share->data_fd, &stamp) == 0 && fsti_share_memory_of(&stamp) >= bytes;
}

/// Opens the file of lock_fd a second time, for its memory, and maps the header. The folder is
/// locked, so the name is still that of the file.
static bool map_control(fsti_share *share, uint64_t control_bytes) {
    share->data_fd = fsti_lockable_open_at(share->folder_fd, share->name, O_RDWR | O_NOFOLLOW, 0);
    if (share->data_fd < 0) return false;
    // Touching a page that the full file system has no memory for would raise SIGBUS.
    if (fallocate(share->data_fd, 0, 0, (off_t)control_bytes) != 0) return false;
    void *control =
        mmap(NULL, control_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, share->data_fd, 0);
    share->control = control == MAP_FAILED ? NULL : control;
    return share->control != NULL;
}

/// Closes a file that could not be used or made. Keeps errno.
static void close_file(fsti_share *share) {
    int failure = errno;
    if (share->control != NULL) munmap(share->control, share->batch_at[0]);
    share->control = NULL;
    fsti_lockable_close(share->lock_fd);
    if (share->data_fd >= 0) fsti_lockable_close(share->data_fd);
    share->lock_fd = share->data_fd = -1;
    errno = failure;
}

/// Deletes and closes a file that could not be used or made. Keeps errno.
static void discard_file(fsti_share *share) {
    int failure = errno;
    fsti_share_folder_remove(share->folder_fd, share->name);
    errno = failure;
    close_file(share);
}

/// The result of opening the file with a segment's name.
typedef enum found_file {
    FILE_ABSENT,  ///< no file exists, or a damaged one has been deleted
    FILE_OPEN,    ///< the segment
    FILE_REFUSED, ///< this process cannot use the file, see errno; others may be able to
} found_file;

static bool matches_request(const share_file *file, const share_header *head) {
    return file->is_valid && file->head.control_bytes == head->control_bytes &&
           file->head.data_bytes == head->data_bytes &&
           file->head.chunk_count == head->chunk_count &&
           file->head.batch_count == head->batch_count;
}

static found_file use_file(fsti_share *share, const share_header *head) {
    share_file file;
    if (!fsti_share_file_open(share->folder_fd, share->name, &file))
        return errno == ENOENT ? FILE_ABSENT : FILE_REFUSED;
    // An empty file is left by a process that was killed while it created the segment.
    if (!file.has_magic && file.stamp.st_size != 0) {
        fsti_lockable_close(file.fd);
        errno = EEXIST; // a file of another program
        return FILE_REFUSED;
    }
    share->lock_fd = file.fd;
    bool is_good = matches_request(&file, head);
    if (is_good && (!fsti_share_set_lock(file.fd, F_RDLCK, SHARE_USERS_AT, 1) ||
                    !map_control(share, head->control_bytes))) {
        close_file(share);
        return FILE_REFUSED;
    }
    if (is_good && has_its_memory(share)) return FILE_OPEN;
    discard_file(share);
    return FILE_ABSENT;
}

/// Creates the file with its header. Memory for the data is reserved batch by batch.
static bool make_file(fsti_share *share, const share_header *head) {
    if (share->file_bytes > fsti_file_size_max()) {
        errno = EFBIG;
        return false;
    }
    share->lock_fd = fsti_lockable_open_at(
        share->folder_fd, share->name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW, S_IRUSR | S_IWUSR);
    if (share->lock_fd < 0) return false;
    // The header first, so that the file is known as a segment if this process is killed now.
    if (pwrite(share->lock_fd, head, sizeof *head, 0) == (ssize_t)sizeof *head &&
        ftruncate(share->lock_fd, (off_t)share->file_bytes) == 0 &&
        fsti_share_set_lock(share->lock_fd, F_RDLCK, SHARE_USERS_AT, 1) &&
        map_control(share, head->control_bytes))
        return true;
    discard_file(share);
    return false;
}

/// Opens or creates the file. The folder must be locked.
static bool find_file(fsti_share *share, const share_header *head, uint64_t bytes_max, char *why,
                      size_t why_size) {
    found_file found = use_file(share, head);
    if (found == FILE_REFUSED) {
        snprintf(why, why_size, "the shared segment cannot be used: %s", strerror(errno));
        return false;
    }
    // Also if no space is needed, because this deletes unused segments after their grace period.
    uint64_t bytes = found == FILE_OPEN ? 0 : share->file_bytes;
    bool has_space = fsti_share_make_space(share->folder_fd, bytes, bytes_max);
    if (found == FILE_OPEN) return true;
    if (!has_space) {
        snprintf(why, why_size,
                 "it takes %llu bytes, more than the shared segments' limit of %llu leaves",
                 (unsigned long long)bytes, (unsigned long long)bytes_max);
        return false;
    }
    if (make_file(share, head)) return true;
    snprintf(why, why_size, "no shared segment can be made: %s", strerror(errno));
    return false;
}

static void free_share(fsti_share *share) {
    if (share->control != NULL) munmap(share->control, share->batch_at[0]);
    if (share->shared != NULL) // only in a forked child; the owner has unmapped it
        munmap(share->shared, share->file_bytes - share->batch_at[0]);
    if (share->lock_fd >= 0) fsti_lockable_close(share->lock_fd);
    if (share->data_fd >= 0) fsti_lockable_close(share->data_fd);
    if (share->folder_fd >= 0) fsti_lockable_close(share->folder_fd);
    pthread_mutex_destroy(&share->lock);
    fsti_free(share->batch_at);
    fsti_free(share);
}

static fsti_share *alloc_share(const fsti_share_request *request) {
    fsti_share *share = fsti_alloc_zeroed(1, sizeof *share);
    if (share == NULL) return NULL;
    fsti_refcount_init(&share->refs);
    pthread_mutex_init(&share->lock, NULL);
    share->lock_fd = share->data_fd = share->folder_fd = -1;
    share->owner = getpid();
    share->chunk_count = request->chunk_count;
    share->batch_count = request->batch_count;
    share->batch_at = fsti_alloc_zeroed((size_t)request->batch_count + 1, sizeof *share->batch_at);
    if (share->batch_at != NULL) return share;
    free_share(share);
    return NULL;
}

static void note_use(fsti_share *share) {
    atomic_store(&share->control->used_s, (long long)time(NULL));
    atomic_store(&share->control->grace_s, share->grace_s);
}

/// Opens the file under the folder's lock.
static bool open_locked(fsti_share *share, const fsti_share_request *request,
                        const share_settings *settings, char *why, size_t why_size) {
    share_header head = {.magic = {0}};
    make_name(request, share->name);
    if (!lay_out(share, request, &head)) {
        snprintf(why, why_size, "it is too large for a shared segment");
        return false;
    }
    share->folder_fd = fsti_share_folder_open(settings->folder, true, why, why_size);
    if (share->folder_fd < 0) return false;
    int lock_fd = fsti_share_folder_lock(share->folder_fd, SHARE_LOCK_WAIT_MS);
    if (lock_fd < 0) {
        snprintf(why, why_size, "the folder for shared segments cannot be locked: %s",
                 strerror(errno));
        return false;
    }
    bool is_open = find_file(share, &head, settings->bytes_max, why, why_size);
    if (is_open) note_use(share);
    fsti_share_folder_unlock(lock_fd);
    return is_open;
}

fsti_share *fsti_share_open(const fsti_share_request *request, char *why, size_t why_size) {
    share_settings settings;
    if (!fsti_share_settings(NULL, &settings, why, why_size)) return NULL;
    fsti_share *share = alloc_share(request);
    if (share == NULL) {
        snprintf(why, why_size, "out of memory");
        return NULL;
    }
    share->grace_s = request->grace_s != 0 ? request->grace_s : settings.grace_s;
    if (!open_locked(share, request, &settings, why, why_size)) {
        free_share(share);
        return NULL;
    }
    share->seen_ns = fsti_now_ns();
    fsti_share_list_add(share);
    return share;
}

fsti_share *fsti_share_ref(fsti_share *share) {
    fsti_refcount_ref(&share->refs);
    return share;
}

void fsti_share_unref(fsti_share *share) {
    if (share == NULL || !fsti_refcount_unref(&share->refs)) return;
    if (share->owner == getpid() && share->lock_fd >= 0) {
        fsti_share_end_writes(share);
        fsti_share_list_remove(share);
        fsti_share_leave(share);
    }
    free_share(share);
}
