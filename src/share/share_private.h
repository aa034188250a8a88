// SPDX-License-Identifier: Apache-2.0
/// Private to the share module.
#ifndef FSTI_SHARE_PRIVATE_H
#define FSTI_SHARE_PRIVATE_H

#include <sys/stat.h>
#include <sys/types.h>

#include "share.h"

#define SHARE_PATH_BYTES 4096u
#define SHARE_NAME_BYTES 33u ///< 32 hexadecimal digits and a NUL
#define SHARE_LABEL_BYTES 512u
#define SHARE_HEADER_BYTES ((uint64_t)4096)
#define SHARE_PAGE_BYTES ((uint64_t)4096)
/// A segment has at most this many bytes of data and this many chunks and batches.
#define SHARE_DATA_BYTES_MAX ((uint64_t)1 << 50)
#define SHARE_CHUNK_COUNT_MAX ((uint32_t)1 << 22)

/// Locks are on bytes beyond every file. A process that uses a segment holds a read lock on
/// SHARE_USERS_AT; the owner of a chunk has a write lock on SHARE_CLAIMS_AT + chunk.
#define SHARE_USERS_AT ((off_t)1 << 60)
#define SHARE_CLAIMS_AT ((off_t)1 << 61)

/// The first bytes of a segment. The fields up to `check` never change.
typedef struct share_header {
    char magic[16];
    uint64_t control_bytes; ///< header and states: the data begins here
    uint64_t data_bytes;
    uint32_t chunk_count, batch_count;
    char name[SHARE_NAME_BYTES];
    char label[SHARE_LABEL_BYTES];
    uint64_t check; ///< XXH3 of the fields before it
    // changed by all users:
    atomic_uint is_pinned;
    atomic_uint grace_s;
    atomic_llong used_s;
    atomic_ullong progress; ///< finished chunks
    // then, at SHARE_HEADER_BYTES: a byte per chunk and one per batch; 1: done, and reserved
} share_header;
_Static_assert(sizeof(share_header) <= SHARE_HEADER_BYTES, "the header fits in its page");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2 &&
                   ATOMIC_CHAR_LOCK_FREE == 2,
               "atomics work between processes");

struct fsti_share {
    fsti_refcount refs;
    // Descriptors of fsti_lockable_open_at(), -1 in a forked child. A mapping keeps its open file,
    // and the locks of that, alive in a child, so locks are on an open file that is never mapped.
    int lock_fd, data_fd;
    int folder_fd;
    pid_t owner; ///< the process that opened it
    share_header *control;
    uint64_t file_bytes;
    // Copies: another process could change the header.
    uint32_t chunk_count, batch_count;
    uint64_t *batch_at; ///< offsets of the batches in the file, and of the end
    char name[SHARE_NAME_BYTES];
    uint32_t grace_s;
    pthread_mutex_t lock;            ///< protects the mapping and the stall clock
    char *shared;                    ///< mapping of all data, or NULL
    uint64_t seen_progress, seen_ns; ///< the last change of control->progress
    fsti_share *next;                ///< in the list of this process
};

static inline atomic_uchar *share_chunk_state(const fsti_share *share, uint32_t chunk) {
    return (atomic_uchar *)((char *)share->control + SHARE_HEADER_BYTES) + chunk;
}
static inline atomic_uchar *share_batch_state(const fsti_share *share, uint32_t batch) {
    return share_chunk_state(share, share->chunk_count) + batch;
}

// ---- settings (share_settings.c) ----

typedef struct share_settings {
    char folder[SHARE_PATH_BYTES];
    uint32_t grace_s;
    uint64_t bytes_max; ///< of all segments together
} share_settings;
/// `folder`: NULL for the configured one. False, with the reason in `why`, if a setting is invalid.
bool fsti_share_settings(const char *folder, share_settings *out, char *why, size_t why_size);

// ---- the folder (share_folder.c) ----

/// Opens the folder, and creates it if `is_wanted`. Returns -1, with errno and the reason in `why`,
/// if it does not exist or other users can access it.
int fsti_share_folder_open(const char *given, bool is_wanted, char *why, size_t why_size);
/// How long a load waits for other processes that have locked the folder: they list it and make
/// small files.
#define SHARE_LOCK_WAIT_MS 5000u
/// Locks the folder against other processes and loads. Returns the lock's descriptor for
/// fsti_share_folder_unlock(), or -1 with errno: EAGAIN after `wait_ms`.
int fsti_share_folder_lock(int folder_fd, unsigned wait_ms);
void fsti_share_folder_unlock(int lock_fd);

/// A segment's file in the folder, which is locked.
typedef struct share_file {
    char name[SHARE_NAME_BYTES];
    int fd; ///< of fsti_lockable_open_at()
    struct stat stamp;
    share_header head;   ///< a copy
    bool has_magic;      ///< a segment, maybe a damaged one; other files are left alone
    bool is_valid;       ///< the header is valid
    bool in_use;         ///< a process uses it
    uint64_t done_count; ///< chunks; counted only by fsti_share_visit()
} share_file;
typedef void (*share_file_visitor)(void *context, const share_file *file);
/// Calls `visit` for each segment. Other files, and those that cannot be opened, are skipped.
/// Returns 0 or an errno.
int fsti_share_folder_visit(int folder_fd, share_file_visitor visit, void *context);
/// Removes the name of a segment.
void fsti_share_folder_remove(int folder_fd, const char *name);
/// Opens a segment by name, if it is a regular file of this user alone. False with errno.
bool fsti_share_file_open(int folder_fd, const char *name, share_file *out);
uint64_t fsti_share_memory_of(const struct stat *stamp);
/// Deletes unused segments after their grace period, then other unused ones, least recently used
/// first, until all segments and `bytes` of a new one fit in `bytes_max`. False if they do not fit.
bool fsti_share_make_space(int folder_fd, uint64_t bytes, uint64_t bytes_max);

// ---- locks and headers (share_lock.c) ----

/// Sets a lock on `count` bytes without waiting: F_RDLCK, F_WRLCK or F_UNLCK. False with errno.
bool fsti_share_set_lock(int fd, int type, off_t at, off_t count);
/// Whether no other open file holds a lock on the users' byte.
bool fsti_share_is_unused(int fd);
void fsti_share_header_make(share_header *head);
bool fsti_share_header_has_magic(const share_header *head);
bool fsti_share_header_is_valid(const share_header *head, uint64_t file_bytes);

// ---- the segments of this process (share_process.c) ----

void fsti_share_list_add(fsti_share *share);
void fsti_share_list_remove(fsti_share *share);
/// Ends the use of a segment by its load: the last user removes it, unless it is pinned or has a
/// grace period. Mappings stay valid. (share_leave.c)
void fsti_share_leave(fsti_share *share);

#endif
