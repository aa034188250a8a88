// SPDX-License-Identifier: Apache-2.0
/// Shared by the files of the io module.
#ifndef FSTI_IO_PRIVATE_H
#define FSTI_IO_PRIVATE_H

#include <pthread.h>
#include <sys/stat.h>

#include "io.h"

typedef struct fsti_gds_api fsti_gds_api;

/// Whether mincore() says which pages of a file are resident to this process.
typedef enum fsti_mincore_answer {
    FSTI_MINCORE_UNKNOWN,
    FSTI_MINCORE_ALLOWED,
    FSTI_MINCORE_DENIED, ///< it reports all pages as resident
} fsti_mincore_answer;

struct fsti_file {
    fsti_refcount refs;
    char *path;
    int fd;
    bool is_shared; ///< the descriptor is shared with the program, so advice would affect its reads
    uint64_t size_bytes, device;
    atomic_uint read_count;       ///< calls of fsti_file_read()
    atomic_ullong kept_bytes;     ///< see fsti_io_keep_mapped()
    atomic_bool in_parts;         ///< see fsti_file_read_parts()
    atomic_bool residency_denied; ///< the kernel refused to report residency
    struct timespec modified;
    pthread_mutex_t lock;            ///< protects the fields created on first use, below
    bool direct_probed, loses_cache; ///< see fsti_file_loses_cache()
    fsti_mincore_answer mincore_answer;
    bool file_system_known, has_own_readahead, is_distant, is_memory; ///< see io.h
    int fd_direct; ///< the file opened with O_DIRECT, or -1
    char direct_reason[128];
    const fsti_gds_api *gds_api; ///< NULL until the file is registered
    void *gds_handle;
    void *mapping; ///< shared and read-only, for copies; NULL until needed
    // Sources that are not system files (fd is -1):
    const char *memory; ///< the bytes, or NULL
    fst_read_callback read_at;
    void *context;
    void (*release)(void *context); ///< also closes descriptors
    fsti_object *object;            ///< a remote object read by requests, or NULL
    fsti_object *origin;            ///< the object of any URL (owned reference), or NULL
    fsti_cache_entry *entry;        ///< the cache entry that reads go through, or NULL
    char words[160];                ///< for a URL, where it is read from
    fsti_derivation derivation;     ///< for a derived file; otherwise zero
};

/// Allocates a file that is not open yet. NULL without memory.
fsti_file *fsti_io_file_make(const char *path, fst_error *error);
fst_status fsti_io_check_regular(const char *path, const struct stat *info, fst_error *error);
/// Whether the kernel knows the file, so that it can be mapped and advised.
bool fsti_io_file_is_plain(const fsti_file *file);
/// Whether all bytes are in memory, because the file lies in a file system without storage (tmpfs
/// or ramfs) and has no holes.
bool fsti_io_file_is_memory(fsti_file *file);
/// Opens the file of a descriptor again. `path` (may be NULL) is used on systems without /proc, if
/// it still is that file's. -1 with errno on failure.
int fsti_io_reopen(int fd, const char *path, int flags);
/// Has the kernel start to read [begin, end), in calls small enough for every device's limit.
void fsti_io_start_reads(int fd, uint64_t begin, uint64_t end);
/// pread(2) from any source. The result is the number of bytes, or -errno.
void fsti_io_file_pread(fsti_io_op *read);

/// The descriptor for direct reads, or -1. `reason` (may be NULL) explains it.
int fsti_io_file_direct(fsti_file *file, char *reason, size_t reason_size);
/// Unregisters the file from GPUDirect Storage.
void fsti_gds_unregister(fsti_file *file);
/// Lanes of synchronous engines, which finish a read in submit.
fst_status fsti_io_sync_lane_open(uint32_t depth, void **lane, fst_error *error);
void fsti_io_sync_lane_close(void *lane);
void fsti_io_sync_finish(void *lane, fsti_io_op *read, int64_t result, const void *data);
fsti_io_op *fsti_io_sync_reap(void *lane);

#endif
