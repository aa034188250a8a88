// SPDX-License-Identifier: Apache-2.0
/// Interface of the cache module: remote objects, cached on disk for all processes of a user. Knows
/// blocks of objects and files of a folder, not tensors.
///
/// Knows: blocks of objects, files of one folder, locks.
/// Does not know: tensors, and which store an object is from.
/// Main types: fsti_cache_entry, fsti_cached.
#ifndef FSTI_CACHE_H
#define FSTI_CACHE_H

#include "base/primitives.h"
#include "fastsafetensors/experimental/object_cache.h"
#include "fastsafetensors/remote.h"
#include "store/store.h"

/// Checks the cache settings of fst_remote_configure(): FST_E_ARGUMENT.
fst_status fsti_cache_check(const fst_remote_options *options, fst_error *error);
/// Applies checked settings.
void fsti_cache_configure(const fst_remote_options *options);

/// An object that is partly cached. Reads take cached blocks from disk, fetch missing ones and
/// store them, and wait for blocks that another process is fetching. Thread-safe, and usable after
/// a fork.
typedef struct fsti_cache_entry fsti_cache_entry;

/// The result of opening a URL.
typedef struct fsti_cached {
    fsti_object *object;     ///< never NULL
    fsti_cache_entry *entry; ///< NULL: not cached, or completely cached
    int complete_fd;         ///< a file with the complete object; -1: not complete
    char words[160]; ///< for statistics: where reads come from, or why the cache is not used
} fsti_cached;

/// Opens a URL through the cache, if one is configured. If the cache fails, the object is read
/// without it, unless the cache is required.
fst_status fsti_cache_open(const char *url, fsti_cached *out, fst_error *error);
/// The stored size and version of the object's URL were wrong: the next open queries both again.
void fsti_cache_invalidate(fsti_object *object);
/// Closes an entry. No read may be in progress. NULL is allowed.
void fsti_cache_close(fsti_cache_entry *entry);

/// fsti_range_read_begin() and fsti_object_read() through an entry.
void fsti_cache_read_begin(fsti_cache_entry *entry, fsti_range_read *read);
fst_status fsti_cache_read(fsti_cache_entry *entry, fsti_range_read *read, fst_error *error);
/// The errno that stopped writing to the entry; 0: no failure.
int fsti_cache_failure(const fsti_cache_entry *entry);
/// Network counts of blocking reads.
void fsti_cache_counts(fsti_cache_entry *entry, fsti_http_counts *out);
/// Logs a warning, once per process and folder, if writing to the cache has failed.
void fsti_cache_warn_failure(const fsti_cache_entry *entry);

/// Implements fst_cache_visit() and fst_cache_prune(). A NULL `folder` is the configured one.
fst_status fsti_cache_visit(const char *folder, fst_cache_visitor visit, void *context,
                            fst_error *error);
fst_status fsti_cache_prune(const char *folder, uint64_t bytes_max, fst_cache_pruned *out,
                            fst_error *error);

#endif
