// SPDX-License-Identifier: Apache-2.0
/// Writes a file in compressed form. Private to the save module.
#ifndef FSTI_PACK_H
#define FSTI_PACK_H

#include "fastsafetensors/writer.h"
#include "format/format.h"
#include "io/io.h"
#include "output/output.h"

/// What to compress, and how.
typedef struct pack_request {
    fsti_file *file;           ///< the original, a complete safetensors file
    const fsti_header *header; ///< its header
    fst_compress compress;     ///< FST_COMPRESS_FLOAT or _ALL
    uint32_t thread_count;
    fsti_copy_report report; ///< called with bytes of the original that are done
    void *context;
} pack_request;

/// Writes the compressed file to `output`, replacing its contents. If compression saves nothing,
/// the output equals the original. *size_bytes: of the output. FST_E_ARGUMENT for a file with
/// reserved tensor names, such as a compressed one.
fst_status fsti_pack(const pack_request *request, fsti_output *output, uint64_t *size_bytes,
                     fst_error *error);

#endif
