// SPDX-License-Identifier: Apache-2.0
/// Every way to save a small model, and checks of the resulting files.
#ifndef MODEL_SAVES_H
#define MODEL_SAVES_H

#include <stdbool.h>
#include <stdint.h>

#include "fastsafetensors.h"
#include "fastsafetensors/experimental.h"

/// As a number of files: an edit of the one that is there.
#define EDIT UINT32_MAX
/// With a number of files: each is written by a rank, and all are published by one; the same
/// without an index; the files are made by one that publishes them, and filled by ranks.
#define RANKS 0x1000u
#define RANKS_NO_INDEX 0x2000u
#define PARTS 0x4000u
/// With a number of files: and a manifest.
#define MANIFEST 0x8000u
/// With a number of files: they are compressed. COPY: the file SOURCE is compressed.
#define PACKED 0x10000u
#define COPY 0x20000u
/// An edit of the file that is there, and a manifest.
#define LISTED_EDIT (0x40000u | MANIFEST)
/// With a number of files: they are saved asynchronously, and waited for.
#define ASYNC 0x80000u
/// From the folder of the target.
#define SOURCE "../source"
#define FILE_COUNT(files) ((files) & 0xfffu)

enum { NO_MODEL = 0, NOT_WHOLE = -1, OLD_MODEL = 'o', NEW_MODEL = 'n' };

/// Whether that is one file, and no folder.
bool is_file(uint32_t files);
/// Saves tensors that hold `value`: to a file (0 files), or to a folder with `file_count` files.
fst_status save_model(const char *path, uint32_t file_count, char value, fst_save_promise promise,
                      fst_error *error);
/// Whether such a save can be tried here: compressing needs libzstd.
bool can_save(uint32_t file_count);
/// The model that a path leads to.
int model_at(const char *path);
/// Whether the model at a path has a manifest (0: no) that fits it; -1: one that does not.
int manifest_at(const char *path);

#endif
