// SPDX-License-Identifier: Apache-2.0
/// A relay that simulates a distant server on the loopback interface, with a delay before the first
/// byte of each response and a limited speed per connection. For compare_remote.py:
///
///     slow_relay UPSTREAM_PORT DELAY_MS BYTES_A_SECOND
///
/// It prints its port, and runs until it is killed.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define PIECE_BYTES 65536

static struct sockaddr_in upstream = {.sin_family = AF_INET};
static uint64_t delay_ns, rate_bytes_s;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void sleep_until(uint64_t when_ns) {
    struct timespec when = {.tv_sec = (time_t)(when_ns / 1000000000u),
                            .tv_nsec = (long)(when_ns % 1000000000u)};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &when, NULL);
}

/// Forwards the available bytes. Returns their number, 0 or less at the end.
static ssize_t hand_on(int from, int to, char *piece) {
    ssize_t size = read(from, piece, PIECE_BYTES);
    for (ssize_t at = 0, sent; at < size; at += sent)
        if ((sent = write(to, piece + at, (size_t)(size - at))) <= 0) return -1;
    return size;
}

/// Forwards in both directions until either side closes.
static void carry(int client, int server, char *piece) {
    uint64_t when_ns = 0; // before which nothing goes to the client
    struct pollfd ends[2] = {{client, POLLIN, 0}, {server, POLLIN, 0}};
    while (poll(ends, 2, -1) > 0) {
        if (ends[0].revents != 0) {
            if (hand_on(client, server, piece) <= 0) return;
            when_ns = now_ns() + delay_ns;
        }
        if (ends[1].revents == 0) continue;
        if (when_ns > now_ns()) sleep_until(when_ns);
        ssize_t size = hand_on(server, client, piece);
        if (size <= 0) return;
        when_ns = (when_ns == 0 ? now_ns() : when_ns) + (uint64_t)size * 1000000000u / rate_bytes_s;
    }
}

static void *serve(void *context) {
    int client = (int)(intptr_t)context, one = 1, server = socket(AF_INET, SOCK_STREAM, 0);
    char *piece = malloc(PIECE_BYTES);
    setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(server, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (piece != NULL && connect(server, (void *)&upstream, sizeof upstream) == 0)
        carry(client, server, piece);
    free(piece);
    close(server);
    close(client);
    return NULL;
}

int main(int count, char **words) {
    if (count < 4) return 2;
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof here;
    upstream.sin_addr = here.sin_addr;
    upstream.sin_port = htons((uint16_t)strtoul(words[1], NULL, 10));
    delay_ns = strtoull(words[2], NULL, 10) * 1000000u;
    rate_bytes_s = strtoull(words[3], NULL, 10);
    signal(SIGPIPE, SIG_IGN);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (void *)&here, size) != 0 || listen(listener, 256) != 0) return 1;
    getsockname(listener, (void *)&here, &size);
    printf("%u\n", ntohs(here.sin_port));
    fflush(stdout);
    for (;;) {
        pthread_t thread;
        int client = accept(listener, NULL, NULL);
        if (client < 0) return 1;
        if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)client) == 0)
            pthread_detach(thread);
        else
            close(client);
    }
}
