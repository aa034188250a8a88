// SPDX-License-Identifier: Apache-2.0
/// The hosts that have responded to this process. Private to the http module.
#ifndef FSTI_ANSWERED_HOSTS_H
#define FSTI_ANSWERED_HOSTS_H

#include <stdbool.h>
#include <stdint.h>

/// A hash of a URL's scheme, host and port; 0 if the text is not a URL.
uint64_t fsti_host_key(const char *url);
/// Records that the host has responded. Memory is limited: after more than 256 hosts, earlier ones
/// may be forgotten. Thread-safe.
void fsti_host_note_response(uint64_t host_key);
/// Whether the host is recorded. Thread-safe.
bool fsti_host_has_answered(uint64_t host_key);

#endif
