// SPDX-License-Identifier: Apache-2.0
/// Stores: from names to addresses, and what their requests are signed with. Private to the net
/// room.
#ifndef FSTI_STORE_H
#define FSTI_STORE_H

#include "curl_library.h"
#include "net.h"
#include "url.h"

typedef enum net_store_kind {
    NET_STORE_WEB,
    NET_STORE_S3,
    NET_STORE_GCS,
    NET_STORE_AZURE,
    NET_STORE_HUB,
} net_store_kind;

typedef struct net_store net_store;
/// Who asks. Texts are "" where there is none.
struct net_store {
    fsti_refcount refs;
    net_store_kind kind;
    char endpoint[512]; ///< without a slash at its end; "" for the store's own
    char region[64];
    char access_key[160], secret_key[192], session_token[4096];
    char bearer_token[4096], sas_token[1024], account[64];
    char own_endpoint[512];  ///< of the account, with its name; "" for the usual one
    char account_key[128];   ///< of Azure, in BASE64
    const char *source;      ///< of the credentials, in words
    const char *service;     ///< that is asked, NULL: s3
    struct net_lease *lease; ///< that credentials are taken from; NULL: those above
    fst_bucket_style style;
};

/// What an address is about, with settings and credentials as they are now. `watch`: asked while
/// credentials are fetched, or NULL.
fst_status fsti_store_open(const char *url, const fsti_net_watch *watch, net_store **out,
                           fst_error *error);
net_store *fsti_store_ref(net_store *store);
void fsti_store_unref(net_store *store);
/// The address that is asked for an object: of the web, escaped. *out is from fsti_alloc.
fst_status fsti_store_address(const net_store *store, const char *url, char **out,
                              fst_error *error);
/// The address of a part of a folder's listing that begins behind `mark` ("": the first).
fst_status fsti_store_listing(const net_store *store, const char *url, const char *mark, char **out,
                              fst_error *error);
/// Whether a text that a server sent has a part of a secret: of the store, or of an address's
/// query.
bool fsti_store_knows(const net_store *store, const char *text);
bool fsti_url_knows(const char *url, const char *text);
/// A request that is to be signed.
typedef struct store_call {
    const char *method, *address;
    const char *const *lines;  ///< of its head, ended by NULL; or NULL
    const char *range, *match; ///< values of Range and If-Match; NULL: none
    const char *body_hash;     ///< SHA-256 in hexadecimal digits; NULL: it is not signed
    size_t body_bytes;
    int64_t now_s;
    uint32_t *keys_number; ///< set to that of the lease's keys
} store_call;
/// Adds what a request is signed with to *list. False: no memory, or it does not fit. (sign.c)
bool fsti_store_sign(const net_store *store, const store_call *call, curl_list **list);

/// Whether a text has a part of a secret, or the other way.
bool fsti_text_knows(const char *secret, const char *text);
/// The machine's clock is wrong, as a store has said in its Date: signatures follow it from now on.
/// False where it says nothing new.
bool fsti_store_learn_time(const char *date);
/// The bucket is elsewhere: its region is used from now on. False where that is nothing new.
bool fsti_store_move(net_store *store, const char *region);

/// Whether its endpoint, region and account can be parts of an address: FST_E_ARGUMENT.
fst_status fsti_store_check(const net_store *store, fst_error *error);
/// Fills in the region and endpoint of the profile where there are none. (credentials.c)
void fsti_store_find_place(net_store *store);
/// Leases of Google and Microsoft, where they are configured. (cloud_credentials.c)
fst_status fsti_store_find_google(net_store *store, const char *name, fst_error *error);
fst_status fsti_store_find_azure(net_store *store, const char *name, fst_error *error);
/// Fills in credentials of S3: those of the options are there already. (credentials.c)
fst_status fsti_store_find_keys(net_store *store, const char *name, fst_error *error);

/// A copy of what fst_remote_configure() was told.
typedef struct net_options {
    net_store store; ///< as far as it was said
    bool anonymous, no_overwrite;
    char ca_file[512];
} net_options;
void fsti_net_options(net_options *out);

#endif
