// SPDX-License-Identifier: Apache-2.0
/// Statuses in words, and the one way to fill an fst_error.
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base.h"
#include "status_map.h"

static const struct {
    const char *name, *meaning;
} statuses[] = {
#define STATUS_ROW(constant, name, meaning) [constant] = {name, meaning},
    FSTI_STATUS_MAP(STATUS_ROW)
#undef STATUS_ROW
};
#define STATUS_COUNT (sizeof statuses / sizeof *statuses)

// Every number of the public enum has its row, once.
#define STATUS_ONE(constant, name, meaning) +1
_Static_assert((0 FSTI_STATUS_MAP(STATUS_ONE)) == STATUS_COUNT, "numbers without a hole");
#undef STATUS_ONE

const char *fsti_status_name(fst_status status) {
    return (unsigned)status < STATUS_COUNT ? statuses[status].name : "Unknown";
}

const char *fsti_status_meaning(fst_status status) {
    return (unsigned)status < STATUS_COUNT ? statuses[status].meaning : "unknown status";
}

/// Appends formatted text to a fixed buffer; what does not fit is cut.
__attribute__((format(printf, 3, 4))) static void append_text(char *text, size_t capacity,
                                                              const char *format, ...) {
    size_t used = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + used, capacity - used, format, arguments);
    va_end(arguments);
}

/// Bytes of the character of UTF-8 that begins here; 0: none does.
static size_t character_bytes(const unsigned char *at) {
    size_t size = at[0] < 0x80 ? 1 : at[0] < 0xc2 ? 0 : at[0] < 0xe0 ? 2 : at[0] < 0xf0 ? 3 : 4;
    if (at[0] > 0xf4) return 0;
    for (size_t i = 1; i < size; i++)
        if ((at[i] & 0xc0) != 0x80) return 0;
    return size;
}

/// Controls, and what turns the direction of what follows, or ends a line (U+061C, U+200E, U+200F,
/// U+2028 to U+202E, U+2066 to U+2069): a name could make a message read as another one.
static bool is_control(const unsigned char *at, size_t size) {
    if (size == 1) return *at < 0x20 || *at == 0x7f;
    if (size == 2) return (at[0] == 0xc2 && at[1] < 0xa0) || (at[0] == 0xd8 && at[1] == 0x9c);
    if (size != 3 || at[0] != 0xe2) return false;
    if (at[1] == 0x80) return (at[2] >= 0xa8 && at[2] <= 0xae) || (at[2] & 0xfe) == 0x8e;
    return at[1] == 0x81 && at[2] >= 0xa6 && at[2] <= 0xa9;
}

void fsti_append(char *text, size_t size, const char *words) {
    size_t used = strlen(text), count = strnlen(words, size - 1 - used);
    memcpy(text + used, words, count);
    text[used + count] = '\0';
}

void fsti_text_make_printable(char *text) {
    for (unsigned char *at = (unsigned char *)text; *at != '\0';) {
        size_t size = character_bytes(at);
        if (size == 0 || is_control(at, size)) memset(at, '?', size == 0 ? 1 : size);
        at += size == 0 ? 1 : size;
    }
}

static void copy_printable(char *target, size_t capacity, const char *source, size_t size) {
    size_t count = size < capacity - 1 ? size : capacity - 1;
    for (size_t i = 0; i < count; i++) target[i] = source[i] == '\0' ? '?' : source[i];
    target[count] = '\0';
    fsti_text_make_printable(target);
}

/// Says where, as far as `place` knows.
static void append_place(fst_error *error, const fsti_error_place *place) {
    if (place->tensor != NULL) {
        copy_printable(error->tensor, sizeof error->tensor, place->tensor, place->tensor_size);
        append_text(error->message, sizeof error->message, ", tensor `%s`", error->tensor);
    }
    if (place->byte_offset != FST_NO_OFFSET) {
        error->byte_offset = place->byte_offset;
        append_text(error->message, sizeof error->message, ", at byte %" PRIu64,
                    place->byte_offset);
    }
}

void fsti_error_locate(fst_error *error, const fsti_error_place *place) {
    if (error == NULL) return;
    append_place(error, place);
    fsti_text_make_printable(error->message);
}

fst_status fsti_error_set(fst_error *error, fst_status status, fsti_error_place place,
                          const char *format, ...) {
    if (error == NULL) return status;
    memset(error, 0, sizeof *error);
    error->status = status;
    error->os_errno = place.os_errno;
    error->byte_offset = place.byte_offset;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->message, sizeof error->message, format, arguments);
    va_end(arguments);
    append_place(error, &place);
    if (place.file != NULL) {
        // No query of an address is ever told: it is a key as likely as not.
        if (fsti_path_is_address(place.file))
            fsti_url_tell(place.file, error->file, sizeof error->file);
        else
            copy_printable(error->file, sizeof error->file, place.file, strlen(place.file));
        append_text(error->message, sizeof error->message, ", in %s", error->file);
    }
    if (place.os_errno != 0)
        append_text(error->message, sizeof error->message, ": %s", strerror(place.os_errno));
    fsti_text_make_printable(error->message);
    return status;
}

static fst_status status_of_errno(int os_errno) {
    switch (os_errno) {
    case ENOENT:
    case ENOTDIR: return FST_E_NOT_FOUND;
    case EACCES:
    case EPERM: return FST_E_PERMISSION;
    case EISDIR: return FST_E_NOT_REGULAR;
    case ENOMEM: return FST_E_NO_MEMORY;
    case ENOSPC:
    case EDQUOT: return FST_E_NO_SPACE;
    case EROFS: return FST_E_PERMISSION;
    default: return FST_E_IO;
    }
}

fst_status fsti_error_errno(fst_error *error, int os_errno, const char *path, const char *what) {
    fsti_error_place place = FSTI_NOWHERE;
    place.file = path;
    place.os_errno = os_errno;
    const char *advice = os_errno == EMFILE ? " (ulimit -n: so many files may a process open)" : "";
    return fsti_error_set(error, status_of_errno(os_errno), place, "%s failed%s", what, advice);
}

fst_status fsti_error_memory(fst_error *error, uint64_t size_bytes) {
    return fsti_error_set(error, FST_E_NO_MEMORY, FSTI_NOWHERE,
                          "out of memory: %" PRIu64 " bytes could not be allocated", size_bytes);
}
