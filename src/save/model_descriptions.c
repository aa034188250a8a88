// SPDX-License-Identifier: Apache-2.0
/// Recognises files that describe the bytes of a model, and become wrong when it changes.
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "journal_steps.h"

/// First words of files that this package writes next to a model and that describe its bytes.
static const char *const first_words[] = {JOURNAL_MANIFEST_WORD, "fastsafetensors-digest "};
#define FIRST_WORD_BYTES_MAX 32u
#define EXAMINING "examining a file that may describe the old model"

fst_status fsti_save_describes_model(const char *path, bool *describes, fst_error *error) {
    char start[FIRST_WORD_BYTES_MAX];
    *describes = false;
    // A link is followed to look at the content; the link itself is what a save deletes.
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) {
        bool is_none = errno == ENOENT || errno == ENOTDIR || errno == ELOOP || errno == ENXIO ||
                       errno == ENAMETOOLONG;
        return is_none ? FST_OK : fsti_error_errno(error, errno, path, EXAMINING);
    }
    ssize_t got;
    do got = read(fd, start, sizeof start);
    while (got < 0 && errno == EINTR);
    // A folder may have the name.
    int failure = got < 0 && errno != EISDIR ? errno : 0;
    for (size_t i = 0; i < sizeof first_words / sizeof *first_words; i++) {
        size_t size = strlen(first_words[i]);
        if (got >= (ssize_t)size && memcmp(start, first_words[i], size) == 0) *describes = true;
    }
    close(fd);
    return failure == 0 ? FST_OK : fsti_error_errno(error, failure, path, EXAMINING);
}
