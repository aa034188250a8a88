// SPDX-License-Identifier: Apache-2.0
/// The door of the cache room: objects of servers, kept on disk for all processes of a user. Knows
/// blocks of objects and files of a folder, never tensors.
#ifndef FSTI_CACHE_H
#define FSTI_CACHE_H

#include "base/base.h"
#include "fastsafetensors/remote.h"
#include "net/net.h"

/// Whether what fst_remote_configure() is told of the cache can be: FST_E_ARGUMENT.
fst_status fsti_cache_check(const fst_remote_options *options, fst_error *error);
/// Takes it, once it was checked.
void fsti_cache_configure(const fst_remote_options *options);

/// An object of which some is on disk, or will be. Reads of it come from there as far as it is, and
/// leave there what they bring; of a block that another process is bringing they wait for it. From
/// any thread, and after a fork.
typedef struct fsti_cache_entry fsti_cache_entry;

/// What an address is read from.
typedef struct fsti_cached {
    fsti_object *object;     ///< always
    fsti_cache_entry *entry; ///< NULL: past the cache, or whole
    int whole_fd;            ///< all of the object, to be read as a file; -1: it is not there
    char words[160];         ///< for statistics: where it is read from, or why not from the cache
} fsti_cached;

/// Opens an address, by way of the cache where there is one. What can't be had of the cache is done
/// without, unless it is required.
fst_status fsti_cache_open(const char *url, fsti_cached *out, fst_error *error);
/// What was told of the object's size and version turned out not to fit what it is: whoever opens
/// its address next asks for both anew.
void fsti_cache_forget(fsti_object *object);
/// NULL is allowed. Nothing of it is being read any more.
void fsti_cache_close(fsti_cache_entry *entry);

/// fsti_range_read_begin() and fsti_object_read() of an entry.
void fsti_cache_read_begin(fsti_cache_entry *entry, fsti_range_read *read);
fst_status fsti_cache_read(fsti_cache_entry *entry, fsti_range_read *read, fst_error *error);
/// Why nothing is written to it any more, an errno; 0: all is well.
int fsti_cache_failure(const fsti_cache_entry *entry);
/// What reads that were waited for have cost.
void fsti_cache_counts(fsti_cache_entry *entry, fsti_net_counts *out);

/// fst_cache_visit() and fst_cache_prune(); `folder` as in the options, NULL: as configured.
fst_status fsti_cache_visit(const char *folder, fst_cache_visitor visit, void *context,
                            fst_error *error);
fst_status fsti_cache_prune(const char *folder, uint64_t bytes_max, fst_cache_pruned *out,
                            fst_error *error);

#endif
