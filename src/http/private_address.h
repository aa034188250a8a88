// SPDX-License-Identifier: Apache-2.0
/// Recognises private addresses. Private to the http module. Pure.
#ifndef FSTI_PRIVATE_ADDRESS_H
#define FSTI_PRIVATE_ADDRESS_H

#include <stdbool.h>
#include <stddef.h>

struct sockaddr;

/// Whether a socket address is not public: private and link-local networks, loopback, multicast,
/// reserved blocks, and cloud metadata services. For IPv6 with an embedded IPv4 address, that
/// address decides.
bool fsti_sockaddr_is_private(const struct sockaddr *address);
/// The same for the host of a URL (without brackets): an address in its usual spelling, or a name
/// reserved for private use or for a known metadata service. For other names and spellings, check
/// the socket address.
bool fsti_host_is_private(const char *host, size_t size);

#endif
