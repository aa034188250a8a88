// SPDX-License-Identifier: Apache-2.0
/// Recognises addresses of this machine, its network, and cloud metadata services.
#include "private_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

/// A block of IPv4 addresses, given by the first `bits` bits of `network`.
typedef struct block_4 {
    uint32_t network;
    uint32_t bits;
} block_4;

static const block_4 private_4[] = {
    {0x00000000, 8},  // 0.0.0.0/8: this host
    {0x0a000000, 8},  // 10.0.0.0/8
    {0x64400000, 10}, // 100.64.0.0/10: carriers, and metadata of some clouds
    {0x7f000000, 8},  // 127.0.0.0/8: loopback
    {0xa83f8110, 32}, // 168.63.129.16: Azure's host
    {0xa9fe0000, 16}, // 169.254.0.0/16: link-local, and most metadata services
    {0xac100000, 12}, // 172.16.0.0/12
    {0xc0000000, 24}, // 192.0.0.0/24: protocol assignments, and metadata of one cloud
    {0xc0a80000, 16}, // 192.168.0.0/16
    {0xc6120000, 15}, // 198.18.0.0/15: benchmarks of networks
    {0xe0000000, 3},  // 224.0.0.0 and above: multicast, reserved, broadcast
};

static bool is_private_4(uint32_t address) {
    for (size_t i = 0; i < sizeof private_4 / sizeof *private_4; i++)
        if ((address ^ private_4[i].network) >> (32 - private_4[i].bits) == 0) return true;
    return false;
}

static uint32_t read_4(const unsigned char *bytes) {
    return (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 | bytes[3];
}

/// A block of IPv6 addresses. An embedded IPv4 address decides, if there is one.
typedef struct block_6 {
    unsigned char network[14];
    unsigned char bytes;    ///< significant bytes of the network, at most 14
    unsigned char mask;     ///< of the next byte; 0: none
    unsigned char masked;   ///< value of that byte under the mask
    unsigned char inner_at; ///< offset of an embedded IPv4 address; 0: none
} block_6;

static const block_6 private_6[] = {
    {{0}, 10, 0, 0, 12},                                              // compatible with IPv4
    {{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff}, 12, 0, 0, 12},       // ::ffff:0:0/96
    {{0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0}, 12, 0, 0, 12},       // ::ffff:0:0:0/96
    {{0x00, 0x64, 0xff, 0x9b, 0, 0, 0, 0, 0, 0, 0, 0}, 12, 0, 0, 12}, // 64:ff9b::/96
    {{0x00, 0x64, 0xff, 0x9b, 0x00, 0x01}, 6, 0, 0, 0},               // 64:ff9b:1::/48
    {{0x20, 0x01, 0, 0}, 4, 0, 0, 0},                                 // 2001::/32: Teredo
    {{0x20, 0x02}, 2, 0, 0, 2},                                       // 2002::/16
    {{0}, 0, 0xfe, 0xfc, 0},                                          // fc00::/7
    {{0xfe}, 1, 0xc0, 0x80, 0},                                       // fe80::/10
    {{0xfe}, 1, 0xc0, 0xc0, 0},                                       // fec0::/10
    {{0xff}, 1, 0, 0, 0},                                             // ff00::/8
};

static bool is_private_6(const unsigned char *address) {
    for (size_t i = 0; i < sizeof private_6 / sizeof *private_6; i++) {
        const block_6 *block = &private_6[i];
        if (memcmp(address, block->network, block->bytes) != 0) continue;
        if ((address[block->bytes] & block->mask) != block->masked) continue;
        if (block->inner_at == 0 || is_private_4(read_4(address + block->inner_at))) return true;
    }
    return false;
}

bool fsti_sockaddr_is_private(const struct sockaddr *address) {
    if (address->sa_family == AF_INET) {
        struct sockaddr_in four;
        memcpy(&four, address, sizeof four);
        return is_private_4(ntohl(four.sin_addr.s_addr));
    }
    if (address->sa_family == AF_INET6) {
        struct sockaddr_in6 six;
        memcpy(&six, address, sizeof six);
        return is_private_6(six.sin6_addr.s6_addr);
    }
    return true; // a local socket or an unknown address family
}

/// Names that never belong to a public host, and the name of a metadata service. A name without a
/// dot is one of the local network.
static bool is_private_name(const char *name, size_t size) {
    static const char metadata[] = "metadata.goog";
    static const char *const endings[] = {".localhost", ".local", ".internal", ".localdomain",
                                          ".home.arpa"};
    if (memchr(name, '.', size) == NULL) return true;
    if (size == sizeof metadata - 1 && strncasecmp(name, metadata, size) == 0) return true;
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
        size_t ending = strlen(endings[i]);
        if (size > ending && strncasecmp(name + size - ending, endings[i], ending) == 0)
            return true;
    }
    return false;
}

bool fsti_host_is_private(const char *host, size_t size) {
    char text[INET6_ADDRSTRLEN + 1];
    unsigned char bytes[16];
    struct in_addr four;
    while (size > 1 && host[size - 1] == '.') size--; // a fully qualified name
    size_t address_size = strcspn(host, "%");         // without the interface
    if (address_size > size) address_size = size;
    if (address_size < sizeof text) {
        memcpy(text, host, address_size);
        text[address_size] = '\0';
        // Also "0x7f.1", "2130706433" and "0177.1", which a proxy may resolve.
        if (inet_aton(text, &four) == 1) return is_private_4(ntohl(four.s_addr));
        if (inet_pton(AF_INET6, text, bytes) == 1) return is_private_6(bytes);
    }
    return is_private_name(host, size);
}
