// SPDX-License-Identifier: Apache-2.0
/// Credential providers: their requests, files and answers. Blocking, so never called on an event
/// loop's thread. Private to the store module.
#ifndef FSTI_PROVIDER_H
#define FSTI_PROVIDER_H

#include "credential_cache.h"
#include "store.h"
#include "http/http.h"

fst_status fsti_provider_aws(const provider_config *source, store_keys *out, fst_error *error);
fst_status fsti_provider_google(const provider_config *source, store_keys *out, fst_error *error);
fst_status fsti_provider_azure(const provider_config *source, store_keys *out, fst_error *error);

const char *fsti_provider_name(provider_kind kind);

/// A request to a provider. All of it is secret and wiped after use.
typedef struct provider_call {
    const char *method, *url, *body;
    const char *const *lines;
    http_authority authority; ///< signs the request
    bool is_link_local;       ///< link-local metadata service: no proxy, one attempt of a second
} provider_call;
/// Sets the cancellation of this thread's provider requests; NULL: none.
void fsti_provider_watch(const fsti_http_watch *watch);
/// Sends the request. `out` receives the response with a final NUL.
fst_status fsti_provider_request(const provider_call *call, char *out, size_t size,
                                 fst_error *error);
/// Reads a file without trailing blanks. False if it cannot be read or is too large.
bool fsti_provider_read_file(const char *path, char *out, size_t size);
/// Reads a bearer token from JSON: access_token, and expires_in or expires_on.
fst_status fsti_provider_read_token(const char *text, store_keys *out, fst_error *error);
fst_status fsti_provider_fail(const char *what, fst_error *error);
/// The same for a file that fsti_provider_read_file() could not read. `what`: its purpose. The
/// message has the path and the errno.
fst_status fsti_provider_fail_file(const char *what, const char *path, int os_errno,
                                   fst_error *error);

#endif
