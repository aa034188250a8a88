// SPDX-License-Identifier: Apache-2.0
/// NVIDIA's cuFile and AMD's hipFile, whose APIs agree. Types as in cufile.h 1.14 (package
/// nvidia-cufile) and hipfile.h.
#ifndef FSTI_GDS_LIBRARY_H
#define FSTI_GDS_LIBRARY_H

#include <sys/types.h>

#include "io_private.h"

#define FSTI_GDS_HANDLE_FD 1 // CU_FILE_HANDLE_TYPE_OPAQUE_FD

typedef struct fsti_gds_error {
    int error, driver_error;
} fsti_gds_error;

typedef struct fsti_gds_descriptor {
    int type;
    union {
        int fd;
        void *handle;
    } handle;
    const void *operations;
} fsti_gds_descriptor;

struct fsti_gds_api {
    const char *library;
    fsti_gds_error (*driver_open)(void);
    fsti_gds_error (*handle_register)(void **handle, fsti_gds_descriptor *descriptor);
    void (*handle_deregister)(void *handle);
    ssize_t (*read)(void *handle, void *base, size_t size, off_t file_offset, off_t base_offset);
    bool is_loaded; ///< the library is there and has all functions
    int result;     ///< of driver_open
    char reason[192];
    pid_t owner;
};

/// The library, loaded and started on first use, or NULL with the reason. A library that does not
/// start within ten seconds cannot be used until it has started.
const fsti_gds_api *fsti_gds_library(bool is_hip, char *reason, size_t reason_size);
/// Whether cuFile's kernel module is loaded, or its settings do not need it. True for hipFile.
bool fsti_gds_has_module(bool is_hip);
/// What a container may lack if cuFile rejects a file: a text that begins with ". ", or "".
const char *fsti_gds_container_hint(const fsti_gds_api *api);

#endif
