// SPDX-License-Identifier: Apache-2.0
/// Folders of stores: the keys with a prefix, page by page.
#include <stdio.h>
#include <string.h>

#include "hub.h"
#include "listing.h"
#include "http/http.h"
#include "object_store.h"

#define PAGE_BYTES_MAX ((size_t)8 << 20) ///< a thousand keys take 500 KB
#define PAGE_COUNT_MAX 1000u
#define KEY_COUNT_MAX 1000000u

typedef struct folder_visit {
    char prefix[LISTING_KEY_BYTES_MAX]; ///< common to all keys
    fsti_key_visitor visit;
    void *context;
    fst_error *error;
    fst_status status;
    uint32_t key_count;
    const fsti_http_watch *watch;
} folder_visit;

static bool visit_key(void *context, const char *key) {
    folder_visit *folder = context;
    size_t size = strlen(folder->prefix);
    if (strncmp(key, folder->prefix, size) != 0) return true; // not requested
    const char *name = key + size;
    // Skip the folder itself, hidden names, and subfolders.
    if (name[0] == '\0' || name[0] == '.' || strchr(name, '/') != NULL) return true;
    folder->status = ++folder->key_count > KEY_COUNT_MAX
                         ? fsti_error_set(folder->error, FST_E_IO, FSTI_NO_LOCATION,
                                          "the folder has more than a million objects")
                         : folder->visit(folder->context, name, folder->error);
    return folder->status == FST_OK;
}

/// *is_in_other_region: repeat the request in another region.
static fst_status read_page(object_store *store, const char *url, folder_visit *folder,
                            listing *page, bool *is_in_other_region, fst_error *error) {
    char *address = NULL, name[1024];
    FST_TRY(fsti_store_listing(store, url, page->next, &address, error));
    fsti_url_redact(url, name, sizeof name);
    http_request request = {.url = address,
                            .name = name,
                            .authority = fsti_store_authority(store),
                            .text_bytes_max = PAGE_BYTES_MAX,
                            .watch = folder->watch};
    fsti_request_run(&request);
    fsti_secret_text_free(address);
    *is_in_other_region = request.status != FST_OK && fsti_store_move(store, request.answer.region);
    const char *why = NULL;
    if (request.status == FST_OK && request.text == NULL) why = "the response is not a listing";
    if (request.status == FST_OK && why == NULL)
        why = fsti_listing_read(request.text, request.text_bytes, visit_key, folder, page);
    fsti_free(request.text);
    if (request.status != FST_OK && error != NULL) *error = request.error;
    if (request.status != FST_OK) return request.status;
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = name;
    if (why != NULL) return fsti_error_set(error, FST_E_IO, location, "%s", why);
    return folder->status;
}

static fst_status read_pages(object_store *store, const char *url, folder_visit *folder,
                             fst_error *error) {
    char name[512];
    listing page = {""};
    fsti_error_location location = FSTI_NO_LOCATION;
    fsti_url_redact(url, name, sizeof name);
    location.file = name;
    if (store->kind == FSTI_LOCATION_HUB)
        return fsti_hub_list(store, url, folder->visit, folder->context, error);
    if (store->kind == FSTI_LOCATION_WEB)
        return fsti_error_set(
            error, FST_E_UNSUPPORTED, location,
            "web servers do not list folders. Give the URL of the file or the index");
    for (uint32_t i = 0; i < PAGE_COUNT_MAX; i++) {
        bool is_in_other_region = false;
        fst_status status = read_page(store, url, folder, &page, &is_in_other_region, error);
        if (is_in_other_region)
            status = read_page(store, url, folder, &page, &is_in_other_region, error);
        FST_TRY(status);
        if (page.next[0] == '\0') return FST_OK;
    }
    return fsti_error_set(error, FST_E_IO, location, "the listing never ends");
}

fst_status fsti_store_list(const char *url, const fsti_http_watch *watch, fsti_key_visitor visit,
                           void *context, fst_error *error) {
    object_store *store = NULL;
    url_parts parsed;
    folder_visit folder = {.visit = visit, .context = context, .error = error, .watch = watch};
    FST_TRY(fsti_http_check(error));
    FST_TRY(fsti_store_open(url, watch, &store, error));
    fst_status status = FST_OK;
    if (fsti_url_parse(url, &parsed) != NULL ||
        !fsti_url_key(&parsed, folder.prefix, sizeof folder.prefix))
        status = fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION, "its name is too long");
    if (status == FST_OK) status = read_pages(store, url, &folder, error);
    fsti_store_unref(store);
    return status;
}
