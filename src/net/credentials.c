// SPDX-License-Identifier: Apache-2.0
/// Keys of S3, where its own tools find them: the environment, then the profile in the files of
/// ~/.aws. A step that is configured and can't be taken is an error, never passed over: what comes
/// behind it may belong to somebody else.
#include <stdio.h>
#include <string.h>

#include "settings.h"
#include "store.h"

#define LINE_BYTES 4096u

static char *trim(char *text) {
    while (*text == ' ' || *text == '\t') text++;
    size_t size = strlen(text);
    while (size > 0 && strchr(" \t\r\n", text[size - 1]) != NULL) text[--size] = '\0';
    return text;
}

/// The value of a setting in a section of such a file; false where it is not there.
static bool read_setting(const char *path, const char *section, const char *name, char *value,
                         size_t size) {
    char line[LINE_BYTES];
    bool is_here = false, is_found = false;
    FILE *file = fopen(path, "re");
    if (file == NULL) return false;
    while (!is_found && fgets(line, sizeof line, file) != NULL) {
        char *text = trim(line), *equals = strchr(text, '=');
        size_t length = strlen(text);
        if (text[0] == '[' && length > 2 && text[length - 1] == ']') {
            text[length - 1] = '\0';
            is_here = strcmp(trim(text + 1), section) == 0;
        } else if (is_here && equals != NULL && text[0] != '#' && text[0] != ';') {
            *equals = '\0';
            is_found =
                strcmp(trim(text), name) == 0 && fsti_net_setting(value, size, trim(equals + 1));
        }
    }
    explicit_bzero(line, sizeof line);
    fclose(file);
    return is_found;
}

/// A file of the user's: by a variable, or in the home folder.
static bool user_file(const char *variable, const char *name, char *path, size_t size) {
    const char *given = fsti_net_environment(variable), *home = fsti_net_environment("HOME");
    int used = given != NULL  ? snprintf(path, size, "%s", given)
               : home != NULL ? snprintf(path, size, "%s/.aws/%s", home, name)
                              : -1;
    return used > 0 && (size_t)used < size;
}

static fst_status refuse(const char *name, const char *what, fst_error *error) {
    fsti_error_place place = FSTI_NOWHERE;
    place.file = name;
    return fsti_error_set(error, FST_E_UNSUPPORTED, place, "%s", what);
}

/// *found: they are there.
static fst_status keys_of_environment(net_store *store, const char *name, bool *found,
                                      fst_error *error) {
    const struct {
        const char *variable, *what;
        char *field;
        size_t size;
    } texts[] = {{"AWS_ACCESS_KEY_ID", "AWS_ACCESS_KEY_ID can't be a key", store->access_key,
                  sizeof store->access_key},
                 {"AWS_SECRET_ACCESS_KEY", "AWS_SECRET_ACCESS_KEY can't be a key",
                  store->secret_key, sizeof store->secret_key},
                 {"AWS_SESSION_TOKEN", "AWS_SESSION_TOKEN is too long, or has a control byte",
                  store->session_token, sizeof store->session_token}};
    bool has_key = fsti_net_environment("AWS_ACCESS_KEY_ID") != NULL;
    bool has_secret = fsti_net_environment("AWS_SECRET_ACCESS_KEY") != NULL;
    *found = has_key && has_secret;
    if (has_key != has_secret)
        return refuse(name,
                      has_key ? "AWS_ACCESS_KEY_ID is set, and AWS_SECRET_ACCESS_KEY is not"
                              : "AWS_SECRET_ACCESS_KEY is set, and AWS_ACCESS_KEY_ID is not",
                      error);
    for (size_t i = 0; *found && i < sizeof texts / sizeof *texts; i++) {
        const char *value = fsti_net_environment(texts[i].variable);
        if (value != NULL && !fsti_net_setting(texts[i].field, texts[i].size, value))
            return refuse(name, texts[i].what, error);
    }
    store->source = "the environment";
    return FST_OK;
}

/// Of one file; the config file calls its sections "profile NAME".
static bool keys_of_file(net_store *store, const char *path, const char *section) {
    (void)read_setting(path, section, "aws_session_token", store->session_token,
                       sizeof store->session_token);
    return read_setting(path, section, "aws_access_key_id", store->access_key,
                        sizeof store->access_key) &&
           read_setting(path, section, "aws_secret_access_key", store->secret_key,
                        sizeof store->secret_key);
}

#define SECTION_BYTES 160u

/// The profile's name, and that of its section in the config file.
static const char *find_profile(char section[SECTION_BYTES]) {
    const char *profile = fsti_net_environment("AWS_PROFILE");
    if (profile == NULL) profile = "default";
    snprintf(section, SECTION_BYTES, "%s%.128s", strcmp(profile, "default") == 0 ? "" : "profile ",
             profile);
    return profile;
}

void fsti_store_find_place(net_store *store) {
    char config[1024], section[SECTION_BYTES];
    bool has_config = user_file("AWS_CONFIG_FILE", "config", config, sizeof config);
    (void)find_profile(section);
    if (has_config && store->region[0] == '\0')
        (void)read_setting(config, section, "region", store->region, sizeof store->region);
    if (has_config && store->endpoint[0] == '\0')
        (void)read_setting(config, section, "endpoint_url", store->endpoint,
                           sizeof store->endpoint);
}

static fst_status keys_of_profile(net_store *store, const char *name, bool *found,
                                  fst_error *error) {
    char path[1024], config[1024], section[SECTION_BYTES], role[256];
    bool is_named = fsti_net_environment("AWS_PROFILE") != NULL;
    const char *profile = find_profile(section);
    bool has_config = user_file("AWS_CONFIG_FILE", "config", config, sizeof config);
    store->source = "the profile in ~/.aws";
    *found = (user_file("AWS_SHARED_CREDENTIALS_FILE", "credentials", path, sizeof path) &&
              keys_of_file(store, path, profile)) ||
             (has_config && keys_of_file(store, config, section));
    if (*found) return FST_OK;
    static const char *const others[] = {"role_arn", "credential_process", "sso_session",
                                         "sso_start_url"};
    for (size_t i = 0; has_config && i < sizeof others / sizeof *others; i++)
        if (read_setting(config, section, others[i], role, sizeof role))
            return refuse(name,
                          "the AWS profile gets its keys by a role, a process or SSO, which "
                          "is not done here: give keys by the environment (aws configure "
                          "export-credentials --format env prints them)",
                          error);
    if (is_named) return refuse(name, "the AWS profile has no keys", error);
    return FST_OK;
}

fst_status fsti_store_find_keys(net_store *store, const char *name, fst_error *error) {
    bool found = false;
    if (store->access_key[0] != '\0') {
        store->source = "an argument";
        return FST_OK;
    }
    FST_TRY(keys_of_environment(store, name, &found, error));
    if (found) return FST_OK;
    if (fsti_net_environment("AWS_WEB_IDENTITY_TOKEN_FILE") != NULL ||
        fsti_net_environment("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI") != NULL ||
        fsti_net_environment("AWS_CONTAINER_CREDENTIALS_FULL_URI") != NULL)
        return refuse(name,
                      "keys by web identity or of a container are not fetched here: give "
                      "them by the environment",
                      error);
    FST_TRY(keys_of_profile(store, name, &found, error));
    if (found) return FST_OK;
    return refuse(name,
                  "no keys for S3: neither in the settings, nor AWS_ACCESS_KEY_ID and "
                  "AWS_SECRET_ACCESS_KEY, nor a profile in ~/.aws (public buckets are read "
                  "with anonymous)",
                  error);
}
