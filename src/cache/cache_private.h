// SPDX-License-Identifier: Apache-2.0
/// Shared by the files of the cache module.
///
/// For each version of an object the folder has NAME.part (its bytes, with holes for absent blocks)
/// and NAME.map (its identity, and a digest of each cached block). Once all blocks are cached,
/// verified and synced, .part is renamed to .data, a plain file. NAME.ref stores the version that a
/// URL had last; its name is a hash of the URL.
///
/// Locks: a process that uses a version holds a shared flock() on its data file; eviction takes an
/// exclusive one. A process that fetches blocks holds byte-range locks on their numbers in the map
/// (open file description locks, released when the process dies) and writes heartbeats there
/// (cache_heartbeat.c). The file `lock` is held while files are created or deleted.
#ifndef FSTI_CACHE_PRIVATE_H
#define FSTI_CACHE_PRIVATE_H

#include <sys/stat.h>
#include <sys/types.h>

#include "cache.h"

/// The unit of fetching and digesting; also the size of a first request.
#define CACHE_BLOCK_BYTES ((uint64_t)65536)
/// Blocks in a read: a chunk of a load, and its partial first and last blocks.
#define CACHE_READ_BLOCKS 132u
#define CACHE_NAME_BYTES 33u
#define CACHE_FILE_NAME_BYTES 48u
#define CACHE_PATH_BYTES 4096u

/// The first bytes of maps and of references, which distinguish the cache's files from others.
#define CACHE_MAGIC_BYTES 16u
#define CACHE_MAP_MAGIC "fst-cache-map 1\n"
#define CACHE_REF_MAGIC "fst-cache-ref 1\n"

/// An open folder: its descriptor, and its path for messages.
typedef struct cache_folder {
    int fd, lock_fd;
    char path[CACHE_PATH_BYTES];
} cache_folder;

typedef struct cache_settings {
    char folder[CACHE_PATH_BYTES]; ///< "": disabled
    uint64_t bytes_max;
    bool is_required;
} cache_settings;

/// Resolves the settings. Fails if "auto" finds no folder.
fst_status fsti_cache_settings(const char *folder, cache_settings *out, fst_error *error);

// ---- folders (cache_folder.c) ----

/// Opens a folder, and creates it if `makes`. FST_E_PERMISSION if other users may write to it.
fst_status fsti_cache_folder_open(const char *given, bool makes, cache_folder *out,
                                  fst_error *error);
void fsti_cache_folder_close(cache_folder *folder);
/// Takes the folder's lock, waiting at most 10 seconds. Returns 0 or an errno.
int fsti_cache_folder_lock(cache_folder *folder);
void fsti_cache_folder_unlock(cache_folder *folder);
/// Opens a file of the folder, which must be a regular file of this user with one link. -1 and
/// errno on failure.
int fsti_cache_file_open(const cache_folder *folder, const char *name, int flags);
/// Writes NAME plus an ending.
void fsti_cache_file_name(char out[CACHE_FILE_NAME_BYTES], const char *name, const char *ending);

// ---- maps (cache_map.c) ----

/// The header of a map.
typedef struct cache_map_header {
    char magic[CACHE_MAGIC_BYTES];
    uint64_t check; ///< digest of the fields below
    uint64_t size_bytes, block_bytes;
    char version[FSTI_VERSION_TEXT_BYTES];
    char address[1024]; ///< without query, for messages
} cache_map_header;
#define CACHE_MAP_HEADER_BYTES ((uint64_t)4096)

uint64_t fsti_cache_digest(const void *bytes, size_t size); ///< never 0
void fsti_cache_name_of(const char *text, size_t size, char name[CACHE_NAME_BYTES]);
static inline uint64_t fsti_cache_block_count(uint64_t size_bytes) {
    return size_bytes / CACHE_BLOCK_BYTES + (size_bytes % CACHE_BLOCK_BYTES != 0);
}
int fsti_cache_map_write_header(int fd, cache_map_header *head);
/// Returns 0, an errno, or EINVAL if it is not a map.
int fsti_cache_map_read_header(int fd, cache_map_header *head);
/// Digests of blocks; 0 marks an absent block.
int fsti_cache_map_read(int fd, uint64_t first, uint64_t count, uint64_t *digests);
int fsti_cache_map_write(int fd, uint64_t first, uint64_t count, const uint64_t *digests);

// ---- entries ----

/// Blocks that this process is fetching. Part of a job.
typedef struct cache_claim {
    uint64_t first, last; ///< [first, last)
    struct cache_claim *next;
} cache_claim;

struct fsti_cache_entry {
    fsti_object *object;
    uint64_t size_bytes, block_count;
    int data_fd, map_fd;
    pid_t owner;              ///< process that owns the claims and opened the map
    cache_claim *claims;      ///< protected by the module's lock
    atomic_bool is_broken;    ///< nothing is written any more
    atomic_int failure;       ///< the errno that caused it
    bool is_required;         ///< a failure is an error of the load
    char *folder;             ///< for messages
    fsti_http_counts counts;  ///< this and the fields below: protected by the module's lock
    uint32_t waiter_count;    ///< jobs that wait for blocks of other processes
    uint64_t stalled_process; ///< counter of a process found stalled; 0: no stalled process
    bool has_heartbeat;       ///< in the list of entries with claims or waiters
    pid_t heartbeat_owner;    ///< process that owns that list
    fsti_cache_entry *next_with_heartbeat;
};

/// The module's lock, held briefly only. Unlocked in a forked child.
void fsti_cache_lock(void);
void fsti_cache_unlock(void);

/// Stops writing to the entry.
static inline void fsti_cache_break(fsti_cache_entry *entry, int failure) {
    atomic_store(&entry->failure, failure);
    atomic_store(&entry->is_broken, true);
}

/// Claims blocks at the start of [first, last), or after blocks claimed by others, and sets
/// `claim`. False if others have claimed them all.
bool fsti_cache_claim(fsti_cache_entry *entry, uint64_t first, uint64_t last, cache_claim *claim);
void fsti_cache_unclaim(fsti_cache_entry *entry, cache_claim *claim);

// ---- warnings (cache_warning.c) ----

/// Logs that the cache folder cannot be used, once per process and folder. `failure`: an errno, or
/// 0 if `why` is complete. The caller holds no lock.
void fsti_cache_warn(const char *folder, const char *why, int failure);

// ---- heartbeats (cache_heartbeat.c) ----

/// Starts heartbeats for a claim (NULL: for waiting only). The module's lock must be held.
void fsti_cache_heartbeat_start(fsti_cache_entry *entry, const cache_claim *claim);
/// Stops heartbeats, before the entry is closed.
void fsti_cache_heartbeat_end(fsti_cache_entry *entry);
/// Mark the start and the end of a wait for other processes.
void fsti_cache_wait_begin(fsti_cache_entry *entry);
void fsti_cache_wait_end(fsti_cache_entry *entry);

/// What a waiter knows about the process that fetches a block.
typedef struct cache_stall {
    bool is_begun;
    uint64_t block, number, round;
} cache_stall;
/// Whether the process that fetches the block has sent no heartbeat for 3 seconds, or was found
/// stalled before. Call it repeatedly with the same `silence` while waiting.
bool fsti_cache_is_stalled(fsti_cache_entry *entry, uint64_t block, cache_stall *stall);
/// For tests: sets the heartbeat interval. 0: half a second.
void fsti_cache_heartbeat_period(uint64_t period_ns);

/// Verifies all blocks of a complete entry and renames its file to .data. True on success.
bool fsti_cache_seal(fsti_cache_entry *entry, cache_folder *folder, const char *name);

/// Fetches the few blocks that loads skip, such as padding between tensors. Without them an object
/// would never become complete.
void fsti_cache_backfill(fsti_cache_entry *entry);

/// Evicts the least recently used versions until `bytes` more fit. False if they do not fit. The
/// folder must be locked.
bool fsti_cache_evict(const cache_folder *folder, uint64_t bytes, uint64_t bytes_max);

// ---- delayed tasks (cache_pool.c) ----

typedef struct cache_task cache_task;
struct cache_task {
    void (*run)(cache_task *task);
    uint64_t due_ns;
    cache_task *next;
};
/// Ensures that the pool has a thread. False if it cannot start one.
bool fsti_cache_pool_ready(void);
/// Runs a task on a pool thread, at once if `due_ns` is 0, else at `due_ns` or when blocks were
/// written.
void fsti_cache_pool_add(cache_task *task, uint64_t due_ns);
/// Wakes waiting tasks, because blocks were written.
void fsti_cache_pool_wake(void);

#endif
