// SPDX-License-Identifier: Apache-2.0
/// Makes Huffman codes and writes the literals sections of blocks (RFC 8878, 3.1.1.3.1 and 4.2).
#include "huffman_code.h"

#include "base/primitives.h"
#include "codec_kernels.h"
#include "fse_code.h"

enum { LITERALS_RAW, LITERALS_REPEATED, LITERALS_CODED, LITERALS_CODED_AS_BEFORE };

/// Fewer literals are stored unchanged, and fewer than the second are one stream.
#define CODED_MIN ((size_t)32)
#define STREAMS_MIN ((size_t)256)
/// Uses of a tree before the symbols are counted again.
#define TREE_USES_MAX 64u
/// Joined codes are made for blocks of so many literals: there are usually more such blocks.
#define JOINED_MIN ((size_t)4096)
#define STREAM_COUNT 4u
#define WEIGHT_LOG_MAX 6u
#define WEIGHT_COUNT (HUFFMAN_CODE_BITS + 1)

/// Symbols that occur, the rarest first.
typedef struct symbol_order {
    uint8_t symbols[HUFFMAN_SYMBOL_COUNT];
    uint32_t counts[HUFFMAN_SYMBOL_COUNT];
    uint32_t count;
} symbol_order;

/// Sorts by Shell's method: there are at most 256, and their order is new each time.
static void sort_by_count(symbol_order *order, const uint32_t *counts) {
    static const uint32_t gaps[] = {57, 23, 10, 4, 1};
    order->count = 0;
    for (uint32_t s = 0; s < HUFFMAN_SYMBOL_COUNT; s++)
        if (counts[s] > 0) order->symbols[order->count++] = (uint8_t)s;
    for (size_t g = 0; g < sizeof gaps / sizeof *gaps; g++)
        for (uint32_t i = gaps[g]; i < order->count; i++) {
            uint8_t symbol = order->symbols[i];
            uint32_t at = i;
            for (; at >= gaps[g] && counts[order->symbols[at - gaps[g]]] > counts[symbol];
                 at -= gaps[g])
                order->symbols[at] = order->symbols[at - gaps[g]];
            order->symbols[at] = symbol;
        }
    for (uint32_t i = 0; i < order->count; i++) order->counts[i] = counts[order->symbols[i]];
}

/// The lists of the package-merge algorithm, one for each bit of the longest code. An item is a
/// symbol, or a package of two items of the list before.
typedef struct package_list {
    uint64_t counts[2 * HUFFMAN_SYMBOL_COUNT];
    bool is_symbol[2 * HUFFMAN_SYMBOL_COUNT];
    uint32_t size;
} package_list;

/// Merges the symbols with the packages of `before` (NULL: none).
static void merge_packages(package_list *list, const symbol_order *order,
                           const package_list *before) {
    uint32_t packages = before == NULL ? 0 : before->size / 2, symbol = 0, package = 0;
    list->size = order->count + packages;
    for (uint32_t i = 0; i < list->size; i++) {
        uint64_t sum = UINT64_MAX;
        if (package < packages) sum = before->counts[2 * package] + before->counts[2 * package + 1];
        list->is_symbol[i] = symbol < order->count && order->counts[symbol] <= sum;
        list->counts[i] = list->is_symbol[i] ? order->counts[symbol++] : sum;
        package += !list->is_symbol[i];
    }
}

/// The lengths of the best codes of at most HUFFMAN_CODE_BITS bits (Larmore and Hirschberg, "A fast
/// algorithm for optimal length-limited Huffman codes", 1990): a symbol's code has a bit for each
/// list in which it is among the items that are taken.
static void find_lengths(const symbol_order *order, uint8_t bits[HUFFMAN_SYMBOL_COUNT]) {
    package_list lists[HUFFMAN_CODE_BITS];
    for (uint32_t k = 0; k < HUFFMAN_CODE_BITS; k++)
        merge_packages(&lists[k], order, k == 0 ? NULL : &lists[k - 1]);
    memset(bits, 0, HUFFMAN_SYMBOL_COUNT);
    uint32_t taken = 2 * order->count - 2;
    for (uint32_t k = HUFFMAN_CODE_BITS; k-- > 0 && taken > 0;) {
        uint32_t symbols = 0;
        for (uint32_t i = 0; i < taken; i++)
            if (lists[k].is_symbol[i]) bits[order->symbols[symbols++]]++;
        taken = 2 * (taken - symbols);
    }
}

/// Gives codes to the symbols: the longest first, and those of a length by symbol. Returns the bits
/// of the longest.
static uint32_t assign_codes(huffman_code *code) {
    uint32_t next = 0, longest = 0;
    for (uint32_t bits = HUFFMAN_CODE_BITS; bits > 0; bits--, next >>= 1)
        for (uint32_t s = 0; s < HUFFMAN_SYMBOL_COUNT; s++) {
            if (code->bits[s] != bits) continue;
            if (longest == 0) longest = bits;
            code->singles[s] = next++ << 8 | bits;
        }
    for (uint32_t s = 0; s < HUFFMAN_SYMBOL_COUNT; s++)
        if (code->bits[s] == 0) code->singles[s] = HUFFMAN_NO_CODE;
    return longest;
}

/// Joins the codes of any two symbols (or of what stands for them).
static void join_codes(uint32_t *joined, const uint32_t codes[HUFFMAN_SYMBOL_COUNT]) {
    uint8_t present[HUFFMAN_SYMBOL_COUNT];
    uint32_t count = 0;
    for (uint32_t s = 0; s < HUFFMAN_SYMBOL_COUNT; s++)
        if ((codes[s] & HUFFMAN_NO_CODE) == 0) present[count++] = (uint8_t)s;
    memset(joined, HUFFMAN_NO_CODE >> 24, HUFFMAN_SYMBOL_COUNT * HUFFMAN_SYMBOL_COUNT * 4);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t below = codes[present[i]], bits = below & 63;
        uint32_t *row = joined + HUFFMAN_SYMBOL_COUNT * present[i];
        for (uint32_t k = 0; k < count; k++) {
            uint32_t above = codes[present[k]];
            if ((above & 63) + bits <= HUFFMAN_JOINED_BITS)
                row[present[k]] = ((above & ~0xffu) << bits) + (above & 63) + below;
        }
    }
}

/// Writes weights with FSE: two states take turns, so that the last weight begins one, and the last
/// but one the other.
static size_t write_coded_weights(const uint8_t *weights, uint32_t count, unsigned char *target) {
    uint32_t frequencies[WEIGHT_COUNT] = {0}, state[2] = {0, 0};
    fse_counts counts;
    fse_code code;
    for (uint32_t i = 0; i < count; i++) frequencies[weights[i]]++;
    for (uint32_t w = 0; w < WEIGHT_COUNT; w++)
        if (frequencies[w] == count) return 0; // no bits would show where the weights end
    fsti_fse_scale(&counts, frequencies, WEIGHT_COUNT, WEIGHT_LOG_MAX);
    fsti_fse_code_fill(&code, &counts);
    bit_writer writer = {.at = fsti_fse_write_counts(&counts, target)};
    for (uint32_t i = count; i-- > 0; bits_store(&writer)) {
        uint32_t *own = &state[i % 2];
        *own = *own == 0 ? code.first[weights[i]] : fse_put(&code, &writer, *own, weights[i]);
    }
    fse_put_state(&code, &writer, state[1]);
    fse_put_state(&code, &writer, state[0]);
    return (size_t)(bits_end_stream(&writer) - target);
}

/// Describes the tree by weights: 0 for a symbol without code, otherwise 1 for the longest codes, 2
/// for codes of one bit less, and so on. The last symbol's weight follows from the others.
static bool describe_tree(huffman_code *code, uint32_t longest) {
    uint8_t weights[HUFFMAN_SYMBOL_COUNT];
    unsigned char coded[4 * HUFFMAN_SYMBOL_COUNT];
    uint32_t count = 0;
    for (uint32_t s = 0; s < HUFFMAN_SYMBOL_COUNT; s++) {
        weights[s] = (uint8_t)(code->bits[s] == 0 ? 0 : longest + 1 - code->bits[s]);
        if (weights[s] > 0) count = s;
    }
    size_t bytes = count < 2 ? 0 : write_coded_weights(weights, count, coded);
    if (bytes > 0 && bytes < 128 && (bytes < (count + 1) / 2 || count > 128)) {
        code->tree[0] = (unsigned char)bytes;
        memcpy(code->tree + 1, coded, bytes);
        code->tree_bytes = 1 + bytes;
        return true;
    }
    if (count > 128) return false;
    weights[count] = 0; // the half byte after an odd number of weights
    code->tree[0] = (unsigned char)(127 + count);
    for (uint32_t i = 0; i < count; i += 2)
        code->tree[1 + i / 2] = (unsigned char)(weights[i] << 4 | weights[i + 1]);
    code->tree_bytes = 1 + (count + 1) / 2;
    return true;
}

bool fsti_huffman_code_make(huffman_code *code, const uint32_t counts[HUFFMAN_SYMBOL_COUNT]) {
    symbol_order order;
    sort_by_count(&order, counts);
    if (order.count < 2) return false;
    find_lengths(&order, code->bits);
    uint32_t longest = assign_codes(code);
    if (!describe_tree(code, longest)) return false;
    code->is_joined = false;
    return true;
}

/// Fills `pairs` and `even`, which takes as long as encoding some 100,000 symbols without them.
static void join_pairs(huffman_code *code) {
    join_codes(code->pairs, code->singles);
    join_codes(code->even, code->pairs); // of the pairs whose second symbol is zero
    code->is_joined = true;
}

void fsti_literals_begin(literal_coder *coder) {
    memset(coder->counts, 0, sizeof coder->counts);
    coder->has_tree = false;
}

/// The head of literals that are stored unchanged, or of one that is repeated.
static unsigned char *put_plain_head(unsigned char *target, uint32_t kind, size_t size) {
    if (size < 32) return fsti_number_store(target, kind | size << 3, 1);
    if (size < 4096) return fsti_number_store(target, kind | 1u << 2 | size << 4, 2);
    return fsti_number_store(target, kind | 3u << 2 | size << 4, 3);
}

static unsigned char *put_raw(unsigned char *target, const unsigned char *literals, size_t size) {
    target = put_plain_head(target, LITERALS_RAW, size);
    memcpy(target, literals, size);
    return target + size;
}

/// The form of the head of coded literals: their width in bits, and how many streams there are.
typedef struct coded_form {
    uint32_t number, width;
    size_t head_bytes, streams;
} coded_form;

static coded_form find_form(size_t size) {
    if (size < STREAMS_MIN) return (coded_form){0, 10, 3, 1};
    if (size < 1024) return (coded_form){1, 10, 3, STREAM_COUNT};
    if (size < 16384) return (coded_form){2, 14, 4, STREAM_COUNT};
    return (coded_form){3, 18, 5, STREAM_COUNT};
}

/// Writes the streams, before which the sizes of all but the last are stated. NULL: a literal has
/// no code, or coding saves nothing.
static unsigned char *put_streams(const huffman_code *code, const unsigned char *literals,
                                  size_t size, size_t count, unsigned char *target) {
    const codec_kernels *kernels = fsti_codec_kernels();
    unsigned char *sizes = target, *begin = target + size;
    size_t each = (size + count - 1) / count;
    uint32_t missing = 0;
    if (count > 1) target += 2 * (count - 1);
    for (size_t i = 0; i < count; i++) {
        size_t own = i + 1 < count ? each : size - i * each;
        unsigned char *end =
            kernels->encode_stream(code, literals + i * each, own, target, &missing);
        if (i + 1 < count) (void)fsti_number_store(sizes + 2 * i, (uint64_t)(end - target), 2);
        target = end;
    }
    return (missing & HUFFMAN_NO_CODE) != 0 || target >= begin ? NULL : target;
}

/// Writes literals with the current tree, and the tree unless the frame has it. NULL: that saves
/// nothing.
static unsigned char *put_coded(literal_coder *coder, const unsigned char *literals, size_t size,
                                bool with_tree, unsigned char *target) {
    coded_form form = find_form(size);
    if (size >= JOINED_MIN && !coder->code.is_joined) join_pairs(&coder->code);
    unsigned char *begin = target + form.head_bytes, *streams = begin;
    if (with_tree) {
        memcpy(streams, coder->code.tree, coder->code.tree_bytes);
        streams += coder->code.tree_bytes;
    }
    unsigned char *end = put_streams(&coder->code, literals, size, form.streams, streams);
    if (end == NULL || (size_t)(end - begin) >= size) return NULL;
    uint32_t kind = with_tree ? LITERALS_CODED : LITERALS_CODED_AS_BEFORE;
    (void)fsti_number_store(target,
                            kind | form.number << 2 | (uint64_t)size << 4 |
                                (uint64_t)(end - begin) << (4 + form.width),
                            form.head_bytes);
    return end;
}

/// Writes literals with the tree that the frame has. NULL: another one is needed, because a literal
/// has no code, or because they take clearly more bytes than those for which the tree was made.
static unsigned char *put_with_old_tree(literal_coder *coder, const unsigned char *literals,
                                        size_t size, unsigned char *target) {
    if (!coder->has_tree || coder->tree_uses >= TREE_USES_MAX) return NULL;
    unsigned char *end = put_coded(coder, literals, size, false, target);
    if (end == NULL) return NULL;
    size_t expected = size * coder->cost / 1024;
    if ((size_t)(end - target) > expected + expected / 32 + 16) return NULL;
    coder->tree_uses++;
    return end;
}

/// Counts the literals, in four tables: otherwise equal literals wait for each other. Symbols of
/// earlier blocks stay, so that the tree has codes for what may come again. Returns whether all
/// literals are equal.
static bool count_literals(literal_coder *coder, const unsigned char *literals, size_t size) {
    uint32_t counts[4][HUFFMAN_SYMBOL_COUNT] = {{0}};
    for (size_t i = 0; i < size; i++) counts[i % 4][literals[i]]++;
    for (size_t s = 0; s < HUFFMAN_SYMBOL_COUNT; s++) {
        uint32_t own = counts[0][s] + counts[1][s] + counts[2][s] + counts[3][s];
        if (own == size) return true;
        coder->counts[s] = (coder->counts[s] + 1) / 2 + own;
    }
    return false;
}

unsigned char *fsti_literals_encode(literal_coder *coder, const unsigned char *literals,
                                    size_t size, unsigned char *target) {
    if (size < CODED_MIN) return put_raw(target, literals, size);
    unsigned char *end = put_with_old_tree(coder, literals, size, target);
    if (end != NULL) return end;
    if (count_literals(coder, literals, size)) {
        target = put_plain_head(target, LITERALS_REPEATED, size);
        *target = literals[0];
        return target + 1;
    }
    coder->has_tree = fsti_huffman_code_make(&coder->code, coder->counts);
    end = coder->has_tree ? put_coded(coder, literals, size, true, target) : NULL;
    coder->has_tree = end != NULL;
    if (end == NULL) return put_raw(target, literals, size);
    coder->tree_uses = 0;
    coder->cost = (size_t)(end - target) * 1024 / size + 1;
    return end;
}
