// SPDX-License-Identifier: Apache-2.0
/// Settings of all requests. Private to the net module.
#ifndef FSTI_SETTINGS_H
#define FSTI_SETTINGS_H

#include "base/primitives.h"
#include "fastsafetensors/remote.h"

/// Timeouts and limits of all requests: see fst_remote_options.
typedef struct net_limits {
    uint32_t connect_ms, first_byte_ms, stall_ms, retry_base_ms, retry_cap_ms, tries_max,
        connections_max;
    bool is_offline; ///< by fst_remote_configure(): requests are forbidden
    bool takes_private_redirects;
} net_limits;

net_limits fsti_net_limits(void);
/// Sets the limits and the certificate file. The strings must be valid settings.
void fsti_net_set_limits(const fst_remote_options *wanted);
/// Refuses certificates that can't be read when they are given, instead of at the first request.
fst_status fsti_net_check_ca_file(const char *path, fst_error *error);
/// The certificate file that fsti_net_read_environment() found last. False: the library's default.
bool fsti_net_ca_file(char *path, size_t size);
/// Where its path comes from, such as an environment variable.
const char *fsti_net_ca_source(void);
/// The proxy from the environment that libcurl uses for `url`, as "http_proxy: http://host:port"
/// without user and password. False: no proxy. Ignores address ranges in no_proxy.
bool fsti_net_proxy_of(const char *url, char *out, size_t size);
/// Whether redirects to private addresses are followed.
bool fsti_net_takes_private_redirects(void);
/// Whether the environment has a proxy with that port. A proxy may have a private address; it
/// decides which hosts to reach.
bool fsti_net_is_proxy_port(uint32_t port);
/// Whether a text has no control characters; a line break would start another header.
bool fsti_net_is_setting(const char *text);
/// Copies a setting. False if it is invalid or too long.
bool fsti_net_setting(char *field, size_t size, const char *text);

#endif
