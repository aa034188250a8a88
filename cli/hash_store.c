// SPDX-License-Identifier: Apache-2.0
/// Digests in metadata, and comparisons with stored ones.
#include "hash_store.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "digest_file.h"
#include "metadata.h"
#include "rewrite.h"

#define ALGORITHM_KEY "digest.algorithm"
#define TENSOR_KEY "digest.tensor."

static char *copy_bytes(const char *bytes, size_t size) {
    char *copy = malloc(size + 1);
    if (copy == NULL) return NULL;
    memcpy(copy, bytes, size);
    copy[size] = '\0';
    return copy;
}

/// The digest in a line "KIND HEX NAME\n"; *hex is not terminated.
static bool read_line(const char *line, const char *kind, const char **hex, size_t *hex_size) {
    size_t size = strlen(kind);
    if (strncmp(line, kind, size) != 0 || line[size] != ' ') return false;
    *hex = line + size + 1;
    *hex_size = strcspn(*hex, " \n");
    return true;
}

static const char *next_line(const char *text) {
    const char *end = strchr(text, '\n');
    return end == NULL ? text + strlen(text) : end + 1;
}

/// Text with a size.
typedef struct span {
    const char *bytes;
    size_t size;
} span;

/// A metadata entry whose strings are copies.
static bool add_pair(fst_metadata_entry *entry, const char *prefix, span key, span value) {
    size_t prefix_size = strlen(prefix);
    char *full = malloc(prefix_size + key.size + 1), *copy = copy_bytes(value.bytes, value.size);
    *entry = (fst_metadata_entry){
        .key = full, .key_size = prefix_size + key.size, .value = copy, .value_size = value.size};
    if (full == NULL || copy == NULL) return false;
    memcpy(full, prefix, prefix_size);
    memcpy(full + prefix_size, key.bytes, key.size);
    full[prefix_size + key.size] = '\0';
    return true;
}

static bool is_digest_key(const fst_metadata_entry *entry) {
    return (entry->key_size == strlen(ALGORITHM_KEY) &&
            memcmp(entry->key, ALGORITHM_KEY, entry->key_size) == 0) ||
           (entry->key_size >= strlen(TENSOR_KEY) &&
            memcmp(entry->key, TENSOR_KEY, strlen(TENSOR_KEY)) == 0);
}

/// Adds the lines of tensors, in the model's order.
static bool add_tensor_pairs(const fst_model *model, const char *text, fst_metadata_entry *entries,
                             size_t *count) {
    size_t tensor = 0;
    for (const char *line = text; *line != '\0'; line = next_line(line)) {
        const char *hex;
        size_t hex_size;
        fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
        if (!read_line(line, "tensor", &hex, &hex_size)) continue;
        if (fst_model_tensor_info(model, tensor++, &info, NULL) != FST_OK) return false;
        if (!add_pair(&entries[(*count)++], TENSOR_KEY, (span){info.name, info.name_size},
                      (span){hex, hex_size}))
            return false;
    }
    return true;
}

fst_metadata_entry *hash_metadata(const fst_model *model, const char *text, size_t *count) {
    size_t own_count, kept = 0;
    fst_metadata_entry *own = cli_model_metadata(model, &own_count);
    fst_metadata_entry *entries =
        own == NULL ? NULL : calloc(own_count + fst_model_tensor_count(model) + 1, sizeof *entries);
    bool good = entries != NULL;
    for (size_t i = 0; good && i < own_count; i++)
        if (!is_digest_key(&own[i]))
            good = add_pair(&entries[kept++], "", (span){own[i].key, own[i].key_size},
                            (span){own[i].value, own[i].value_size});
    const char *algorithm = text + strlen(DIGEST_FILE_WORDS);
    if (good)
        good = add_pair(&entries[kept], ALGORITHM_KEY, (span){"", 0},
                        (span){algorithm, strcspn(algorithm, "\n")});
    kept++;
    if (good) good = add_tensor_pairs(model, text, entries, &kept);
    free(own);
    *count = kept;
    if (good) return entries;
    hash_metadata_free(entries, kept);
    return NULL;
}

void hash_metadata_free(fst_metadata_entry *entries, size_t count) {
    for (size_t i = 0; entries != NULL && i < count; i++) {
        free((void *)(uintptr_t)entries[i].key);
        free((void *)(uintptr_t)entries[i].value);
    }
    free(entries);
}

// ---- verifying ----

static bool is_silent;          ///< only compare
static size_t difference_count; ///< differences printed so far for one path

/// The algorithm of embedded digests; "" without such digests.
static void read_embedded(const fst_model *model, char *algorithm, size_t capacity) {
    size_t count;
    fst_metadata_entry *entries = cli_model_metadata(model, &count);
    algorithm[0] = '\0';
    for (size_t i = 0; entries != NULL && i < count; i++)
        if (entries[i].key_size == strlen(ALGORITHM_KEY) &&
            memcmp(entries[i].key, ALGORITHM_KEY, entries[i].key_size) == 0)
            snprintf(algorithm, capacity, "%s", entries[i].value);
    free(entries);
}

/// What is wrong with a tensor or file: the word for people, and the one in JSON.
typedef struct difference {
    const char *text, *json;
} difference;
static const difference is_changed = {"differs", "changed"};
static const difference is_missing = {"missing", "missing"};
static const difference is_unlisted = {"no digest is stored", "unlisted"};

/// The name without the quotes of a JSON string, if it has them.
static span without_quotes(span name) {
    bool has_quotes = name.size >= 2 && name.bytes[0] == '"' && name.bytes[name.size - 1] == '"';
    return has_quotes ? (span){name.bytes + 1, name.size - 2} : name;
}

/// The size of a JSON escape sequence at `text`, which begins with a backslash; 0: it is invalid.
static size_t escape_size(const char *text) {
    if (text[1] != '\0' && strchr("\"\\/bfnrt", text[1]) != NULL) return 2;
    return text[1] == 'u' && strspn(text + 2, "0123456789abcdefABCDEF") >= 4 ? 6 : 0;
}

/// Whether text that ends with a line or NUL behind it is a JSON string, as cli_put_json() writes.
static bool is_json_string(span text) {
    size_t at = 1, step;
    if (text.size < 2 || text.bytes[0] != '"' || text.bytes[text.size - 1] != '"') return false;
    for (; at < text.size - 1; at += step) {
        uint32_t code;
        int columns;
        step = fst_text_step(text.bytes + at, text.size - 1 - at, &code, &columns);
        if (code == '\\') step = escape_size(text.bytes + at);
        if (step == 0 || code == FST_TEXT_INVALID || columns < 0 || code == '"') return false;
    }
    return at == text.size - 1;
}

/// Prints what is wrong, in JSON as an element of the array that the caller started. `is_json`: the
/// name is a JSON string.
static void print_different(const difference *what, span kind, span name, bool is_json) {
    if (is_silent) return;
    if (!cli_wants_json()) {
        printf("%s: ", what->text);
        cli_print_name(kind.bytes, kind.size);
        printf(" ");
        if (is_json) name = without_quotes(name);
        cli_print_name(name.bytes, name.size);
        printf("\n");
        return;
    }
    printf("%s{\"problem\": \"%s\", \"kind\": ", difference_count++ > 0 ? ", " : "", what->json);
    cli_print_json(kind.bytes, kind.size);
    printf(", \"name\": ");
    if (is_json)
        printf("%.*s", (int)name.size, name.bytes);
    else
        cli_print_json(name.bytes, name.size);
    printf("}");
}

static int compare_embedded(const fst_model *model, const char *text) {
    size_t count, tensor = 0;
    int code = EXIT_OK;
    metadata_index index = {0};
    fst_metadata_entry *entries = cli_model_metadata(model, &count);
    bool good = entries != NULL && cli_metadata_index(entries, count, &index);
    if (!good) code = cli_no_memory();
    for (const char *line = text; good && *line != '\0'; line = next_line(line)) {
        const char *hex;
        size_t hex_size;
        fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
        if (!read_line(line, "tensor", &hex, &hex_size) ||
            fst_model_tensor_info(model, tensor++, &info, NULL) != FST_OK)
            continue;
        const fst_metadata_entry *kept =
            cli_metadata_find(&index, TENSOR_KEY, info.name, info.name_size);
        if (kept != NULL && kept->value_size == hex_size && memcmp(kept->value, hex, hex_size) == 0)
            continue;
        print_different(kept == NULL ? &is_unlisted : &is_changed, (span){"tensor", 6},
                        (span){info.name, info.name_size}, false);
        code = EXIT_INVALID;
    }
    free(index.order);
    free(entries);
    return code;
}

/// A line "KIND HEX NAME" of a .digest file, whose name is a JSON string.
typedef struct digest_line {
    span kind, hex, name;
    bool is_stored; ///< of a computed line: the stored text has one with this kind and name
} digest_line;

typedef struct digest_lines {
    digest_line *lines;
    size_t count;
} digest_lines;

static span word_at(const char *text) { return (span){text, strcspn(text, " \n")}; }

/// A line without one of its words has empty ones.
static digest_line cut_line(const char *line) {
    digest_line cut = {.kind = word_at(line)};
    const char *hex = line + cut.kind.size;
    cut.hex = word_at(hex += *hex == ' ');
    const char *name = hex + cut.hex.size;
    name += *name == ' ';
    cut.name = (span){name, strcspn(name, "\n")};
    return cut;
}

/// The lines behind the first one. The caller frees them; false without memory.
static bool cut_lines(const char *text, digest_lines *out) {
    size_t capacity = 1;
    for (const char *line = text; *line != '\0'; line = next_line(line)) capacity++;
    *out = (digest_lines){.lines = calloc(capacity, sizeof *out->lines)};
    if (out->lines == NULL) return false;
    for (const char *line = next_line(text); *line != '\0' && out->count < capacity;
         line = next_line(line))
        out->lines[out->count++] = cut_line(line);
    return true;
}

static int compare_spans(span one, span other) {
    size_t least = one.size < other.size ? one.size : other.size;
    int order = least == 0 ? 0 : memcmp(one.bytes, other.bytes, least);
    return order != 0 ? order : (one.size > other.size) - (one.size < other.size);
}

/// By name, then by kind.
static int compare_names(const void *one, const void *other) {
    const digest_line *a = one, *b = other;
    int order = compare_spans(a->name, b->name);
    return order != 0 ? order : compare_spans(a->kind, b->kind);
}

/// Then by digest. Names that are not UTF-8 may be equal here.
static int compare_whole(const void *one, const void *other) {
    const digest_line *a = one, *b = other;
    int order = compare_names(one, other);
    return order != 0 ? order : compare_spans(a->hex, b->hex);
}

/// The first such line that no other stored line has marked; else any.
static digest_line *find_line(const digest_line *wanted, const digest_lines *among,
                              int (*compare)(const void *, const void *)) {
    if (among->count == 0) return NULL;
    digest_line *any = bsearch(wanted, among->lines, among->count, sizeof *wanted, compare);
    if (any == NULL) return NULL;
    digest_line *line = any, *end = among->lines + among->count;
    while (line > among->lines && compare(wanted, line - 1) == 0) line--;
    for (; line < end && compare(wanted, line) == 0; line++)
        if (!line->is_stored) return line;
    return any;
}

/// Compares a stored line with the computed one, and marks that. `found` is sorted.
static int compare_line(const digest_line *kept, digest_lines *found) {
    digest_line *equal = find_line(kept, found, compare_whole);
    digest_line *same = equal != NULL ? equal : find_line(kept, found, compare_names);
    if (same != NULL) {
        same->is_stored = true;
        if (equal != NULL) return EXIT_OK;
        print_different(&is_changed, same->kind, same->name, true);
        return EXIT_INVALID;
    }
    // The stored text may be anything.
    bool is_json = is_json_string(kept->name);
    print_different(&is_missing, kept->kind, is_json ? kept->name : without_quotes(kept->name),
                    is_json);
    return EXIT_INVALID;
}

/// Compares the stored text with the computed one, whose order may be another.
static int compare_lines(const char *kept_text, const char *found_text) {
    digest_lines kept = {0}, found = {0};
    int code = EXIT_OK;
    if (!cut_lines(kept_text, &kept) || !cut_lines(found_text, &found)) {
        free(kept.lines);
        return cli_no_memory();
    }
    if (found.count > 0) qsort(found.lines, found.count, sizeof *found.lines, compare_whole);
    for (size_t i = 0; i < kept.count; i++)
        if (compare_line(&kept.lines[i], &found) != EXIT_OK) code = EXIT_INVALID;
    for (size_t i = 0; i < found.count; i++) {
        const digest_line *line = &found.lines[i];
        if (line->is_stored) continue;
        print_different(&is_unlisted, line->kind, line->name, true);
        code = EXIT_INVALID;
    }
    free(kept.lines);
    free(found.lines);
    return code;
}

/// The algorithm of the stored digests; "" without such digests.
static void find_algorithm(const fst_model *model, const char *kept, char *algorithm,
                           size_t capacity) {
    if (kept != NULL)
        snprintf(algorithm, capacity, "%.*s", (int)strcspn(kept + strlen(DIGEST_FILE_WORDS), "\n"),
                 kept + strlen(DIGEST_FILE_WORDS));
    else
        read_embedded(model, algorithm, capacity);
}

int hash_gather(const char *path, fst_model *model, hash_check *check) {
    *check = (hash_check){0};
    int code = digest_file_read(path, &check->kept);
    if (code != EXIT_OK) return code;
    find_algorithm(model, check->kept, check->algorithm, sizeof check->algorithm);
    if (check->algorithm[0] == '\0') return EXIT_OK;
    fst_digest digest;
    if (!cli_digest_find(check->algorithm, &digest))
        return cli_refuse(EXIT_UNREADABLE, "Unsupported", "unknown digest algorithm '%s'",
                          check->algorithm);
    return cli_digest_model(model, path, digest, &check->found);
}

bool hash_is_same(const fst_model *model, const hash_check *check) {
    if (check->algorithm[0] == '\0') return false;
    is_silent = true;
    int code = check->kept != NULL ? compare_lines(check->kept, check->found)
                                   : compare_embedded(model, check->found);
    is_silent = false;
    return code == EXIT_OK;
}

int hash_compare(const char *path, const fst_model *model, const hash_check *check, bool quiet) {
    bool json = cli_wants_json();
    if (check->algorithm[0] == '\0') {
        if (json)
            printf(", \"digests\": null, \"error\": {\"kind\": \"NoDigests\", \"message\": "
                   "\"no digests were stored for this model\"}");
        else
            cli_print_path(path), printf(": no stored digests, in a .digest file or embedded\n");
        return EXIT_INVALID;
    }
    difference_count = 0;
    if (json) printf(", \"digests\": \"%s\", \"different\": [", check->algorithm);
    int code = check->kept != NULL ? compare_lines(check->kept, check->found)
                                   : compare_embedded(model, check->found);
    if (json) printf("]");
    if (code == EXIT_OK && !quiet && !json)
        cli_print_path(path), printf(": all digests (%s) match\n", check->algorithm);
    return code;
}

void hash_check_clear(hash_check *check) {
    free(check->kept);
    free(check->found);
}
