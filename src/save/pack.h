// SPDX-License-Identifier: Apache-2.0
/// A file written as a compressed one: private to the save room.
#ifndef FSTI_PACK_H
#define FSTI_PACK_H

#include "fastsafetensors/writer.h"
#include "format/format.h"
#include "io/io.h"
#include "output/output.h"

/// What is to be packed, and how.
typedef struct pack_request {
    fsti_file *file;           ///< the original: a whole safetensors file
    const fsti_header *header; ///< its header
    fst_compress compress;     ///< FST_COMPRESS_FLOAT or _ALL
    uint32_t thread_count;
    fsti_copy_report report; ///< told of bytes of the original that are done
    void *context;
} pack_request;

/// Writes the file anew to `output`, whatever that holds, and ends it there. Where compressing
/// saves nothing in all, the output is the original, byte for byte. *size_bytes: of the output.
/// FST_E_ARGUMENT for a file that has tensors of reserved names, a compressed one among them.
fst_status fsti_pack(const pack_request *request, fsti_output *output, uint64_t *size_bytes,
                     fst_error *error);

#endif
