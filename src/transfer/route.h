// SPDX-License-Identifier: Apache-2.0
/// The routes of a file's chunks: which engines, by what was probed and what policy says of it.
#ifndef FSTI_ROUTE_H
#define FSTI_ROUTE_H

#include "io/io.h"
#include "plan/plan.h"

/// What reads the absent and the resident chunks of a file, and why.
typedef struct fsti_file_route {
    const fsti_io_engine *resident; ///< NULL: nothing reads the file
    atomic_bool is_far;             ///< absent whole pages go straight to the device
    atomic_int absent;              ///< fsti_route of what does not; only goes down
    const fsti_io_engine *forced;   ///< NULL: the route decides
    char reason[256];
} fsti_file_route;

typedef struct fsti_route_wish {
    fst_engine engine;
    bool guard_allowed, keeps_cache, clears_cache;
    bool is_small;
    uint64_t buffer_bytes; ///< of address space that the load's buffers will take
} fsti_route_wish;

fst_status fsti_route_choose(fsti_file *file, const fsti_route_wish *wish, fsti_file_route *out,
                             fst_error *error);
const fsti_io_engine *fsti_route_engine(const fsti_file_route *route, bool is_resident);

#endif
