// SPDX-License-Identifier: Apache-2.0
/// Signs requests to stores. Private to the store module.
#ifndef FSTI_SIGN_H
#define FSTI_SIGN_H

#include "http/http.h"
#include "credential_cache.h"
#include "object_store.h"

/// Adds the headers of a signature with these keys. False: no memory, or too long.
bool fsti_sign(const object_store *store, const store_keys *keys, const http_call *call,
               http_headers *headers);

#endif
