// SPDX-License-Identifier: Apache-2.0
/// What the files of the cache room share.
///
/// A folder has, of each version of an object, NAME.part (its bytes; blocks that are absent are
/// holes) and NAME.map (what it is, and a digest of each block that is there). When all blocks are
/// there, hold what the map says and are on the device, .part becomes .data: a plain file. NAME.ref
/// says which version an address had last; its name is the address's. Who uses a version holds a
/// shared lock (flock) on its bytes, who removes it an exclusive one. Who brings blocks holds locks
/// on their numbers in the map (of an open file: they go with the process), and gives signs of life
/// there (cache_beat.c). `lock` is held by who
/// makes or removes files.
#ifndef FSTI_CACHE_PRIVATE_H
#define FSTI_CACHE_PRIVATE_H

#include <sys/stat.h>
#include <sys/types.h>

#include "cache.h"

/// What is brought and digested at once. As large as what a first request brings.
#define CACHE_BLOCK_BYTES ((uint64_t)65536)
/// Blocks of a read: a chunk of a load, and what it begins and ends in.
#define CACHE_READ_BLOCKS 132u
#define CACHE_NAME_BYTES 33u
#define CACHE_FILE_NAME_BYTES 48u
#define CACHE_PATH_BYTES 4096u

/// A folder that is open: the descriptor, and its path for messages.
typedef struct cache_folder {
    int fd, lock_fd;
    char path[CACHE_PATH_BYTES];
} cache_folder;

typedef struct cache_settings {
    char folder[CACHE_PATH_BYTES]; ///< "": off
    uint64_t bytes_max;
    bool is_required;
} cache_settings;

/// Fails where "auto" finds no folder.
fst_status fsti_cache_settings(const char *folder, cache_settings *out, fst_error *error);

// ---- folders (cache_folder.c) ----

/// Makes it where it is missing and `makes`. FST_E_PERMISSION for one that others may write to.
fst_status fsti_cache_folder_open(const char *path, bool makes, cache_folder *out,
                                  fst_error *error);
void fsti_cache_folder_close(cache_folder *folder);
/// Holds the folder's lock, for 10 seconds at most; fails with an errno.
int fsti_cache_folder_lock(cache_folder *folder);
void fsti_cache_folder_unlock(cache_folder *folder);
/// Opens a file of the folder: a regular one of this user's with no other name, or -1 and errno.
int fsti_cache_file_open(const cache_folder *folder, const char *name, int flags);
/// NAME and an ending.
void fsti_cache_file_name(char out[CACHE_FILE_NAME_BYTES], const char *name, const char *ending);
/// Reads or writes all of it; 0 or an errno (EIO where the file ends).
int fsti_cache_pread(int fd, void *target, size_t size, uint64_t offset);
int fsti_cache_pwrite(int fd, const void *bytes, size_t size, uint64_t offset);

// ---- maps (cache_map.c) ----

/// The beginning of a map.
typedef struct cache_map_head {
    char magic[16];
    uint64_t check; ///< digest of what follows
    uint64_t size_bytes, block_bytes;
    char version[FSTI_VERSION_TEXT_BYTES];
    char address[1024]; ///< as it may be told
} cache_map_head;
#define CACHE_MAP_HEAD_BYTES ((uint64_t)4096)

uint64_t fsti_cache_digest(const void *bytes, size_t size); ///< never 0
void fsti_cache_name_of(const char *text, size_t size, char name[CACHE_NAME_BYTES]);
static inline uint64_t fsti_cache_block_count(uint64_t size_bytes) {
    return size_bytes / CACHE_BLOCK_BYTES + (size_bytes % CACHE_BLOCK_BYTES != 0);
}
int fsti_cache_map_write_head(int fd, cache_map_head *head);
/// 0, an errno, or EINVAL for what is no map.
int fsti_cache_map_read_head(int fd, cache_map_head *head);
/// Digests of blocks, 0 of those that are absent.
int fsti_cache_map_read(int fd, uint64_t first, uint64_t count, uint64_t *digests);
int fsti_cache_map_write(int fd, uint64_t first, uint64_t count, const uint64_t *digests);

// ---- entries ----

/// Blocks that somebody in this process is bringing: part of a job.
typedef struct cache_claim {
    uint64_t first, last; ///< [first, last)
    struct cache_claim *next;
} cache_claim;

struct fsti_cache_entry {
    fsti_object *object;
    uint64_t size_bytes, block_count;
    int data_fd, map_fd;
    pid_t owner;            ///< of the claims, and of the map's opening
    cache_claim *claims;    ///< under the room's lock
    atomic_bool is_broken;  ///< nothing is written any more
    atomic_int failure;     ///< why: an errno
    bool is_required;       ///< then that is an error
    char *folder;           ///< for messages
    fsti_net_counts counts; ///< under the room's lock, as what follows
    uint32_t waiter_count;  ///< for blocks that others bring
    uint64_t silent_number; ///< of a process that stands still; 0: none
    bool is_beating;        ///< in the list of those with claims or waiters
    pid_t beat_owner;       ///< of that list
    fsti_cache_entry *next_beating;
};

/// The room's lock, for short whiles; free in the child of a fork.
void fsti_cache_hold(void);
void fsti_cache_release(void);

/// Nothing is written to the entry from now on.
static inline void fsti_cache_break(fsti_cache_entry *entry, int failure) {
    atomic_store(&entry->failure, failure);
    atomic_store(&entry->is_broken, true);
}

/// Claims what it can of the beginning of [first, last), or behind what others have of it: false
/// where they have it all. What is claimed is in `claim`.
bool fsti_cache_claim(fsti_cache_entry *entry, uint64_t first, uint64_t last, cache_claim *claim);
void fsti_cache_unclaim(fsti_cache_entry *entry, cache_claim *claim);

// ---- signs of life (cache_beat.c) ----

/// Says from now on that a claim's blocks are coming (NULL: nothing yet). The room is held.
void fsti_cache_beat(fsti_cache_entry *entry, const cache_claim *claim);
/// The entry is to be closed.
void fsti_cache_beat_end(fsti_cache_entry *entry);
/// Between these two somebody waits for others.
void fsti_cache_wait_begin(fsti_cache_entry *entry);
void fsti_cache_wait_end(fsti_cache_entry *entry);

/// What a waiter has seen of who brings a block.
typedef struct cache_silence {
    bool is_begun;
    uint64_t block, number, round;
} cache_silence;
/// Whether who brings the block has given no sign for 3 seconds, or is known to give none. By who
/// waits, again and again, with the same `silence`.
bool fsti_cache_is_silent(fsti_cache_entry *entry, uint64_t block, cache_silence *silence);
/// For tests: time between signs; 0: half a second.
void fsti_cache_beat_period(uint64_t period_ns);

/// Checks all blocks of an entry that has all and makes the file plain: true when it is.
bool fsti_cache_seal(fsti_cache_entry *entry, cache_folder *folder, const char *name);

/// Brings the few blocks that loads leave out, such as what files are filled up with between
/// tensors: without them an object would never be whole.
void fsti_cache_bring_rest(fsti_cache_entry *entry);

/// Removes what was used least until `bytes` more fit; false where they don't. The folder is
/// locked.
bool fsti_cache_make_room(const cache_folder *folder, uint64_t bytes, uint64_t bytes_max);

// ---- work that waits (cache_pool.c) ----

typedef struct cache_task cache_task;
struct cache_task {
    void (*run)(cache_task *task);
    uint64_t due_ns;
    cache_task *next;
};
/// Whether there are threads, of which one is made when there is none; false: none can be had.
bool fsti_cache_pool_ready(void);
/// By a thread of the pool's; at `due_ns`, or when something was written, where that is not 0.
void fsti_cache_pool_add(cache_task *task, uint64_t due_ns);
/// Something was written: what waits looks again.
void fsti_cache_pool_wake(void);

#endif
