// SPDX-License-Identifier: Apache-2.0
/// The inner loops of the codec. Private to the codec module. Compiled once per instruction set;
/// all produce the same bytes.
#ifndef FSTI_CODEC_KERNELS_H
#define FSTI_CODEC_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct huffman_code;
struct huffman_table;
struct literal_run;
struct sequence_coder;
struct sparse_reader;
struct huffman_stream;

/// Memory that is needed after decoding and is prefetched meanwhile.
typedef struct huffman_ahead {
    const unsigned char *at, *end;
} huffman_ahead;

/// `planes[k]` has one byte per element (for nibble pairs, per two elements); plane 0 has the most
/// significant bytes. `count` counts elements. Pointers need no alignment.
typedef struct codec_kernels {
    const char *name;
    void (*split_16)(const void *source, unsigned char *const *planes, size_t count,
                     uint32_t rotation);
    void (*split_32)(const void *source, unsigned char *const *planes, size_t count,
                     uint32_t rotation);
    void (*split_64)(const void *source, unsigned char *const *planes, size_t count,
                     uint32_t rotation);
    void (*split_nibbles)(const void *source, unsigned char *const *planes, size_t count);
    void (*join_16)(void *target, const unsigned char *const *planes, size_t count,
                    uint32_t rotation);
    void (*join_32)(void *target, const unsigned char *const *planes, size_t count,
                    uint32_t rotation);
    void (*join_64)(void *target, const unsigned char *const *planes, size_t count,
                    uint32_t rotation);
    void (*join_nibbles)(void *target, const unsigned char *const *planes, size_t count);
    uint32_t (*crc32c)(const void *bytes, size_t size_bytes);
    /// Decodes most of each stream, and leaves its end to the bounds-checked decoder.
    void (*decode_streams)(const struct huffman_table *table, struct huffman_stream *streams,
                           size_t count, huffman_ahead ahead);
    /// Writes a stream of the codes of `size` symbols. Returns its end. *missing gets the flag
    /// HUFFMAN_NO_CODE if a symbol has no code: then the stream means nothing.
    unsigned char *(*encode_stream)(const struct huffman_code *code, const unsigned char *symbols,
                                    size_t size, unsigned char *target, uint32_t *missing);
    /// Finds where zones of literals begin and end in a block that is mostly zeros: a zone ends
    /// where SPARSE_RUN_MIN zeros follow a change, SPARSE_RUN_MIN bytes behind that change. The
    /// first zone begins at 0, even if that byte is zero: a run of zeros repeats the byte before
    /// it. Returns the number of edges, two for each zone; changes up to 63 more.
    size_t (*find_edges)(const unsigned char *bytes, size_t size, uint32_t *edges);
    /// Decodes sequences whose matches repeat zeros, and XORs them into `target`. Stops at others,
    /// at one that does not fit or is damaged, and at the block's last one. Returns the bytes of
    /// content.
    size_t (*xor_runs)(struct sparse_reader *reader, unsigned char *target, size_t size);
    /// Writes the bits of sequences. Returns their end.
    unsigned char *(*put_runs)(const struct sequence_coder *coder, const struct literal_run *runs,
                               uint32_t count, unsigned char *target);
} codec_kernels;

extern const codec_kernels fsti_codec_scalar;
#if defined(__x86_64__)
extern const codec_kernels fsti_codec_avx2, fsti_codec_avx512;
#elif defined(__aarch64__)
extern const codec_kernels fsti_codec_neon;
#endif

/// Whether this CPU supports the kernels.
bool fsti_codec_usable(const codec_kernels *kernels);
/// The best kernels for this CPU, or those set by a test.
const codec_kernels *fsti_codec_kernels(void);

#endif
