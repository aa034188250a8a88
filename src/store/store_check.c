// SPDX-License-Identifier: Apache-2.0
/// Checks that settings can be parts of a URL.
#include <stdio.h>
#include <string.h>

#include "object_store.h"
#include "token_text.h"

bool fsti_store_is_plain_name(const char *text) {
    for (; *text != '\0'; text++)
        if (!((*text >= 'a' && *text <= 'z') || (*text >= 'A' && *text <= 'Z') ||
              (*text >= '0' && *text <= '9') || *text == '-' || *text == '_'))
            return false;
    return true;
}

static const char *check_endpoint(const char *endpoint) {
    char text[600];
    url_parts url;
    // The endpoint of an emulator may have no scheme.
    snprintf(text, sizeof text, "%s%s", strstr(endpoint, "://") == NULL ? "http://" : "", endpoint);
    const char *why = fsti_url_parse(text, &url);
    if (why != NULL) return why;
    if (!fsti_url_part_is(url.scheme, "http") && !fsti_url_part_is(url.scheme, "https"))
        return "it is neither http:// nor https://";
    return url.has_query ? "it has a query" : NULL;
}

fst_status fsti_store_check(const object_store *store, fst_error *error) {
    unsigned char key[sizeof store->account_key];
    if (fsti_base64_read(store->account_key, key, sizeof key) < 0)
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                              "the account key is not valid base64");
    explicit_bzero(key, sizeof key);
    const char *why = store->endpoint[0] == '\0' ? NULL : check_endpoint(store->endpoint);
    if (why == NULL && store->account_endpoint[0] != '\0')
        why = check_endpoint(store->account_endpoint);
    if (why != NULL)
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                              "the endpoint can't be used: %s", why);
    if (fsti_store_is_plain_name(store->region) && fsti_store_is_plain_name(store->account))
        return FST_OK;
    return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                          "the %s contains characters other than letters, digits, - and _",
                          fsti_store_is_plain_name(store->region) ? "account" : "region");
}
