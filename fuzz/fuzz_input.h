// SPDX-License-Identifier: Apache-2.0
/// Numbers from a fuzzer's input; zeros after its end.
#ifndef FUZZ_INPUT_H
#define FUZZ_INPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/// A property that must hold; otherwise the input is a finding.
static inline void require(bool condition) {
    if (!condition) __builtin_trap();
}

typedef struct fuzz_input {
    const uint8_t *data;
    size_t size;
} fuzz_input;

static inline uint8_t fuzz_byte(fuzz_input *input) {
    if (input->size == 0) return 0;
    input->size--;
    return *input->data++;
}

/// Below `limit`.
static inline uint32_t fuzz_below(fuzz_input *input, uint32_t limit) {
    uint32_t value = fuzz_byte(input);
    if (limit > 256) value = value << 8 | fuzz_byte(input);
    return value % limit;
}

#endif
