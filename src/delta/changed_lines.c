// SPDX-License-Identifier: Apache-2.0
/// Finds changed lines and bytes, and writes them.
#include "changed_lines.h"

#include <stdatomic.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LINE_BYTES ((size_t)64)
#define GROUP_LINES ((size_t)64)
#define GROUP_BYTES (LINE_BYTES * GROUP_LINES)
#define MASK_BYTES sizeof(uint64_t)
/// With more changed bytes, a line is stored whole: that takes little more memory, and copying it
/// is faster than writing many bytes one by one, as CPUs do that cannot scatter them.
#define SPARSE_BYTES_MAX 48
#define SPARSE_BYTES_MAX_PLAIN 16
#define WHOLE_LINE UINT64_MAX
/// Bytes behind a list that may be read or written: a line's changes are moved all at once.
#define SPARE_BYTES LINE_BYTES
/// The most that a piece can take: all lines whole.
#define LIST_BYTES_MAX                                                                             \
    (CHANGED_PIECE_BYTES / GROUP_BYTES * MASK_BYTES +                                              \
     CHANGED_PIECE_BYTES / LINE_BYTES * (MASK_BYTES + LINE_BYTES))

struct changed_lines {
    size_t size;
    bool has_changes;
    unsigned char bytes[LIST_BYTES_MAX + SPARE_BYTES];
};

fst_status fsti_changed_lines_open(changed_lines **out, fst_error *error) {
    *out = fsti_alloc(sizeof **out);
    if (*out == NULL) return fsti_error_memory(error, sizeof **out);
    (*out)->size = 0;
    (*out)->has_changes = false;
    return FST_OK;
}

void fsti_changed_lines_close(changed_lines *lines) { fsti_free(lines); }

static atomic_bool is_plain;

void fsti_changed_lines_be_plain(bool plain) { atomic_store(&is_plain, plain); }

#if defined(__x86_64__)
/// Whether the CPU can gather and scatter the bytes of a line by a mask.
static bool has_masks(void) {
    return __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512bw") &&
           !atomic_load_explicit(&is_plain, memory_order_relaxed);
}

#define WITH_MASKS __attribute__((target("avx512bw,avx512vbmi2")))

WITH_MASKS static void gather_by_mask(unsigned char *list, uint64_t mask,
                                      const unsigned char *line) {
    _mm512_storeu_si512(list, _mm512_maskz_compress_epi8(mask, _mm512_loadu_si512(line)));
}

WITH_MASKS static void scatter_by_mask(unsigned char *line, uint64_t mask,
                                       const unsigned char *list) {
    __m512i bytes = _mm512_maskz_expand_epi8(mask, _mm512_loadu_si512(list));
    _mm512_mask_storeu_epi8(line, mask, bytes);
}
#else
static bool has_masks(void) { return false; }
static void gather_by_mask(unsigned char *list, uint64_t mask, const unsigned char *line) {
    (void)list, (void)mask, (void)line;
}
static void scatter_by_mask(unsigned char *line, uint64_t mask, const unsigned char *list) {
    (void)line, (void)mask, (void)list;
}
#endif

/// Appends the bytes of the mask. Returns the end of the list.
static unsigned char *gather(unsigned char *list, uint64_t mask, const unsigned char *line) {
    if (has_masks()) {
        gather_by_mask(list, mask, line);
        return list + __builtin_popcountll(mask);
    }
    for (; mask != 0; mask &= mask - 1) *list++ = line[__builtin_ctzll(mask)];
    return list;
}

/// Writes only the bytes of the mask. Returns the end of the bytes read.
static const unsigned char *scatter(unsigned char *line, uint64_t mask, const unsigned char *list) {
    if (has_masks()) {
        scatter_by_mask(line, mask, list);
        return list + __builtin_popcountll(mask);
    }
    for (; mask != 0; mask &= mask - 1) line[__builtin_ctzll(mask)] = *list++;
    return list;
}

/// The bytes of a line that differ.
static uint64_t compare_bytes(const unsigned char *old, const unsigned char *made, size_t size) {
    uint64_t mask = 0;
    for (size_t i = 0; i < size; i++) mask |= (uint64_t)(old[i] != made[i]) << i;
    return mask;
}

static uint64_t compare_line(const unsigned char *old, const unsigned char *made) {
#if defined(__x86_64__)
    uint64_t same = 0;
    for (size_t i = 0; i < LINE_BYTES; i += 16) {
        __m128i a = _mm_loadu_si128((const __m128i *)(const void *)(old + i));
        __m128i b = _mm_loadu_si128((const __m128i *)(const void *)(made + i));
        same |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(a, b)) << i;
    }
    return ~same;
#else
    return memcmp(old, made, LINE_BYTES) == 0 ? 0 : compare_bytes(old, made, LINE_BYTES);
#endif
}

/// Appends a changed line: its mask and its bytes. Returns the end of the list.
static unsigned char *put_line(unsigned char *end, uint64_t mask, const unsigned char *made) {
    int sparse_max = has_masks() ? SPARSE_BYTES_MAX : SPARSE_BYTES_MAX_PLAIN;
    bool is_whole = __builtin_popcountll(mask) > sparse_max;
    memcpy(end, is_whole ? &(uint64_t){WHOLE_LINE} : &mask, MASK_BYTES);
    end += MASK_BYTES;
    if (is_whole) {
        memcpy(end, made, LINE_BYTES);
        return end + LINE_BYTES;
    }
    return gather(end, mask, made);
}

/// Appends the changes of up to GROUP_BYTES.
static void add_group(changed_lines *lines, const unsigned char *old, const unsigned char *made,
                      size_t size) {
    unsigned char *begin = lines->bytes + lines->size, *end = begin + MASK_BYTES;
    unsigned char last[LINE_BYTES];
    uint64_t changed = 0;
    size_t at = 0;
    for (; at + LINE_BYTES <= size; at += LINE_BYTES) {
        uint64_t mask = compare_line(old + at, made + at);
        if (mask == 0) continue;
        changed |= (uint64_t)1 << (at / LINE_BYTES);
        end = put_line(end, mask, made + at);
    }
    uint64_t mask = compare_bytes(old + at, made + at, size - at);
    if (mask != 0) {
        changed |= (uint64_t)1 << (at / LINE_BYTES);
        memset(last, 0, sizeof last);
        memcpy(last, made + at, size - at);
        end = put_line(end, mask, last);
    }
    memcpy(begin, &changed, MASK_BYTES);
    lines->has_changes |= changed != 0;
    lines->size = (size_t)(end - lines->bytes);
}

void fsti_changed_lines_add(changed_lines *lines, const unsigned char *old,
                            const unsigned char *made, size_t size) {
    for (size_t at = 0; at < size; at += GROUP_BYTES)
        add_group(lines, old + at, made + at, (size_t)fsti_min(GROUP_BYTES, size - at));
}

fst_status fsti_changed_lines_take(changed_lines *lines, changed_piece *out, fst_error *error) {
    size_t size = lines->has_changes ? lines->size : 0;
    lines->size = 0;
    lines->has_changes = false;
    *out = (changed_piece){NULL, size};
    if (size == 0) return FST_OK;
    out->bytes = fsti_alloc(size + SPARE_BYTES);
    if (out->bytes == NULL) return fsti_error_memory(error, size);
    memcpy(out->bytes, lines->bytes, size);
    return FST_OK;
}

/// Writes a whole line. Stores that bypass the caches do not read the target first.
static void write_whole(unsigned char *target, const unsigned char *bytes, size_t size) {
#if defined(__x86_64__)
    if (size == LINE_BYTES && ((uintptr_t)target & 15) == 0) {
        for (size_t i = 0; i < LINE_BYTES; i += 16)
            _mm_stream_si128((__m128i *)(void *)(target + i),
                             _mm_loadu_si128((const __m128i *)(const void *)(bytes + i)));
        return;
    }
#endif
    memcpy(target, bytes, size);
}

/// Writes the changes of a group to `target`, which has `size` bytes. Returns the end of its list.
static const unsigned char *write_group(const unsigned char *list, unsigned char *target,
                                        size_t size) {
    uint64_t changed, mask;
    memcpy(&changed, list, MASK_BYTES);
    list += MASK_BYTES;
    for (; changed != 0; changed &= changed - 1) {
        size_t at = (size_t)__builtin_ctzll(changed) * LINE_BYTES;
        memcpy(&mask, list, MASK_BYTES);
        list += MASK_BYTES;
        if (mask == WHOLE_LINE) {
            write_whole(target + at, list, (size_t)fsti_min(LINE_BYTES, size - at));
            list += LINE_BYTES;
        } else {
            list = scatter(target + at, mask, list);
        }
    }
    return list;
}

void fsti_changed_piece_write(const changed_piece *piece, unsigned char *target, size_t size) {
    const unsigned char *list = piece->bytes;
    for (size_t at = 0; list != NULL && at < size; at += GROUP_BYTES)
        list = write_group(list, target + at, (size_t)fsti_min(GROUP_BYTES, size - at));
#if defined(__x86_64__)
    _mm_sfence();
#endif
}
