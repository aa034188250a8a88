// SPDX-License-Identifier: Apache-2.0
/// Leases: the process's table of them, and their renewal.
#include "lease.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "store.h"

/// Renewed so long before they end.
#define EARLY_S 300
#define LEASE_COUNT_MAX 16u
/// One that failed is tried again no sooner.
#define PAUSE_S 10

struct net_lease {
    fsti_refcount refs;
    lease_source source;
    pthread_mutex_t lock; ///< for what follows
    net_keys keys;
    uint32_t number;
    pid_t renewer; ///< the process that renews it now; 0: none
    int64_t failed_s;
};

static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static net_lease *table[LEASE_COUNT_MAX];

const char *fsti_lease_words(lease_kind kind) {
    static const char *const words[] = {
        [LEASE_WEB_IDENTITY] = "a role by web identity",
        [LEASE_ROLE] = "a role of the profile in ~/.aws",
        [LEASE_CONTAINER] = "the container's credentials",
        [LEASE_INSTANCE] = "the machine's role",
        [LEASE_GOOGLE_USER] = "the user of gcloud's file",
        [LEASE_GOOGLE_SERVICE] = "a service account's file",
        [LEASE_GOOGLE_MACHINE] = "the machine's service account",
        [LEASE_AZURE_FEDERATED] = "a federated token",
        [LEASE_AZURE_MACHINE] = "a managed identity",
    };
    return words[kind];
}

static fst_status fetch(const lease_source *source, net_keys *out, fst_error *error) {
    memset(out, 0, sizeof *out);
    if (source->kind <= LEASE_INSTANCE) return fsti_lend_aws(source, out, error);
    if (source->kind <= LEASE_GOOGLE_MACHINE) return fsti_lend_google(source, out, error);
    return fsti_lend_azure(source, out, error);
}

void fsti_lease_unref(net_lease *lease) {
    if (lease == NULL || !fsti_refcount_unref(&lease->refs)) return;
    pthread_mutex_destroy(&lease->lock);
    fsti_secret_free(lease, sizeof *lease);
}

// ---- the table ----

/// One more reference to the lease of that source; NULL: nobody has it.
static net_lease *look_up(const lease_source *source) {
    for (size_t i = 0; i < LEASE_COUNT_MAX; i++)
        if (table[i] != NULL && memcmp(&table[i]->source, source, sizeof *source) == 0) {
            fsti_refcount_ref(&table[i]->refs);
            return table[i];
        }
    return NULL;
}

/// The table's own reference. What was first in a full table goes; who uses it keeps it.
static void remember(net_lease *lease) {
    fsti_refcount_ref(&lease->refs);
    size_t place = 0;
    while (place < LEASE_COUNT_MAX && table[place] != NULL) place++;
    if (place == LEASE_COUNT_MAX) {
        fsti_lease_unref(table[0]);
        memmove(table, table + 1, sizeof table - sizeof *table);
        place--;
    }
    table[place] = lease;
}

static bool has_ended(const net_lease *lease) {
    return lease->keys.expires_s != 0 && lease->keys.expires_s <= (int64_t)time(NULL);
}

/// Ended ones are nobody's: a process that has slept asks anew.
static net_lease *find_good(const lease_source *source) {
    pthread_mutex_lock(&table_lock);
    net_lease *lease = look_up(source);
    pthread_mutex_unlock(&table_lock);
    if (lease == NULL) return NULL;
    pthread_mutex_lock(&lease->lock);
    bool is_good = !has_ended(lease);
    pthread_mutex_unlock(&lease->lock);
    if (is_good) return lease;
    pthread_mutex_lock(&table_lock);
    for (size_t i = 0; i < LEASE_COUNT_MAX; i++)
        if (table[i] == lease) {
            table[i] = NULL;
            fsti_lease_unref(lease);
        }
    pthread_mutex_unlock(&table_lock);
    fsti_lease_unref(lease);
    return NULL;
}

fst_status fsti_lease_get(const lease_source *source, net_lease **out, fst_error *error) {
    fsti_fork_lock(&table_lock);
    *out = find_good(source);
    if (*out != NULL) return FST_OK;
    net_lease *lease = fsti_secret_alloc(sizeof *lease);
    if (lease == NULL) return fsti_error_memory(error, sizeof *lease);
    fsti_refcount_init(&lease->refs);
    pthread_mutex_init(&lease->lock, NULL);
    lease->source = *source;
    fst_status status = fetch(source, &lease->keys, error);
    if (status != FST_OK) {
        fsti_lease_unref(lease);
        return status;
    }
    pthread_mutex_lock(&table_lock);
    remember(lease);
    pthread_mutex_unlock(&table_lock);
    *out = lease;
    return FST_OK;
}

// ---- renewal ----

static void *renew(void *context) {
    net_lease *lease = context;
    fst_error error = {0};
    net_keys *keys = fsti_secret_alloc(sizeof *keys);
    fst_status status = keys == NULL ? FST_E_NO_MEMORY : fetch(&lease->source, keys, &error);
    if (status != FST_OK) fsti_log(FST_LOG_WARNING, "credentials not renewed: %s", error.message);
    pthread_mutex_lock(&lease->lock);
    if (keys != NULL && status == FST_OK) {
        lease->keys = *keys;
        lease->number++;
    } else {
        lease->failed_s = (int64_t)time(NULL);
    }
    lease->renewer = 0;
    pthread_mutex_unlock(&lease->lock);
    fsti_secret_free(keys, sizeof *keys);
    fsti_lease_unref(lease);
    return NULL;
}

/// The lock is held. False where it can't be begun, or has just failed.
static bool begin_renewal(net_lease *lease) {
    pthread_t thread;
    if (lease->renewer == getpid()) return true; // of a child's parent nothing is known
    if ((int64_t)time(NULL) - lease->failed_s < PAUSE_S) return false;
    lease->renewer = getpid();
    fsti_refcount_ref(&lease->refs);
    if (fsti_thread_start(&thread, renew, lease) == 0) {
        pthread_detach(thread);
        return true;
    }
    lease->renewer = 0;
    fsti_lease_unref(lease);
    return false;
}

uint32_t fsti_lease_copy(net_lease *lease, net_keys *out) {
    pthread_mutex_lock(&lease->lock);
    int64_t left_s = lease->keys.expires_s - (int64_t)time(NULL);
    if (lease->keys.expires_s != 0 && left_s < EARLY_S) (void)begin_renewal(lease);
    *out = lease->keys;
    uint32_t number = lease->number;
    pthread_mutex_unlock(&lease->lock);
    return number;
}

bool fsti_lease_refused(net_lease *lease, uint32_t number) {
    pthread_mutex_lock(&lease->lock);
    bool will_differ = lease->number != number || begin_renewal(lease);
    pthread_mutex_unlock(&lease->lock);
    return will_differ;
}

bool fsti_lease_is_renewing(net_lease *lease) {
    pthread_mutex_lock(&lease->lock);
    bool is_renewing = lease->renewer == getpid();
    pthread_mutex_unlock(&lease->lock);
    return is_renewing;
}

bool fsti_lease_knows(net_lease *lease, const char *text) {
    pthread_mutex_lock(&lease->lock);
    const net_keys *keys = &lease->keys;
    bool knows =
        fsti_text_knows(keys->access_key, text) || fsti_text_knows(keys->secret_key, text) ||
        fsti_text_knows(keys->session_token, text) || fsti_text_knows(keys->bearer_token, text);
    pthread_mutex_unlock(&lease->lock);
    return knows;
}

// ---- questions ----

/// Of this thread's store that is being opened; or NULL.
static _Thread_local const fsti_net_watch *asker;

void fsti_lend_watch(const fsti_net_watch *watch) { asker = watch; }

#define ANSWER_BYTES_MAX ((size_t)16384)

fst_status fsti_lend_fail(const char *what, fst_error *error) {
    (void)!fsti_error_set(error, FST_E_PERMISSION, FSTI_NOWHERE, "%s", what);
    if (error != NULL) error->os_errno = EACCES;
    return FST_E_PERMISSION;
}

fst_status fsti_lend_ask(const lend_call *call, char *out, size_t size, fst_error *error) {
    char name[256];
    fsti_url_tell(call->url, name, sizeof name);
    net_request request = {.method = call->method,
                           .url = call->url,
                           .name = name,
                           .store = call->store,
                           .body = call->body,
                           .body_bytes = call->body == NULL ? 0 : strlen(call->body),
                           .lines = call->lines,
                           .is_near = call->is_near,
                           .stays = true,
                           .text_bytes_max = size - 1,
                           .watch = asker};
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
    snprintf(why, sizeof why, "no credentials could be had: %.400s", request.error.message);
    return fsti_lend_fail(why, error);
}

bool fsti_lend_read_file(const char *path, char *out, size_t size) {
    FILE *file = fopen(path, "re");
    if (file == NULL) return false;
    memset(out, 0, size);
    size_t used = fread(out, 1, size, file);
    fclose(file);
    if (used >= size || strlen(out) != used) return false;
    for (char *end = out + used; end > out && strchr(" \t\r\n", end[-1]) != NULL; end--)
        end[-1] = '\0';
    return true;
}
