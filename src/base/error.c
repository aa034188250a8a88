// SPDX-License-Identifier: Apache-2.0
/// Texts of statuses, and the only function that fills an fst_error.
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "primitives.h"
#include "status_map.h"

static const struct {
    const char *name, *meaning;
} statuses[] = {
#define STATUS_ROW(constant, name, meaning) [constant] = {name, meaning},
    FSTI_STATUS_MAP(STATUS_ROW)
#undef STATUS_ROW
};
#define STATUS_COUNT (sizeof statuses / sizeof *statuses)

// Compile-time check: each number of the public enum has exactly one row.
#define STATUS_ONE(constant, name, meaning) +1
_Static_assert((0 FSTI_STATUS_MAP(STATUS_ONE)) == STATUS_COUNT, "numbers without a hole");
#undef STATUS_ONE

const char *fsti_status_name(fst_status status) {
    return (unsigned)status < STATUS_COUNT ? statuses[status].name : "Unknown";
}

const char *fsti_status_meaning(fst_status status) {
    return (unsigned)status < STATUS_COUNT ? statuses[status].meaning : "unknown status";
}

/// Appends formatted text to a fixed buffer, truncating it.
__attribute__((format(printf, 3, 4))) static void append_text(char *text, size_t capacity,
                                                              const char *format, ...) {
    size_t used = strlen(text);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text + used, capacity - used, format, arguments);
    va_end(arguments);
}

void fsti_append(char *text, size_t size, const char *words) {
    size_t used = strlen(text), count = strnlen(words, size - 1 - used);
    memcpy(text + used, words, count);
    text[used + count] = '\0';
}

static void copy_printable(char *target, size_t capacity, const char *source, size_t size) {
    size_t count = size < capacity - 1 ? size : capacity - 1;
    for (size_t i = 0; i < count; i++) target[i] = source[i] == '\0' ? '?' : source[i];
    target[count] = '\0';
    fsti_text_make_printable(target);
}

/// Appends the known fields of a location.
static void append_location(fst_error *error, const fsti_error_location *location) {
    if (location->tensor != NULL) {
        copy_printable(error->tensor, sizeof error->tensor, location->tensor,
                       location->tensor_size);
        append_text(error->message, sizeof error->message, ", tensor `%s`", error->tensor);
    }
    if (location->byte_offset != FST_NO_OFFSET) {
        error->byte_offset = location->byte_offset;
        append_text(error->message, sizeof error->message, ", at byte %" PRIu64,
                    location->byte_offset);
    }
}

void fsti_error_locate(fst_error *error, const fsti_error_location *location) {
    if (error == NULL) return;
    append_location(error, location);
    fsti_text_make_printable(error->message);
}

const char *fsti_error_text(const fst_error *error) {
    size_t size = strlen(error->file);
    bool has_file = size > 0 && strncmp(error->message, error->file, size) == 0 &&
                    strncmp(error->message + size, ": ", 2) == 0;
    return error->message + (has_file ? size + 2 : 0);
}

static void begin_with_file(fst_error *error, const char *file) {
    // Never print a URL's query: it often contains a key.
    if (fsti_url_scheme(file) != FSTI_SCHEME_NONE)
        fsti_url_redact(file, error->file, sizeof error->file);
    else
        copy_printable(error->file, sizeof error->file, file, strlen(file));
    append_text(error->message, sizeof error->message, "%s: ", error->file);
}

fst_status fsti_error_set(fst_error *error, fst_status status, fsti_error_location location,
                          const char *format, ...) {
    if (error == NULL) return status;
    memset(error, 0, sizeof *error);
    error->status = status;
    error->os_errno = location.os_errno;
    error->byte_offset = location.byte_offset;
    if (location.file != NULL) begin_with_file(error, location.file);
    size_t used = strlen(error->message);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->message + used, sizeof error->message - used, format, arguments);
    va_end(arguments);
    append_location(error, &location);
    if (location.os_errno != 0)
        append_text(error->message, sizeof error->message, ": %s", strerror(location.os_errno));
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
    case EDQUOT:
    case EFBIG: return FST_E_NO_SPACE;
    case EROFS: return FST_E_PERMISSION;
    default: return FST_E_IO;
    }
}

fst_status fsti_error_errno(fst_error *error, int os_errno, const char *path, const char *what) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = path;
    location.os_errno = os_errno;
    const char *advice =
        os_errno == EMFILE ? ". The limit on open files is reached (ulimit -n)" : "";
    return fsti_error_set(error, status_of_errno(os_errno), location, "%s failed%s", what, advice);
}

fst_status fsti_error_thread(fst_error *error, int os_errno, const char *path) {
    fsti_error_location location = FSTI_NO_LOCATION;
    struct rlimit limit;
    char processes[64] = "ulimit -u";
    location.file = path;
    location.os_errno = os_errno;
    if (os_errno != EAGAIN)
        return fsti_error_set(error, FST_E_IO, location, "a thread could not be started");
    if (getrlimit(RLIMIT_NPROC, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
        snprintf(processes, sizeof processes, "ulimit -u: %" PRIu64, (uint64_t)limit.rlim_cur);
    return fsti_error_set(error, FST_E_IO, location,
                          "a thread could not be started (EAGAIN): the limit on processes and "
                          "threads is reached (%s, or pids.max of the cgroup). Raise it or use "
                          "fewer threads",
                          processes);
}

fst_status fsti_error_memory(fst_error *error, uint64_t size_bytes) {
    fsti_error_location location = FSTI_NO_LOCATION;
    struct rlimit limit;
    location.os_errno = ENOMEM;
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
        return fsti_error_set(error, FST_E_NO_MEMORY, location,
                              "out of memory: %" PRIu64 " bytes could not be allocated",
                              size_bytes);
    return fsti_error_set(error, FST_E_NO_MEMORY, location,
                          "out of memory: %" PRIu64
                          " bytes could not be allocated. This process may "
                          "have %" PRIu64 " bytes of address space (ulimit -v)",
                          size_bytes, (uint64_t)limit.rlim_cur);
}
