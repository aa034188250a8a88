// SPDX-License-Identifier: Apache-2.0
/// Credentials that are lent for a time: by roles, machines, accounts. One lease a lender and
/// process, shared by all who ask the same; renewed in the background before it ends. Private to
/// the net room.
#ifndef FSTI_LEASE_H
#define FSTI_LEASE_H

#include "net.h"
#include "request.h"

typedef struct net_lease net_lease;

typedef enum lease_kind {
    LEASE_WEB_IDENTITY, ///< AWS: a token in a file, for a role
    LEASE_ROLE,         ///< AWS: keys, for a role
    LEASE_CONTAINER,    ///< AWS: an address that the container knows
    LEASE_INSTANCE,     ///< AWS: the machine's own, IMDSv2
    LEASE_GOOGLE_USER,
    LEASE_GOOGLE_SERVICE,
    LEASE_GOOGLE_MACHINE,
    LEASE_AZURE_FEDERATED,
    LEASE_AZURE_MACHINE,
} lease_kind;

typedef struct net_keys {
    char access_key[160], secret_key[192], session_token[4096], bearer_token[4096];
    int64_t expires_s; ///< Unix time; 0: not told
} net_keys;

/// Who is asked, and as whom. All bytes that are not set are zero: sources are compared by them.
typedef struct lease_source {
    lease_kind kind;
    char url[1024];
    char file[1024]; ///< of a token or an account, read each time
    char role[256];  ///< or client, or account
    char session[80], external_id[1232], region[64];
    char header[1200]; ///< a line of the request's head, or ""
    char access_key[160], secret_key[192], session_token[4096]; ///< to sign with, or client secrets
} lease_source;

/// The lease of a source, fetched now if nobody has it. Fails as fetching does.
fst_status fsti_lease_get(const lease_source *source, net_lease **out, fst_error *error);
void fsti_lease_unref(net_lease *lease);
/// The keys as they are now; begins to renew them where they end soon. Returns their number:
/// another one for other keys.
uint32_t fsti_lease_copy(net_lease *lease, net_keys *out);
/// A store does not take keys of that number any more: begins to renew them, unless that is done.
/// False where they can't be had.
bool fsti_lease_refused(net_lease *lease, uint32_t number);
bool fsti_lease_is_renewing(net_lease *lease);
const char *fsti_lease_words(lease_kind kind);
/// Whether a text has a part of a lent secret.
bool fsti_lease_knows(net_lease *lease, const char *text);

// ---- those who lend (blocking; not on a reactor's thread) ----

fst_status fsti_lend_aws(const lease_source *source, net_keys *out, fst_error *error);
fst_status fsti_lend_google(const lease_source *source, net_keys *out, fst_error *error);
fst_status fsti_lend_azure(const lease_source *source, net_keys *out, fst_error *error);

/// A question to one who lends. Whatever is in it is secret.
typedef struct lend_call {
    const char *method, *url, *body;
    const char *const *lines;
    const struct net_store *store; ///< that signs it, or NULL
    bool is_near;                  ///< a machine's own: no proxy, one try of a second
} lend_call;
/// What this thread's questions are watched by from now on; NULL: nothing.
void fsti_lend_watch(const fsti_net_watch *watch);
/// The answer is `out`, with a NUL at its end.
fst_status fsti_lend_ask(const lend_call *call, char *out, size_t size, fst_error *error);
/// A file's text without blanks at its end; false where it can't be read, or is too large.
bool fsti_lend_read_file(const char *path, char *out, size_t size);
/// A bearer token of JSON: access_token, expires_in or expires_on.
fst_status fsti_lend_read_token(const char *text, net_keys *out, fst_error *error);
fst_status fsti_lend_fail(const char *what, fst_error *error);

#endif
