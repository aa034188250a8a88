// SPDX-License-Identifier: Apache-2.0
/// Selects the credential sources of Google and Azure, in the order of their SDKs.
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "provider.h"
#include "http/http.h"
#include "object_store.h"
#include "token_text.h"

#define FILE_BYTES 16384u

static fst_status refuse(const char *name, const char *what, fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = name;
    return fsti_error_set(error, FST_E_UNSUPPORTED, location, "%s", what);
}

static fst_status take_credentials(object_store *store, const provider_config *source,
                                   fst_error *error) {
    bool is_azure = store->kind == FSTI_LOCATION_AZURE;
    provider_fetch fetch = is_azure ? fsti_provider_azure : fsti_provider_google;
    store->source = fsti_provider_name(source->kind);
    return fsti_credentials_get(source, fetch, &store->credentials, error);
}

static provider_config *make_source(provider_kind kind, fst_error *error) {
    provider_config *source = fsti_alloc_zeroed(1, sizeof *source);
    if (source == NULL) (void)!fsti_error_memory(error, sizeof *source);
    if (source != NULL) source->kind = kind;
    return source;
}

static fst_status end_source(object_store *store, provider_config *source, fst_error *error) {
    fst_status status = take_credentials(store, source, error);
    explicit_bzero(source, sizeof *source);
    fsti_free(source);
    return status;
}

// ---- Google ----

/// Finds the file of application default credentials: the program's, or gcloud's.
static bool find_google_file(char *path, size_t size, bool *is_named) {
    const char *named = fsti_http_environment("GOOGLE_APPLICATION_CREDENTIALS");
    const char *folder = fsti_http_environment("CLOUDSDK_CONFIG");
    const char *home = fsti_http_environment("HOME");
    static const char name[] = "application_default_credentials.json";
    *is_named = named != NULL;
    int used = named != NULL    ? snprintf(path, size, "%s", named)
               : folder != NULL ? snprintf(path, size, "%s/%s", folder, name)
               : home != NULL   ? snprintf(path, size, "%s/.config/gcloud/%s", home, name)
                                : -1;
    bool fits = used > 0 && (size_t)used < size;
    return *is_named || (fits && access(path, F_OK) == 0);
}

static fst_status use_google_file(object_store *store, const char *name, const char *path,
                                  fst_error *error) {
    char type[64] = "";
    char *text = fsti_alloc_zeroed(1, FILE_BYTES);
    if (text == NULL) return fsti_error_memory(error, FILE_BYTES);
    bool is_read = fsti_provider_read_file(path, text, FILE_BYTES);
    int failure = errno;
    bool has_type = is_read && fsti_json_find(text, strlen(text), "type", type, sizeof type);
    explicit_bzero(text, FILE_BYTES);
    fsti_free(text);
    bool is_user = strcmp(type, "authorized_user") == 0;
    if (!is_read)
        return fsti_provider_fail_file("the Google credentials file "
                                       "(GOOGLE_APPLICATION_CREDENTIALS, or gcloud's)",
                                       path, failure, error);
    if (!has_type)
        return refuse(name, "the Google credentials file has no JSON field \"type\"", error);
    if (!is_user && strcmp(type, "service_account") != 0)
        return refuse(name,
                      "the Google credentials file has an unsupported type "
                      "(supported: authorized_user, service_account). Set a token in "
                      "GOOGLE_OAUTH_ACCESS_TOKEN",
                      error);
    provider_config *source =
        make_source(is_user ? PROVIDER_GOOGLE_USER : PROVIDER_GOOGLE_SERVICE, error);
    if (source == NULL) return FST_E_NO_MEMORY;
    snprintf(source->file, sizeof source->file, "%s", path);
    return end_source(store, source, error);
}

/// The GCE metadata server, probed once per process. Machines elsewhere have no such server.
static fst_status use_google_metadata(object_store *store, fst_error *error) {
    static atomic_bool is_missing;
    const char *host = fsti_http_environment("GCE_METADATA_HOST");
    bool is_off = fsti_http_environment("NO_GCE_CHECK") != NULL || atomic_load(&is_missing);
    if (host == NULL && is_off) return FST_OK;
    provider_config *source = make_source(PROVIDER_GOOGLE_METADATA, error);
    if (source == NULL) return FST_E_NO_MEMORY;
    snprintf(source->url, sizeof source->url,
             "http://%s/computeMetadata/v1/instance/service-accounts/default/token",
             host == NULL ? "metadata.google.internal" : host);
    fst_status status = end_source(store, source, host == NULL ? NULL : error);
    if (status == FST_OK || host != NULL) return status;
    atomic_store(&is_missing, true);
    store->source = "none";
    return FST_OK;
}

fst_status fsti_store_find_google(object_store *store, const char *name, fst_error *error) {
    char path[1024];
    bool is_named;
    if (find_google_file(path, sizeof path, &is_named))
        return use_google_file(store, name, path, error);
    // An emulator needs no credentials.
    return store->endpoint[0] != '\0' && fsti_http_environment("GCE_METADATA_HOST") == NULL
               ? FST_OK
               : use_google_metadata(store, error);
}

// ---- Microsoft ----

/// The value of a name in "Name=value;Name=value". False if it is missing or too long.
static bool find_part(const char *text, const char *name, char *out, size_t size) {
    size_t name_size = strlen(name);
    while (*text != '\0') {
        size_t part = strcspn(text, ";");
        if (part > name_size && strncasecmp(text, name, name_size) == 0 && text[name_size] == '=') {
            char value[1100];
            size_t length = part - name_size - 1;
            if (length >= sizeof value) return false;
            memcpy(value, text + name_size + 1, length);
            value[length] = '\0';
            return fsti_http_setting(out, size, value);
        }
        text += part + (text[part] == ';');
    }
    return false;
}

static fst_status use_connection_string(object_store *store, const char *text, const char *name,
                                        fst_error *error) {
    char suffix[200] = "core.windows.net", protocol[8] = "https";
    (void)find_part(text, "EndpointSuffix", suffix, sizeof suffix);
    (void)find_part(text, "DefaultEndpointsProtocol", protocol, sizeof protocol);
    bool has_account = find_part(text, "AccountName", store->account, sizeof store->account);
    bool has_key = find_part(text, "AccountKey", store->account_key, sizeof store->account_key);
    bool has_sas =
        find_part(text, "SharedAccessSignature", store->sas_token, sizeof store->sas_token);
    if (!find_part(text, "BlobEndpoint", store->account_endpoint, sizeof store->account_endpoint))
        snprintf(store->account_endpoint, sizeof store->account_endpoint, "%s://%s.blob.%s",
                 protocol, store->account, suffix);
    if (has_account && (has_key || has_sas)) return FST_OK;
    return refuse(name,
                  "AZURE_STORAGE_CONNECTION_STRING has no AccountName, or neither AccountKey nor "
                  "SharedAccessSignature",
                  error);
}

static fst_status use_federation(object_store *store, const char *file, const char *name,
                                 fst_error *error) {
    const char *tenant = fsti_http_environment("AZURE_TENANT_ID");
    const char *client = fsti_http_environment("AZURE_CLIENT_ID");
    const char *host = fsti_http_environment("AZURE_AUTHORITY_HOST");
    if (tenant == NULL || client == NULL)
        return refuse(name,
                      "AZURE_FEDERATED_TOKEN_FILE is set, but AZURE_TENANT_ID or "
                      "AZURE_CLIENT_ID is not",
                      error);
    provider_config *source = make_source(PROVIDER_AZURE_FEDERATED, error);
    if (source == NULL) return FST_E_NO_MEMORY;
    if (host == NULL) host = "https://login.microsoftonline.com/";
    const char *slash = host[strlen(host) - 1] == '/' ? "" : "/";
    snprintf(source->url, sizeof source->url, "%s%s%.100s/oauth2/v2.0/token", host, slash, tenant);
    snprintf(source->file, sizeof source->file, "%s", file);
    snprintf(source->role, sizeof source->role, "%s", client);
    return end_source(store, source, error);
}

/// A managed identity: of an application if its service sets the variables, of the machine if a
/// client ID is given.
static fst_status use_identity(object_store *store, fst_error *error) {
    const char *service = fsti_http_environment("IDENTITY_ENDPOINT");
    const char *header = fsti_http_environment("IDENTITY_HEADER");
    const char *host = fsti_http_environment("AZURE_POD_IDENTITY_AUTHORITY_HOST");
    const char *client = fsti_http_environment("AZURE_CLIENT_ID");
    bool is_service = service != NULL && header != NULL;
    if (!is_service && host == NULL && client == NULL) return FST_OK;
    provider_config *source = make_source(PROVIDER_AZURE_METADATA, error);
    if (source == NULL) return FST_E_NO_MEMORY;
    static const char what[] = "resource=https%3A%2F%2Fstorage.azure.com%2F";
    if (is_service)
        snprintf(source->url, sizeof source->url, "%s?api-version=2019-08-01&%s", service, what);
    else
        snprintf(source->url, sizeof source->url,
                 "%s/metadata/identity/oauth2/token?api-version=2018-02-01&%s",
                 host == NULL ? "http://169.254.169.254" : host, what);
    bool fits = client == NULL;
    size_t used = strlen(source->url);
    if (client != NULL && used + 16 < sizeof source->url) {
        snprintf(source->url + used, sizeof source->url - used, "&client_id=");
        fits = fsti_url_escape((url_part){client, strlen(client)}, false, source->url + used + 11,
                               sizeof source->url - used - 11);
    }
    if (!fits) source->url[used] = '\0';
    snprintf(source->header, sizeof source->header, is_service ? "X-IDENTITY-HEADER: %s" : "%s",
             is_service ? header : "Metadata: true");
    return end_source(store, source, error);
}

fst_status fsti_store_find_azure(object_store *store, const char *name, fst_error *error) {
    const char *text = fsti_http_environment("AZURE_STORAGE_CONNECTION_STRING");
    const char *sas = fsti_http_environment("AZURE_STORAGE_SAS_TOKEN");
    const char *key = fsti_http_environment("AZURE_STORAGE_ACCOUNT_KEY");
    const char *file = fsti_http_environment("AZURE_FEDERATED_TOKEN_FILE");
    if (key == NULL) key = fsti_http_environment("AZURE_STORAGE_KEY");
    if (store->sas_token[0] != '\0' || store->account_key[0] != '\0') return FST_OK;
    if (text != NULL) return use_connection_string(store, text, name, error);
    if (sas != NULL && !fsti_http_setting(store->sas_token, sizeof store->sas_token, sas))
        return refuse(name, "AZURE_STORAGE_SAS_TOKEN is too long or contains a control character",
                      error);
    if (sas == NULL && key != NULL &&
        !fsti_http_setting(store->account_key, sizeof store->account_key, key))
        return refuse(name, "AZURE_STORAGE_ACCOUNT_KEY is not a valid key", error);
    if (sas != NULL || key != NULL) return FST_OK;
    return file != NULL ? use_federation(store, file, name, error) : use_identity(store, error);
}
