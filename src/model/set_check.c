// SPDX-License-Identifier: Apache-2.0
/// Checks that a sharded model is complete, and that it is still the one that was opened.
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "open_model.h"
#include "location/location.h"

/// Maximum of names in the message; more are only counted.
#define NAME_COUNT_MAX 5u
#define ENDING ".safetensors"
#define DIGITS_MIN 5
/// The digits that distinguish a save at a store from the one that it replaces (save/publish.c).
#define TAG_BYTES ((size_t)16)

/// A path that ends in "-00002-of-00003.safetensors", or with a tag in
/// "-00002-of-00003-0123456789abcdef.safetensors". Other programs write "-00002-of-000003", or
/// numbers from 0 to 2. Fewer digits also mean other things: epochs, steps, ranks.
typedef struct shard_name {
    size_t prefix_size;       ///< up to the number
    int digits, count_digits; ///< of the number and of the count
    uint64_t number, count;
    const char *tag; ///< the tag's digits, if any
    size_t tag_size; ///< 0 or TAG_BYTES
} shard_name;

/// Reads at most 9 digits backwards from `at`; returns how many.
static int read_digits(const char *text, size_t at, uint64_t *number) {
    int digits = 0;
    uint64_t digit_value = 1;
    for (*number = 0; digits < 9 && at > 0 && isdigit((unsigned char)text[at - 1]); digits++) {
        *number += digit_value * (uint64_t)(text[--at] - '0');
        digit_value *= 10;
    }
    return digits;
}

static bool read_shard_name(const char *path, shard_name *out) {
    size_t size = fsti_location_is_url(path) ? strcspn(path, "?#") : strlen(path);
    if (size < sizeof ENDING ||
        memcmp(path + size - sizeof ENDING + 1, ENDING, sizeof ENDING - 1) != 0)
        return false;
    *out = (shard_name){.tag = ""};
    size -= sizeof ENDING - 1;
    if (size > TAG_BYTES && path[size - TAG_BYTES - 1] == '-' &&
        strspn(path + size - TAG_BYTES, "0123456789abcdef") == TAG_BYTES) {
        out->tag = path + size - TAG_BYTES;
        out->tag_size = TAG_BYTES;
        size -= TAG_BYTES + 1;
    }
    out->count_digits = read_digits(path, size, &out->count);
    size_t at = size - (size_t)out->count_digits;
    if (out->count == 0 || out->count_digits < DIGITS_MIN || at < 4 ||
        memcmp(path + at - 4, "-of-", 4) != 0)
        return false;
    out->digits = read_digits(path, at - 4, &out->number);
    out->prefix_size = at - 4 - (size_t)out->digits;
    return out->digits >= DIGITS_MIN && out->prefix_size > 0 && path[out->prefix_size - 1] == '-' &&
           out->number <= out->count;
}

bool fsti_model_is_tagged(const char *path) {
    shard_name shard;
    return read_shard_name(path, &shard) && shard.tag_size > 0;
}

/// A set of files "PREFIX00001-of-00003.safetensors", by one of them.
typedef struct named_set {
    const char *path;
    shard_name shard;
} named_set;

/// Whether the file belongs with the set, but to another save of it: it has another number of
/// files or another tag, or is the only one, "PREFIX.safetensors".
static bool is_of_other_save(const named_set *set, const char *path, const shard_name *shard) {
    size_t size = set->shard.prefix_size;
    if (shard != NULL)
        return shard->prefix_size == size && memcmp(path, set->path, size) == 0 &&
               (shard->count != set->shard.count ||
                shard->count_digits != set->shard.count_digits ||
                shard->tag_size != set->shard.tag_size ||
                memcmp(shard->tag, set->shard.tag, shard->tag_size) != 0);
    return strncmp(path, set->path, size - 1) == 0 && strcmp(path + size - 1, ENDING) == 0;
}

/// The set that the file shows to be of another save, or NULL.
static const named_set *find_other_save(const named_set *sets, size_t count, const char *path,
                                        const shard_name *shard) {
    for (size_t i = 0; i < count; i++)
        if (is_of_other_save(&sets[i], path, shard)) return &sets[i];
    return NULL;
}

static bool is_in_set(const named_set *sets, size_t count, const char *path,
                      const shard_name *shard) {
    for (size_t i = count; i > 0; i--)
        if (sets[i - 1].shard.prefix_size == shard->prefix_size &&
            memcmp(path, sets[i - 1].path, shard->prefix_size) == 0)
            return true;
    return false;
}

fst_status fsti_model_find_two_saves(const char *const *paths, size_t count, const char *found[2],
                                     fst_error *error) {
    size_t set_count = 0;
    shard_name shard;
    named_set *sets = fsti_alloc_zeroed(count + 1, sizeof *sets);
    found[0] = found[1] = NULL;
    if (sets == NULL) return fsti_error_memory(error, count * sizeof *sets);
    for (size_t i = 0; i < count; i++)
        if (read_shard_name(paths[i], &shard) && !is_in_set(sets, set_count, paths[i], &shard))
            sets[set_count++] = (named_set){paths[i], shard};
    for (size_t i = 0; i < count && set_count > 0 && found[0] == NULL; i++) {
        bool is_shard = read_shard_name(paths[i], &shard);
        const named_set *other =
            find_other_save(sets, set_count, paths[i], is_shard ? &shard : NULL);
        if (other == NULL) continue;
        found[0] = other->path;
        found[1] = paths[i];
    }
    fsti_free(sets);
    return FST_OK;
}

static int compare_paths(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/// Whether the file with another number is there.
static bool has_shard(const model_paths *paths, const char *path, const shard_name *shard,
                      uint64_t number) {
    const char *rest = path + shard->prefix_size + shard->digits;
    size_t capacity = strlen(path) + 32;
    char *wanted = fsti_alloc(capacity);
    if (wanted == NULL) return true; // out of memory; reported by the next allocation
    memcpy(wanted, path, shard->prefix_size);
    snprintf(wanted + shard->prefix_size, capacity - shard->prefix_size, "%0*" PRIu64 "%s",
             shard->digits, number, rest);
    bool found =
        bsearch(&wanted, paths->paths, paths->count, sizeof *paths->paths, compare_paths) != NULL;
    fsti_free(wanted);
    return found;
}

/// The number of a set's first file: 1, or 0.
static uint64_t first_number(const model_paths *paths, const char *path, const shard_name *shard) {
    return shard->number == 0 || has_shard(paths, path, shard, 0) ? 0 : 1;
}

static void add_name(char *list, size_t capacity, size_t count, const char *name) {
    size_t used = strlen(list);
    if (count < NAME_COUNT_MAX)
        snprintf(list + used, capacity - used, "%s%.60s", count > 0 ? ", " : "", name);
    else if (count == NAME_COUNT_MAX)
        snprintf(list + used, capacity - used, ", ..");
}

/// How many files of the set are missing. The name of one file says how many there should be, so
/// the files that are there are counted.
static uint64_t count_missing(const model_paths *paths, const char *path, const shard_name *shard) {
    named_set set = {path, *shard};
    uint64_t present = 0;
    for (size_t i = 0; i < paths->count; i++) {
        shard_name other;
        present +=
            read_shard_name(paths->paths[i], &other) && is_in_set(&set, 1, paths->paths[i], &other);
    }
    return shard->count - fsti_min(present, shard->count - 1);
}

static fst_status name_missing_shards(const model_paths *paths, const char *folder,
                                      const char *path, const shard_name *shard, fst_error *error) {
    char list[400] = "", name[32];
    uint64_t missing = count_missing(paths, path, shard), first = first_number(paths, path, shard);
    size_t named = 0;
    for (uint64_t number = first; number < first + shard->count && named <= NAME_COUNT_MAX;
         number++) {
        if (has_shard(paths, path, shard, number)) continue;
        snprintf(name, sizeof name, "%0*" PRIu64, shard->digits, number);
        add_name(list, sizeof list, named++, name);
    }
    const char *base = strrchr(path, '/');
    base = base == NULL ? path : base + 1;
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = folder;
    return fsti_error_set(error, FST_E_NOT_FOUND, location,
                          "the folder has no index, and of the %" PRIu64
                          " files %.*s..-of-%0*" PRIu64 ENDING " %" PRIu64 " %s missing: number %s",
                          shard->count, (int)(shard->prefix_size - (size_t)(base - path)), base,
                          shard->count_digits, shard->count, missing, missing == 1 ? "is" : "are",
                          list);
}

fst_status fsti_model_check_shards(const model_paths *paths, const char *folder, fst_error *error) {
    for (size_t i = 0; i < paths->count; i++) {
        shard_name shard;
        if (!read_shard_name(paths->paths[i], &shard)) continue;
        // Find gaps: each present shard checks that its neighbours exist.
        uint64_t first = first_number(paths, paths->paths[i], &shard);
        bool expected = (shard.number == first ||
                         has_shard(paths, paths->paths[i], &shard, shard.number - 1)) &&
                        (shard.number >= first + shard.count - 1 ||
                         has_shard(paths, paths->paths[i], &shard, shard.number + 1));
        if (!expected) return name_missing_shards(paths, folder, paths->paths[i], &shard, error);
    }
    return FST_OK;
}

bool fsti_model_names_hidden(const model_paths *paths) {
    for (size_t i = 0; i < paths->count; i++) {
        const char *slash = strrchr(paths->paths[i], '/');
        if ((slash == NULL ? paths->paths[i] : slash + 1)[0] == '.' &&
            fsti_ends_with(paths->paths[i], ".tmp"))
            return true;
    }
    return false;
}

fst_status fsti_model_name_missing(const model_paths *paths, fst_status status, fst_error *error) {
    char list[400] = "";
    struct stat info;
    size_t missing = 0, first = 0;
    if (paths->index_path == NULL) return status; // objects report their own errors
    for (size_t i = 0; i < paths->count; i++) {
        if (stat(paths->paths[i], &info) == 0 || errno != ENOENT) continue;
        const char *slash = strrchr(paths->paths[i], '/');
        if (missing == 0) first = i;
        add_name(list, sizeof list, missing++, slash == NULL ? paths->paths[i] : slash + 1);
    }
    if (missing == 0) return status; // present by now, or another error
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = paths->paths[first];
    location.os_errno = ENOENT;
    return fsti_error_set(error, FST_E_NOT_FOUND, location,
                          "%zu of %zu files listed in the index %s missing (%s)", missing,
                          paths->count, missing == 1 ? "is" : "are", list);
}
