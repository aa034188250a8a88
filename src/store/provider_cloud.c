// SPDX-License-Identifier: Apache-2.0
/// Credential providers of Google and Azure, for bearer tokens.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "digest/digest.h"
#include "http/http.h"
#include "provider.h"
#include "token_text.h"

#define TEXT_BYTES 16384u
#define FORM_BYTES 24576u
/// Longer lifetimes are not credible.
#define LIFETIME_S_MAX ((int64_t)1 << 31)
#define GOOGLE_TOKENS "https://oauth2.googleapis.com/token"
#define GOOGLE_SCOPE "https://www.googleapis.com/auth/devstorage.read_write"

static const char *const form_lines[] = {"Content-Type: application/x-www-form-urlencoded", NULL};

/// At least 1, because 0 means unknown.
static int64_t read_seconds(const char *number, int64_t most) {
    int64_t seconds = strtol(number, NULL, 10);
    return seconds < 1 ? 1 : seconds > most ? most : seconds;
}

fst_status fsti_provider_read_token(const char *text, store_keys *out, fst_error *error) {
    char number[32] = "";
    size_t size = strlen(text);
    bool good =
        fsti_json_find(text, size, "access_token", out->bearer_token, sizeof out->bearer_token) &&
        fsti_http_is_setting(out->bearer_token) && out->bearer_token[0] != '\0';
    if (!good) return fsti_provider_fail("the response has no access_token", error);
    if (fsti_json_find(text, size, "expires_in", number, sizeof number))
        out->expires_s = (int64_t)time(NULL) + read_seconds(number, LIFETIME_S_MAX);
    else if (fsti_json_find(text, size, "expires_on", number, sizeof number))
        out->expires_s = read_seconds(number, INT64_MAX);
    return FST_OK;
}

/// Sends a token request, with `text` as scratch of TEXT_BYTES.
typedef fst_status (*token_asker)(const provider_config *source, char *text, fst_error *error);

static fst_status fetch_keys(const provider_config *source, token_asker ask, store_keys *out,
                             fst_error *error) {
    char *text = fsti_alloc_zeroed(1, TEXT_BYTES);
    if (text == NULL) return fsti_error_memory(error, TEXT_BYTES);
    fst_status status = ask(source, text, error);
    if (status == FST_OK) status = fsti_provider_read_token(text, out, error);
    explicit_bzero(text, TEXT_BYTES);
    fsti_free(text);
    return status;
}

/// Frees a form, which may hold a secret.
static void free_form(char *form) {
    if (form != NULL) explicit_bzero(form, FORM_BYTES);
    fsti_free(form);
}

/// Sends a form.
static fst_status send_form(const char *url, const char *form, char *answer, fst_error *error) {
    const provider_call call = {.method = "POST", .url = url, .body = form, .lines = form_lines};
    return fsti_provider_request(&call, answer, TEXT_BYTES, error);
}

// ---- Google ----

typedef struct google_file {
    char url[512], id[256], secret[512], token[1024], email[256], key[4096], key_id[128];
} google_file;

static bool find(const char *text, const char *name, char *out, size_t size) {
    return fsti_json_find(text, strlen(text), name, out, size);
}

static fst_status read_google_file(const provider_config *source, char *text, google_file *out,
                                   fst_error *error) {
    memset(out, 0, sizeof *out);
    if (!fsti_provider_read_file(source->file, text, TEXT_BYTES))
        return fsti_provider_fail_file("the Google credentials file", source->file, errno, error);
    if (!find(text, "token_uri", out->url, sizeof out->url))
        snprintf(out->url, sizeof out->url, "%s", GOOGLE_TOKENS);
    bool is_user = source->kind == PROVIDER_GOOGLE_USER;
    bool good = is_user ? find(text, "client_id", out->id, sizeof out->id) &&
                              find(text, "client_secret", out->secret, sizeof out->secret) &&
                              find(text, "refresh_token", out->token, sizeof out->token)
                        : find(text, "client_email", out->email, sizeof out->email) &&
                              find(text, "private_key", out->key, sizeof out->key);
    if (!is_user) (void)find(text, "private_key_id", out->key_id, sizeof out->key_id);
    return good ? FST_OK
                : fsti_provider_fail("the Google credentials file lacks a required field", error);
}

static fst_status sign_claim(const char *key, const char *text, fsti_octets *signature,
                             fst_error *error) {
    fst_status status = fsti_rsa_sign(key, text, strlen(text), signature, error);
    if (status == FST_E_UNSUPPORTED)
        return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
                              "service accounts need libcrypto (OpenSSL 1.1 or later), which was "
                              "not found. Set a token in GOOGLE_OAUTH_ACCESS_TOKEN");
    if (status == FST_E_ARGUMENT || status == FST_E_SIGNATURE)
        return fsti_error_set(error, FST_E_PERMISSION, FSTI_NO_LOCATION,
                              "the service account's private key is not a valid RSA key");
    return status;
}

/// A service account's claim, signed with its key: "header.claims.signature".
static fst_status write_claim(const google_file *file, char *out, size_t size, fst_error *error) {
    char head[256], claims[1536];
    fsti_octets signature;
    int64_t now_s = (int64_t)time(NULL);
    if (strpbrk(file->email, "\"\\") != NULL || strpbrk(file->url, "\"\\") != NULL ||
        strpbrk(file->key_id, "\"\\") != NULL)
        return fsti_provider_fail("the service account's file has invalid names", error);
    snprintf(head, sizeof head, "{\"alg\":\"RS256\",\"typ\":\"JWT\",\"kid\":\"%s\"}", file->key_id);
    snprintf(claims, sizeof claims,
             "{\"iss\":\"%s\",\"scope\":\"" GOOGLE_SCOPE "\",\"aud\":\"%s\",\"iat\":%lld,"
             "\"exp\":%lld}",
             file->email, file->url, (long long)now_s, (long long)now_s + 3600);
    size_t text_size = BASE64_BYTES(strlen(head)) + BASE64_BYTES(strlen(claims));
    if (text_size + BASE64_BYTES(FSTI_SIGNATURE_BYTES_MAX) + 2 > size)
        return fsti_provider_fail("the service account's names are too long", error);
    fsti_base64_write((const unsigned char *)head, strlen(head), true, out);
    size_t used = strlen(out);
    out[used++] = '.';
    fsti_base64_write((const unsigned char *)claims, strlen(claims), true, out + used);
    FST_TRY(sign_claim(file->key, out, &signature, error));
    used = strlen(out);
    out[used++] = '.';
    fsti_base64_write(signature.bytes, signature.size, true, out + used);
    fsti_free(signature.bytes);
    return FST_OK;
}

static fst_status write_google_form(const provider_config *source, const google_file *file,
                                    char *form, fst_error *error) {
    char claim[6144];
    bool good;
    if (source->kind == PROVIDER_GOOGLE_USER) {
        good = fsti_form_add(form, FORM_BYTES, "grant_type", "refresh_token") &&
               fsti_form_add(form, FORM_BYTES, "client_id", file->id) &&
               fsti_form_add(form, FORM_BYTES, "client_secret", file->secret) &&
               fsti_form_add(form, FORM_BYTES, "refresh_token", file->token);
    } else {
        FST_TRY(write_claim(file, claim, sizeof claim, error));
        good = fsti_form_add(form, FORM_BYTES, "grant_type",
                             "urn:ietf:params:oauth:grant-type:jwt-bearer") &&
               fsti_form_add(form, FORM_BYTES, "assertion", claim);
        explicit_bzero(claim, sizeof claim); // a token for an hour
    }
    return good ? FST_OK : fsti_provider_fail("Google's credentials are too long", error);
}

static fst_status request_google(const provider_config *source, char *text, fst_error *error) {
    google_file *file = fsti_alloc(sizeof *file);
    char *form = fsti_alloc_zeroed(1, FORM_BYTES);
    if (file == NULL || form == NULL) {
        fsti_free(file);
        free_form(form);
        return fsti_error_memory(error, FORM_BYTES);
    }
    fst_status status = read_google_file(source, text, file, error);
    if (status == FST_OK) status = write_google_form(source, file, form, error);
    if (status == FST_OK) status = send_form(file->url, form, text, error);
    explicit_bzero(file, sizeof *file);
    fsti_free(file);
    free_form(form);
    return status;
}

static fst_status request_google_metadata(const provider_config *source, char *text,
                                          fst_error *error) {
    static const char *const lines[] = {"Metadata-Flavor: Google", NULL};
    const provider_call call = {.url = source->url, .lines = lines, .is_link_local = true};
    return fsti_provider_request(&call, text, TEXT_BYTES, error);
}

fst_status fsti_provider_google(const provider_config *source, store_keys *out, fst_error *error) {
    bool is_metadata = source->kind == PROVIDER_GOOGLE_METADATA;
    return fetch_keys(source, is_metadata ? request_google_metadata : request_google, out, error);
}

// ---- Microsoft ----

static fst_status request_azure_metadata(const provider_config *source, char *text,
                                         fst_error *error) {
    const char *const lines[] = {source->header, NULL};
    const provider_call call = {.url = source->url, .lines = lines, .is_link_local = true};
    return fsti_provider_request(&call, text, TEXT_BYTES, error);
}

static fst_status request_federated(const provider_config *source, char *text, fst_error *error) {
    char *form = fsti_alloc_zeroed(1, FORM_BYTES);
    if (form == NULL) return fsti_error_memory(error, FORM_BYTES);
    bool is_read = fsti_provider_read_file(source->file, text, TEXT_BYTES);
    int failure = errno;
    bool good = is_read && fsti_form_add(form, FORM_BYTES, "grant_type", "client_credentials") &&
                fsti_form_add(form, FORM_BYTES, "client_id", source->role) &&
                fsti_form_add(form, FORM_BYTES, "scope", "https://storage.azure.com/.default") &&
                fsti_form_add(form, FORM_BYTES, "client_assertion_type",
                              "urn:ietf:params:oauth:client-assertion-type:jwt-bearer") &&
                fsti_form_add(form, FORM_BYTES, "client_assertion", text);
    fst_status status = FST_OK;
    if (!is_read)
        status = fsti_provider_fail_file("the token file of AZURE_FEDERATED_TOKEN_FILE",
                                         source->file, failure, error);
    else if (!good)
        status = fsti_provider_fail("the token of AZURE_FEDERATED_TOKEN_FILE is too long", error);
    if (good) status = send_form(source->url, form, text, error);
    free_form(form);
    return status;
}

fst_status fsti_provider_azure(const provider_config *source, store_keys *out, fst_error *error) {
    bool is_metadata = source->kind == PROVIDER_AZURE_METADATA;
    return fetch_keys(source, is_metadata ? request_azure_metadata : request_federated, out, error);
}
