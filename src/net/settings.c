// SPDX-License-Identifier: Apache-2.0
/// How requests are made.
#include "settings.h"

net_limits fsti_net_limits(void) {
    return (net_limits){.connect_ms = 5000,
                        .first_byte_ms = 10000,
                        .stall_ms = 5000,
                        .retry_base_ms = 100,
                        .retry_cap_ms = 20000,
                        .tries_max = 8,
                        .connections_max = 64};
}
