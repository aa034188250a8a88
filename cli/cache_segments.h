// SPDX-License-Identifier: Apache-2.0
/// Segments of shared memory, for `cache list`, `pin`, `unpin` and `drop`.
#ifndef CLI_CACHE_SEGMENTS_H
#define CLI_CACHE_SEGMENTS_H

#include "cli.h"

/// Prints the segments, one a line and a total, or nothing without segments. With --json:
/// `, "segments": [...]`. `folder` NULL: the default one.
fst_status cli_list_segments(const char *folder, fst_error *error);
/// Pins or unpins the segment whose name begins with `name`. An exit code.
int cli_pin_segment(const char *folder, const char *name, bool is_pinned);
/// Drops the segments whose name begins with `name`, or "all". An exit code.
int cli_drop_segments(const char *folder, const char *name);

#endif
