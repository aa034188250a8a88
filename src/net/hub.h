// SPDX-License-Identifier: Apache-2.0
/// The Hub: its addresses, and what it says of a repository. Private to the net room.
#ifndef FSTI_HUB_H
#define FSTI_HUB_H

#include "net.h"
#include "store.h"

/// hf://OWNER/NAME[@REVISION]/PATH
typedef struct hub_name {
    url_part owner, repository;
    char revision[160]; ///< "main" where there is none
    url_part path;      ///< with its slash
} hub_name;

/// NULL, or what is wrong with it. The parts point into the address.
const char *fsti_hub_parse(const net_url *url, hub_name *out);
/// The address of a file. NULL, or why there is none.
const char *fsti_hub_address(const net_store *store, const net_url *url, char *out, size_t size);
/// The files right below an address of the Hub that ends with a slash, by one request. `visit`: as
/// of fsti_net_list().
fst_status fsti_hub_list(const net_store *store, const char *url, fsti_key_visitor visit,
                         void *context, fst_error *error);

#endif
