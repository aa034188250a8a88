// SPDX-License-Identifier: Apache-2.0
/// Loads libcurl once per process.
#include "curl_library.h"

#include <stdio.h>
#include <unistd.h>

#include "http.h"

#define VERSION_MIN 0x074400u // 7.68.0, the first version with curl_multi_wakeup()
#define GLOBAL_ALL 3L

static atomic_bool is_searched;
static curl_library library;
static bool is_found;
static const char *missing; ///< a function that an old version lacks

static void find_library(void) {
    static const char *const names[] = {"libcurl.so.4", "libcurl-gnutls.so.4", NULL};
#define CURL_SYMBOL(result, name, parameters) {#name, &library.name},
    static const fsti_library_symbol symbols[] = {CURL_FUNCTIONS(CURL_SYMBOL){NULL, NULL}};
#undef CURL_SYMBOL
    is_found = fsti_library_bind(names, symbols, &missing);
    // Global initialisation is not thread-safe before 7.84, so it is done once here.
    if (is_found && library.curl_version_info(0)->number < VERSION_MIN) {
        is_found = false;
        missing = "what 7.68 has";
    }
    is_found = is_found && library.curl_global_init(GLOBAL_ALL) == 0;
}

fst_status fsti_curl_open(const curl_library **out, fst_error *error) {
    fsti_library_once(&is_searched, find_library);
    *out = &library;
    if (is_found) return FST_OK;
    return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
                          "URLs need libcurl 7.68 or later (install libcurl4, or "
                          "libcurl), which was not found%s%s",
                          missing == NULL ? "" : ", or too old: it lacks ",
                          missing == NULL ? "" : missing);
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
