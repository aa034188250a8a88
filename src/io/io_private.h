// SPDX-License-Identifier: Apache-2.0
/// What the files of the I/O room share.
#ifndef FSTI_IO_PRIVATE_H
#define FSTI_IO_PRIVATE_H

#include <pthread.h>
#include <sys/stat.h>

#include "io.h"

typedef struct fsti_gds_api fsti_gds_api;

struct fsti_file {
    fsti_refcount refs;
    char *path;
    int fd;
    bool is_shared; ///< with the program: advice on `fd` would count for its reads as well
    uint64_t size_bytes, device;
    atomic_uint read_count; ///< of fsti_file_read()
    atomic_bool is_silent;  ///< what the page cache holds of it was asked for, and refused
    struct timespec modified;
    pthread_mutex_t lock; ///< for what is made on first use, below
    bool direct_probed;
    bool system_asked, is_cached; ///< see fsti_file_is_cached()
    int fd_direct;                ///< the same file past the page cache, or -1
    char direct_reason[128];
    const fsti_gds_api *gds_api; ///< NULL until the file is registered
    void *gds_handle;
    void *mapping; ///< shared, read-only, for copies; NULL until asked for
    // Of a source that is no file of the system's (fd is -1):
    const char *memory; ///< its bytes; or NULL
    fst_read_callback read_at;
    void *context;
    void (*release)(void *context); ///< also of descriptors
    fsti_object *object;            ///< of an address that is read by requests; or NULL
    fsti_object *origin;            ///< of any address, whose reference this is; or NULL
    fsti_cache_entry *entry;        ///< NULL, or by way of what it is read
    char words[160];                ///< of an address: where it is read from
    fsti_file_maker maker;          ///< of a file that is made of another; else all zero
};

/// A file that is not open yet; NULL without memory.
fsti_file *fsti_io_file_make(const char *path, fst_error *error);
fst_status fsti_io_check_regular(const char *path, const struct stat *info, fst_error *error);
/// Whether the kernel knows it: it can be mapped, advised, asked about.
bool fsti_io_file_is_plain(const fsti_file *file);
/// pread(2), wherever the bytes come from: result is how many, or -errno.
void fsti_io_file_pread(fsti_io_op *read);

/// The descriptor for direct reads, or -1; `reason` (may be NULL) says why.
int fsti_io_file_direct(fsti_file *file, char *reason, size_t reason_size);
/// Gives the file's registration back.
void fsti_gds_forget(fsti_file *file);
/// Lanes of engines that finish a read within submit.
fst_status fsti_io_sync_lane_open(uint32_t depth, void **lane, fst_error *error);
void fsti_io_sync_lane_close(void *lane);
void fsti_io_sync_finish(void *lane, fsti_io_op *read, int64_t result, const void *data);
fsti_io_op *fsti_io_sync_reap(void *lane);
/// Whether io_uring can be set up in this process, and why not.
bool fsti_io_uring_available(char *reason, size_t reason_size);

#endif
