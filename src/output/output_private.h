// SPDX-License-Identifier: Apache-2.0
/// What the files of the output room share.
#ifndef FSTI_OUTPUT_PRIVATE_H
#define FSTI_OUTPUT_PRIVATE_H

#include "output.h"

struct fsti_output {
    fsti_target target;
    char *hidden; ///< path of the hidden name, chosen when the file is made
    bool has_hidden, is_durable;
    int fd, fd_direct;
    uint64_t size_bytes;
    bool direct_probed;
    char direct_reason[128];
    void *mapping;
};

/// A new hidden path beside `path`; NULL without memory.
char *fsti_hidden_path(const char *folder, const char *path);

/// Makes a file with the hidden path, locked by this process.
int fsti_hidden_create(const char *hidden);

#endif
