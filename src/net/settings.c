// SPDX-License-Identifier: Apache-2.0
/// What fst_remote_configure() was told, and the environment.
#include "settings.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "curl_library.h"
#include "net.h"
#include "store.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static net_options *options; ///< NULL: nothing was said
static char ca_file[512];
static const net_limits defaults = {.connect_ms = 5000,
                                    .first_byte_ms = 10000,
                                    .stall_ms = 5000,
                                    .retry_base_ms = 100,
                                    .retry_cap_ms = 20000,
                                    .tries_max = 8,
                                    .connections_max = 64};
static net_limits limits; ///< zeros: the defaults

const char *fsti_net_environment(const char *name) {
    const char *value = secure_getenv(name);
    return value == NULL || value[0] == '\0' ? NULL : value;
}

bool fsti_net_is_setting(const char *text) {
    for (; *text != '\0'; text++)
        if ((unsigned char)*text < ' ' || *text == 0x7f) return false;
    return true;
}

bool fsti_net_setting(char *field, size_t size, const char *text) {
    size_t length = strlen(text);
    field[0] = '\0';
    if (!fsti_net_is_setting(text) || length >= size) return false;
    memcpy(field, text, length + 1);
    return true;
}

net_limits fsti_net_limits(void) {
    pthread_mutex_lock(&lock);
    net_limits copy = limits.tries_max == 0 ? defaults : limits;
    pthread_mutex_unlock(&lock);
    return copy;
}

void fsti_net_options(net_options *out) {
    pthread_mutex_lock(&lock);
    *out = options != NULL ? *options : (net_options){.anonymous = false};
    pthread_mutex_unlock(&lock);
}

bool fsti_net_must_be_new(void) {
    pthread_mutex_lock(&lock);
    bool must_be_new = options != NULL && options->no_overwrite;
    pthread_mutex_unlock(&lock);
    return must_be_new;
}

void fsti_net_find_ca_file(void) {
    static const char *const variables[] = {"AWS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE"};
    const char *found = NULL;
    for (size_t i = 0; i < sizeof variables / sizeof *variables && found == NULL; i++)
        found = fsti_net_environment(variables[i]);
    if (found == NULL) found = fsti_curl_ca_file();
    pthread_mutex_lock(&lock);
    if (options != NULL && options->ca_file[0] != '\0') found = options->ca_file;
    snprintf(ca_file, sizeof ca_file, "%s", found == NULL ? "" : found);
    pthread_mutex_unlock(&lock);
}

bool fsti_net_ca_file(char *path, size_t size) {
    pthread_mutex_lock(&lock);
    int used = snprintf(path, size, "%s", ca_file);
    pthread_mutex_unlock(&lock);
    return used > 0 && (size_t)used < size;
}

static uint32_t choose(uint32_t wanted, uint32_t usual) { return wanted != 0 ? wanted : usual; }

static void set_limits(const fst_remote_options *wanted) {
    limits = (net_limits){.connect_ms = choose(wanted->connect_ms, defaults.connect_ms),
                          .first_byte_ms = choose(wanted->first_byte_ms, defaults.first_byte_ms),
                          .stall_ms = choose(wanted->stall_ms, defaults.stall_ms),
                          .retry_base_ms = choose(wanted->retry_base_ms, defaults.retry_base_ms),
                          .retry_cap_ms = choose(wanted->retry_cap_ms, defaults.retry_cap_ms),
                          .tries_max = choose(wanted->tries_max, defaults.tries_max),
                          .connections_max = (uint32_t)fsti_min(
                              choose(wanted->connections_max, defaults.connections_max), 1024),
                          .is_offline = wanted->cache_offline != 0};
}

bool fsti_net_is_offline(void) { return fsti_net_limits().is_offline; }

/// Copies what the caller has said; `made` is all zeros. *is_any: that is something.
static fst_status copy_options(const fst_remote_options *wanted, net_options *made, bool *is_any,
                               fst_error *error) {
    net_store *store = &made->store;
    const struct {
        const char *name, *text;
        char *field;
        size_t size;
    } texts[] = {
        {"endpoint", wanted->endpoint, store->endpoint, sizeof store->endpoint},
        {"region", wanted->region, store->region, sizeof store->region},
        {"access_key", wanted->access_key, store->access_key, sizeof store->access_key},
        {"secret_key", wanted->secret_key, store->secret_key, sizeof store->secret_key},
        {"session_token", wanted->session_token, store->session_token, sizeof store->session_token},
        {"bearer_token", wanted->bearer_token, store->bearer_token, sizeof store->bearer_token},
        {"sas_token", wanted->sas_token, store->sas_token, sizeof store->sas_token},
        {"account_key", wanted->account_key, store->account_key, sizeof store->account_key},
        {"account", wanted->account, store->account, sizeof store->account},
        {"ca_file", wanted->ca_file, made->ca_file, sizeof made->ca_file},
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        const char *text = texts[i].text == NULL ? "" : texts[i].text;
        if (!fsti_net_setting(texts[i].field, texts[i].size, text))
            return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NOWHERE,
                                  "%s is too long, or has a line break or control byte",
                                  texts[i].name);
    }
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) *is_any |= texts[i].field[0] != '\0';
    FST_TRY(fsti_store_check(store, error));
    if ((wanted->access_key == NULL) != (wanted->secret_key == NULL))
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NOWHERE,
                              "access_key and secret_key go together");
    store->style = wanted->bucket_style;
    made->anonymous = wanted->anonymous != 0;
    made->no_overwrite = wanted->no_overwrite != 0;
    *is_any |= made->anonymous || made->no_overwrite || store->style != FST_BUCKET_STYLE_AUTO;
    return FST_OK;
}

fst_status fsti_net_configure(const fst_remote_options *wanted, fst_error *error) {
    bool is_any = false; // of nothing no memory is kept
    net_options *made = fsti_secret_alloc(sizeof *made);
    if (made == NULL) return fsti_error_memory(error, sizeof *made);
    fst_status status = copy_options(wanted, made, &is_any, error);
    if (status == FST_OK) {
        fsti_fork_lock(&lock);
        pthread_mutex_lock(&lock);
        net_options *old = options;
        options = is_any ? made : NULL;
        if (is_any) made = NULL;
        set_limits(wanted);
        pthread_mutex_unlock(&lock);
        fsti_secret_free(old, sizeof *old);
    }
    fsti_secret_free(made, sizeof *made);
    return status;
}
