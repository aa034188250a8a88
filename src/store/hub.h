// SPDX-License-Identifier: Apache-2.0
/// The Hugging Face Hub: its URLs, and repository information. Private to the store module.
#ifndef FSTI_HUB_H
#define FSTI_HUB_H

#include "store.h"
#include "object_store.h"

/// hf://OWNER/NAME[@REVISION]/PATH
typedef struct hub_name {
    url_part owner, repository;
    char revision[160]; ///< "main" if there is no revision
    url_part path;      ///< with its slash
} hub_name;

/// Returns NULL, or the error. The parts point into the URL.
const char *fsti_hub_parse(const url_parts *url, hub_name *out);
/// The configured endpoint, or the Hub's own.
const char *fsti_hub_endpoint(const object_store *store);
/// Writes the revision as a part of a URL. False if it is too long.
bool fsti_hub_escape_revision(const hub_name *name, char *out, size_t size);
/// Writes the URL of a file. Returns NULL, or the error.
const char *fsti_hub_address(const object_store *store, const url_parts *url, char *out,
                             size_t size);
/// Lists the files directly in a folder of the Hub (URL with a final slash) with one request.
/// `visit`: see fsti_store_list().
fst_status fsti_hub_list(const object_store *store, const char *url, fsti_key_visitor visit,
                         void *context, fst_error *error);

#endif
