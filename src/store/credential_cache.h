// SPDX-License-Identifier: Apache-2.0
/// Temporary credentials (STS, instance metadata, service accounts). One entry per source and
/// process, shared by all stores with the same source, and renewed in the background before it
/// expires. Private to the store module.
#ifndef FSTI_CREDENTIAL_CACHE_H
#define FSTI_CREDENTIAL_CACHE_H

#include "base/primitives.h"

typedef struct store_credentials store_credentials;

typedef enum provider_kind {
    PROVIDER_WEB_IDENTITY, ///< AWS: exchanges a token file for a role's keys
    PROVIDER_ROLE,         ///< AWS: assumes a role with other keys
    PROVIDER_CONTAINER,    ///< AWS: a URL in the container's environment
    PROVIDER_INSTANCE,     ///< AWS: instance metadata (IMDSv2)
    PROVIDER_GOOGLE_USER,
    PROVIDER_GOOGLE_SERVICE,
    PROVIDER_GOOGLE_METADATA,
    PROVIDER_AZURE_FEDERATED,
    PROVIDER_AZURE_METADATA,
} provider_kind;

typedef struct store_keys {
    char access_key[160], secret_key[192], session_token[4096], bearer_token[4096];
    int64_t expires_s; ///< Unix time; 0: unknown
} store_keys;

/// A credential source: the provider and the identity. Unset bytes must be zero, because sources
/// are compared bytewise.
typedef struct provider_config {
    provider_kind kind;
    char url[1024];
    char file[1024]; ///< a token or account, read each time
    char role[256];  ///< or client, or account
    char session[80], external_id[1232], region[64];
    char header[1200];                                          ///< a request header, or ""
    char access_key[160], secret_key[192], session_token[4096]; ///< to sign with, or client secrets
} provider_config;
/// Asks a provider for keys. Blocking, so never called on an event loop's thread, which would
/// deadlock.
typedef fst_status (*provider_fetch)(const provider_config *source, store_keys *out,
                                     fst_error *error);

/// Returns the credentials of a source, and fetches them if they are not in the table. `fetch` is
/// kept to renew them. Its errors.
fst_status fsti_credentials_get(const provider_config *source, provider_fetch fetch,
                                store_credentials **out, fst_error *error);
void fsti_credentials_unref(store_credentials *credentials);
/// Copies the current keys, and starts a renewal if they expire soon. Returns their number, which
/// changes with the keys.
uint32_t fsti_credentials_copy(store_credentials *credentials, store_keys *out);
/// A store rejected the keys with that number: starts a renewal, unless they have been renewed.
/// False if that is impossible.
bool fsti_credentials_rejected(store_credentials *credentials, uint32_t number);
bool fsti_credentials_are_renewing(store_credentials *credentials);
/// Whether a text contains part of a temporary secret.
bool fsti_credentials_have_secret(store_credentials *credentials, const char *text);

#endif
