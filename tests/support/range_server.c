// SPDX-License-Identifier: Apache-2.0
#include "range_server.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static char *content;
static size_t content_size;
static atomic_int busy_left, cut_left;
static int listener = -1;

static void send_all(int fd, const char *bytes, size_t size) {
    while (size > 0) {
        ssize_t sent = send(fd, bytes, size, MSG_NOSIGNAL);
        if (sent <= 0) return;
        bytes += sent;
        size -= (size_t)sent;
    }
}

/// Reads a request's head; false at the end of the connection.
static bool read_head(int fd, char *head, size_t size) {
    size_t used = 0;
    head[0] = '\0';
    while (strstr(head, "\r\n\r\n") == NULL) {
        ssize_t got = recv(fd, head + used, size - used - 1, 0);
        if (got <= 0 || used + (size_t)got >= size - 1) return false;
        used += (size_t)got;
        head[used] = '\0';
    }
    return true;
}

static bool takes_one(atomic_int *left) {
    int before = atomic_load(left);
    while (before > 0)
        if (atomic_compare_exchange_weak(left, &before, before - 1)) return true;
    return false;
}

/// Answers a request; false where the connection is to end.
static bool answer(int fd, const char *head) {
    static const char busy[] = "HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n";
    char line[256];
    size_t first = 0, last = content_size - 1;
    const char *range = strstr(head, "Range: bytes=");
    if (range != NULL) sscanf(range, "Range: bytes=%zu-%zu", &first, &last);
    if (last >= content_size) last = content_size - 1;
    if (first > last) return false;
    if (first > 0 && takes_one(&busy_left)) {
        send_all(fd, busy, sizeof busy - 1);
        return true;
    }
    size_t size = last - first + 1;
    int used = snprintf(line, sizeof line,
                        "HTTP/1.1 206 Partial Content\r\nETag: \"1\"\r\nContent-Length: %zu\r\n"
                        "Content-Range: bytes %zu-%zu/%zu\r\n\r\n",
                        size, first, last, content_size);
    send_all(fd, line, (size_t)used);
    bool is_cut = first > 0 && takes_one(&cut_left);
    send_all(fd, content + first, is_cut ? size / 2 : size);
    return !is_cut;
}

static void *serve_connection(void *context) {
    int fd = (int)(intptr_t)context;
    char head[8192];
    while (read_head(fd, head, sizeof head) && answer(fd, head)) {
    }
    close(fd);
    return NULL;
}

static void *serve(void *context) {
    (void)context;
    for (int fd; (fd = accept(listener, NULL, NULL)) >= 0;) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, serve_connection, (void *)(intptr_t)fd) == 0)
            pthread_detach(thread);
        else
            close(fd);
    }
    return NULL;
}

static void read_content(const char *path) {
    FILE *file = fopen(path, "rb");
    if (file == NULL || fseek(file, 0, SEEK_END) != 0) abort();
    content_size = (size_t)ftell(file);
    content = malloc(content_size);
    rewind(file);
    if (content == NULL || fread(content, 1, content_size, file) != content_size) abort();
    fclose(file);
}

const char *range_server_begin(const char *path) {
    static char url[64];
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    pthread_t thread;
    if (listener >= 0) return url;
    read_content(path);
    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) != 0 ||
        listen(listener, 64) != 0 ||
        getsockname(listener, (struct sockaddr *)&address, &size) != 0 ||
        pthread_create(&thread, NULL, serve, NULL) != 0)
        abort();
    pthread_detach(thread);
    snprintf(url, sizeof url, "http://127.0.0.1:%u/model.safetensors", ntohs(address.sin_port));
    return url;
}

void range_server_fail_next(int busy, int cut) {
    atomic_store(&busy_left, busy);
    atomic_store(&cut_left, cut);
}

bool range_server_runs(void *(*run)(void *context)) {
    return run == serve || run == serve_connection;
}

bool range_server_usable(void) { return dlopen("libcurl.so.4", RTLD_NOW | RTLD_LOCAL) != NULL; }
