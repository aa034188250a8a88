// SPDX-License-Identifier: Apache-2.0
/// A web server in the test process: one object, read by ranges, with faults on request.
#ifndef RANGE_SERVER_H
#define RANGE_SERVER_H

#include <stdbool.h>

/// Starts the server on a free port of the loopback interface; it runs until the process ends.
/// Returns the URL of the file at `path`, which is read once.
const char *range_server_begin(const char *path);

/// The next requests for ranges behind the first one fail: `busy` of them with status 503, and
/// after those `cut` answers end in the middle.
void range_server_fail_next(int busy, int cut);

/// Whether that is what the server's own threads run, for tests that limit the library's.
bool range_server_runs(void *(*run)(void *context));

/// Whether libcurl, which the library reads URLs with, is installed.
bool range_server_usable(void);

#endif
