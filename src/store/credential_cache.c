// SPDX-License-Identifier: Apache-2.0
/// The process's table of temporary credentials, and their renewal.
#include "credential_cache.h"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "store.h"
#include "http/http.h"

/// Renew this many seconds before they expire.
#define EARLY_S 300
#define CREDENTIALS_COUNT_MAX 16u
/// Seconds between attempts after a failed renewal.
#define PAUSE_S 10

struct store_credentials {
    fsti_refcount refs;
    provider_config source;
    provider_fetch fetch;
    store_keys keys;
    uint32_t number;
    pid_t renewer; ///< the process that is renewing them; 0: not being renewed
    int64_t failed_s;
};

/// Protects the table and the fields of all credentials. It is held for copies only, so one lock is
/// enough, and fork() can wait for it.
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static store_credentials *table[CREDENTIALS_COUNT_MAX];

void fsti_credentials_unref(store_credentials *credentials) {
    if (credentials == NULL || !fsti_refcount_unref(&credentials->refs)) return;
    fsti_secret_free(credentials, sizeof *credentials);
}

// ---- the table ----

/// Returns a new reference to the credentials of that source, or NULL.
static store_credentials *look_up(const provider_config *source) {
    for (size_t i = 0; i < CREDENTIALS_COUNT_MAX; i++)
        if (table[i] != NULL && memcmp(&table[i]->source, source, sizeof *source) == 0) {
            fsti_refcount_ref(&table[i]->refs);
            return table[i];
        }
    return NULL;
}

/// Adds credentials to the table, which holds a reference. In a full table the oldest entry is
/// dropped; its users keep their references.
static void remember(store_credentials *credentials) {
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

static bool has_ended(const store_credentials *credentials) {
    return credentials->keys.expires_s != 0 && credentials->keys.expires_s <= (int64_t)time(NULL);
}

/// Drops expired credentials, for example after the machine was suspended.
static store_credentials *find_valid(const provider_config *source) {
    pthread_mutex_lock(&lock);
    store_credentials *credentials = look_up(source);
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

fst_status fsti_credentials_get(const provider_config *source, provider_fetch fetch,
                                store_credentials **out, fst_error *error) {
    fsti_fork_lock(&lock);
    *out = NULL;
    if (fsti_http_is_offline()) return FST_OK; // offline, requests are never sent
    *out = find_valid(source);
    if (*out != NULL) return FST_OK;
    store_credentials *credentials = fsti_secret_alloc(sizeof *credentials);
    if (credentials == NULL) return fsti_error_memory(error, sizeof *credentials);
    fsti_refcount_init(&credentials->refs);
    credentials->source = *source;
    credentials->fetch = fetch;
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
    store_credentials *credentials = context;
    fst_error error = {0};
    store_keys *keys = fsti_secret_alloc(sizeof *keys);
    fst_status status =
        keys == NULL ? FST_E_NO_MEMORY : credentials->fetch(&credentials->source, keys, &error);
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
static bool begin_renewal(store_credentials *credentials) {
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

uint32_t fsti_credentials_copy(store_credentials *credentials, store_keys *out) {
    pthread_mutex_lock(&lock);
    int64_t left_s = credentials->keys.expires_s - (int64_t)time(NULL);
    if (credentials->keys.expires_s != 0 && left_s < EARLY_S) (void)begin_renewal(credentials);
    *out = credentials->keys;
    uint32_t number = credentials->number;
    pthread_mutex_unlock(&lock);
    return number;
}

bool fsti_credentials_rejected(store_credentials *credentials, uint32_t number) {
    pthread_mutex_lock(&lock);
    bool will_differ = credentials->number != number || begin_renewal(credentials);
    pthread_mutex_unlock(&lock);
    return will_differ;
}

bool fsti_credentials_are_renewing(store_credentials *credentials) {
    pthread_mutex_lock(&lock);
    bool is_renewing = credentials->renewer == getpid();
    pthread_mutex_unlock(&lock);
    return is_renewing;
}

bool fsti_credentials_have_secret(store_credentials *credentials, const char *text) {
    pthread_mutex_lock(&lock);
    const store_keys *keys = &credentials->keys;
    bool is_found = fsti_text_has_secret(keys->access_key, text) ||
                    fsti_text_has_secret(keys->secret_key, text) ||
                    fsti_text_has_secret(keys->session_token, text) ||
                    fsti_text_has_secret(keys->bearer_token, text);
    pthread_mutex_unlock(&lock);
    return is_found;
}
