// SPDX-License-Identifier: Apache-2.0
/// Signs requests to stores. Private to the net module.
#ifndef FSTI_SIGN_H
#define FSTI_SIGN_H

#include "authority.h"
#include "credential_cache.h"
#include "store.h"

/// Adds the headers of a signature with these keys. False: no memory, or too long.
bool fsti_sign(const net_store *store, const net_keys *keys, const http_call *call,
               http_headers *headers);

#endif
