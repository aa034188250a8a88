// SPDX-License-Identifier: Apache-2.0
/// Settings of stores, from fst_remote_configure().
#include <stdio.h>
#include <string.h>

#include "http/http.h"
#include "object_store.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static store_options *options; ///< NULL: not configured

/// When the library is loaded, because the first use may come under another lock.
__attribute__((constructor)) static void register_lock(void) { fsti_fork_last_lock(&lock); }

void fsti_store_options(store_options *out) {
    pthread_mutex_lock(&lock);
    *out = options != NULL ? *options : (store_options){.anonymous = false};
    pthread_mutex_unlock(&lock);
}

bool fsti_store_forbids_overwrite(void) {
    pthread_mutex_lock(&lock);
    bool forbids_overwrite = options != NULL && options->create_only;
    pthread_mutex_unlock(&lock);
    return forbids_overwrite;
}

/// Copies the caller's options; `made` is zeroed. *is_any: some option is set.
static fst_status copy_options(const fst_remote_options *wanted, store_options *made, bool *is_any,
                               fst_error *error) {
    object_store *store = &made->store;
    char ca_file[512]; // only checked here
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
        {"ca_file", wanted->ca_file, ca_file, sizeof ca_file},
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        const char *text = texts[i].text == NULL ? "" : texts[i].text;
        if (!fsti_http_setting(texts[i].field, texts[i].size, text))
            return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                                  "%s is too long or contains a line break or control character",
                                  texts[i].name);
    }
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        *is_any |= texts[i].field != ca_file && texts[i].field[0] != '\0';
    FST_TRY(fsti_store_check(store, error));
    FST_TRY(fsti_http_check_ca_file(wanted->ca_file, error));
    if ((store->access_key[0] == '\0') != (store->secret_key[0] == '\0'))
        return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                              "access_key and secret_key must be given together");
    store->style = wanted->bucket_style;
    made->anonymous = wanted->anonymous != 0;
    made->create_only = wanted->create_only != 0;
    *is_any |= made->anonymous || made->create_only || store->style != FST_BUCKET_STYLE_AUTO;
    return FST_OK;
}

fst_status fsti_store_configure(const fst_remote_options *wanted, fst_error *error) {
    bool is_any = false; // allocate nothing if no option is set
    store_options *made = fsti_secret_alloc(sizeof *made);
    if (made == NULL) return fsti_error_memory(error, sizeof *made);
    fst_status status = copy_options(wanted, made, &is_any, error);
    if (status == FST_OK) {
        pthread_mutex_lock(&lock);
        store_options *old = options;
        options = is_any ? made : NULL;
        if (is_any) made = NULL;
        pthread_mutex_unlock(&lock);
        fsti_http_set_limits(wanted);
        fsti_secret_free(old, sizeof *old);
    }
    fsti_secret_free(made, sizeof *made);
    return status;
}
