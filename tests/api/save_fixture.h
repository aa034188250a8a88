// SPDX-License-Identifier: Apache-2.0
/// Shared by tests of saves: requests in one line, and checks of folders.
#ifndef SAVE_FIXTURE_H
#define SAVE_FIXTURE_H

#include <fastsafetensors.h>

/// A tensor of rank 1, or of rank 0 where `shape` is NULL.
fst_save_tensor save_tensor_of(const char *name, fst_dtype dtype, const uint64_t *shape,
                               const void *data);
fst_metadata_entry save_entry_of(const char *key, const char *value);
fst_save_options save_options_of(void);

/// Entries of a folder in the fixture folder ("." is that itself): those that begin with a dot,
/// all.
int save_hidden_count(const char *name);
int save_entry_count(const char *name);
/// Whether a file holds just these bytes (fewer than 4096).
int save_file_holds(const char *name, const char *text, size_t size);
/// The byte that every tensor of a folder's model is made of; -1: mixed, unreadable, or not
/// `tensor_count` of them.
int save_set_value(const char *folder, size_t tensor_count);

#endif
