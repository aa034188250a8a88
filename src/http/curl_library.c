// SPDX-License-Identifier: Apache-2.0
/// Loads libcurl once per process.
#include "curl_library.h"

#include <stdio.h>
#include <unistd.h>

#include "http.h"

#define VERSION_MIN 0x074400u // 7.68.0, the first version with curl_multi_wakeup()
#define GLOBAL_ALL 3L

static curl_library library;

static fsti_library_state find_library(char *reason, size_t reason_size) {
    static const char *const names[] = {"libcurl.so.4", "libcurl-gnutls.so.4", NULL};
#define CURL_SYMBOL(result, name, parameters) {#name, &library.name},
    static const fsti_library_symbol symbols[] = {CURL_FUNCTIONS(CURL_SYMBOL){NULL, NULL}};
#undef CURL_SYMBOL
    fsti_library_state state = fsti_library_bind(names, symbols, reason, reason_size);
    if (state != FSTI_LIBRARY_FOUND) return state;
    if (library.curl_version_info(0)->number < VERSION_MIN) {
        snprintf(reason, reason_size, ", and version %s was found",
                 library.curl_version_info(0)->text);
        return FSTI_LIBRARY_ABSENT;
    }
    // Global initialisation is not thread-safe before 7.84, so it is done once here.
    if (library.curl_global_init(GLOBAL_ALL) == 0) return FSTI_LIBRARY_FOUND;
    snprintf(reason, reason_size, ", which could not be initialised");
    return FSTI_LIBRARY_UNKNOWN;
}

static fsti_library optional = {
    .need = "URLs need libcurl 7.68 or later (install libcurl4, or libcurl)", .find = find_library};

fst_status fsti_curl_open(const curl_library **out, fst_error *error) {
    *out = &library;
    return fsti_library_require(&optional, error);
}

fst_status fsti_http_check(fst_error *error) {
    const curl_library *curl;
    return fsti_curl_open(&curl, error);
}

bool fsti_http_usable(char *reason, size_t reason_size) {
    const curl_library *curl;
    fst_error error;
    bool usable = fsti_curl_open(&curl, &error) == FST_OK;
    if (usable)
        snprintf(reason, reason_size, "for URLs, with libcurl %s",
                 curl->curl_version_info(0)->text);
    else
        snprintf(reason, reason_size, "%.150s", error.message);
    return usable;
}

const char *fsti_curl_ca_file(void) {
    // Certificate files of distributions. The first is also libcurl's default on Debian.
    static const char *const files[] = {"/etc/ssl/certs/ca-certificates.crt",
                                        "/etc/pki/tls/certs/ca-bundle.crt",
                                        "/etc/ssl/ca-bundle.pem",
                                        "/etc/pki/tls/cacert.pem",
                                        "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
                                        "/etc/ssl/cert.pem"};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        if (access(files[i], R_OK) == 0) return files[i];
    return NULL;
}
