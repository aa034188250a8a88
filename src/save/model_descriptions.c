// SPDX-License-Identifier: Apache-2.0
/// Recognises files that describe the bytes of a model, and become wrong when it changes.
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "journal_steps.h"

/// First words of files that this package writes next to a model and that describe its bytes.
static const char *const first_words[] = {JOURNAL_MANIFEST_WORD, "fastsafetensors-digest "};
#define FIRST_WORD_BYTES_MAX 32u

fst_status fsti_save_describes_model(const char *path, bool *describes, fst_error *error) {
    char start[FIRST_WORD_BYTES_MAX];
    struct stat info;
    *describes = false;
    // Reading a pipe would take what its writer sent.
    if (stat(path, &info) == 0 && !S_ISREG(info.st_mode)) return FST_OK;
    // A link is followed to look at the content; the link itself is what a save deletes.
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : read(fd, start, sizeof start);
    while (fd >= 0 && got < 0 && errno == EINTR) got = read(fd, start, sizeof start);
    int failure = got < 0 ? errno : 0;
    if (fd >= 0) close(fd);
    bool is_none = fd < 0 && (failure == ENOENT || failure == ENOTDIR || failure == ELOOP ||
                              failure == ENXIO || failure == ENAMETOOLONG);
    if (failure != 0 && !is_none)
        return fsti_error_errno(error, failure, path,
                                "examining a file that may describe the old model");
    for (size_t i = 0; i < sizeof first_words / sizeof *first_words; i++) {
        size_t size = strlen(first_words[i]);
        if (got >= (ssize_t)size && memcmp(start, first_words[i], size) == 0) *describes = true;
    }
    return FST_OK;
}
