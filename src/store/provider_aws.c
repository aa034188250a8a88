// SPDX-License-Identifier: Apache-2.0
/// AWS credential providers: STS for roles, containers, instance metadata (IMDSv2).
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "provider.h"
#include "listing.h"
#include "http/http.h"
#include "object_store.h"
#include "token_text.h"

#define ANSWER_BYTES 16384u
#define FORM_BYTES 24576u

/// Keys become request headers, where a line break would start another header.
static bool are_plain(const store_keys *keys) {
    const char *const texts[] = {keys->access_key, keys->secret_key, keys->session_token};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (!fsti_http_is_setting(texts[i])) return false;
    return true;
}

// ---- STS ----

static bool read_xml(const char *text, const char *name, char *out, size_t size) {
    return fsti_xml_find(text, strlen(text), name, out, size);
}

static fst_status read_sts(const char *text, store_keys *out, fst_error *error) {
    char date[40] = "";
    bool good = read_xml(text, "AccessKeyId", out->access_key, sizeof out->access_key) &&
                read_xml(text, "SecretAccessKey", out->secret_key, sizeof out->secret_key) &&
                read_xml(text, "SessionToken", out->session_token, sizeof out->session_token) &&
                read_xml(text, "Expiration", date, sizeof date);
    out->expires_s = fsti_date_read(date);
    return good && are_plain(out) && out->expires_s > 0
               ? FST_OK
               : fsti_provider_fail("STS returned no credentials", error);
}

/// Writes the form that requests a role's credentials.
static fst_status write_form(const provider_config *source, char *form, size_t size,
                             fst_error *error) {
    static const char too_long[] = "the role's names are too long";
    bool is_web = source->kind == PROVIDER_WEB_IDENTITY;
    bool good =
        fsti_form_add(form, size, "Action", is_web ? "AssumeRoleWithWebIdentity" : "AssumeRole") &&
        fsti_form_add(form, size, "Version", "2011-06-15") &&
        fsti_form_add(form, size, "RoleArn", source->role) &&
        fsti_form_add(form, size, "RoleSessionName", source->session) &&
        (source->external_id[0] == '\0' ||
         fsti_form_add(form, size, "ExternalId", source->external_id));
    if (!good) return fsti_provider_fail(too_long, error);
    if (!is_web) return FST_OK;
    char *token = fsti_alloc(ANSWER_BYTES);
    if (token == NULL) return fsti_error_memory(error, ANSWER_BYTES);
    bool is_read = fsti_provider_read_file(source->file, token, ANSWER_BYTES);
    int failure = errno;
    good = is_read && fsti_form_add(form, size, "WebIdentityToken", token);
    explicit_bzero(token, ANSWER_BYTES);
    fsti_free(token);
    if (is_read) return good ? FST_OK : fsti_provider_fail(too_long, error);
    return fsti_provider_fail_file(
        "the token file of AWS_WEB_IDENTITY_TOKEN_FILE, or of the profile's "
        "web_identity_token_file,",
        source->file, failure, error);
}

/// The keys that sign the AssumeRole request, as a store, because only stores sign.
static fst_status make_signer(const provider_config *source, object_store **out, fst_error *error) {
    object_store *store = fsti_secret_alloc(sizeof *store);
    if (store == NULL) return fsti_error_memory(error, sizeof *store);
    store->kind = FSTI_LOCATION_S3;
    store->service = "sts";
    store->source = "the source profile";
    snprintf(store->region, sizeof store->region, "%s", source->region);
    snprintf(store->access_key, sizeof store->access_key, "%s", source->access_key);
    snprintf(store->secret_key, sizeof store->secret_key, "%s", source->secret_key);
    snprintf(store->session_token, sizeof store->session_token, "%s", source->session_token);
    *out = store;
    return FST_OK;
}

static fst_status request_sts(const provider_config *source, char *answer, fst_error *error) {
    static const char *const lines[] = {"Content-Type: application/x-www-form-urlencoded", NULL};
    object_store *signer = NULL;
    char *form = fsti_alloc_zeroed(1, FORM_BYTES);
    if (form == NULL) return fsti_error_memory(error, FORM_BYTES);
    fst_status status = write_form(source, form, FORM_BYTES, error);
    if (status == FST_OK && source->kind == PROVIDER_ROLE)
        status = make_signer(source, &signer, error);
    const provider_call call = {.method = "POST",
                                .url = source->url,
                                .body = form,
                                .lines = lines,
                                .authority = signer == NULL ? (http_authority){0}
                                                            : fsti_store_authority(signer)};
    if (status == FST_OK) status = fsti_provider_request(&call, answer, ANSWER_BYTES, error);
    fsti_secret_free(signer, sizeof *signer);
    explicit_bzero(form, FORM_BYTES);
    fsti_free(form);
    return status;
}

// ---- containers and instances ----

static fst_status read_json(const char *text, store_keys *out, fst_error *error) {
    char date[40] = "";
    size_t size = strlen(text);
    bool good =
        fsti_json_find(text, size, "AccessKeyId", out->access_key, sizeof out->access_key) &&
        fsti_json_find(text, size, "SecretAccessKey", out->secret_key, sizeof out->secret_key) &&
        fsti_json_find(text, size, "Token", out->session_token, sizeof out->session_token);
    if (fsti_json_find(text, size, "Expiration", date, sizeof date))
        out->expires_s = fsti_date_read(date);
    return good && are_plain(out) && out->expires_s >= 0
               ? FST_OK
               : fsti_provider_fail("the machine or container returned no credentials", error);
}

static fst_status request_container(const provider_config *source, char *answer, fst_error *error) {
    char line[4200] = "", token[4096] = "";
    const char *const lines[] = {line, NULL};
    if (source->file[0] != '\0' && !fsti_provider_read_file(source->file, token, sizeof token))
        return fsti_provider_fail_file("the token file of AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
                                       source->file, errno, error);
    if (token[0] != '\0')
        snprintf(line, sizeof line, "Authorization: %s", token);
    else
        snprintf(line, sizeof line, "%s", source->header);
    if (strpbrk(line, "\r\n") != NULL)
        return fsti_provider_fail("the container's token contains a line break", error);
    const provider_call call = {
        .url = source->url, .lines = line[0] == '\0' ? NULL : lines, .is_link_local = true};
    fst_status status = fsti_provider_request(&call, answer, ANSWER_BYTES, error);
    explicit_bzero(line, sizeof line);
    explicit_bzero(token, sizeof token);
    return status;
}

/// IMDSv2: a session token for an hour, then the role's name, then its keys.
static fst_status request_instance(const provider_config *source, char *answer, fst_error *error) {
    static const char *const first[] = {"X-aws-ec2-metadata-token-ttl-seconds: 3600", NULL};
    char url[1400], line[600], token[512], role[128];
    const char *const lines[] = {line, NULL};
    snprintf(url, sizeof url, "%s/latest/api/token", source->url);
    provider_call call = {
        .method = "PUT", .url = url, .body = "", .lines = first, .is_link_local = true};
    FST_TRY(fsti_provider_request(&call, token, sizeof token, error));
    if (token[0] == '\0' || !fsti_http_is_setting(token))
        return fsti_provider_fail("the machine's metadata service returned no token", error);
    snprintf(line, sizeof line, "X-aws-ec2-metadata-token: %s", token);
    call = (provider_call){.url = url, .lines = lines, .is_link_local = true};
    static const char roles[] = "latest/meta-data/iam/security-credentials/";
    snprintf(url, sizeof url, "%s/%s", source->url, roles);
    FST_TRY(fsti_provider_request(&call, role, sizeof role, error));
    role[strcspn(role, "\r\n")] = '\0';
    if (role[0] == '\0' || strpbrk(role, "/?# ") != NULL || !fsti_http_is_setting(role))
        return fsti_provider_fail("the machine has no role", error);
    snprintf(url, sizeof url, "%s/%s%s", source->url, roles, role);
    return fsti_provider_request(&call, answer, ANSWER_BYTES, error);
}

fst_status fsti_provider_aws(const provider_config *source, store_keys *out, fst_error *error) {
    char *answer = fsti_alloc_zeroed(1, ANSWER_BYTES);
    if (answer == NULL) return fsti_error_memory(error, ANSWER_BYTES);
    bool is_sts = source->kind == PROVIDER_WEB_IDENTITY || source->kind == PROVIDER_ROLE;
    fst_status status = is_sts ? request_sts(source, answer, error)
                        : source->kind == PROVIDER_CONTAINER
                            ? request_container(source, answer, error)
                            : request_instance(source, answer, error);
    if (status == FST_OK)
        status = is_sts ? read_sts(answer, out, error) : read_json(answer, out, error);
    explicit_bzero(answer, ANSWER_BYTES);
    fsti_free(answer);
    return status;
}
