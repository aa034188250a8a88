// SPDX-License-Identifier: Apache-2.0
/// Keeps redirects out of private networks. Otherwise a server on the Internet could make this
/// process send requests to internal hosts, such as a metadata service.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "private_address.h"
#include "attempt.h"
#include "location/location.h"

/// The part of struct curl_sockaddr up to the address.
typedef struct curl_address {
    int family, kind, protocol;
    unsigned size;
    struct sockaddr address;
} curl_address;

#define SOCKET_REFUSED (-1) // CURL_SOCKET_BAD
#define REQUEST_ALLOWED 0
#define REQUEST_IS_REFUSED 1

/// Records a refused address for the message.
static void note_refusal(http_attempt *attempt, const struct sockaddr *address) {
    const void *bytes =
        address->sa_family == AF_INET6
            ? (const void *)&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr
            : (const void *)&((const struct sockaddr_in *)(const void *)address)->sin_addr;
    attempt->refused_address[0] = '\0';
    (void)!inet_ntop(address->sa_family, bytes, attempt->refused_address,
                     sizeof attempt->refused_address);
    attempt->has_refused_address = true;
}

/// Called before libcurl creates a socket: the name is resolved, nothing has been sent.
static int open_socket(void *context, int purpose, curl_address *where) {
    http_attempt *attempt = context;
    (void)purpose;
    if (fsti_sockaddr_is_private(&where->address)) {
        note_refusal(attempt, &where->address);
        return SOCKET_REFUSED;
    }
    return socket(where->family, where->kind | SOCK_CLOEXEC, where->protocol);
}

/// Called before libcurl sends a request, which may use a connection made for another request.
/// (Since libcurl 7.80; older versions do not call it.)
static int check_connection(void *context, const char *address, const char *own_address, int port,
                            int own_port) {
    http_attempt *attempt = context;
    (void)own_address;
    (void)own_port;
    (void)port;
    if (!fsti_host_is_private(address, strlen(address))) return REQUEST_ALLOWED;
    snprintf(attempt->refused_address, sizeof attempt->refused_address, "%s", address);
    attempt->has_refused_address = true;
    return REQUEST_IS_REFUSED;
}

static bool has_same_host(const char *a, const char *b) {
    url_parts one, other;
    return fsti_url_parse(a, &one) == NULL && fsti_url_parse(b, &other) == NULL &&
           one.host.size == other.host.size &&
           strncasecmp(one.host.at, other.host.at, one.host.size) == 0;
}

bool fsti_redirect_is_refused(const http_request *request, const char *to) {
    url_parts target;
    return fsti_url_parse(to, &target) == NULL && !has_same_host(request->url, to) &&
           !fsti_http_takes_private_redirects() &&
           fsti_host_is_private(target.host.at, target.host.size);
}

/// Whether the host is an address in the usual notation.
static bool is_address(url_part host) {
    char text[INET6_ADDRSTRLEN];
    struct in6_addr address;
    if (host.size >= sizeof text) return false;
    memcpy(text, host.at, host.size);
    text[host.size] = '\0';
    return inet_pton(AF_INET, text, &address) == 1 || inet_pton(AF_INET6, text, &address) == 1;
}

/// A proxy may have a private address, and it makes the connection to the host, so only the name in
/// the URL was checked. Without a proxy libcurl may not choose one, so the address is the host's.
/// An address in the URL was checked before, and holds with or without a proxy.
void fsti_redirect_guard(const curl_library *curl, http_attempt *attempt, const char *url) {
    url_parts target;
    if (!attempt->is_redirected || has_same_host(attempt->request->url, url) ||
        fsti_http_takes_private_redirects())
        return;
    if (fsti_url_parse(url, &target) == NULL && is_address(target.host)) return;
    const char *proxy = fsti_http_proxy_text(url);
    curl->curl_easy_setopt(attempt->easy, CURL_PROXY_EXCEPTIONS, proxy == NULL ? "*" : "");
    if (proxy != NULL) {
        curl->curl_easy_setopt(attempt->easy, CURL_PROXY, proxy);
        return;
    }
    curl->curl_easy_setopt(attempt->easy, CURL_OPEN_SOCKET_CALL, open_socket);
    curl->curl_easy_setopt(attempt->easy, CURL_OPEN_SOCKET_CONTEXT, (void *)attempt);
    curl->curl_easy_setopt(attempt->easy, CURL_BEFORE_CALL, check_connection);
    curl->curl_easy_setopt(attempt->easy, CURL_BEFORE_CONTEXT, (void *)attempt);
}
