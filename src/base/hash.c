// SPDX-License-Identifier: Apache-2.0
/// A keyed hash for names: multiply and fold 64 x 64 -> 128 bits, eight bytes at a time.
#include <string.h>
#include <sys/random.h>

#include "primitives.h"

static uint64_t fold(uint64_t a, uint64_t b) {
    __extension__ typedef unsigned __int128 wide;
    wide product = (wide)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t load_bytes(const unsigned char *bytes, size_t size) {
    uint64_t word = 0;
    memcpy(&word, bytes, size);
    return word;
}

uint64_t fsti_hash(const void *bytes, size_t size, uint64_t key) {
    // Two odd 64-bit constants: the fractional parts of sqrt(2) and sqrt(3).
    const uint64_t mix_a = 0x6a09e667f3bcc909u, mix_b = 0xbb67ae8584caa73bu;
    const unsigned char *cursor = bytes;
    uint64_t state = key ^ fold(size ^ mix_a, mix_b);
    size_t left = size;
    for (; left > 16; left -= 16, cursor += 16)
        state = fold(load_bytes(cursor, 8) ^ mix_a, load_bytes(cursor + 8, 8) ^ state);
    uint64_t a, b = 0;
    if (left > 8) {
        a = load_bytes(cursor, 8);
        b = load_bytes(cursor + left - 8, 8);
    } else {
        a = left == 8 ? load_bytes(cursor, 8) : load_bytes(cursor, left);
    }
    return fold(fold(a ^ mix_a, b ^ state), mix_b ^ key);
}

uint64_t fsti_hash_key(void) {
    static atomic_uint_fast64_t process_key;
    // Relaxed is enough, because the key protects no other data. If several threads make one at the
    // same time, all of them use the first.
    uint64_t key = atomic_load_explicit(&process_key, memory_order_relaxed);
    if (key != 0) return key;
    uint64_t fresh = 0;
    // Without entropy, an address and the time still vary between runs.
    if (getrandom(&fresh, sizeof fresh, GRND_NONBLOCK) != (ssize_t)sizeof fresh)
        fresh = fsti_now_ns() ^ (uint64_t)(uintptr_t)&fresh;
    fresh |= 1;
    uint_fast64_t expected = 0;
    return atomic_compare_exchange_strong(&process_key, &expected, fresh) ? fresh : expected;
}

/// The counter makes values of the same nanosecond differ; the process's secret key makes them
/// unpredictable.
uint64_t fsti_random(void) {
    static atomic_uint_fast64_t random_state;
    uint64_t state = atomic_fetch_add(&random_state, 1) ^ fsti_now_ns();
    return fsti_hash(&state, sizeof state, fsti_hash_key());
}
