// SPDX-License-Identifier: Apache-2.0
/// Paths and URLs: which kind of file or object one names, and its folder, name and query.
#include "location.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

fsti_location_kind fsti_location_kind_of(const char *path) {
    static const fsti_location_kind kinds[] = {
        [FSTI_SCHEME_NONE] = FSTI_LOCATION_FILE, [FSTI_SCHEME_HTTP] = FSTI_LOCATION_WEB,
        [FSTI_SCHEME_S3] = FSTI_LOCATION_S3,     [FSTI_SCHEME_GS] = FSTI_LOCATION_GCS,
        [FSTI_SCHEME_AZ] = FSTI_LOCATION_AZURE,  [FSTI_SCHEME_HF] = FSTI_LOCATION_HUB};
    fsti_scheme scheme = fsti_url_scheme(path);
    const char *colon = path + strcspn(path, ":");
    bool has_slashes = scheme != FSTI_SCHEME_NONE && strncmp(colon, "://", 3) == 0;
    return has_slashes ? kinds[scheme] : FSTI_LOCATION_FILE;
}

bool fsti_location_is_url(const char *path) {
    return fsti_location_kind_of(path) != FSTI_LOCATION_FILE;
}

bool fsti_location_looks_like_url(const char *path) {
    return fsti_url_scheme(path) != FSTI_SCHEME_NONE;
}

fst_status fsti_url_refuse(const char *path, const char *what, fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = path;
    return fsti_error_set(error, FST_E_UNSUPPORTED, location, "%s", what);
}

/// Whether a text is a URL of a scheme that is not supported, such as s3a://. Spaces before it make
/// no difference.
static bool has_other_scheme(const char *path) {
    static const char scheme_bytes[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                       "0123456789+.-";
    const char *start = path + strspn(path, " \t\r\n");
    size_t size = strspn(start, scheme_bytes);
    bool begins_with_letter = size > 0 && strspn(start, "0123456789+.-") == 0;
    return begins_with_letter && strncmp(start + size, "://", 3) == 0 &&
           !fsti_location_looks_like_url(path);
}

fst_status fsti_location_check_scheme(const char *path, fst_error *error) {
    if (!has_other_scheme(path)) return FST_OK;
    char shown[512];
    fsti_url_redact(path, shown, sizeof shown);
    fsti_error_location location = {.file = shown, .byte_offset = FST_NO_OFFSET};
    return fsti_error_set(error, FST_E_UNSUPPORTED, location,
                          "unsupported URL scheme; expected one of: https, http, s3, gs, az, hf");
}

fst_status fsti_location_require_file(const char *path, const char *what, fst_error *error) {
    if (fsti_location_looks_like_url(path)) return fsti_url_refuse(path, what, error);
    return fsti_location_check_scheme(path, error);
}

fst_status fsti_location_require_path(const char *path, fst_error *error) {
    return fsti_location_require_file(
        path,
        fsti_location_is_url(path)
            ? "URLs are not supported here"
            : "a URL must be a str, not a path object, and have two slashes after its scheme",
        error);
}

fst_status fsti_location_check(const char *path, fst_error *error) {
    url_parts parts;
    fsti_error_location location = {.file = path, .byte_offset = FST_NO_OFFSET};
    if (!fsti_location_looks_like_url(path)) return fsti_location_check_scheme(path, error);
    if (!fsti_location_is_url(path)) return fsti_location_require_path(path, error);
    const char *why = fsti_url_parse(path, &parts);
    return why == NULL ? FST_OK
                       : fsti_error_set(error, FST_E_ARGUMENT, location, "invalid URL: %s", why);
}

bool fsti_location_is_absolute(const char *path) {
    return path[0] == '/' || fsti_location_looks_like_url(path);
}

bool fsti_location_is_bucket(const char *path) {
    switch (fsti_location_kind_of(path)) {
    case FSTI_LOCATION_S3:
    case FSTI_LOCATION_GCS:
    case FSTI_LOCATION_AZURE: break;
    default: return false;
    }
    const char *bucket = strstr(path, "://") + 3;
    return strcspn(bucket, "/?#") == strlen(bucket);
}

/// Returns the size of the scheme with its colon; *with_slashes counts the slashes as well.
static size_t scheme_size(const char *url, size_t *with_slashes) {
    size_t size = strcspn(url, ":") + 1;
    *with_slashes = size + strspn(url + size, "/");
    return size;
}

/// Whether two URLs of a store have one key, which may be escaped in several ways.
static bool have_same_key(const char *one, const char *other) {
    char one_key[URL_BYTES_MAX], other_key[URL_BYTES_MAX];
    url_parts one_parts, other_parts;
    fsti_location_kind kind = fsti_location_kind_of(one);
    if (kind != FSTI_LOCATION_S3 && kind != FSTI_LOCATION_GCS && kind != FSTI_LOCATION_AZURE)
        return false;
    return fsti_url_parse(one, &one_parts) == NULL && fsti_url_parse(other, &other_parts) == NULL &&
           fsti_url_key(&one_parts, one_key, sizeof one_key) &&
           fsti_url_key(&other_parts, other_key, sizeof other_key) && one_key[0] != '\0' &&
           strcmp(one_key, other_key) == 0;
}

bool fsti_location_is_same(const char *one, const char *other) {
    if (!fsti_location_looks_like_url(one) || !fsti_location_looks_like_url(other))
        return strcmp(one, other) == 0;
    size_t one_at, other_at, size = scheme_size(one, &one_at);
    if (scheme_size(other, &other_at) != size || strncasecmp(one, other, size) != 0) return false;
    one += one_at;
    other += other_at;
    size_t host = strcspn(one, "/?#");
    if (strncasecmp(one, other, host) != 0 || strcspn(other, "/?#") != host) return false;
    return strcmp(one + host, other + host) == 0 || have_same_key(one - one_at, other - other_at);
}

char *fsti_location_join(const char *start, const char *end) {
    size_t size = strlen(start) + strlen(end) + 1, length = strlen(start);
    fsti_location_kind kind = fsti_location_kind_of(start);
    const char *query = "";
    if (kind != FSTI_LOCATION_FILE) length = strcspn(start, "?#");
    // A store's query is the version of one object.
    if (kind == FSTI_LOCATION_WEB) query = start + length;
    while (end[0] == '/' && length > 0 && start[length - 1] == '/') length--;
    char *text = fsti_alloc(size);
    if (text != NULL) snprintf(text, size, "%.*s%s%s", (int)length, start, end, query);
    return text;
}

static const char *last_part(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}

char *fsti_location_folder(const char *path, bool is_folder) {
    if (fsti_location_is_url(path)) return fsti_url_sibling(path, "");
    size_t size = is_folder ? strlen(path) : (size_t)(last_part(path) - path);
    char *folder = fsti_alloc(size + 2);
    if (folder == NULL) return NULL;
    memcpy(folder, path, size);
    if (is_folder && size > 0 && path[size - 1] != '/') folder[size++] = '/';
    folder[size] = '\0';
    return folder;
}

const char *fsti_location_name(const char *path, char *text, size_t size) {
    bool is_url = fsti_location_is_url(path);
    return is_url && fsti_url_relative(path, NULL, text, size) ? text : last_part(path);
}

const char *fsti_location_below(const char *path, const char *folder, char *text, size_t size) {
    if (fsti_location_is_url(path) && fsti_url_relative(path, folder, text, size)) return text;
    size_t folder_size = strlen(folder);
    return strncmp(path, folder, folder_size) == 0 ? path + folder_size : last_part(path);
}

char *fsti_location_redact(const char *path) {
    size_t size = strlen(path) + 1;
    char *text = fsti_string_copy(path, size - 1);
    if (text != NULL && fsti_location_is_url(path)) fsti_url_redact(path, text, size);
    return text;
}
