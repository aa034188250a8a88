// SPDX-License-Identifier: Apache-2.0
/// Stored digests: writing, finding and comparing.
#include "hash_store.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "metadata.h"
#include "rewrite.h"

#define ALGORITHM_KEY "digest.algorithm"
#define TENSOR_KEY "digest.tensor."
#define FIRST_LINE "fastsafetensors-digest 1 "

static char *copy_bytes(const char *bytes, size_t size) {
    char *copy = malloc(size + 1);
    if (copy == NULL) return NULL;
    memcpy(copy, bytes, size);
    copy[size] = '\0';
    return copy;
}

/// Digests lie next to a file under the name that was given, and next to the folder that a name
/// leads to: fsti_file_digests_find() looks there, and saves delete them there.
static char *sidecar_path(const char *path, const char *suffix) {
    struct stat info;
    bool is_folder = stat(path, &info) == 0 && S_ISDIR(info.st_mode);
    char *real = is_folder ? realpath(path, NULL) : NULL;
    if (real != NULL && stat(real, &info) == 0) path = real;
    size_t size = strlen(path);
    while (size > 1 && path[size - 1] == '/') size--;
    size_t capacity = size + strlen(suffix) + 1;
    char *result = malloc(capacity);
    if (result != NULL) snprintf(result, capacity, "%.*s%s", (int)size, path, suffix);
    free(real);
    return result;
}

/// Creates a temporary file next to the target, named and locked as those of saves are, so that
/// their clean-up finds it. Existing files and links are never opened. The caller frees *temporary,
/// the name. Returns -1 with errno set on failure.
static int create_temporary(const char *target, char **temporary) {
    const char *slash = strrchr(target, '/');
    int folder_size = slash == NULL ? 0 : (int)(slash - target) + 1;
    size_t capacity = strlen(target) + sizeof "..0123456789abcdef.tmp";
    if ((*temporary = malloc(capacity)) == NULL) return -1;
    for (int attempt = 0; attempt < 16; attempt++) {
        uint64_t random_number = 0;
        if (getrandom(&random_number, sizeof random_number, 0) != (ssize_t)sizeof random_number)
            return -1;
        snprintf(*temporary, capacity, "%.*s.%.200s.%016" PRIx64 ".tmp", folder_size, target,
                 target + folder_size, random_number);
        int fd = open(*temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
        if (fd >= 0) (void)flock(fd, LOCK_EX | LOCK_NB);
        if (fd >= 0 || errno != EEXIST) return fd;
    }
    return -1;
}

static bool write_all(int fd, const char *text) {
    size_t left = strlen(text);
    while (left > 0) {
        ssize_t written = write(fd, text, left);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return false;
        text += written;
        left -= (size_t)written;
    }
    return fsync(fd) == 0;
}

char *hash_settle(const char *path) {
    struct stat info;
    if (stat(path, &info) == 0 && S_ISDIR(info.st_mode)) {
        char *whole = realpath(path, NULL);
        // Below a parent that may not be searched only the given path leads there.
        if (whole != NULL && stat(whole, &info) == 0) return whole;
        free(whole);
        return strdup(path);
    }
    const char *slash = strrchr(path, '/');
    size_t folder_size = slash == NULL ? 0 : (size_t)(slash - path) + 1;
    bool is_plain = cli_is_address(path) || folder_size == 0 || slash[1] == '\0';
    char *folder = is_plain ? NULL : copy_bytes(path, folder_size);
    char *real = folder == NULL ? NULL : realpath(folder, NULL), *settled = NULL;
    if (real != NULL && stat(real, &info) != 0) {
        free(real);
        real = NULL;
    }
    size_t capacity = real == NULL ? 0 : strlen(real) + strlen(path) + 2;
    if (real != NULL && (settled = malloc(capacity)) != NULL)
        snprintf(settled, capacity, "%s/%s", real, slash + 1);
    free(folder);
    free(real);
    return settled != NULL ? settled : strdup(path);
}

static bool identify(int fd, hash_sidecar *out) {
    struct stat info;
    if (fstat(fd, &info) != 0) return false;
    *out = (hash_sidecar){.device = (uint64_t)info.st_dev, .inode = (uint64_t)info.st_ino};
    return true;
}

int hash_sidecar_write(const char *path, const char *text, hash_sidecar *written) {
    char *target = sidecar_path(path, ".digest"), *temporary = NULL;
    int fd = target == NULL ? -1 : create_temporary(target, &temporary);
    bool good = fd >= 0 && write_all(fd, text) && identify(fd, written);
    if (fd >= 0 && close(fd) != 0) good = false;
    // The rename replaces a planted link, not its target.
    if (good && rename(temporary, target) != 0) good = false;
    if (!good) {
        cli_fail_errno("writing", target == NULL ? path : target);
        if (fd >= 0) unlink(temporary);
    }
    free(target);
    free(temporary);
    return good ? EXIT_OK : EXIT_UNREADABLE;
}

void hash_sidecar_remove(const char *path, const hash_sidecar *written) {
    char *target = sidecar_path(path, ".digest");
    struct stat info;
    if (target != NULL && lstat(target, &info) == 0 && (uint64_t)info.st_dev == written->device &&
        (uint64_t)info.st_ino == written->inode)
        unlink(target);
    free(target);
}

int hash_sidecar_check(const char *path) {
    // Checks a name that does not exist, because an existing .digest file is replaced even if it is
    // read-only.
    char *unused_name = sidecar_path(path, ".digest.0");
    int code = unused_name == NULL ? cli_no_memory() : cli_check_file_target(unused_name, false);
    free(unused_name);
    return code;
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
    const char *algorithm = text + strlen(FIRST_LINE);
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

/// Reads the stored digests as a string. NULL if there are no digests. Never waits for a pipe.
static char *read_sidecar(const char *path) {
    char *name = sidecar_path(path, ".digest"), *text = NULL;
    struct stat info;
    int fd = name == NULL ? -1 : open(name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd >= 0 && fstat(fd, &info) == 0 && S_ISREG(info.st_mode) &&
        info.st_size < (off_t)1 << 31 && (text = calloc((size_t)info.st_size + 1, 1)) != NULL) {
        size_t have = 0;
        for (ssize_t got = 1; got > 0 && have < (size_t)info.st_size; have += (size_t)got)
            if ((got = read(fd, text + have, (size_t)info.st_size - have)) < 0) got = 0;
    }
    if (fd >= 0) close(fd);
    free(name);
    return text;
}

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
    for (const char *line = next_line(text); *line != '\0'; line = next_line(line))
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

static digest_line *find_line(const digest_line *wanted, const digest_lines *among,
                              int (*compare)(const void *, const void *)) {
    if (among->count == 0) return NULL;
    return bsearch(wanted, among->lines, among->count, sizeof *wanted, compare);
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
    // The stored text may be anything, so the name may be no JSON string.
    print_different(&is_missing, kept->kind, without_quotes(kept->name), false);
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
    if (kept != NULL && strncmp(kept, FIRST_LINE, strlen(FIRST_LINE)) == 0)
        snprintf(algorithm, capacity, "%.*s", (int)strcspn(kept + strlen(FIRST_LINE), "\n"),
                 kept + strlen(FIRST_LINE));
    else if (kept == NULL)
        read_embedded(model, algorithm, capacity);
}

int hash_gather(const char *path, fst_model *model, hash_check *check) {
    *check = (hash_check){.kept = read_sidecar(path)};
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
