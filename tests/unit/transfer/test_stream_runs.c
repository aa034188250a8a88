// SPDX-License-Identifier: Apache-2.0
/// Absent files are read into the page cache by runs of chunks, each one stream, and copied by
/// whichever thread is free.
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <time.h>

#include "check.h"
#include "fastsafetensors.h"
#include "fixture.h"
#include "transfer/pipeline.h"

#define COUNT 12
#define BYTES ((uint64_t)4 << 20)

static atomic_uint stream_count, copy_count, first_copies;
static atomic_uint_fast64_t bytes_sent, read_count;
static _Atomic(pthread_t) first_reader;
static atomic_bool has_reader, is_first_slow;

int __real_open64(const char *path, int flags, ...);
int __wrap_open64(const char *path, int flags, ...);
ssize_t __real_sendfile64(int to, int from, off_t *offset, size_t size);
ssize_t __wrap_sendfile64(int to, int from, off_t *offset, size_t size);
void __real_fsti_scatter(scatter_order *order);
void __wrap_fsti_scatter(scatter_order *order);
void __real_fsti_stream_close(fsti_file_stream *stream);
void __wrap_fsti_stream_close(fsti_file_stream *stream);

/// Each stream opens the null device.
int __wrap_open64(const char *path, int flags, ...) {
    if (strcmp(path, "/dev/null") == 0) atomic_fetch_add(&stream_count, 1);
    return __real_open64(path, flags, 0600);
}

/// The thread that reads first is slow, if wanted.
ssize_t __wrap_sendfile64(int to, int from, off_t *offset, size_t size) {
    bool expected = false;
    if (atomic_compare_exchange_strong(&has_reader, &expected, true))
        atomic_store(&first_reader, pthread_self());
    if (is_first_slow && pthread_equal(atomic_load(&first_reader), pthread_self()))
        nanosleep(&(struct timespec){.tv_nsec = 3000000}, NULL);
    ssize_t sent = __real_sendfile64(to, from, offset, size);
    if (sent > 0) atomic_fetch_add(&bytes_sent, (uint64_t)sent);
    atomic_fetch_add(&read_count, 1);
    return sent;
}

void __wrap_fsti_scatter(scatter_order *order) {
    atomic_fetch_add(&copy_count, 1);
    if (pthread_equal(atomic_load(&first_reader), pthread_self()))
        atomic_fetch_add(&first_copies, 1);
    __real_fsti_scatter(order);
}

/// Meanwhile another thread copies the last chunks, and the load ends.
void __wrap_fsti_stream_close(fsti_file_stream *stream) {
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    __real_fsti_stream_close(stream);
}

/// Loads a file that is not in the page cache, by two threads. False: it cannot be evicted here.
static bool load_absent(bool slow, fst_load_stats *stats) {
    fst_load_options options = {
        .struct_size = sizeof options, .mode = FST_MODE_LOAD, .cache = FST_CACHE_KEEP};
    const char *path = fixture_tensors("runs", COUNT, BYTES);
    fst_model *model;
    fst_loader *loader;
    options.thread_count = 2;
    fixture_evict(path);
    atomic_store(&is_first_slow, slow);
    atomic_store(&has_reader, false);
    stream_count = copy_count = first_copies = 0;
    bytes_sent = read_count = 0;
    *stats = (fst_load_stats){.struct_size = sizeof *stats};
    if (fst_model_open(path, NULL, &model, NULL) != FST_OK) abort();
    if (fst_loader_open(model, &options, &loader, NULL) != FST_OK) abort();
    if (fst_loader_wait(loader, -1, NULL) != FST_OK) abort();
    if (fst_loader_stats_get(loader, stats, NULL) != FST_OK) abort();
    if (!fixture_is_loaded(loader, COUNT, BYTES)) abort();
    fst_loader_close(loader);
    fst_model_close(model);
    return stats->chunks_resident < stats->chunk_count / 4;
}

TEST(streams_are_longer_than_chunks)
{
    fst_load_stats stats;
    if (!load_absent(false, &stats)) SKIP("this file system does not evict");
    CHECK_INT(copy_count, stats.chunk_count);
    CHECK(stream_count <= stats.chunk_count / 2);
    CHECK_INT(bytes_sent, COUNT * BYTES);
}

/// A thread that finds no chunk waits for those that another one is reading, instead of ending.
TEST(chunks_of_a_slow_stream_are_copied_by_another_thread)
{
    fst_load_stats stats;
    if (!load_absent(true, &stats)) SKIP("this file system does not evict");
    CHECK_INT(copy_count, stats.chunk_count);
    CHECK(first_copies <= stats.chunk_count / 4);
    CHECK_INT(bytes_sent, COUNT * BYTES);
    CHECK(stats.read_count >= read_count + copy_count); // none is counted after the end
}
