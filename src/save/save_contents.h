// SPDX-License-Identifier: Apache-2.0
/// What a save writes: tensors, grouped by the files that they are written to. Private to the save
/// module.
#ifndef FSTI_SAVE_CONTENTS_H
#define FSTI_SAVE_CONTENTS_H

#include "chunk_digests.h"
#include "coverage.h"
#include "layout.h"
#include "output/output.h"
#include "stage.h"

/// A tensor of a save. Constant once the writer is open.
typedef struct save_tensor {
    const char *name;
    size_t name_size;
    const char *data;            ///< NULL: its bytes come from elsewhere
    fst_device device;           ///< the device of `data`
    uint32_t file, index;        ///< index: in the file's layout
    uint64_t offset, size_bytes; ///< in the file
} save_tensor;

/// What a manifest says of a file.
typedef struct file_digests {
    chunk_digests *chunks;  ///< NULL: no manifest
    chunk_digests *passing; ///< the same if each write updates it; else NULL
    uint64_t header_bytes;
    unsigned char header[FSTI_DIGEST_BYTES_MAX];
} file_digests;

/// A file of a save.
typedef struct save_file {
    fst_layout layout;
    fsti_target target;
    fsti_output *output;
    save_stage *stage; ///< open while bytes are written
    bool header_put;
    file_digests digests;
} save_file;

typedef struct save_contents {
    save_tensor *tensors;
    size_t tensor_count;
    uint32_t *members; ///< tensors grouped by file, in layout order
    size_t *member_begin;
    char *names;
    save_file *files;
    uint32_t file_count;
} save_contents;

/// What to lay out.
typedef struct contents_request {
    const fst_save_tensor *tensors;
    size_t tensor_count;
    const fst_save_options *options;
    bool is_shifted;      ///< the data of each file begins where blocks can be shared with a file
    uint64_t shift_begin; ///< whose data begins here
} contents_request;

/// Copies the tensors and lays out the files. `out` must be cleared, also after an error.
fst_status fsti_contents_make(const contents_request *request, save_contents *out,
                              fst_error *error);
/// Bytes of all files, and tensors without bytes.
uint64_t fsti_contents_bytes(const save_contents *contents);
size_t fsti_contents_empty_count(const save_contents *contents);
/// Frees tensors and files. The outputs are closed.
void fsti_contents_clear(save_contents *contents);
/// The tensors of a file, by their index in its layout.
const uint32_t *fsti_contents_members(const save_contents *contents, uint32_t file_index);

/// FST_E_ARGUMENT with the tensor's name.
fst_status fsti_tensor_refuse(const save_tensor *tensor, const char *why, fst_error *error);
/// The same for some of its bytes: "bytes 1 to 2 of the tensor <were why>".
fst_status fsti_tensor_refuse_range(const save_tensor *tensor, byte_range range, const char *why,
                                    fst_error *error);

#endif
