// SPDX-License-Identifier: Apache-2.0
/// The routes of a file: which engines read its chunks, from probes and policy. The loader creates
/// them; the transfer moves to the next one when one fails.
#ifndef FSTI_ROUTE_H
#define FSTI_ROUTE_H

#include "io/io.h"
#include "plan/plan.h"

/// How page faults of the file's mapping read. Large ones are for file systems that answer slowly,
/// which the first thread that needs to know finds out.
typedef enum fsti_route_faults {
    FSTI_FAULTS_SMALL,
    FSTI_FAULTS_UNKNOWN,
    FSTI_FAULTS_LARGE,
} fsti_route_faults;

/// How absent and resident chunks of a file are read, and why.
typedef struct fsti_file_route {
    const fsti_io_engine *resident; ///< NULL: the file is not read
    atomic_bool uses_gds;           ///< absent whole pages are read by GPUDirect
    atomic_int absent;              ///< fsti_route of the other absent bytes; only moves forward
    const fsti_io_engine *forced;   ///< NULL: the route decides
    bool has_own_readahead;         ///< see fsti_file_has_own_readahead()
    atomic_uint views_left;         ///< chunks of views that are not finished
    atomic_int faults;              ///< fsti_route_faults
    char reason[256];
} fsti_file_route;

/// The engine of a route into CPU memory.
const fsti_io_engine *fsti_route_reader(fsti_route route);
const fsti_io_engine *fsti_route_engine(const fsti_file_route *route, bool is_resident);

#endif
