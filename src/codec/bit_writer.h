// SPDX-License-Identifier: Apache-2.0
/// Writes bits, the lowest first, as the streams of zstd frames have them. Such a stream is read
/// from its end backwards, so what is written last is read first. Private to the codec module.
#ifndef FSTI_BIT_WRITER_H
#define FSTI_BIT_WRITER_H

#include <stdint.h>
#include <string.h>

/// Bytes that a writer may change behind its end.
#define BIT_WRITER_SPARE_BYTES ((size_t)8)

typedef struct bit_writer {
    uint64_t bits; ///< not stored yet
    uint32_t count;
    unsigned char *at;
} bit_writer;

/// Adds `count` bits; those of `value` above them are zero. At most 56 between calls of
/// bits_store().
static inline void bits_put(bit_writer *writer, uint64_t value, uint32_t count) {
    writer->bits |= value << writer->count;
    writer->count += count;
}

/// Stores whole bytes; up to 7 bits remain.
static inline void bits_store(bit_writer *writer) {
    memcpy(writer->at, &writer->bits, sizeof writer->bits);
    writer->at += writer->count / 8;
    writer->bits >>= writer->count & ~7u;
    writer->count &= 7;
}

/// Stores all bits, the last byte filled with zeros. Returns the end of the bytes.
static inline unsigned char *bits_end(bit_writer *writer) {
    bits_store(writer);
    if (writer->count > 0) writer->at++;
    return writer->at;
}

/// Ends a stream that is read backwards: a set bit marks its end.
static inline unsigned char *bits_end_stream(bit_writer *writer) {
    bits_put(writer, 1, 1);
    return bits_end(writer);
}

#endif
