// SPDX-License-Identifier: Apache-2.0
/// Hash functions by number and name, hexadecimal digests, and lists of digests.
#include <string.h>

#include "digest.h"

static const fsti_digest_kind *const kinds[FST_DIGEST_COUNT] = {
    [FST_DIGEST_XXH3_128] = &fsti_digest_xxh3,   [FST_DIGEST_BLAKE3] = &fsti_digest_blake3,
    [FST_DIGEST_SHA256] = &fsti_digest_sha256,   [FST_DIGEST_XXH3_64] = &fsti_digest_xxh3_64,
    [FST_DIGEST_ADLER32] = &fsti_digest_adler32,
};

const fsti_digest_kind *fsti_digest_get(fst_digest digest) {
    return (unsigned)digest < sizeof kinds / sizeof *kinds ? kinds[digest] : NULL;
}

const fsti_digest_kind *fsti_digest_find(const char *name, size_t name_size) {
    for (size_t i = 0; i < FSTI_MANIFEST_DIGEST_COUNT; i++)
        if (strlen(kinds[i]->name) == name_size && memcmp(kinds[i]->name, name, name_size) == 0)
            return kinds[i];
    return NULL;
}

const fsti_digest_kind *fsti_digest_of_stored_name(const char *name, size_t name_size) {
    const char *last = fsti_digest_xxh3_64.name;
    if (strlen(last) == name_size && memcmp(last, name, name_size) == 0)
        return &fsti_digest_xxh3_64;
    return fsti_digest_find(name, name_size);
}

const fsti_digest_kind *fsti_digest_of_delta(const char *name) {
    if (strcmp(name, fsti_digest_adler32.name) == 0) return &fsti_digest_adler32;
    const fsti_digest_kind *kind = fsti_digest_find(name, strlen(name));
    return kind == &fsti_digest_sha256 ? NULL : kind;
}

void fsti_digest_print(const unsigned char *digest, size_t size_bytes, char *text) {
    for (size_t i = 0; i < size_bytes; i++) {
        *text++ = "0123456789abcdef"[digest[i] >> 4];
        *text++ = "0123456789abcdef"[digest[i] & 15];
    }
    *text = '\0';
}

/// The value of a hexadecimal digit; 16 for any other character. Only lower case is accepted, so
/// that each digest has one spelling.
static unsigned digit_value(char digit) {
    if (digit >= '0' && digit <= '9') return (unsigned)(digit - '0');
    return digit >= 'a' && digit <= 'f' ? (unsigned)(digit - 'a') + 10 : 16;
}

bool fsti_digest_read(const char *text, size_t size_bytes, unsigned char *digest) {
    for (size_t i = 0; i < size_bytes; i++) {
        unsigned high = digit_value(text[2 * i]);
        unsigned low = high > 15 ? 16 : digit_value(text[2 * i + 1]);
        if (low > 15) return false;
        digest[i] = (unsigned char)(high << 4 | low);
    }
    return true;
}

bool fsti_digest_list_matches(const fsti_digest_list *list, uint64_t begin, const void *bytes,
                              uint64_t size_bytes, uint64_t *bad_begin) {
    const fsti_digest_kind *kind = list->kind;
    const char *at = bytes;
    for (uint64_t done = 0; done < size_bytes; done += list->chunk_bytes) {
        unsigned char found[FSTI_DIGEST_BYTES_MAX];
        uint64_t number = (begin + done) / list->chunk_bytes;
        uint64_t size = fsti_min(list->chunk_bytes, size_bytes - done);
        *bad_begin = begin + done;
        if (!kind->hash(at + done, (size_t)size, found) ||
            memcmp(found, list->digests + number * kind->digest_bytes, kind->digest_bytes) != 0)
            return false;
    }
    return true;
}
