// SPDX-License-Identifier: Apache-2.0
/// SHA-256 and HMAC.
#include "sha256.h"

#include <string.h>

static const uint32_t rounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate_right(uint32_t word, int bits) { return word >> bits | word << (32 - bits); }

static uint32_t read_word(const unsigned char *bytes) {
    return (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 | bytes[3];
}

static void mix_block(sha256 *hash) {
    uint32_t words[64], v[8];
    for (int i = 0; i < 16; i++) words[i] = read_word(hash->block + 4 * i);
    for (int i = 16; i < 64; i++) {
        uint32_t a = words[i - 15], b = words[i - 2];
        words[i] = words[i - 16] + (rotate_right(a, 7) ^ rotate_right(a, 18) ^ a >> 3) +
                   words[i - 7] + (rotate_right(b, 17) ^ rotate_right(b, 19) ^ b >> 10);
    }
    memcpy(v, hash->state, sizeof v);
    for (int i = 0; i < 64; i++) {
        uint32_t first = v[7] +
                         (rotate_right(v[4], 6) ^ rotate_right(v[4], 11) ^ rotate_right(v[4], 25)) +
                         ((v[4] & v[5]) ^ (~v[4] & v[6])) + rounds[i] + words[i];
        uint32_t second =
            (rotate_right(v[0], 2) ^ rotate_right(v[0], 13) ^ rotate_right(v[0], 22)) +
            ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += first;
        v[0] = first + second;
    }
    for (int i = 0; i < 8; i++) hash->state[i] += v[i];
}

void fsti_sha256_begin(sha256 *hash) {
    *hash = (sha256){.state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f,
                               0x9b05688c, 0x1f83d9ab, 0x5be0cd19}};
}

void fsti_sha256_add(sha256 *hash, const void *bytes, size_t size) {
    const unsigned char *from = bytes;
    for (size_t i = 0; i < size; i++) {
        hash->block[hash->size_bytes++ % sizeof hash->block] = from[i];
        if (hash->size_bytes % sizeof hash->block == 0) mix_block(hash);
    }
}

void fsti_sha256_add_text(sha256 *hash, const char *text) {
    fsti_sha256_add(hash, text, strlen(text));
}

void fsti_sha256_end(sha256 *hash, unsigned char digest[SHA256_BYTES]) {
    uint64_t bit_count = hash->size_bytes * 8;
    unsigned char length[8];
    fsti_sha256_add(hash, "\x80", 1);
    while (hash->size_bytes % sizeof hash->block != 56) fsti_sha256_add(hash, "", 1);
    for (int i = 0; i < 8; i++) length[i] = (unsigned char)(bit_count >> (56 - 8 * i));
    fsti_sha256_add(hash, length, sizeof length);
    for (int i = 0; i < 32; i++)
        digest[i] = (unsigned char)(hash->state[i / 4] >> (24 - 8 * (i % 4)));
}

void fsti_sha256_hex(const unsigned char digest[SHA256_BYTES], char *text) {
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < SHA256_BYTES; i++) {
        text[2 * i] = digits[digest[i] >> 4];
        text[2 * i + 1] = digits[digest[i] & 15];
    }
    text[(size_t)2 * SHA256_BYTES] = '\0';
}

void fsti_hmac_sha256(hmac_key key, const void *bytes, size_t size,
                      unsigned char digest[SHA256_BYTES]) {
    unsigned char pad[64] = {0};
    sha256 hash;
    if (key.size > sizeof pad) {
        fsti_sha256_begin(&hash);
        fsti_sha256_add(&hash, key.bytes, key.size);
        fsti_sha256_end(&hash, pad);
    } else {
        memcpy(pad, key.bytes, key.size);
    }
    for (size_t i = 0; i < sizeof pad; i++) pad[i] ^= 0x36;
    fsti_sha256_begin(&hash);
    fsti_sha256_add(&hash, pad, sizeof pad);
    fsti_sha256_add(&hash, bytes, size);
    fsti_sha256_end(&hash, digest);
    for (size_t i = 0; i < sizeof pad; i++) pad[i] ^= 0x36 ^ 0x5c;
    fsti_sha256_begin(&hash);
    fsti_sha256_add(&hash, pad, sizeof pad);
    fsti_sha256_add(&hash, digest, SHA256_BYTES);
    fsti_sha256_end(&hash, digest);
    explicit_bzero(pad, sizeof pad);
}
