// SPDX-License-Identifier: Apache-2.0
/// How requests are made: private to the net room.
#ifndef FSTI_SETTINGS_H
#define FSTI_SETTINGS_H

#include "base/base.h"

/// Times and numbers of all requests: see fst_remote_options.
typedef struct net_limits {
    uint32_t connect_ms, first_byte_ms, stall_ms, retry_base_ms, retry_cap_ms, tries_max,
        connections_max;
    bool is_offline; ///< no request is sent
} net_limits;

net_limits fsti_net_limits(void);
/// Looks in the environment for the file of certificates to trust: on the thread of who opens
/// something, since others may change the environment while a reactor's thread looks.
void fsti_net_find_ca_file(void);
/// That file, as it was found last; false: the library's own.
bool fsti_net_ca_file(char *path, size_t size);
/// Whether a text has no control byte: a line break would begin another header.
bool fsti_net_is_setting(const char *text);
/// Copies a setting; false where it is none, or too long.
bool fsti_net_setting(char *field, size_t size, const char *text);

#endif
