// SPDX-License-Identifier: Apache-2.0
/// Settings of all requests, from fst_remote_configure() and the environment.
#include "http_settings.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "curl_library.h"
#include "http.h"
#include "location/location.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char ca_option[512]; ///< the option ca_file; "": not given
static char ca_file[512];
static const char *ca_source = ""; ///< a string literal
static const http_limits defaults = {.connect_ms = 5000,
                                     .first_byte_ms = 10000,
                                     .stall_ms = 5000,
                                     .retry_base_ms = 100,
                                     .retry_cap_ms = 20000,
                                     .tries_max = 8,
                                     .connections_max = 64};
static http_limits limits; ///< zeros: the defaults
static atomic_bool offline_by_environment, private_redirects_by_environment;
static const char *const proxy_variables[] = {"http_proxy", "https_proxy", "HTTPS_PROXY",
                                              "all_proxy", "ALL_PROXY"};
#define PROXY_COUNT (sizeof proxy_variables / sizeof *proxy_variables)
static char proxies[PROXY_COUNT][256]; ///< redacted; "": no proxy

/// When the library is loaded, because the first use may come under another lock.
__attribute__((constructor)) static void register_lock(void) { fsti_fork_last_lock(&lock); }

const char *fsti_http_environment(const char *name) {
    const char *value = secure_getenv(name);
    return value == NULL || value[0] == '\0' ? NULL : value;
}

bool fsti_http_is_setting(const char *text) {
    for (; *text != '\0'; text++)
        if ((unsigned char)*text < ' ' || *text == 0x7f) return false;
    return true;
}

bool fsti_http_setting(char *field, size_t size, const char *text) {
    size_t length = strlen(text);
    field[0] = '\0';
    if (!fsti_http_is_setting(text) || length >= size) return false;
    memcpy(field, text, length + 1);
    return true;
}

http_limits fsti_http_limits(void) {
    pthread_mutex_lock(&lock);
    http_limits copy = limits.tries_max == 0 ? defaults : limits;
    pthread_mutex_unlock(&lock);
    return copy;
}

/// A switch in the environment is on unless it is empty, 0, false, no or off.
static bool is_switched_on(const char *variable) {
    static const char *const off[] = {"0", "false", "no", "off"};
    const char *value = fsti_http_environment(variable);
    for (size_t i = 0; value != NULL && i < sizeof off / sizeof *off; i++)
        if (strcasecmp(value, off[i]) == 0) return false;
    return value != NULL;
}

bool fsti_http_takes_private_redirects(void) {
    return fsti_http_limits().takes_private_redirects ||
           atomic_load(&private_redirects_by_environment);
}

/// Writes "scheme://host:port" of a proxy. A password may contain any character, so everything
/// before the last @ is dropped.
static void describe_proxy(const char *proxy, char *out, size_t size) {
    const char *scheme_end = strstr(proxy, "://"), *user_end = strrchr(proxy, '@');
    const char *host = user_end != NULL     ? user_end + 1
                       : scheme_end != NULL ? scheme_end + 3
                                            : proxy;
    int scheme_size = scheme_end == NULL ? 0 : (int)fsti_min((size_t)(scheme_end - proxy), 16);
    snprintf(out, size, "%.*s://%.*s", scheme_size == 0 ? 4 : scheme_size,
             scheme_size == 0 ? "http" : proxy, (int)strcspn(host, "/?#"), host);
    fsti_text_make_printable(out);
}

/// Reads the proxies that libcurl will use, for messages and for redirect_guard.c. libcurl reads
/// the same variables itself. The lock must be held.
static void read_proxies(void) {
    for (size_t i = 0; i < PROXY_COUNT; i++) {
        const char *proxy = fsti_http_environment(proxy_variables[i]);
        proxies[i][0] = '\0';
        if (proxy != NULL) describe_proxy(proxy, proxies[i], sizeof proxies[i]);
    }
}

static size_t without_last_dot(const char *text, size_t size) {
    return size > 1 && text[size - 1] == '.' ? size - 1 : size;
}

/// Whether an entry of no_proxy is the host or one of its parent domains.
static bool is_entry_of(const char *entry, size_t size, url_part host) {
    size_t host_size = without_last_dot(host.at, host.size);
    size = without_last_dot(entry, size);
    if (size > 0 && entry[0] == '.') {
        entry++;
        size--;
    }
    if (size == 0 || size > host_size) return false;
    const char *end = host.at + host_size - size;
    return (size == host_size || end[-1] == '.') && strncasecmp(end, entry, size) == 0;
}

/// Whether no_proxy exempts the host, by libcurl's rules for names.
static bool is_exempt(url_part host) {
    static const char separators[] = ", \t";
    const char *list = fsti_http_environment("no_proxy");
    if (list == NULL) list = fsti_http_environment("NO_PROXY");
    if (list == NULL) return false;
    if (strcmp(list, "*") == 0) return true;
    for (const char *at = list + strspn(list, separators); *at != '\0';
         at += strspn(at, separators)) {
        size_t size = strcspn(at, separators);
        if (is_entry_of(at, size, host)) return true;
        at += size;
    }
    return false;
}

/// The position of the variable with the proxy of a URL; PROXY_COUNT: none. The lock must be held.
static size_t find_proxy(const url_parts *url) {
    bool is_https = fsti_url_part_is(url->scheme, "https");
    // The first variable applies to http only, the next two to https.
    for (size_t i = is_https ? 1 : 0; i < PROXY_COUNT; i++)
        if (proxies[i][0] != '\0' && (is_https || (i != 1 && i != 2)))
            return is_exempt(url->host) ? PROXY_COUNT : i;
    return PROXY_COUNT;
}

bool fsti_http_proxy_of(const char *url, char *out, size_t size) {
    url_parts parsed;
    if (fsti_url_parse(url, &parsed) != NULL) return false;
    pthread_mutex_lock(&lock);
    size_t i = find_proxy(&parsed);
    if (i < PROXY_COUNT) snprintf(out, size, "%s: %s", proxy_variables[i], proxies[i]);
    pthread_mutex_unlock(&lock);
    return i < PROXY_COUNT;
}

const char *fsti_http_proxy_text(const char *url) {
    url_parts parsed;
    if (fsti_url_parse(url, &parsed) != NULL) return NULL;
    pthread_mutex_lock(&lock);
    size_t i = find_proxy(&parsed);
    pthread_mutex_unlock(&lock);
    return i < PROXY_COUNT ? fsti_http_environment(proxy_variables[i]) : NULL;
}

const char *fsti_http_ca_source(void) {
    pthread_mutex_lock(&lock);
    const char *source = ca_source;
    pthread_mutex_unlock(&lock);
    return source;
}

void fsti_http_read_environment(void) {
    static const char *const variables[] = {"AWS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE"};
    const char *found = NULL;
    atomic_store(&offline_by_environment, is_switched_on("FASTSAFETENSORS_OFFLINE"));
    atomic_store(&private_redirects_by_environment,
                 is_switched_on("FASTSAFETENSORS_PRIVATE_REDIRECTS"));
    const char *source = "the system's default";
    for (size_t i = 0; i < sizeof variables / sizeof *variables && found == NULL; i++) {
        found = fsti_http_environment(variables[i]);
        if (found != NULL) source = variables[i];
    }
    if (found == NULL) found = fsti_curl_ca_file();
    pthread_mutex_lock(&lock);
    read_proxies();
    bool is_given = ca_option[0] != '\0';
    if (is_given) found = ca_option;
    ca_source = is_given ? "the option ca_file" : source;
    snprintf(ca_file, sizeof ca_file, "%s", found == NULL ? "" : found);
    pthread_mutex_unlock(&lock);
}

bool fsti_http_ca_file(char *path, size_t size) {
    pthread_mutex_lock(&lock);
    int used = snprintf(path, size, "%s", ca_file);
    pthread_mutex_unlock(&lock);
    return used > 0 && (size_t)used < size;
}

static uint32_t choose(uint32_t wanted, uint32_t usual) { return wanted != 0 ? wanted : usual; }

void fsti_http_set_limits(const fst_remote_options *wanted) {
    pthread_mutex_lock(&lock);
    limits = (http_limits){.connect_ms = choose(wanted->connect_ms, defaults.connect_ms),
                           .first_byte_ms = choose(wanted->first_byte_ms, defaults.first_byte_ms),
                           .stall_ms = choose(wanted->stall_ms, defaults.stall_ms),
                           .retry_base_ms = choose(wanted->retry_base_ms, defaults.retry_base_ms),
                           .retry_cap_ms = choose(wanted->retry_cap_ms, defaults.retry_cap_ms),
                           .tries_max = choose(wanted->tries_max, defaults.tries_max),
                           .connections_max = (uint32_t)fsti_min(
                               choose(wanted->connections_max, defaults.connections_max), 1024),
                           .is_offline = wanted->offline != 0,
                           .takes_private_redirects = wanted->private_redirects != 0};
    snprintf(ca_option, sizeof ca_option, "%s", wanted->ca_file == NULL ? "" : wanted->ca_file);
    pthread_mutex_unlock(&lock);
}

bool fsti_http_is_offline(void) {
    return fsti_http_limits().is_offline || atomic_load(&offline_by_environment);
}

fst_status fsti_http_check_ca_file(const char *path, fst_error *error) {
    struct stat info;
    if (path == NULL || path[0] == '\0') return FST_OK;
    if (access(path, R_OK) != 0 || stat(path, &info) != 0)
        return fsti_error_errno(error, errno, path, "reading ca_file");
    if (S_ISREG(info.st_mode) && info.st_size > 0) return FST_OK;
    fsti_error_location location = {.file = path, .byte_offset = FST_NO_OFFSET};
    return fsti_error_set(error, FST_E_ARGUMENT, location,
                          "ca_file must be a file with certificates in PEM format");
}
