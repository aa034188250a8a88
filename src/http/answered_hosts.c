// SPDX-License-Identifier: Apache-2.0
/// Remembers which hosts have responded to this process. A host that never did probably has a wrong
/// name or port and fails after few attempts; one that did is probably restarting.
#include "answered_hosts.h"

#include "base/primitives.h"
#include "location/location.h"

#define HOST_COUNT 256u

/// One key per slot; 0: free. A host whose slot is overwritten only loses retries.
static _Atomic uint64_t hosts[HOST_COUNT];

uint64_t fsti_host_key(const char *url) {
    url_parts parsed;
    if (fsti_url_parse(url, &parsed) != NULL) return 0;
    size_t size = (size_t)(parsed.authority.at + parsed.authority.size - url);
    uint64_t hash = fsti_hash(url, size, fsti_hash_key());
    return hash == 0 ? 1 : hash;
}

void fsti_host_note_response(uint64_t host_key) {
    _Atomic uint64_t *slot = &hosts[host_key % HOST_COUNT];
    if (host_key != 0) atomic_store_explicit(slot, host_key, memory_order_relaxed);
}

bool fsti_host_has_answered(uint64_t host_key) {
    _Atomic uint64_t *slot = &hosts[host_key % HOST_COUNT];
    return host_key != 0 && atomic_load_explicit(slot, memory_order_relaxed) == host_key;
}
