// SPDX-License-Identifier: Apache-2.0
#include "object_server.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "fuzz_input.h"

#define HEAD_BYTES_MAX 16384

static const char *model_bytes;
static size_t model_size;
static int listener = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static fuzz_input rules; ///< protected by `lock`

/// A request, and its correct response.
typedef struct exchange {
    char head[HEAD_BYTES_MAX];
    char *answer;
    size_t size;
} exchange;

typedef enum answer_kind {
    ANSWER_CORRECT,
    ANSWER_RAW,    ///< the input's bytes
    ANSWER_STATUS, ///< a status without a body, or with an error's
    ANSWER_CUT,
    ANSWER_DAMAGED, ///< one byte differs
    ANSWER_FIELD,   ///< one more header field, before the others
    ANSWER_COUNT
} answer_kind;

static bool send_all(int fd, const char *bytes, size_t size) {
    while (size > 0) {
        ssize_t sent = send(fd, bytes, size, MSG_NOSIGNAL);
        if (sent <= 0) return false;
        bytes += sent;
        size -= (size_t)sent;
    }
    return true;
}

/// Reads a request and drops its body. False at the end of the connection.
static bool read_request(int fd, exchange *one) {
    size_t used = 0, body = 0;
    char *end;
    one->head[0] = '\0';
    while ((end = strstr(one->head, "\r\n\r\n")) == NULL) {
        ssize_t got = recv(fd, one->head + used, sizeof one->head - used - 1, 0);
        if (got <= 0) return false;
        used += (size_t)got;
        one->head[used] = '\0';
    }
    const char *length = strcasestr(one->head, "content-length:");
    if (length != NULL && length < end) body = strtoul(length + 15, NULL, 10);
    size_t have = used - (size_t)(end + 4 - one->head);
    end[2] = '\0';
    if (strcasestr(one->head, "100-continue") != NULL)
        (void)send_all(fd, "HTTP/1.1 100 Continue\r\n\r\n", 25);
    while (have < body) {
        char part[1 << 14];
        size_t wanted = body - have < sizeof part ? body - have : sizeof part;
        ssize_t got = recv(fd, part, wanted, 0);
        if (got <= 0) return false;
        have += (size_t)got;
    }
    return true;
}

static void put_answer(exchange *one, const char *status, const char *fields, const void *body,
                       size_t size) {
    char head[1024];
    int used = snprintf(head, sizeof head,
                        "HTTP/1.1 %s\r\nContent-Length: %zu\r\nDate: Sun, 22 Nov 2026 10:00:00 "
                        "GMT\r\nETag: \"1\"\r\n%s\r\n",
                        status, size, fields);
    one->answer = malloc((size_t)used + size + 1);
    require(one->answer != NULL);
    memcpy(one->answer, head, (size_t)used);
    if (size > 0) memcpy(one->answer + used, body, size);
    one->size = (size_t)used + size;
}

static void put_text(exchange *one, const char *text) {
    put_answer(one, "200 OK", "", text, strlen(text));
}

/// Answers for the model's object.
static void put_model(exchange *one) {
    char fields[256];
    size_t first = 0, last = model_size - 1;
    const char *range = strcasestr(one->head, "\r\nrange: bytes=");
    if (strstr(one->head, "If-None-Match: \"1\"") != NULL) {
        put_answer(one, "304 Not Modified", "", NULL, 0);
        return;
    }
    if (range == NULL) {
        put_answer(one, "200 OK", "", model_bytes, model_size);
        return;
    }
    sscanf(range + 15, "%zu-%zu", &first, &last);
    if (last >= model_size) last = model_size - 1;
    if (first > last) first = last;
    snprintf(fields, sizeof fields, "Content-Range: bytes %zu-%zu/%zu\r\n", first, last,
             model_size);
    put_answer(one, "206 Partial Content", fields, model_bytes + first, last - first + 1);
}

#define SHA "0123456789abcdef0123456789abcdef01234567"
/// Answers of stores to other requests, by a part of the request's first line.
static const struct {
    const char *part, *text;
} texts[] = {
    {"comp=list", "<EnumerationResults><Blobs><Blob><Name>m/model.safetensors</Name></Blob>"
                  "<Blob><Name>m/config.json</Name></Blob></Blobs><NextMarker/>"
                  "</EnumerationResults>"},
    {"list-type=2", "<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>"
                    "m/model.safetensors</Key></Contents></ListBucketResult>"},
    {"prefix=", "<ListBucketResult><Contents><Key>m/model.safetensors</Key></Contents>"
                "</ListBucketResult>"},
    {"/api/models/", "{\"sha\":\"" SHA "\",\"siblings\":[{\"rfilename\":\"model.safetensors\"}]}"},
    {"?uploads", "<InitiateMultipartUploadResult><UploadId>up/1+=</UploadId>"
                 "</InitiateMultipartUploadResult>"},
    {"/credentials", "{\"AccessKeyId\":\"AKID\",\"SecretAccessKey\":\"secret\",\"Token\":\"t\","
                     "\"Expiration\":\"2099-01-01T00:00:00Z\"}"},
    {"/token", "{\"access_token\":\"ya29.x\",\"expires_in\":3599,\"token_type\":\"Bearer\"}"},
};

static void answer_correctly(exchange *one) {
    char line[2048];
    snprintf(line, sizeof line, "%.*s", (int)strcspn(one->head, "\r"), one->head);
    bool is_get = strncmp(line, "GET ", 4) == 0, is_head = strncmp(line, "HEAD ", 5) == 0;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (strstr(line, texts[i].part) != NULL) {
            put_text(one, texts[i].text);
            return;
        }
    bool is_model = strstr(line, ".safetensors ") != NULL || strstr(line, ".safetensors?") != NULL;
    if (is_get && is_model)
        put_model(one);
    else if (is_get || is_head)
        put_answer(one, "404 Not Found", "", NULL, 0);
    else if (strncmp(line, "DELETE ", 7) == 0)
        put_answer(one, "204 No Content", "", NULL, 0);
    else if (strncmp(line, "POST ", 5) == 0)
        put_text(one, "<CompleteMultipartUploadResult><ETag>&quot;1&quot;</ETag>"
                      "</CompleteMultipartUploadResult>");
    else
        put_answer(one, "201 Created", "", NULL, 0);
}

static size_t take_size(fuzz_input *input) {
    size_t low = fuzz_byte(input);
    return low | (size_t)fuzz_byte(input) << 8;
}

static void replace_answer(exchange *one, const void *bytes, size_t size) {
    free(one->answer);
    one->answer = malloc(size + 1);
    require(one->answer != NULL);
    if (size > 0) memcpy(one->answer, bytes, size);
    one->size = size;
}

static void put_status(exchange *one, uint8_t which) {
    static const char *const statuses[] = {"301 Moved\r\nLocation: /other.safetensors",
                                           "307 Moved\r\nLocation: /m/model.safetensors",
                                           "400 Bad\r\nx-amz-bucket-region: eu-west-3",
                                           "403 Forbidden",
                                           "404 Not Found",
                                           "409 Conflict",
                                           "412 Precondition Failed",
                                           "416 Range",
                                           "429 Slow\r\nRetry-After: 1",
                                           "500 Error",
                                           "503 Busy\r\nRetry-After: Sun, 22 Nov 2026 10:00:00 GMT",
                                           "200 OK",
                                           "304 No"};
    static const char body[] = "<Error><Code>SlowDown</Code></Error>";
    free(one->answer);
    put_answer(one, statuses[which % (sizeof statuses / sizeof *statuses)], "", body,
               which >= 128 ? sizeof body - 1 : 0);
}

static void add_field(exchange *one, const uint8_t *field, size_t size) {
    const char *end = memchr(one->answer, '\n', one->size);
    size_t begin = end == NULL ? 0 : (size_t)(end + 1 - one->answer);
    char *joined = malloc(one->size + size + 2);
    require(joined != NULL);
    memcpy(joined, one->answer, begin);
    memcpy(joined + begin, field, size);
    memcpy(joined + begin + size, "\r\n", 2);
    memcpy(joined + begin + size + 2, one->answer + begin, one->size - begin);
    free(one->answer);
    one->answer = joined;
    one->size += size + 2;
}

/// Applies the next rule. False if the connection is to end after the answer.
static bool apply_rule(exchange *one) {
    bool stays = true;
    pthread_mutex_lock(&lock);
    answer_kind kind = (answer_kind)fuzz_below(&rules, ANSWER_COUNT);
    if (kind == ANSWER_RAW || kind == ANSWER_FIELD) {
        size_t size = take_size(&rules) % 2048;
        if (size > rules.size) size = rules.size;
        if (kind == ANSWER_RAW)
            replace_answer(one, rules.data, size);
        else
            add_field(one, rules.data, size);
        stays = kind == ANSWER_FIELD;
        rules.data += size;
        rules.size -= size;
    } else if (kind == ANSWER_STATUS) {
        put_status(one, fuzz_byte(&rules));
    } else if (kind == ANSWER_CUT) {
        size_t size = take_size(&rules);
        one->size = size < one->size ? size : one->size;
        stays = false;
    } else if (kind == ANSWER_DAMAGED) {
        size_t at = take_size(&rules) % one->size;
        one->answer[at] = (char)fuzz_byte(&rules);
        stays = false;
    }
    pthread_mutex_unlock(&lock);
    return stays;
}

static void *serve_connection(void *context) {
    int fd = (int)(intptr_t)context;
    exchange *one = calloc(1, sizeof *one);
    bool stays = one != NULL;
    while (stays && read_request(fd, one)) {
        answer_correctly(one);
        stays = apply_rule(one);
        // A response to HEAD has no body.
        const char *end = memmem(one->answer, one->size, "\r\n\r\n", 4);
        if (strncmp(one->head, "HEAD ", 5) == 0 && end != NULL)
            one->size = (size_t)(end + 4 - one->answer);
        stays = send_all(fd, one->answer, one->size) && stays;
        free(one->answer);
        one->answer = NULL;
    }
    close(fd);
    free(one);
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

const char *object_server_begin(const void *model, size_t size_bytes) {
    static char url[64];
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    pthread_t thread;
    if (dlopen("libcurl.so.4", RTLD_NOW | RTLD_LOCAL) == NULL) return NULL;
    model_bytes = model;
    model_size = size_bytes;
    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) != 0 ||
        listen(listener, 64) != 0 ||
        getsockname(listener, (struct sockaddr *)&address, &size) != 0 ||
        pthread_create(&thread, NULL, serve, NULL) != 0)
        abort();
    pthread_detach(thread);
    snprintf(url, sizeof url, "http://127.0.0.1:%u", ntohs(address.sin_port));
    return url;
}

void object_server_answer(const uint8_t *bytes, size_t size) {
    pthread_mutex_lock(&lock);
    rules = (fuzz_input){bytes, size};
    pthread_mutex_unlock(&lock);
}

void object_server_end(void) { object_server_answer(NULL, 0); }
