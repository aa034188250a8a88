// SPDX-License-Identifier: Apache-2.0
/// The disk cache with many threads: a server thread, and readers of the same object through
/// several entries. Mainly for the sanitizers; python/tests/test_remote_cache.py has the other
/// tests.
#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cache/cache_private.h"
#include "check.h"
#include "fixture.h"

#define OBJECT_BYTES ((uint64_t)(20 << 20) + 777)
#define READER_COUNT 6
#define READ_COUNT 40

static int listener;
static atomic_uint_fast64_t sent_bytes, largest_answer;
static uint16_t port; ///< of the server; 0: not started yet

/// Answers range requests of one connection, until it ends.
static void *serve(void *context) {
    int fd = (int)(intptr_t)context;
    char request[4096], head[512];
    size_t have = 0;
    char *body = malloc(OBJECT_BYTES);
    for (ssize_t got;
         body != NULL && (got = read(fd, request + have, sizeof request - 1 - have)) > 0;) {
        have += (size_t)got;
        request[have] = '\0';
        if (strstr(request, "\r\n\r\n") == NULL) continue;
        have = 0;
        uint64_t begin = 0, end = 0;
        const char *range = strstr(request, "Range: bytes=");
        if (range == NULL || sscanf(range, "Range: bytes=%" SCNu64 "-%" SCNu64, &begin, &end) != 2)
            break;
        end = fsti_min(end + 1, OBJECT_BYTES);
        for (uint64_t i = begin; i < end; i++) body[i - begin] = (char)fixture_byte(i);
        int size =
            snprintf(head, sizeof head,
                     "HTTP/1.1 206 Partial Content\r\nETag: \"v1\"\r\nContent-Length: %" PRIu64
                     "\r\nContent-Range: bytes %" PRIu64 "-%" PRIu64 "/%" PRIu64 "\r\n\r\n",
                     end - begin, begin, end - 1, OBJECT_BYTES);
        atomic_fetch_add(&sent_bytes, end - begin);
        if (end - begin > atomic_load(&largest_answer)) atomic_store(&largest_answer, end - begin);
        if (send(fd, head, (size_t)size, MSG_NOSIGNAL) != size) break;
        for (uint64_t done = 0; done < end - begin;) {
            ssize_t put = send(fd, body + done, end - begin - done, MSG_NOSIGNAL);
            if (put <= 0) break;
            done += (uint64_t)put;
        }
    }
    free(body);
    close(fd);
    return NULL;
}

static void *accept_all(void *context) {
    (void)context;
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        pthread_t thread;
        if (fd < 0) return NULL;
        if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)fd) == 0) pthread_detach(thread);
    }
}

/// Starts the server; its port.
static uint16_t start_server(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    pthread_t thread;
    listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) != 0 ||
        listen(listener, 64) != 0 ||
        getsockname(listener, (struct sockaddr *)&address, &size) != 0 ||
        pthread_create(&thread, NULL, accept_all, NULL) != 0)
        return 0;
    pthread_detach(thread);
    return ntohs(address.sin_port);
}

typedef struct reader {
    fsti_cache_entry *entry;
    fsti_object *object;
    uint64_t seed;
    bool is_good;
} reader;

static void *read_here_and_there(void *context) {
    reader *self = context;
    const size_t most = (size_t)3 << 20;
    char *buffer = malloc(most);
    self->is_good = buffer != NULL;
    for (int i = 0; i < READ_COUNT && self->is_good; i++) {
        uint64_t begin = fixture_random(&self->seed) % OBJECT_BYTES;
        size_t size =
            (size_t)fsti_min(fixture_random(&self->seed) % most + 1, OBJECT_BYTES - begin);
        fsti_range_read read = {
            .object = self->object, .offset = begin, .size = size, .buffer = buffer};
        fst_error error;
        self->is_good = fsti_cache_read(self->entry, &read, &error) == FST_OK &&
                        fixture_matches(buffer, begin, size);
    }
    free(buffer);
    return NULL;
}

TEST(threads_and_entries_share_fetched_blocks)
{
    char reason[160], url[64];
    if (!fsti_http_usable(reason, sizeof reason)) SKIP("libcurl is not there");
    if (port == 0) port = start_server();
    CHECK(port != 0);
    snprintf(url, sizeof url, "http://127.0.0.1:%u/object", (unsigned)port);
    fst_remote_options options = {
        .struct_size = sizeof options, .cache_dir = fixture_path("cache"), .cache_required = 1};
    fst_error error;
    fsti_cache_configure(&options);
    fsti_cached opened[2];
    reader readers[READER_COUNT];
    pthread_t threads[READER_COUNT];
    for (int i = 0; i < 2; i++) {
        CHECK_INT(fsti_cache_open(url, &opened[i], &error), FST_OK);
        CHECK(opened[i].entry != NULL);
    }
    for (int i = 0; i < READER_COUNT; i++) {
        readers[i] = (reader){opened[i % 2].entry, opened[i % 2].object, 22 + (uint64_t)i, false};
        CHECK_INT(pthread_create(&threads[i], NULL, read_here_and_there, &readers[i]), 0);
    }
    for (int i = 0; i < READER_COUNT; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < READER_COUNT; i++) CHECK(readers[i].is_good);
    // Two opens may both have fetched the first block. On a busy machine the module also repeats
    // requests whose responses are late.
    fsti_http_counts counts[2] = {{0}, {0}};
    for (int i = 0; i < 2; i++) fsti_cache_counts(opened[i].entry, &counts[i]);
    uint64_t repeated = counts[0].hedges + counts[1].hedges + counts[0].retries + counts[1].retries;
    CHECK(atomic_load(&sent_bytes) <=
          OBJECT_BYTES + 65536 + repeated * atomic_load(&largest_answer));
    for (int i = 0; i < 2; i++) {
        fsti_cache_close(opened[i].entry);
        fsti_object_unref(opened[i].object);
    }
}

/// The name of the only object of a folder.
static bool find_name(const char *folder, char name[CACHE_NAME_BYTES]) {
    DIR *stream = opendir(folder);
    bool is_found = false;
    for (const struct dirent *entry; stream != NULL && (entry = readdir(stream)) != NULL;) {
        if (!fsti_ends_with(entry->d_name, ".part")) continue;
        snprintf(name, CACHE_NAME_BYTES, "%.32s", entry->d_name);
        is_found = true;
    }
    if (stream != NULL) closedir(stream);
    return is_found;
}

/// An object that is partly cached, in a separate folder.
static bool open_entry(const char *name, fsti_cached *out) {
    char url[64];
    snprintf(url, sizeof url, "http://127.0.0.1:%u/%s", (unsigned)port, name);
    fst_remote_options options = {
        .struct_size = sizeof options, .cache_dir = fixture_path(name), .cache_required = 1};
    fst_error error;
    fsti_cache_configure(&options);
    return fsti_cache_open(url, out, &error) == FST_OK && out->entry != NULL;
}

static bool read_all(const fsti_cached *opened) {
    char *bytes = malloc(OBJECT_BYTES);
    fsti_range_read read = {.object = opened->object, .size = OBJECT_BYTES, .buffer = bytes};
    fst_error error;
    bool is_good = bytes != NULL && fsti_cache_read(opened->entry, &read, &error) == FST_OK &&
                   fixture_matches(bytes, 0, OBJECT_BYTES);
    free(bytes);
    return is_good;
}

static void close_entry(fsti_cached *opened) {
    fsti_cache_close(opened->entry);
    fsti_object_unref(opened->object);
}

/// Opens the map of an entry again. Locks on the new descriptor count as another process's.
static int open_map(const char *folder) {
    char name[CACHE_NAME_BYTES], path[300];
    if (!find_name(folder, name)) return -1;
    snprintf(path, sizeof path, "%s/%s.map", folder, name);
    return open(path, O_RDWR | O_CLOEXEC);
}

/// Blocks of an entry that are there.
static uint64_t count_blocks(const fsti_cache_entry *entry, uint64_t first, uint64_t last) {
    uint64_t digest, count = 0;
    for (uint64_t i = first; i < last; i++)
        if (fsti_cache_map_read(entry->map_fd, i, 1, &digest) == 0) count += digest != 0;
    return count;
}

/// Counters after the header of a map that change are a sign of a running process; these do not.
TEST(stalled_process_is_not_waited_for)
{
    char reason[160];
    if (!fsti_http_usable(reason, sizeof reason)) SKIP("libcurl is not there");
    if (port == 0) port = start_server();
    fsti_cached opened;
    uint64_t numbers[256];
    for (size_t i = 0; i < 256; i++) numbers[i] = 7;
    CHECK(open_entry("stopped", &opened));
    int fd = open_map(fixture_path("stopped"));
    CHECK_INT(fsti_write_at(fd, numbers, sizeof numbers, 2048), 0);
    struct flock range = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 16, .l_len = 150};
    CHECK_INT(fcntl(fd, F_OFD_SETLK, &range), 0);
    fsti_cache_heartbeat_period(10000000);
    CHECK(read_all(&opened));
    CHECK_INT(opened.entry->stalled_process, 7);
    // The process may still write its blocks: no other process has them.
    CHECK_INT(count_blocks(opened.entry, 16, 166), 0);
    CHECK_INT(count_blocks(opened.entry, 0, opened.entry->block_count),
              opened.entry->block_count - 150);
    close(fd);
    CHECK(read_all(&opened));
    CHECK_INT(count_blocks(opened.entry, 0, opened.entry->block_count), opened.entry->block_count);
    fsti_cache_heartbeat_period(0);
    close_entry(&opened);
}

typedef struct whole_read {
    const fsti_cached *opened;
    bool is_good;
    atomic_bool is_done;
} whole_read;

static void *read_whole(void *context) {
    whole_read *self = context;
    self->is_good = read_all(self->opened);
    atomic_store(&self->is_done, true);
    return NULL;
}

TEST(process_with_heartbeats_is_waited_for)
{
    char reason[160];
    if (!fsti_http_usable(reason, sizeof reason)) SKIP("libcurl is not there");
    if (port == 0) port = start_server();
    fsti_cached holder, waiter;
    cache_claim claim;
    pthread_t thread;
    uint64_t number = 0, before = 0;
    fsti_cache_heartbeat_period(10000000);
    CHECK(open_entry("alive", &holder) && open_entry("alive", &waiter));
    CHECK(fsti_cache_claim(holder.entry, 16, 40, &claim));
    whole_read read = {.opened = &waiter};
    CHECK_INT(pthread_create(&thread, NULL, read_whole, &read), 0);
    // More heartbeats than a stalled process would be given before it is bypassed.
    for (int changes = 0; changes < 40; changes += number != before, usleep(1000)) {
        before = number;
        CHECK_INT(fsti_read_at(holder.entry->map_fd, &number, sizeof number, 2048 + 16 * 8), 0);
    }
    CHECK(!atomic_load(&read.is_done));
    CHECK_INT(waiter.entry->stalled_process, 0);
    fsti_cache_unclaim(holder.entry, &claim);
    pthread_join(thread, NULL);
    CHECK(read.is_good);
    fsti_cache_heartbeat_period(0);
    close_entry(&holder);
    close_entry(&waiter);
}

/// Other processes clear the folder between the beginning and the end of a check, and begin new
/// entries. The result of the check must not count for these.
TEST(unverified_blocks_are_not_sealed)
{
    char reason[160], name[CACHE_NAME_BYTES], part[300], map[300], data[300];
    if (!fsti_http_usable(reason, sizeof reason)) SKIP("libcurl is not there");
    if (port == 0) port = start_server();
    fsti_cached first, second;
    cache_folder folder;
    fst_error error;
    CHECK(open_entry("cleared", &first) && read_all(&first));
    const char *path = fixture_path("cleared");
    CHECK(find_name(path, name));
    snprintf(part, sizeof part, "%s/%s.part", path, name);
    snprintf(map, sizeof map, "%s/%s.map", path, name);
    snprintf(data, sizeof data, "%s/%s.data", path, name);
    CHECK(unlink(part) == 0 && unlink(map) == 0);
    CHECK(open_entry("cleared", &second)); // with at most its first block
    CHECK_INT(fsti_cache_folder_open(path, false, &folder, &error), FST_OK);
    CHECK(!fsti_cache_seal(first.entry, &folder, name));
    CHECK(access(part, F_OK) == 0 && access(data, F_OK) != 0);
    CHECK(read_all(&second) && fsti_cache_seal(second.entry, &folder, name));
    CHECK(access(part, F_OK) != 0 && access(data, F_OK) == 0);
    fsti_cache_folder_close(&folder);
    close_entry(&first);
    close_entry(&second);
}
