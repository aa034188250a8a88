// SPDX-License-Identifier: Apache-2.0
/// Measures libcurl alone: it reads a file by parallel ranges into one buffer, with two threads
/// that have a multi handle each. compare_remote.py compares with it:
///
///     plain_ranges URL SIZE CONNECTIONS RANGE_BYTES FILE [CA_FILE]
///
/// It prints [seconds, peak MiB, ""], and exits with 1 if the bytes differ from FILE's.
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "http/curl_library.h"

#define CURL_FUNCTION(result, name, parameters) extern result name parameters;
CURL_FUNCTIONS(CURL_FUNCTION)
#undef CURL_FUNCTION

enum { THREAD_COUNT = 2, CURL_RANGE = 10007 };

typedef struct transfer {
    curl_easy *easy;
    uint64_t at, end;
} transfer;

static const char *url, *ca_file;
static uint64_t size_bytes, range_bytes;
static unsigned connection_count;
static char *target;
static atomic_uint_fast64_t next_byte;
static atomic_bool failed;

static size_t take(char *bytes, size_t one, size_t count, void *context) {
    transfer *now = context;
    if (one * count > now->end - now->at) return 0;
    memcpy(target + now->at, bytes, one * count);
    now->at += one * count;
    return one * count;
}

/// Requests the next range with a handle; false if none is left.
static bool ask(curl_multi *multi, transfer *now) {
    char range[64];
    now->at = atomic_fetch_add(&next_byte, range_bytes);
    if (now->at >= size_bytes) return false;
    now->end = now->at + range_bytes < size_bytes ? now->at + range_bytes : size_bytes;
    snprintf(range, sizeof range, "%" PRIu64 "-%" PRIu64, now->at, now->end - 1);
    curl_easy_setopt(now->easy, CURL_RANGE, range);
    return curl_multi_add_handle(multi, now->easy) == 0;
}

static void prepare(transfer *now) {
    now->easy = curl_easy_init();
    curl_easy_setopt(now->easy, CURL_URL, url);
    curl_easy_setopt(now->easy, CURL_PRIVATE, (void *)now);
    curl_easy_setopt(now->easy, CURL_HTTP_VERSION, (long)CURL_HTTP_1_1);
    curl_easy_setopt(now->easy, CURL_BUFFER_BYTES, 262144L);
    curl_easy_setopt(now->easy, CURL_NO_SIGNALS, 1L);
    curl_easy_setopt(now->easy, CURL_WRITE_CALL, take);
    curl_easy_setopt(now->easy, CURL_WRITE_CONTEXT, (void *)now);
    if (ca_file != NULL) curl_easy_setopt(now->easy, CURL_CA_FILE, ca_file);
}

static int take_finished(curl_multi *multi) {
    int left, more = 0;
    const curl_message *message;
    while ((message = curl_multi_info_read(multi, &left)) != NULL) {
        transfer *now = NULL;
        curl_easy_getinfo(message->easy, CURL_INFO_PRIVATE, &now);
        if (message->data.result != CURL_OK || now->at != now->end) atomic_store(&failed, true);
        curl_multi_remove_handle(multi, now->easy);
        more += ask(multi, now) ? 1 : 0;
    }
    return more;
}

static void *run(void *unused) {
    unsigned count = connection_count / THREAD_COUNT;
    transfer *all = calloc(count, sizeof *all);
    curl_multi *multi = curl_multi_init();
    (void)unused;
    for (unsigned i = 0; i < count; i++) {
        prepare(&all[i]);
        ask(multi, &all[i]);
    }
    for (int running = 1; running > 0 && !atomic_load(&failed);) {
        curl_multi_perform(multi, &running);
        running += take_finished(multi);
        if (running > 0) curl_multi_poll(multi, NULL, 0, 1000, NULL);
    }
    free(all); // the process ends: handles are left to it
    return NULL;
}

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static bool is_same(const char *path) {
    char *held = malloc(range_bytes);
    FILE *file = fopen(path, "rb");
    bool same = held != NULL && file != NULL;
    for (uint64_t at = 0; same && at < size_bytes; at += range_bytes) {
        size_t part = (size_t)(size_bytes - at < range_bytes ? size_bytes - at : range_bytes);
        same = fread(held, 1, part, file) == part && memcmp(held, target + at, part) == 0;
    }
    if (file != NULL) fclose(file);
    free(held);
    return same;
}

int main(int count, char **words) {
    if (count < 6) return 2;
    url = words[1];
    size_bytes = strtoull(words[2], NULL, 10);
    connection_count = (unsigned)strtoul(words[3], NULL, 10);
    range_bytes = strtoull(words[4], NULL, 10);
    ca_file = count > 6 && words[6][0] != '\0' ? words[6] : NULL;
    pthread_t threads[THREAD_COUNT];
    double begin_s = now_s();
    curl_global_init(3);
    target = aligned_alloc((size_t)2 << 20, (size_bytes + ((2 << 20) - 1)) >> 21 << 21);
    if (target == NULL) return 1;
    for (int i = 0; i < THREAD_COUNT; i++) pthread_create(&threads[i], NULL, run, NULL);
    for (int i = 0; i < THREAD_COUNT; i++) pthread_join(threads[i], NULL);
    double took_s = now_s() - begin_s;
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    if (atomic_load(&failed) || !is_same(words[5])) return 1;
    printf("[%.6f, %ld, \"\"]\n", took_s, usage.ru_maxrss >> 10);
    return 0;
}
