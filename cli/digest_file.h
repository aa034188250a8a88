// SPDX-License-Identifier: Apache-2.0
/// The .digest file of a model: its place next to the model, writing and reading it.
#ifndef CLI_DIGEST_FILE_H
#define CLI_DIGEST_FILE_H

#include "cli.h"

/// The beginning of its text. The name of the algorithm follows.
#define DIGEST_FILE_WORDS "fastsafetensors-digest 1 "

/// The path with the links of its folders resolved once, so that the digests are those of the model
/// that they are written next to, although a link changes meanwhile. NULL: no memory. Free it.
char *digest_file_settle(const char *path);
/// The path of a model's .digest file. NULL: no memory. Free it.
char *digest_file_name(const char *path);
/// Whether the file could be written, before the model is read. Returns an exit code.
int digest_file_check(const char *path);

/// A new file, under a temporary name at first.
typedef struct digest_file {
    char *target, *temporary;
    int fd;
    bool is_placed;
    uint64_t device, inode;
} digest_file;

/// Writes the text of cli_digest_model() to a temporary file. Returns an exit code after printing
/// any error. Call digest_file_close() in any case.
int digest_file_open(const char *path, const char *text, digest_file *out);
/// Gives the file its name. Returns an exit code after printing any error.
int digest_file_place(digest_file *file);
/// Deletes the file from its place if it is still there.
void digest_file_remove(const digest_file *file);
void digest_file_close(digest_file *file);

/// Reads the file of a model into *text, which the caller frees also after an error. NULL: the
/// model has no such file. Returns an exit code after printing any error.
int digest_file_read(const char *path, char **text);

#endif
