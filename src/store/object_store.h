// SPDX-License-Identifier: Apache-2.0
/// Object stores: URLs of objects, and the data that signs their requests. Private to the store
/// module.
#ifndef FSTI_OBJECT_STORE_H
#define FSTI_OBJECT_STORE_H

#include "http/http.h"
#include "store.h"
#include "location/location.h"

typedef struct object_store object_store;
/// A store with its settings and credentials. Unset texts are "".
struct object_store {
    fsti_refcount refs;
    fsti_location_kind kind;
    char endpoint[512]; ///< without a final slash; "": the store's default
    char region[64];
    char access_key[160], secret_key[192], session_token[4096];
    char bearer_token[4096], sas_token[1024], account[64];
    char account_endpoint[512];            ///< of the account, including its name; "": the default
    char account_key[128];                 ///< of Azure, in base64
    const char *source;                    ///< the credential source, as text
    const char *service;                   ///< the service to sign for; NULL: s3
    struct store_credentials *credentials; ///< temporary credentials; NULL: the static ones above
    fst_bucket_style style;
};

/// Resolves the store of a URL with current settings and credentials. `watch` is called while
/// credentials are fetched; may be NULL.
fst_status fsti_store_open(const char *url, const fsti_http_watch *watch, object_store **out,
                           fst_error *error);
object_store *fsti_store_ref(object_store *store);
void fsti_store_unref(object_store *store);
/// The http(s) URL of an object, escaped. *out is from fsti_alloc().
fst_status fsti_store_address(const object_store *store, const char *url, char **out,
                              fst_error *error);
/// Checks that a URL can be a new object: FST_E_UNSUPPORTED, FST_E_ARGUMENT.
fst_status fsti_store_check_target(const object_store *store, const char *url, fst_error *error);
/// The URL of a page of a folder's listing after `mark` ("": the first).
fst_status fsti_store_listing(const object_store *store, const char *url, const char *mark,
                              char **out, fst_error *error);
/// Whether a text from a server contains part of a secret of the store.
bool fsti_store_has_secret(const object_store *store, const char *text);
/// The store as the authority of requests, while the caller holds a reference. (store_authority.c)
http_authority fsti_store_authority(const object_store *store);
/// Switches to the bucket's region. False if that changes nothing.
bool fsti_store_move(object_store *store, const char *region);

/// Checks that endpoint, region and account can be parts of a URL: FST_E_ARGUMENT. (store_check.c)
fst_status fsti_store_check(const object_store *store, fst_error *error);
/// Whether a text has only letters, digits, - and _.
bool fsti_store_is_plain_name(const char *text);
/// Fills in the profile's region and endpoint, if unset. (credentials.c)
void fsti_store_find_endpoint(object_store *store);
/// Fills in temporary credentials of Google or Azure, if configured. (cloud_credentials.c)
fst_status fsti_store_find_google(object_store *store, const char *name, fst_error *error);
fst_status fsti_store_find_azure(object_store *store, const char *name, fst_error *error);
/// Fills in S3 credentials, unless the options had them. (credentials.c)
fst_status fsti_store_find_keys(object_store *store, const char *name, fst_error *error);

/// A copy of the options of fst_remote_configure().
typedef struct store_options {
    object_store store; ///< fields that are set
    bool anonymous, create_only;
} store_options;
void fsti_store_options(store_options *out);

#endif
