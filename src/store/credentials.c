// SPDX-License-Identifier: Apache-2.0
/// Finds S3 keys in the order of the AWS tools: environment, web identity, profile in ~/.aws,
/// container, instance metadata. A configured source that fails is an error and never skipped,
/// because the next source may belong to another account.
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "provider.h"
#include "http/http.h"
#include "object_store.h"

#define LINE_BYTES 4096u

static char *trim(char *text) {
    while (*text == ' ' || *text == '\t') text++;
    size_t size = strlen(text);
    while (size > 0 && strchr(" \t\r\n", text[size - 1]) != NULL) text[--size] = '\0';
    return text;
}

/// Reads a setting from a section of an AWS config file. False if it is missing.
static bool read_setting(const char *path, const char *section, const char *name, char *value,
                         size_t size) {
    char line[LINE_BYTES], buffer[BUFSIZ];
    bool is_here = false, is_found = false;
    FILE *file = fopen(path, "re");
    if (file == NULL) return false;
    setvbuf(file, buffer, _IOFBF, sizeof buffer);
    while (!is_found && fgets(line, sizeof line, file) != NULL) {
        char *text = trim(line), *equals = strchr(text, '=');
        size_t length = strlen(text);
        if (text[0] == '[' && length > 2 && text[length - 1] == ']') {
            text[length - 1] = '\0';
            is_here = strcmp(trim(text + 1), section) == 0;
        } else if (is_here && equals != NULL && text[0] != '#' && text[0] != ';') {
            *equals = '\0';
            is_found =
                strcmp(trim(text), name) == 0 && fsti_http_setting(value, size, trim(equals + 1));
        }
    }
    fclose(file);
    explicit_bzero(line, sizeof line); // both may contain a secret key
    explicit_bzero(buffer, sizeof buffer);
    return is_found;
}

/// The path of a user's file: from a variable, or in the home folder.
static bool user_file(const char *variable, const char *name, char *path, size_t size) {
    const char *given = fsti_http_environment(variable), *home = fsti_http_environment("HOME");
    int used = given != NULL  ? snprintf(path, size, "%s", given)
               : home != NULL ? snprintf(path, size, "%s/.aws/%s", home, name)
                              : -1;
    return used > 0 && (size_t)used < size;
}

static fst_status refuse(const char *name, const char *what, fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = name;
    return fsti_error_set(error, FST_E_UNSUPPORTED, location, "%s", what);
}

/// *found: keys are set.
static fst_status keys_of_environment(object_store *store, const char *name, bool *found,
                                      fst_error *error) {
    const struct {
        const char *variable, *what;
        char *field;
        size_t size;
    } texts[] = {{"AWS_ACCESS_KEY_ID", "AWS_ACCESS_KEY_ID is not a valid key", store->access_key,
                  sizeof store->access_key},
                 {"AWS_SECRET_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY is not a valid key",
                  store->secret_key, sizeof store->secret_key},
                 {"AWS_SESSION_TOKEN",
                  "AWS_SESSION_TOKEN is too long or contains a control character",
                  store->session_token, sizeof store->session_token}};
    bool has_key = fsti_http_environment("AWS_ACCESS_KEY_ID") != NULL;
    bool has_secret = fsti_http_environment("AWS_SECRET_ACCESS_KEY") != NULL;
    *found = has_key && has_secret;
    if (has_key != has_secret)
        return refuse(name,
                      has_key ? "AWS_ACCESS_KEY_ID is set, but AWS_SECRET_ACCESS_KEY is not"
                              : "AWS_SECRET_ACCESS_KEY is set, but AWS_ACCESS_KEY_ID is not",
                      error);
    for (size_t i = 0; *found && i < sizeof texts / sizeof *texts; i++) {
        const char *value = fsti_http_environment(texts[i].variable);
        if (value != NULL && !fsti_http_setting(texts[i].field, texts[i].size, value))
            return refuse(name, texts[i].what, error);
    }
    store->source = "the environment";
    return FST_OK;
}

/// Reads keys from one file. Sections of the config file are named "profile NAME".
static bool keys_of_file(object_store *store, const char *path, const char *section) {
    (void)read_setting(path, section, "aws_session_token", store->session_token,
                       sizeof store->session_token);
    return read_setting(path, section, "aws_access_key_id", store->access_key,
                        sizeof store->access_key) &&
           read_setting(path, section, "aws_secret_access_key", store->secret_key,
                        sizeof store->secret_key);
}

#define SECTION_BYTES 160u

/// The profile's name, and the name of its section in the config file.
static const char *find_profile(char section[SECTION_BYTES]) {
    const char *profile = fsti_http_environment("AWS_PROFILE");
    if (profile == NULL) profile = "default";
    snprintf(section, SECTION_BYTES, "%s%.128s", strcmp(profile, "default") == 0 ? "" : "profile ",
             profile);
    return profile;
}

void fsti_store_find_endpoint(object_store *store) {
    char config[1024], section[SECTION_BYTES];
    bool has_config = user_file("AWS_CONFIG_FILE", "config", config, sizeof config);
    (void)find_profile(section);
    if (has_config && store->region[0] == '\0')
        (void)read_setting(config, section, "region", store->region, sizeof store->region);
    if (has_config && store->endpoint[0] == '\0')
        (void)read_setting(config, section, "endpoint_url", store->endpoint,
                           sizeof store->endpoint);
}

// ---- temporary credentials ----

static bool put(char *field, size_t size, const char *text) {
    return fsti_http_setting(field, size, text);
}

static fst_status take_credentials(object_store *store, const provider_config *source,
                                   fst_error *error) {
    store->source = fsti_provider_name(source->kind);
    return fsti_credentials_get(source, fsti_provider_aws, &store->credentials, error);
}

/// The URL of STS: for the region, or a configured endpoint.
static bool write_sts(const object_store *store, provider_config *source) {
    const char *endpoint = fsti_http_environment("AWS_ENDPOINT_URL_STS");
    const char *region = store->region[0] == '\0' ? "us-east-1" : store->region;
    char own[160];
    bool is_china = strncmp(region, "cn-", 3) == 0;
    if (endpoint == NULL) endpoint = fsti_http_environment("AWS_ENDPOINT_URL");
    snprintf(own, sizeof own, "https://sts.%s.amazonaws.com%s/", region, is_china ? ".cn" : "");
    return put(source->region, sizeof source->region, region) &&
           put(source->url, sizeof source->url, endpoint == NULL ? own : endpoint);
}

static fst_status fetch_web_identity_keys(object_store *store, const char *name, const char *file,
                                          const char *role, fst_error *error) {
    const char *session = fsti_http_environment("AWS_ROLE_SESSION_NAME");
    if (role == NULL)
        return refuse(name, "AWS_WEB_IDENTITY_TOKEN_FILE is set, but AWS_ROLE_ARN is not", error);
    provider_config source;
    memset(&source, 0, sizeof source);
    source.kind = PROVIDER_WEB_IDENTITY;
    if (!put(source.file, sizeof source.file, file) ||
        !put(source.role, sizeof source.role, role) ||
        !put(source.session, sizeof source.session,
             session == NULL ? "fastsafetensors" : session) ||
        !write_sts(store, &source))
        return refuse(name, "invalid name of the role, its session or its token file", error);
    return take_credentials(store, &source, error);
}

/// The container's credential URL, which must be link-local or use TLS.
static const char *read_container(provider_config *source) {
    const char *relative = fsti_http_environment("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI");
    const char *full = fsti_http_environment("AWS_CONTAINER_CREDENTIALS_FULL_URI");
    const char *file = fsti_http_environment("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE");
    const char *token = fsti_http_environment("AWS_CONTAINER_AUTHORIZATION_TOKEN");
    static const char *const hosts[] = {"127.0.0.1",     "localhost",      "::1",
                                        "169.254.170.2", "169.254.170.23", "fd00:ec2::23"};
    url_parts url;
    int used = relative != NULL
                   ? snprintf(source->url, sizeof source->url, "http://169.254.170.2%s", relative)
                   : snprintf(source->url, sizeof source->url, "%s", full);
    if (used < 0 || (size_t)used >= sizeof source->url || fsti_url_parse(source->url, &url) != NULL)
        return "the container's credentials URL is invalid";
    bool is_allowed = fsti_url_part_is(url.scheme, "https");
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++)
        is_allowed = is_allowed ||
                     (fsti_url_part_is(url.scheme, "http") && fsti_url_part_is(url.host, hosts[i]));
    if (!is_allowed)
        return "AWS_CONTAINER_CREDENTIALS_FULL_URI is neither https nor a local address";
    if (file != NULL && !put(source->file, sizeof source->file, file))
        return "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE is too long";
    if (file == NULL && token != NULL) {
        used = snprintf(source->header, sizeof source->header, "Authorization: %s", token);
        if (used < 0 || (size_t)used >= sizeof source->header ||
            strpbrk(source->header, "\r\n") != NULL)
            return "AWS_CONTAINER_AUTHORIZATION_TOKEN is not a valid token";
    }
    return NULL;
}

static fst_status fetch_container_keys(object_store *store, const char *name, fst_error *error) {
    provider_config source;
    memset(&source, 0, sizeof source);
    source.kind = PROVIDER_CONTAINER;
    const char *why = read_container(&source);
    return why != NULL ? refuse(name, why, error) : take_credentials(store, &source, error);
}

/// *found: this is an instance with a role. No response means that it is not an instance.
static fst_status fetch_instance_keys(object_store *store, bool *found, fst_error *error) {
    static atomic_bool is_missing; // asked once per process, because no response takes a second
    const char *off = fsti_http_environment("AWS_EC2_METADATA_DISABLED");
    const char *endpoint = fsti_http_environment("AWS_EC2_METADATA_SERVICE_ENDPOINT");
    provider_config source;
    *found = false;
    if (off != NULL && strcasecmp(off, "true") == 0) return FST_OK;
    if (endpoint == NULL && atomic_load(&is_missing)) return FST_OK;
    memset(&source, 0, sizeof source);
    source.kind = PROVIDER_INSTANCE;
    if (!put(source.url, sizeof source.url, endpoint == NULL ? "http://169.254.169.254" : endpoint))
        return FST_OK;
    size_t size = strlen(source.url);
    while (size > 0 && source.url[size - 1] == '/') source.url[--size] = '\0';
    fst_status status = take_credentials(store, &source, endpoint == NULL ? NULL : error);
    *found = status == FST_OK;
    if (endpoint == NULL && !*found && status != FST_E_NO_MEMORY) atomic_store(&is_missing, true);
    return endpoint == NULL ? FST_OK : status;
}

/// A profile that assumes a role.
typedef struct role_profile {
    char role[256], profile[128], file[1024], session[80], external_id[1232], mfa[256];
} role_profile;

/// Reads static keys of a profile.
static bool read_keys(object_store *store, const char *profile) {
    char path[1024], config[1024], section[SECTION_BYTES];
    snprintf(section, sizeof section, "%s%.128s", strcmp(profile, "default") == 0 ? "" : "profile ",
             profile);
    return (user_file("AWS_SHARED_CREDENTIALS_FILE", "credentials", path, sizeof path) &&
            keys_of_file(store, path, profile)) ||
           (user_file("AWS_CONFIG_FILE", "config", config, sizeof config) &&
            keys_of_file(store, config, section));
}

/// Finds the keys that sign the AssumeRole request.
static fst_status fetch_role_keys(object_store *store, const char *name,
                                  const role_profile *profile, fst_error *error) {
    if (profile->mfa[0] != '\0')
        return refuse(
            name, "the AWS profile's role needs an MFA code (mfa_serial), which is not supported",
            error);
    if (profile->profile[0] == '\0')
        return refuse(name, "the AWS profile has a role_arn, but no source_profile with keys",
                      error);
    provider_config source;
    memset(&source, 0, sizeof source);
    source.kind = PROVIDER_ROLE;
    bool has_keys = read_keys(store, profile->profile);
    bool good = put(source.role, sizeof source.role, profile->role) &&
                put(source.session, sizeof source.session,
                    profile->session[0] == '\0' ? "fastsafetensors" : profile->session) &&
                put(source.external_id, sizeof source.external_id, profile->external_id) &&
                put(source.access_key, sizeof source.access_key, store->access_key) &&
                put(source.secret_key, sizeof source.secret_key, store->secret_key) &&
                put(source.session_token, sizeof source.session_token, store->session_token) &&
                write_sts(store, &source);
    explicit_bzero(store->access_key, sizeof store->access_key);
    explicit_bzero(store->secret_key, sizeof store->secret_key);
    explicit_bzero(store->session_token, sizeof store->session_token);
    fst_status status =
        !has_keys ? refuse(name, "the source_profile of the AWS profile has no keys", error)
        : !good   ? refuse(name, "the AWS profile's role_arn is invalid", error)
                  : take_credentials(store, &source, error);
    explicit_bzero(&source, sizeof source);
    return status;
}

static bool read_role(role_profile *out) {
    char config[1024], section[SECTION_BYTES];
    const struct {
        const char *name;
        char *field;
        size_t size;
    } texts[] = {{"source_profile", out->profile, sizeof out->profile},
                 {"web_identity_token_file", out->file, sizeof out->file},
                 {"role_session_name", out->session, sizeof out->session},
                 {"external_id", out->external_id, sizeof out->external_id},
                 {"mfa_serial", out->mfa, sizeof out->mfa}};
    memset(out, 0, sizeof *out);
    (void)find_profile(section);
    if (!user_file("AWS_CONFIG_FILE", "config", config, sizeof config) ||
        !read_setting(config, section, "role_arn", out->role, sizeof out->role))
        return false;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        (void)read_setting(config, section, texts[i].name, texts[i].field, texts[i].size);
    return true;
}

static fst_status refuse_profile(const char *name, fst_error *error) {
    char config[1024], section[SECTION_BYTES], value[256];
    static const char *const others[] = {"credential_process", "sso_session", "sso_start_url"};
    (void)find_profile(section);
    bool has_config = user_file("AWS_CONFIG_FILE", "config", config, sizeof config);
    for (size_t i = 0; has_config && i < sizeof others / sizeof *others; i++)
        if (read_setting(config, section, others[i], value, sizeof value))
            return refuse(
                name,
                "the AWS profile gets its keys from a process or SSO, which is not supported. "
                "Set the keys in the environment (aws configure export-credentials "
                "--format env prints them)",
                error);
    if (fsti_http_environment("AWS_PROFILE") == NULL) return FST_OK;
    return refuse(name, "the AWS profile has no keys", error);
}

static fst_status keys_of_profile(object_store *store, const char *name, bool *found,
                                  fst_error *error) {
    char section[SECTION_BYTES];
    role_profile role;
    const char *profile = find_profile(section);
    *found = true;
    if (read_role(&role))
        return role.file[0] != '\0'
                   ? fetch_web_identity_keys(store, name, role.file, role.role, error)
                   : fetch_role_keys(store, name, &role, error);
    store->source = "the profile in ~/.aws";
    *found = read_keys(store, profile);
    return *found ? FST_OK : refuse_profile(name, error);
}

fst_status fsti_store_find_keys(object_store *store, const char *name, fst_error *error) {
    bool found = false;
    if (store->access_key[0] != '\0') {
        store->source = "an argument";
        return FST_OK;
    }
    FST_TRY(keys_of_environment(store, name, &found, error));
    if (found) return FST_OK;
    const char *file = fsti_http_environment("AWS_WEB_IDENTITY_TOKEN_FILE");
    if (file != NULL)
        return fetch_web_identity_keys(store, name, file, fsti_http_environment("AWS_ROLE_ARN"),
                                       error);
    FST_TRY(keys_of_profile(store, name, &found, error));
    if (found) return FST_OK;
    if (fsti_http_environment("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI") != NULL ||
        fsti_http_environment("AWS_CONTAINER_CREDENTIALS_FULL_URI") != NULL)
        return fetch_container_keys(store, name, error);
    FST_TRY(fetch_instance_keys(store, &found, error));
    if (found) return FST_OK;
    return refuse(
        name,
        "no credentials for S3: looked in the settings, AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY, web identity, the profile in ~/.aws, the container and the "
        "machine's role. For public buckets set anonymous",
        error);
}
