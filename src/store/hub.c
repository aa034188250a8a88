// SPDX-License-Identifier: Apache-2.0
/// The Hugging Face Hub: revisions, and the files of a repository, with one request.
#include "hub.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "http/http.h"
#include "token_text.h"

/// A repository with 100,000 files takes 8 MB.
#define ANSWER_BYTES_MAX ((size_t)16 << 20)
#define COMMIT_DIGITS 40u

static fst_status fail_answer(const char *redacted, const char *why, fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = redacted;
    return fsti_error_set(error, FST_E_IO, location, "%s", why);
}

/// Requests a repository's information at a revision. JSON, from fsti_alloc().
static fst_status request_revision(const object_store *store, const char *url, const hub_name *name,
                                   char **text, size_t *text_bytes, fst_error *error) {
    char address[URL_BYTES_MAX], revision[3 * sizeof name->revision], redacted[1024];
    fsti_url_redact(url, redacted, sizeof redacted);
    int used = -1;
    if (fsti_hub_escape_revision(name, revision, sizeof revision))
        used = snprintf(address, sizeof address, "%s/api/models/%.*s/%.*s/revision/%s",
                        fsti_hub_endpoint(store), (int)name->owner.size, name->owner.at,
                        (int)name->repository.size, name->repository.at, revision);
    if (used < 0 || (size_t)used >= sizeof address)
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION, "%s: it is too long",
                              redacted);
    http_request request = {.url = address,
                            .name = redacted,
                            .authority = fsti_store_authority(store),
                            .text_bytes_max = ANSWER_BYTES_MAX};
    fsti_request_run(&request);
    if (request.status != FST_OK && error != NULL) *error = request.error;
    *text = request.text;
    *text_bytes = request.text_bytes;
    if (request.status != FST_OK || request.text != NULL) return request.status;
    return fail_answer(redacted, "the Hub did not describe the repository", error);
}

static bool is_commit(const char *text) {
    return strlen(text) == COMMIT_DIGITS && strspn(text, "0123456789abcdef") == COMMIT_DIGITS;
}

/// The same URL at the commit that the Hub has named. NULL without memory.
static char *write_settled(const hub_name *name, const char *commit) {
    size_t size = sizeof "hf:///@" + name->owner.size + name->repository.size + COMMIT_DIGITS +
                  name->path.size;
    char *out = fsti_alloc(size);
    if (out != NULL)
        snprintf(out, size, "hf://%.*s/%.*s@%s%.*s", (int)name->owner.size, name->owner.at,
                 (int)name->repository.size, name->repository.at, commit, (int)name->path.size,
                 name->path.at);
    return out;
}

fst_status fsti_store_pin_revision(const char *url, char **out, fst_error *error) {
    url_parts parsed;
    hub_name name;
    object_store *store = NULL;
    char *text = NULL, commit[64] = "";
    size_t text_bytes = 0;
    *out = NULL;
    bool is_hub = fsti_url_parse(url, &parsed) == NULL &&
                  fsti_location_kind_of(url) == FSTI_LOCATION_HUB &&
                  fsti_hub_parse(&parsed, &name) == NULL;
    if (!is_hub || is_commit(name.revision)) return FST_OK;
    fsti_http_read_environment();
    if (fsti_http_is_offline()) return FST_OK;
    FST_TRY(fsti_store_open(url, NULL, &store, error));
    fst_status status = request_revision(store, url, &name, &text, &text_bytes, error);
    fsti_store_unref(store);
    if (status == FST_OK &&
        (!fsti_json_find(text, text_bytes, "sha", commit, sizeof commit) || !is_commit(commit))) {
        char redacted[1024];
        fsti_url_redact(url, redacted, sizeof redacted);
        status = fail_answer(redacted, "the Hub did not name the revision's commit", error);
    }
    fsti_free(text);
    FST_TRY(status);
    *out = write_settled(&name, commit);
    return *out == NULL ? fsti_error_memory(error, strlen(url)) : FST_OK;
}

typedef struct hub_folder {
    char prefix[1024]; ///< of the files, in the repository
    fsti_key_visitor visit;
    void *context;
    fst_error *error;
    fst_status status;
} hub_folder;

static bool visit_file(void *context, const char *file) {
    hub_folder *folder = context;
    size_t size = strlen(folder->prefix);
    if (strncmp(file, folder->prefix, size) != 0) return true;
    const char *name = file + size;
    // The same rule as for keys of stores: no hidden names and no subfolders.
    if (name[0] == '\0' || name[0] == '.' || strchr(name, '/') != NULL) return true;
    folder->status = folder->visit(folder->context, name, folder->error);
    return folder->status == FST_OK;
}

fst_status fsti_hub_list(const object_store *store, const char *url, fsti_key_visitor visit,
                         void *context, fst_error *error) {
    url_parts parsed;
    hub_name name;
    char redacted[1024], *text = NULL;
    size_t text_bytes = 0;
    hub_folder folder = {.visit = visit, .context = context, .error = error};
    fsti_url_redact(url, redacted, sizeof redacted);
    const char *why = fsti_url_parse(url, &parsed);
    if (why == NULL) why = fsti_hub_parse(&parsed, &name);
    const url_parts rest = {.path = name.path};
    if (why == NULL && !fsti_url_key(&rest, folder.prefix, sizeof folder.prefix))
        why = "it is too long";
    if (why != NULL)
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION, "%s: %s", redacted, why);
    FST_TRY(request_revision(store, url, &name, &text, &text_bytes, error));
    const json_list list = {text, text_bytes, "siblings", "rfilename"};
    bool is_read = fsti_json_visit(&list, visit_file, &folder);
    fsti_free(text);
    if (!is_read) return fail_answer(redacted, "the Hub's list of files can't be read", error);
    return folder.status;
}
