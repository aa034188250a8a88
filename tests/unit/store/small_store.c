// SPDX-License-Identifier: Apache-2.0
#include "small_store.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#define ENTRY_COUNT_MAX 256u
#define HEAD_BYTES_MAX 16384u

/// An object, or a part of an upload ("/bucket/key#7-2").
typedef struct entry {
    char path[256], mark[40];
    char *bytes;
    size_t size;
} entry;

typedef struct exchange {
    char method[8], path[256], query[512], condition[64];
    bool is_fresh;
    char *body;
    size_t size;
    char status[40], mark[48];
    char *answer;
    size_t answer_size;
} exchange;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static entry entries[ENTRY_COUNT_MAX];
static char uploads[ENTRY_COUNT_MAX][16];
static unsigned number;
static char address[64];
static int listener = -1;

// ---- objects and uploads; the lock must be held ----

static entry *find(const char *path) {
    for (size_t i = 0; i < ENTRY_COUNT_MAX; i++)
        if (entries[i].bytes != NULL && strcmp(entries[i].path, path) == 0) return &entries[i];
    return NULL;
}

static void drop(entry *gone) {
    free(gone->bytes);
    *gone = (entry){.bytes = NULL};
}

/// Takes ownership of `bytes`.
static entry *put(const char *path, char *bytes, size_t size) {
    entry *old = find(path);
    if (old != NULL) drop(old);
    for (size_t i = 0; i < ENTRY_COUNT_MAX; i++) {
        if (entries[i].bytes != NULL) continue;
        entries[i].bytes = bytes;
        entries[i].size = size;
        snprintf(entries[i].path, sizeof entries[i].path, "%s", path);
        snprintf(entries[i].mark, sizeof entries[i].mark, "\"%u\"", ++number);
        return &entries[i];
    }
    abort();
}

static char *find_upload(const char *id) {
    for (size_t i = 0; i < ENTRY_COUNT_MAX; i++)
        if (strcmp(uploads[i], id) == 0) return uploads[i];
    return NULL;
}

static void say(exchange *one, const char *status, const char *text) {
    snprintf(one->status, sizeof one->status, "%s", status);
    free(one->answer);
    one->answer = strdup(text);
    one->answer_size = strlen(text);
}

static bool is_refused(const exchange *one, const entry *there) {
    if (one->is_fresh) return there != NULL;
    return one->condition[0] != '\0' && (there == NULL || strcmp(there->mark, one->condition) != 0);
}

static void begin_upload(exchange *one) {
    char text[128];
    char *id = find_upload("");
    if (id == NULL) abort();
    snprintf(id, sizeof uploads[0], "%u", ++number);
    snprintf(text, sizeof text, "<A><UploadId>%.15s</UploadId></A>", id);
    say(one, "200 OK", text);
}

static void name_part(const exchange *one, const char *id, unsigned part, char *out, size_t size) {
    snprintf(out, size, "%.200s#%.15s-%u", one->path, id, part);
}

/// Parts 1 to the last one; `target` NULL: they are forgotten.
static size_t take_parts(const exchange *one, const char *id, char *target) {
    char name[256];
    size_t size = 0;
    for (unsigned part = 1;; part++) {
        name_part(one, id, part, name, sizeof name);
        entry *there = find(name);
        if (there == NULL) return size;
        if (target != NULL) memcpy(target + size, there->bytes, there->size);
        size += there->size;
    }
}

static void forget_parts(const exchange *one, char *id) {
    char name[256];
    for (unsigned part = 1; part < 100; part++) {
        name_part(one, id, part, name, sizeof name);
        entry *there = find(name);
        if (there != NULL) drop(there);
    }
    id[0] = '\0';
}

static void end_upload(exchange *one, char *id) {
    if (strcmp(one->method, "POST") == 0) {
        if (is_refused(one, find(one->path))) {
            say(one, "412 Precondition Failed", "<Error/>");
            return;
        }
        size_t size = take_parts(one, id, NULL);
        char *bytes = malloc(size + 1);
        if (bytes == NULL) abort();
        take_parts(one, id, bytes);
        put(one->path, bytes, size);
        say(one, "200 OK",
            "<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>");
    } else {
        say(one, "204 No Content", "");
    }
    forget_parts(one, id);
}

static void act_on_upload(exchange *one) {
    char name[256];
    const char *given = strstr(one->query, "uploadId=") + strlen("uploadId=");
    char *id = find_upload(given), *part = strstr(one->query, "partNumber=");
    if (id == NULL) {
        say(one, "404 Not Found", "<Error><Code>NoSuchUpload</Code></Error>");
        return;
    }
    if (part == NULL) {
        end_upload(one, id);
        return;
    }
    name_part(one, id, (unsigned)strtoul(part + strlen("partNumber="), NULL, 10), name,
              sizeof name);
    entry *made = put(name, one->body, one->size);
    one->body = NULL;
    snprintf(one->mark, sizeof one->mark, "%s", made->mark);
    say(one, "200 OK", "");
}

static void list(exchange *one) {
    char text[65536] = "<ListBucketResult>";
    for (size_t i = 0; i < ENTRY_COUNT_MAX; i++) {
        const char *key = entries[i].bytes == NULL ? NULL : strchr(entries[i].path + 1, '/');
        if (key == NULL || strchr(key, '#') != NULL) continue;
        size_t used = strlen(text);
        snprintf(text + used, sizeof text - used, "<Contents><Key>%s</Key></Contents>", key + 1);
    }
    size_t used = strlen(text);
    snprintf(text + used, sizeof text - used, "</ListBucketResult>");
    say(one, "200 OK", text);
}

static void give(exchange *one, const entry *there) {
    if (there == NULL) {
        say(one, "404 Not Found", "");
        return;
    }
    say(one, "200 OK", "");
    snprintf(one->mark, sizeof one->mark, "%s", there->mark);
    one->answer_size = there->size;
    free(one->answer);
    one->answer = malloc(there->size + 1);
    if (one->answer == NULL) abort();
    memcpy(one->answer, there->bytes, there->size);
}

static void act(exchange *one) {
    entry *there = find(one->path);
    if (strstr(one->query, "list-type") != NULL) {
        list(one);
    } else if (strncmp(one->query, "uploads", 7) == 0) {
        begin_upload(one);
    } else if (strstr(one->query, "uploadId=") != NULL) {
        act_on_upload(one);
    } else if (strcmp(one->method, "GET") == 0 || strcmp(one->method, "HEAD") == 0) {
        give(one, there);
    } else if (is_refused(one, there)) {
        say(one, "412 Precondition Failed", "<Error/>");
    } else if (strcmp(one->method, "PUT") == 0) {
        there = put(one->path, one->body, one->size);
        one->body = NULL;
        snprintf(one->mark, sizeof one->mark, "%s", there->mark);
        say(one, "200 OK", "");
    } else {
        if (there != NULL) drop(there);
        say(one, "204 No Content", "");
    }
}

// ---- connections ----

static bool read_all(int fd, char *to, size_t size) {
    for (size_t have = 0; have < size;) {
        ssize_t got = recv(fd, to + have, size - have, 0);
        if (got <= 0) return false;
        have += (size_t)got;
    }
    return true;
}

/// The value of a header field; NULL: there is no field of that name.
static const char *value_of(const char *head, const char *name) {
    const char *at = strcasestr(head, name);
    return at == NULL ? NULL : at + strlen(name);
}

static bool read_exchange(int fd, exchange *one) {
    char head[HEAD_BYTES_MAX] = "", target[1024] = "";
    for (size_t have = 0; have + 1 < sizeof head && strstr(head, "\r\n\r\n") == NULL; have++)
        if (recv(fd, head + have, 1, 0) != 1) return false;
    if (sscanf(head, "%7s %1023s", one->method, target) != 2) return false;
    char *query = strchr(target, '?');
    if (query != NULL) *query++ = '\0';
    snprintf(one->path, sizeof one->path, "%.255s", target);
    snprintf(one->query, sizeof one->query, "%.511s", query == NULL ? "" : query);
    const char *length = value_of(head, "\r\nContent-Length:");
    const char *match = value_of(head, "\r\nIf-Match: ");
    one->is_fresh = value_of(head, "\r\nIf-None-Match: *") != NULL;
    if (match != NULL)
        snprintf(one->condition, sizeof one->condition, "%.*s", (int)strcspn(match, "\r"), match);
    one->size = length == NULL ? 0 : (size_t)strtoull(length, NULL, 10);
    one->body = malloc(one->size + 1);
    if (one->body == NULL) abort();
    return read_all(fd, one->body, one->size);
}

static bool send_all(int fd, const char *bytes, size_t size) {
    for (size_t sent = 0; sent < size;) {
        ssize_t put_bytes = send(fd, bytes + sent, size - sent, MSG_NOSIGNAL);
        if (put_bytes <= 0) return false;
        sent += (size_t)put_bytes;
    }
    return true;
}

static bool answer(int fd, const exchange *one) {
    char head[512];
    int size =
        snprintf(head, sizeof head, "HTTP/1.1 %s\r\nContent-Length: %zu\r\n%s%s%s\r\n", one->status,
                 one->answer_size, one->mark[0] == '\0' ? "" : "ETag: ", one->mark,
                 one->mark[0] == '\0' ? "" : "\r\n");
    bool has_body = strcmp(one->method, "HEAD") != 0;
    return send_all(fd, head, (size_t)size) &&
           (!has_body || send_all(fd, one->answer, one->answer_size));
}

static void *serve(void *context) {
    int fd = (int)(intptr_t)context, on = 1;
    bool goes_on = true;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    while (goes_on) {
        exchange one = {.answer = NULL};
        goes_on = read_exchange(fd, &one);
        if (goes_on) {
            pthread_mutex_lock(&lock);
            act(&one);
            pthread_mutex_unlock(&lock);
            goes_on = answer(fd, &one);
        }
        free(one.body);
        free(one.answer);
    }
    close(fd);
    return NULL;
}

static void start(void *(*run)(void *), void *context) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, run, context) != 0) abort();
    pthread_detach(thread);
}

static void *take_connections(void *context) {
    (void)context;
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        if (fd >= 0) start(serve, (void *)(intptr_t)fd);
    }
    return NULL;
}

const char *small_store_begin(void) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof at;
    if (listener >= 0) return address;
    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&at, sizeof at) != 0 ||
        listen(listener, 64) != 0 || getsockname(listener, (struct sockaddr *)&at, &size) != 0)
        abort();
    snprintf(address, sizeof address, "http://127.0.0.1:%u", ntohs(at.sin_port));
    start(take_connections, NULL);
    return address;
}

char *small_store_get(const char *path, size_t *size) {
    pthread_mutex_lock(&lock);
    const entry *there = find(path);
    char *copy = there == NULL ? NULL : malloc(there->size + 1);
    if (copy != NULL) {
        memcpy(copy, there->bytes, there->size);
        copy[there->size] = '\0';
        *size = there->size;
    }
    pthread_mutex_unlock(&lock);
    return copy;
}

size_t small_store_count(void) {
    size_t count = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < ENTRY_COUNT_MAX; i++)
        count += entries[i].bytes != NULL && strchr(entries[i].path, '#') == NULL;
    pthread_mutex_unlock(&lock);
    return count;
}

size_t small_store_upload_count(void) {
    size_t count = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < ENTRY_COUNT_MAX; i++) count += uploads[i][0] != '\0';
    pthread_mutex_unlock(&lock);
    return count;
}

void small_store_clear(void) {
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < ENTRY_COUNT_MAX; i++)
        if (entries[i].bytes != NULL) drop(&entries[i]);
    memset(uploads, 0, sizeof uploads);
    pthread_mutex_unlock(&lock);
}
