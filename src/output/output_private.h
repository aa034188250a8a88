// SPDX-License-Identifier: Apache-2.0
/// What the files of the output room share.
#ifndef FSTI_OUTPUT_PRIVATE_H
#define FSTI_OUTPUT_PRIVATE_H

#include "net/net.h"
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
    fsti_upload *upload; ///< of an object, which has nothing but a target besides
};

/// FST_E_UNSUPPORTED, in words.
fst_status fsti_output_refuse_object(const fsti_output *output, fst_error *error);

/// A new hidden path beside `path`; NULL without memory.
char *fsti_hidden_path(const char *folder, const char *path);

/// FST_E_NO_SPACE where the process may not make a file so large: the kernel would send a signal
/// that ends programs.
fst_status fsti_output_check_limit(const fsti_output *output, uint64_t size_bytes,
                                   fst_error *error);

/// Makes a file with the hidden path, locked by this process.
int fsti_hidden_create(const char *hidden);

#endif
