// SPDX-License-Identifier: Apache-2.0
/// How requests are made: private to the net room.
#ifndef FSTI_SETTINGS_H
#define FSTI_SETTINGS_H

#include "base/base.h"

/// Times and numbers of all requests.
typedef struct net_limits {
    uint32_t connect_ms;    ///< to have a connection
    uint32_t first_byte_ms; ///< then, until the answer's head is there
    uint32_t stall_ms;      ///< then, without a byte
    uint32_t retry_base_ms, retry_cap_ms;
    uint32_t tries_max;       ///< in a row, without a byte
    uint32_t connections_max; ///< at one host
} net_limits;

net_limits fsti_net_limits(void);

#endif
