// SPDX-License-Identifier: Apache-2.0
/// Parses and builds URLs.
#include "url.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

static bool is_letter(char byte) {
    return (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z');
}
static bool is_digit(char byte) { return byte >= '0' && byte <= '9'; }

static char lower(char byte) {
    return byte >= 'A' && byte <= 'Z' ? (char)(byte - 'A' + 'a') : byte;
}

bool fsti_url_part_is(url_part part, const char *text) {
    size_t i = 0;
    for (; i < part.size && text[i] != '\0'; i++)
        if (lower(part.at[i]) != lower(text[i])) return false;
    return i == part.size && text[i] == '\0';
}

static bool same_part(url_part a, url_part b) {
    if (a.size != b.size) return false;
    for (size_t i = 0; i < a.size; i++)
        if (lower(a.at[i]) != lower(b.at[i])) return false;
    return true;
}

static uint32_t port_of(const url_parts *url) {
    if (url->port != 0) return url->port;
    return fsti_url_part_is(url->scheme, "http") ? 80 : 443;
}

bool fsti_url_same_host(const url_parts *a, const url_parts *b) {
    return same_part(a->scheme, b->scheme) && same_part(a->host, b->host) &&
           port_of(a) == port_of(b);
}

bool fsti_url_host_is(const char *a, const char *b) {
    url_parts one, other;
    return fsti_url_parse(a, &one) == NULL && fsti_url_parse(b, &other) == NULL &&
           fsti_url_same_host(&one, &other);
}

static const char *parse_port(const char *at, const char *end, url_parts *out) {
    if (at == end) return NULL; // "host:" means the scheme's default port
    for (; at < end; at++) {
        if (!is_digit(*at)) return "its port is not a number";
        out->port = out->port * 10 + (uint32_t)(*at - '0');
        if (out->port > 65535) return "its port is above 65535";
    }
    return out->port == 0 ? "its port is 0" : NULL;
}

/// [at, end) is the text between the slashes and the path.
static const char *parse_authority(const char *at, const char *end, url_parts *out) {
    out->authority = (url_part){at, (size_t)(end - at)};
    if (memchr(at, '@', (size_t)(end - at)) != NULL)
        return "a URL must not contain a user or password. Use the credential settings";
    const char *host_end;
    if (at < end && *at == '[') {
        host_end = memchr(at, ']', (size_t)(end - at));
        if (host_end == NULL) return "its host lacks the closing bracket";
        out->has_brackets = true;
        out->host = (url_part){at + 1, (size_t)(host_end - at) - 1};
        host_end++;
    } else {
        host_end = memchr(at, ':', (size_t)(end - at));
        if (host_end == NULL) host_end = end;
        out->host = (url_part){at, (size_t)(host_end - at)};
    }
    if (out->host.size == 0) return "it has no host";
    // A bucket name becomes a component of the endpoint's path, where these two would name another
    // folder.
    if (fsti_url_part_is(out->host, ".") || fsti_url_part_is(out->host, ".."))
        return "its host or bucket name is invalid";
    for (size_t i = 0; i < out->host.size; i++) {
        char byte = out->host.at[i];
        bool is_allowed = is_letter(byte) || is_digit(byte) || byte == '-' || byte == '.' ||
                          byte == '_' || (out->has_brackets && byte == ':');
        if (!is_allowed) return "its host contains an invalid character";
    }
    if (host_end == end) return NULL;
    return *host_end == ':' ? parse_port(host_end + 1, end, out) : "its host has an invalid end";
}

const char *fsti_url_parse(const char *text, url_parts *out) {
    *out = (url_parts){0};
    size_t size = strnlen(text, URL_BYTES_MAX + 1), at = 0;
    if (size > URL_BYTES_MAX) return "it is longer than 8,192 bytes";
    for (size_t i = 0; i < size; i++)
        if ((unsigned char)text[i] < ' ' || text[i] == 0x7f)
            return "it contains a control character";
    while (at < size && (is_letter(text[at]) || is_digit(text[at]))) at++;
    out->scheme = (url_part){text, at};
    if (at == 0 || size - at < 3 || memcmp(text + at, "://", 3) != 0)
        return "it does not begin with a scheme and ://";
    at += 3;
    const char *begin = text + at, *end = begin + strcspn(begin, "/?#");
    const char *why = parse_authority(begin, end, out);
    if (why != NULL) return why;
    if (strchr(end, '#') != NULL) return "it contains a fragment (#)";
    const char *query = strchr(end, '?');
    // Keys of stores may contain spaces, http(s) URLs have %20.
    bool is_web = fsti_url_part_is(out->scheme, "http") || fsti_url_part_is(out->scheme, "https");
    if (is_web && strchr(text, ' ') != NULL) return "it contains a space";
    out->path = (url_part){end, query == NULL ? strlen(end) : (size_t)(query - end)};
    out->has_query = query != NULL;
    if (query != NULL) out->query = (url_part){query + 1, strlen(query + 1)};
    return NULL;
}

/// The unreserved characters of RFC 3986, 2.3.
static bool is_unreserved(char byte) {
    return is_letter(byte) || is_digit(byte) || byte == '-' || byte == '.' || byte == '_' ||
           byte == '~';
}

bool fsti_url_escape(url_part text, bool keeps_slash, char *out, size_t size) {
    static const char digits[] = "0123456789ABCDEF";
    size_t used = 0;
    for (size_t i = 0; i < text.size; i++) {
        unsigned char byte = (unsigned char)text.at[i];
        bool is_kept = is_unreserved((char)byte) || (keeps_slash && byte == '/');
        if (used + (is_kept ? 1 : 3) >= size) return false;
        if (is_kept) {
            out[used++] = (char)byte;
            continue;
        }
        out[used++] = '%';
        out[used++] = digits[byte >> 4];
        out[used++] = digits[byte & 15];
    }
    if (used >= size) return false;
    out[used] = '\0';
    return true;
}

static int hex_digit(char byte) {
    if (is_digit(byte)) return byte - '0';
    byte = lower(byte);
    return byte >= 'a' && byte <= 'f' ? byte - 'a' + 10 : -1;
}

bool fsti_url_unescape(url_part text, char *out, size_t size) {
    size_t used = 0;
    for (size_t i = 0; i < text.size; i++) {
        char byte = text.at[i];
        if (byte == '%' && i + 2 < text.size && hex_digit(text.at[i + 1]) >= 0 &&
            hex_digit(text.at[i + 2]) >= 0) {
            byte = (char)(hex_digit(text.at[i + 1]) * 16 + hex_digit(text.at[i + 2]));
            i += 2;
        }
        if (byte == '\0' || used + 1 >= size) return false;
        out[used++] = byte;
    }
    if (used >= size) return false;
    out[used] = '\0';
    return true;
}

/// Characters that a store's URL must escape.
static const struct {
    char byte;
    const char *escape;
} key_escapes[] = {{'?', "%3F"}, {'#', "%23"}, {'%', "%25"}};
#define KEY_ESCAPE_COUNT (sizeof key_escapes / sizeof *key_escapes)

bool fsti_url_key(const url_parts *url, char *out, size_t size) {
    size_t used = 0;
    // The key begins after the path's slash.
    for (size_t i = url->path.size > 0; i < url->path.size; i++) {
        char byte = url->path.at[i];
        for (size_t e = 0; e < KEY_ESCAPE_COUNT && url->path.size - i >= 3; e++)
            if (memcmp(url->path.at + i, key_escapes[e].escape, 3) == 0) {
                byte = key_escapes[e].byte;
                i += 2;
                break;
            }
        if (used + 1 >= size) return false;
        out[used++] = byte;
    }
    out[used] = '\0';
    return true;
}

static void escape_key(const char *name, char *out) {
    for (; *name != '\0'; name++) {
        const char *escape = NULL;
        for (size_t e = 0; e < KEY_ESCAPE_COUNT; e++)
            if (*name == key_escapes[e].byte) escape = key_escapes[e].escape;
        if (escape == NULL) {
            *out++ = *name;
        } else {
            memcpy(out, escape, 3);
            out += 3;
        }
    }
    *out = '\0';
}

char *fsti_url_sibling(const char *base, const char *name) {
    size_t length = strcspn(base, "?#");
    const char *query = base + length;
    size_t query_size = strlen(query);
    while (length > 0 && base[length - 1] != '/') length--;
    size_t name_size = strlen(name), capacity = length + 3 * name_size + query_size + 1;
    char *text = fsti_alloc(capacity);
    if (text == NULL) return NULL;
    memcpy(text, base, length);
    bool is_web = fsti_url_scheme(base) == FSTI_SCHEME_HTTP; // keys of stores are not escaped
    if (!is_web) query_size = 0;                             // a version belongs to one object
    if (is_web)
        (void)fsti_url_escape((url_part){name, name_size}, true, text + length, capacity - length);
    else
        escape_key(name, text + length);
    size_t end = length + strlen(text + length);
    memcpy(text + end, query, query_size);
    text[end + query_size] = '\0';
    return text;
}

bool fsti_url_relative(const char *url, const char *folder, char *out, size_t size) {
    size_t length = strcspn(url, "?#"), at = folder == NULL ? 0 : strlen(folder);
    if (at == 0 || at >= length || strncmp(url, folder, at) != 0)
        for (at = length; at > 0 && url[at - 1] != '/';) at--;
    return fsti_url_unescape((url_part){url + at, length - at}, out, size);
}
