// SPDX-License-Identifier: Apache-2.0
/// The process's table of temporary credentials, and their renewal.
#include "credential_cache.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "net.h"
#include "store.h"

/// Renew this many seconds before they expire.
#define EARLY_S 300
#define CREDENTIALS_COUNT_MAX 16u
/// Seconds between attempts after a failed renewal.
#define PAUSE_S 10

struct net_credentials {
    fsti_refcount refs;
    provider_config source;
    net_keys keys;
    uint32_t number;
    pid_t renewer; ///< the process that is renewing them; 0: not being renewed
    int64_t failed_s;
};

/// Protects the table and the fields of all credentials. It is held for copies only, so one lock is
/// enough, and fork() can wait for it.
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static net_credentials *table[CREDENTIALS_COUNT_MAX];

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

static fst_status fetch(const provider_config *source, net_keys *out, fst_error *error) {
    memset(out, 0, sizeof *out);
    if (source->kind <= PROVIDER_INSTANCE) return fsti_provider_aws(source, out, error);
    if (source->kind <= PROVIDER_GOOGLE_METADATA) return fsti_provider_google(source, out, error);
    return fsti_provider_azure(source, out, error);
}

void fsti_credentials_unref(net_credentials *credentials) {
    if (credentials == NULL || !fsti_refcount_unref(&credentials->refs)) return;
    fsti_secret_free(credentials, sizeof *credentials);
}

// ---- the table ----

/// Returns a new reference to the credentials of that source, or NULL.
static net_credentials *look_up(const provider_config *source) {
    for (size_t i = 0; i < CREDENTIALS_COUNT_MAX; i++)
        if (table[i] != NULL && memcmp(&table[i]->source, source, sizeof *source) == 0) {
            fsti_refcount_ref(&table[i]->refs);
            return table[i];
        }
    return NULL;
}

/// Adds credentials to the table, which holds a reference. In a full table the oldest entry is
/// dropped; its users keep their references.
static void remember(net_credentials *credentials) {
    fsti_refcount_ref(&credentials->refs);
    size_t index = 0;
    while (index < CREDENTIALS_COUNT_MAX && table[index] != NULL) index++;
    if (index == CREDENTIALS_COUNT_MAX) {
        fsti_credentials_unref(table[0]);
        memmove(table, table + 1, sizeof table - sizeof *table);
        index--;
    }
    table[index] = credentials;
}

static bool has_ended(const net_credentials *credentials) {
    return credentials->keys.expires_s != 0 && credentials->keys.expires_s <= (int64_t)time(NULL);
}

/// Drops expired credentials, for example after the machine was suspended.
static net_credentials *find_valid(const provider_config *source) {
    pthread_mutex_lock(&lock);
    net_credentials *credentials = look_up(source);
    bool is_expired = credentials != NULL && has_ended(credentials);
    for (size_t i = 0; is_expired && i < CREDENTIALS_COUNT_MAX; i++)
        if (table[i] == credentials) {
            table[i] = NULL;
            fsti_credentials_unref(credentials);
        }
    if (is_expired) {
        fsti_credentials_unref(credentials);
        credentials = NULL;
    }
    pthread_mutex_unlock(&lock);
    return credentials;
}

fst_status fsti_credentials_get(const provider_config *source, net_credentials **out,
                                fst_error *error) {
    fsti_fork_lock(&lock);
    *out = NULL;
    if (fsti_net_is_offline()) return FST_OK; // offline, requests are never sent
    *out = find_valid(source);
    if (*out != NULL) return FST_OK;
    net_credentials *credentials = fsti_secret_alloc(sizeof *credentials);
    if (credentials == NULL) return fsti_error_memory(error, sizeof *credentials);
    fsti_refcount_init(&credentials->refs);
    credentials->source = *source;
    // No lock is held during the request. Two threads may fetch at the same time; both results are
    // valid, and later callers get the first.
    fst_status status = fetch(source, &credentials->keys, error);
    if (status != FST_OK) {
        fsti_credentials_unref(credentials);
        return status;
    }
    pthread_mutex_lock(&lock);
    remember(credentials);
    pthread_mutex_unlock(&lock);
    *out = credentials;
    return FST_OK;
}

// ---- renewal ----

static void *renew(void *context) {
    net_credentials *credentials = context;
    fst_error error = {0};
    net_keys *keys = fsti_secret_alloc(sizeof *keys);
    fst_status status = keys == NULL ? FST_E_NO_MEMORY : fetch(&credentials->source, keys, &error);
    if (status != FST_OK) fsti_log(FST_LOG_WARNING, "credentials not renewed: %s", error.message);
    pthread_mutex_lock(&lock);
    if (keys != NULL && status == FST_OK) {
        credentials->keys = *keys;
        credentials->number++;
    } else {
        credentials->failed_s = (int64_t)time(NULL);
    }
    credentials->renewer = 0;
    pthread_mutex_unlock(&lock);
    fsti_secret_free(keys, sizeof *keys);
    fsti_credentials_unref(credentials);
    return NULL;
}

/// Starts a renewal. False if that fails or failed a moment ago. The lock must be held.
static bool begin_renewal(net_credentials *credentials) {
    pthread_t thread;
    if (credentials->renewer == getpid()) return true; // a child cannot use the parent's renewal
    if ((int64_t)time(NULL) - credentials->failed_s < PAUSE_S) return false;
    credentials->renewer = getpid();
    fsti_refcount_ref(&credentials->refs);
    if (fsti_thread_start(&thread, renew, credentials) == 0) {
        pthread_detach(thread);
        return true;
    }
    credentials->renewer = 0;
    fsti_credentials_unref(credentials);
    return false;
}

uint32_t fsti_credentials_copy(net_credentials *credentials, net_keys *out) {
    pthread_mutex_lock(&lock);
    int64_t left_s = credentials->keys.expires_s - (int64_t)time(NULL);
    if (credentials->keys.expires_s != 0 && left_s < EARLY_S) (void)begin_renewal(credentials);
    *out = credentials->keys;
    uint32_t number = credentials->number;
    pthread_mutex_unlock(&lock);
    return number;
}

bool fsti_credentials_rejected(net_credentials *credentials, uint32_t number) {
    pthread_mutex_lock(&lock);
    bool will_differ = credentials->number != number || begin_renewal(credentials);
    pthread_mutex_unlock(&lock);
    return will_differ;
}

bool fsti_credentials_are_renewing(net_credentials *credentials) {
    pthread_mutex_lock(&lock);
    bool is_renewing = credentials->renewer == getpid();
    pthread_mutex_unlock(&lock);
    return is_renewing;
}

bool fsti_credentials_have_secret(net_credentials *credentials, const char *text) {
    pthread_mutex_lock(&lock);
    const net_keys *keys = &credentials->keys;
    bool is_found = fsti_text_has_secret(keys->access_key, text) ||
                    fsti_text_has_secret(keys->secret_key, text) ||
                    fsti_text_has_secret(keys->session_token, text) ||
                    fsti_text_has_secret(keys->bearer_token, text);
    pthread_mutex_unlock(&lock);
    return is_found;
}

// ---- requests to providers ----

/// Cancellation of the store that this thread is opening, or NULL.
static _Thread_local const fsti_net_watch *thread_watch;

void fsti_provider_watch(const fsti_net_watch *watch) { thread_watch = watch; }

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
    net_request request = {.method = call->method,
                           .url = call->url,
                           .name = name,
                           .store = call->store,
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
