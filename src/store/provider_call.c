// SPDX-License-Identifier: Apache-2.0
/// Requests to credential providers, and their files.
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "provider.h"

const char *fsti_provider_name(provider_kind kind) {
    static const char *const words[] = {
        [PROVIDER_WEB_IDENTITY] = "a role through web identity",
        [PROVIDER_ROLE] = "a role from the profile in ~/.aws",
        [PROVIDER_CONTAINER] = "the container's credentials",
        [PROVIDER_INSTANCE] = "the machine's role",
        [PROVIDER_GOOGLE_USER] = "the user of gcloud's file",
        [PROVIDER_GOOGLE_SERVICE] = "a service account's file",
        [PROVIDER_GOOGLE_METADATA] = "the machine's service account",
        [PROVIDER_AZURE_FEDERATED] = "a federated token",
        [PROVIDER_AZURE_METADATA] = "a managed identity",
    };
    return words[kind];
}

/// Cancellation of the store that this thread is opening, or NULL.
static _Thread_local const fsti_http_watch *thread_watch;

void fsti_provider_watch(const fsti_http_watch *watch) { thread_watch = watch; }

#define ANSWER_BYTES_MAX ((size_t)16384)

fst_status fsti_provider_fail(const char *what, fst_error *error) {
    (void)!fsti_error_set(error, FST_E_PERMISSION, FSTI_NO_LOCATION, "%s", what);
    if (error != NULL) error->os_errno = EACCES;
    return FST_E_PERMISSION;
}

fst_status fsti_provider_fail_file(const char *what, const char *path, int os_errno,
                                   fst_error *error) {
    // Never FST_E_NOT_FOUND: callers would take it for a missing model.
    const char *code = os_errno == ENOENT ? "ENOENT: " : os_errno == EACCES ? "EACCES: " : "";
    (void)!fsti_error_set(error, FST_E_PERMISSION, FSTI_NO_LOCATION, "%s can't be read: %s (%s%s)",
                          what, path, code, strerror(os_errno));
    if (error != NULL) error->os_errno = EACCES;
    return FST_E_PERMISSION;
}

fst_status fsti_provider_request(const provider_call *call, char *out, size_t size,
                                 fst_error *error) {
    char name[256];
    fsti_url_redact(call->url, name, sizeof name);
    http_request request = {.method = call->method,
                            .url = call->url,
                            .name = name,
                            .authority = call->authority,
                            .body = call->body,
                            .body_bytes = call->body == NULL ? 0 : strlen(call->body),
                            .lines = call->lines,
                            .is_link_local = call->is_link_local,
                            .stays = true,
                            .text_bytes_max = size - 1,
                            .watch = thread_watch};
    fsti_request_run(&request);
    fst_status status = request.status;
    size_t used = request.text == NULL ? 0 : request.text_bytes;
    if (status == FST_OK) snprintf(out, size, "%s", used == 0 ? "" : request.text);
    if (request.text != NULL) explicit_bzero(request.text, used);
    fsti_free(request.text);
    if (status == FST_OK) return FST_OK;
    if (status == FST_E_NO_MEMORY) return fsti_error_memory(error, size);
    if (status == FST_E_CANCELLED) {
        if (error != NULL) *error = request.error;
        return status;
    }
    char why[480];
    snprintf(why, sizeof why, "no credentials available: %.400s", request.error.message);
    return fsti_provider_fail(why, error);
}

bool fsti_provider_read_file(const char *path, char *out, size_t size) {
    FILE *file = fopen(path, "re");
    if (file == NULL) return false;
    memset(out, 0, size);
    size_t used = fread(out, 1, size, file);
    fclose(file);
    errno = used >= size ? EFBIG : EINVAL;
    if (used >= size || strlen(out) != used) return false;
    for (char *end = out + used; end > out && strchr(" \t\r\n", end[-1]) != NULL; end--)
        end[-1] = '\0';
    return true;
}
