// SPDX-License-Identifier: Apache-2.0
/// Fuzzes the decoder of chunks. The input: dtype, whether it is raw, three bytes of the chunk's
/// decoded size, its stored bytes. The CRC is set to match, so decoding must fail or stay within
/// its bounds.
#include <string.h>

#include "codec/codec.h"
#include "fuzz_input.h"
#include "fuzz_target.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static fsti_decoder *decoder;
    fuzz_input input = {data, size};
    fst_error error;
    if (decoder == NULL && fsti_decoder_open(&decoder, NULL) != FST_OK) return 0;
    fsti_chunk chunk = {.dtype = (fst_dtype)fuzz_below(&input, FST_DTYPE_COUNT)};
    chunk.is_raw = fuzz_byte(&input) != 0;
    chunk.true_bytes = fuzz_byte(&input);
    chunk.true_bytes |= (size_t)fuzz_byte(&input) << 8;
    chunk.true_bytes |= (size_t)fuzz_byte(&input) << 16;
    if (chunk.true_bytes > (size_t)2 << FSTI_CHUNK_LOG_MAX) return 0;
    // Exactly sized memory, so that a sanitizer detects every overrun.
    unsigned char *target = fsti_alloc(chunk.true_bytes), *stored = fsti_alloc(input.size);
    if (target != NULL && stored != NULL) {
        memcpy(stored, input.data, input.size);
        chunk.stored = stored;
        chunk.stored_bytes = input.size;
        fst_status status = fsti_chunk_decode(decoder, &chunk, target, &error);
        require(status == FST_OK || status == FST_E_CORRUPT);
        if (status == FST_OK) require(fsti_crc32c(target, chunk.true_bytes) == chunk.crc);
    }
    fsti_free(target);
    fsti_free(stored);
    return 0;
}
