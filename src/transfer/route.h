// SPDX-License-Identifier: Apache-2.0
/// The routes of a file's chunks: which engines, by what was probed and what policy says of it. Who
/// opens a load makes them, who carries it out leaves those that fail.
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
    bool is_cached;                 ///< see fsti_file_is_cached()
    char reason[256];
} fsti_file_route;

/// The engine of a route of memory's.
const fsti_io_engine *fsti_route_reader(fsti_route route);
const fsti_io_engine *fsti_route_engine(const fsti_file_route *route, bool is_resident);

#endif
