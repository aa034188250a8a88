// SPDX-License-Identifier: Apache-2.0
/// Settings of all requests. Part of http.h.
#ifndef FSTI_HTTP_SETTINGS_H
#define FSTI_HTTP_SETTINGS_H

#include "base/primitives.h"
#include "fastsafetensors/remote.h"

/// Timeouts and limits of all requests: see fst_remote_options.
typedef struct http_limits {
    uint32_t connect_ms, first_byte_ms, stall_ms, retry_base_ms, retry_cap_ms, tries_max,
        connections_max;
    bool is_offline; ///< by fst_remote_configure(): requests are forbidden
    bool takes_private_redirects;
} http_limits;

http_limits fsti_http_limits(void);
/// Whether requests are forbidden, by fst_remote_configure() or by the environment as last read.
bool fsti_http_is_offline(void);
/// Reads from the environment whether requests are forbidden and which certificates to trust.
/// Called by the thread that opens something, because the program may change the environment while
/// an event loop runs.
void fsti_http_read_environment(void);
/// An environment variable that is not empty; NULL in a setuid program or if unset.
const char *fsti_http_environment(const char *name);
/// FST_E_UNSUPPORTED if libcurl is missing or too old.
fst_status fsti_http_check(fst_error *error);
/// Whether libcurl is available, and the reason if not.
bool fsti_http_usable(char *reason, size_t reason_size);

/// Sets the limits and the certificate file. The strings must be valid settings.
void fsti_http_set_limits(const fst_remote_options *wanted);
/// Refuses certificates that can't be read when they are given, instead of at the first request.
fst_status fsti_http_check_ca_file(const char *path, fst_error *error);
/// The certificate file that fsti_http_read_environment() found last. False: the library's default.
bool fsti_http_ca_file(char *path, size_t size);
/// Where its path comes from, such as an environment variable.
const char *fsti_http_ca_source(void);
/// The proxy from the environment that libcurl uses for `url`, as "http_proxy: http://host:port"
/// without user and password. False: no proxy. Ignores address ranges in no_proxy.
bool fsti_http_proxy_of(const char *url, char *out, size_t size);
/// The same as the environment has it, with user and password; NULL: no proxy.
const char *fsti_http_proxy_text(const char *url);
/// Whether redirects to private addresses are followed.
bool fsti_http_takes_private_redirects(void);
/// Whether a text has no control characters; a line break would start another header.
bool fsti_http_is_setting(const char *text);
/// Copies a setting. False if it is invalid or too long.
bool fsti_http_setting(char *field, size_t size, const char *text);

#endif
