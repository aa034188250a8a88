// SPDX-License-Identifier: Apache-2.0
/// Cached reads. Cached blocks are copied from the file; missing ones are fetched into the caller's
/// buffer and written back; blocks that another process fetches are waited for.
///
/// A job is one read, and a step of it examines the map: it copies cached blocks, claims a run of
/// missing ones, fetches them with one request, writes them and repeats. A job never holds a claim
/// while it waits for another one, so there are no deadlocks. A job that waits too long bypasses
/// the cache.
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "cache_private.h"

#define PAUSE_NS_MIN ((uint64_t)1000000)
#define PAUSE_NS_MAX ((uint64_t)20000000)
/// If another process has held a block this long without delivering it, this process may reach the
/// server faster. (A stopped process is detected sooner: cache_heartbeat.c.)
#define CLAIM_TIMEOUT_NS ((uint64_t)30000000000)
/// The bytes of one job at most. A range of this size may begin and end within a block, so it
/// touches up to two blocks more than it fills.
#define PART_BYTES ((CACHE_READ_BLOCKS - 2) * CACHE_BLOCK_BYTES)

/// The state of a block in the read.
typedef enum block_state {
    BLOCK_WANTED,
    BLOCK_SUSPECT, ///< the file does not match the map
    BLOCK_DONE,
} block_state;

typedef struct cache_job {
    cache_task task; ///< first member: a task pointer is a job pointer
    fsti_cache_entry *entry;
    fsti_range_read *read;
    uint64_t first, last; ///< block range [first, last)
    uint64_t digests[CACHE_READ_BLOCKS];
    uint8_t states[CACHE_READ_BLOCKS];
    cache_claim claim;
    bool is_fetching; ///< a finished request must be processed
    bool is_uncached; ///< bypasses the cache
    uint64_t pause_ns;
    uint64_t waiting_ns; ///< when the wait without progress began; 0: not waiting
    bool is_waiting;     ///< counted in the entry's waiter_count
    cache_stall stall;
    fsti_range_read fetch;
    fsti_range_edges edges;
    fst_error error;
    char *scratch[2]; ///< one block each, for blocks of which only a part is requested
    bool scratch_failed;
} cache_job;

static uint64_t block_begin(uint64_t block) { return block * CACHE_BLOCK_BYTES; }

static uint64_t block_end(const fsti_cache_entry *entry, uint64_t block) {
    return fsti_min(block_begin(block + 1), entry->size_bytes);
}

static void stop_waiting(cache_job *job) {
    if (job->is_waiting) fsti_cache_wait_end(job->entry);
    job->is_waiting = false;
}

static void end_job(cache_job *job, int64_t result) {
    fsti_range_read *read = job->read;
    read->result = result;
    stop_waiting(job);
    fsti_free(job->scratch[0]);
    fsti_free(job->scratch[1]);
    fsti_free(job);
    read->done(read);
}

/// A block of scratch memory next to the read's buffer. NULL without memory.
static char *scratch_block(cache_job *job, int which) {
    if (job->scratch[which] == NULL) job->scratch[which] = fsti_alloc(CACHE_BLOCK_BYTES);
    return job->scratch[which];
}

// ---- cached blocks ----

/// The range [*first, *last) of blocks that lie completely within the read.
static void find_complete(const cache_job *job, uint64_t *first, uint64_t *last) {
    uint64_t begin = job->read->offset, end = begin + job->read->size;
    while (*first < *last && block_begin(*first) < begin) (*first)++;
    while (*last > *first && block_end(job->entry, *last - 1) > end) (*last)--;
}

/// Checks a block's bytes against the map and records the result.
static void check_block(cache_job *job, uint64_t block, const char *bytes) {
    size_t size = (size_t)(block_end(job->entry, block) - block_begin(block));
    size_t index = (size_t)(block - job->first);
    bool matches = fsti_cache_digest(bytes, size) == job->digests[index];
    job->states[index] = matches ? BLOCK_DONE : BLOCK_SUSPECT;
}

static void set_states(cache_job *job, uint64_t first, uint64_t last, block_state state) {
    for (uint64_t i = first; i < last; i++) job->states[i - job->first] = (uint8_t)state;
}

/// Reads complete blocks directly to their destination.
static void copy_complete(cache_job *job, uint64_t first, uint64_t last) {
    fsti_range_read *read = job->read;
    if (first == last) return;
    uint64_t begin = block_begin(first), end = block_end(job->entry, last - 1);
    char *target = read->buffer + (begin - read->offset);
    if (fsti_read_at(job->entry->data_fd, target, (size_t)(end - begin), begin) != 0) {
        set_states(job, first, last, BLOCK_SUSPECT);
        return;
    }
    for (uint64_t i = first; i < last; i++) check_block(job, i, target + (block_begin(i) - begin));
    for (uint64_t i = first; i < last; i++)
        if (job->states[i - job->first] == BLOCK_DONE)
            read->counts.kept_bytes += block_end(job->entry, i) - block_begin(i);
}

/// Reads a partially requested block through scratch memory, because its digest covers the complete
/// block.
static void copy_part(cache_job *job, uint64_t block) {
    fsti_range_read *read = job->read;
    uint64_t begin = block_begin(block), end = block_end(job->entry, block);
    char *scratch = scratch_block(job, 0);
    size_t index = (size_t)(block - job->first);
    job->states[index] = BLOCK_SUSPECT;
    if (scratch == NULL) job->scratch_failed = true;
    if (scratch == NULL ||
        fsti_read_at(job->entry->data_fd, scratch, (size_t)(end - begin), begin) != 0)
        return;
    check_block(job, block, scratch);
    if (job->states[index] != BLOCK_DONE) return;
    uint64_t from = fsti_max(begin, read->offset), to = fsti_min(end, read->offset + read->size);
    memcpy(read->buffer + (from - read->offset), scratch + (from - begin), (size_t)(to - from));
    read->counts.kept_bytes += to - from;
}

static void copy_run(cache_job *job, uint64_t first, uint64_t last) {
    uint64_t complete_first = first, complete_last = last;
    find_complete(job, &complete_first, &complete_last);
    for (uint64_t i = first; i < complete_first; i++) copy_part(job, i);
    copy_complete(job, complete_first, complete_last);
    for (uint64_t i = complete_last; i < last; i++) copy_part(job, i);
}

static bool is_absent(const cache_job *job, uint64_t block) {
    size_t index = (size_t)(block - job->first);
    return job->states[index] == BLOCK_SUSPECT ||
           (job->states[index] == BLOCK_WANTED && job->digests[index] == 0);
}

/// Copies all cached blocks. False if the map cannot be read.
static bool copy_present(cache_job *job) {
    if (fsti_cache_map_read(job->entry->map_fd, job->first, job->last - job->first, job->digests) !=
        0)
        return false;
    for (uint64_t first = job->first; first < job->last; first++) {
        if (job->states[first - job->first] != BLOCK_WANTED || is_absent(job, first)) continue;
        uint64_t last = first + 1;
        while (last < job->last && job->states[last - job->first] == BLOCK_WANTED &&
               !is_absent(job, last))
            last++;
        copy_run(job, first, last);
        job->waiting_ns = 0; // progress resets the timeout
        first = last - 1;
    }
    return true;
}

// ---- missing blocks ----

/// Runs on a thread of the http module.
static void use_fetched(fsti_range_read *fetch) {
    cache_job *job = fetch->context;
    job->is_fetching = true;
    fsti_cache_pool_add(&job->task, 0);
}

/// Fetches [begin, end); bytes outside the request go to scratch memory. False without memory.
static bool fetch_bytes(cache_job *job, uint64_t begin, uint64_t end) {
    fsti_range_read *read = job->read;
    uint64_t from = fsti_max(begin, read->offset), to = fsti_min(end, read->offset + read->size);
    uint64_t tail_block = (end - 1) / CACHE_BLOCK_BYTES;
    bool is_one = begin / CACHE_BLOCK_BYTES == tail_block;
    job->edges = (fsti_range_edges){.begin = from, .end = to};
    if ((from > begin && (job->edges.head = scratch_block(job, 0)) == NULL) ||
        (to < end && (job->edges.tail = scratch_block(job, is_one ? 0 : 1)) == NULL))
        return false;
    // The scratch memory holds a complete block; its requested part is copied there before
    // digesting.
    if (to < end) job->edges.tail += to - block_begin(tail_block);
    job->fetch = (fsti_range_read){.object = job->entry->object,
                                   .offset = begin,
                                   .size = (size_t)(end - begin),
                                   .buffer = read->buffer + (from - read->offset),
                                   .edges = &job->edges,
                                   .stop = read->stop,
                                   .done = use_fetched,
                                   .context = job,
                                   .error = &job->error};
    fsti_range_read_begin(&job->fetch);
    return true;
}

/// The bytes of a fetched block as one contiguous piece.
static const char *fetched_block(cache_job *job, uint64_t block) {
    const fsti_range_edges *edges = &job->edges;
    uint64_t begin = block_begin(block), end = block_end(job->entry, block);
    if (begin >= edges->begin && end <= edges->end)
        return job->fetch.buffer + (begin - edges->begin);
    bool is_head = begin < edges->begin;
    char *scratch = job->scratch[is_head ? 0 : 1];
    if (!is_head && job->claim.last == job->claim.first + 1) scratch = job->scratch[0];
    uint64_t from = fsti_max(begin, edges->begin), to = fsti_min(end, edges->end);
    memcpy(scratch + (from - begin), job->fetch.buffer + (from - edges->begin),
           (size_t)(to - from));
    return scratch;
}

/// Writes fetched blocks, then marks them in the map. 0 or an errno.
///
/// The order matters: a process that finds a block's digest in the map reads the block at once. A
/// crash may still lose the data and keep the digest, since neither is synced; then the digest does
/// not match, and the block is fetched again.
static int write_fetched(cache_job *job) {
    fsti_cache_entry *entry = job->entry;
    uint64_t first = job->claim.first, last = job->claim.last, complete_first = first,
             complete_last = last;
    uint64_t digests[CACHE_READ_BLOCKS];
    int failed = 0;
    find_complete(job, &complete_first, &complete_last);
    for (uint64_t i = first; i < last; i++) {
        const char *bytes = fetched_block(job, i);
        size_t size = (size_t)(block_end(entry, i) - block_begin(i));
        digests[i - first] = fsti_cache_digest(bytes, size);
        bool is_complete = i >= complete_first && i < complete_last;
        if (!is_complete && failed == 0)
            failed = fsti_write_at(entry->data_fd, bytes, size, block_begin(i));
    }
    if (failed == 0 && complete_first < complete_last) {
        uint64_t begin = block_begin(complete_first), end = block_end(entry, complete_last - 1);
        failed = fsti_write_at(entry->data_fd, fetched_block(job, complete_first),
                               (size_t)(end - begin), begin);
    }
    if (failed == 0) failed = fsti_cache_map_write(entry->map_fd, first, last - first, digests);
    if (failed != 0) return failed;
    uint64_t begin = block_begin(first), end = block_end(entry, last - 1);
    job->read->counts.written_bytes += end - begin;
    // Start writeback now, so that the disk works in parallel with the network.
    sync_file_range(entry->data_fd, (off_t)begin, (off_t)(end - begin), SYNC_FILE_RANGE_WRITE);
    return 0;
}

/// Stores fetched blocks. If writing fails, the bytes are still correct, and the read continues
/// without the cache. False if the cache is required.
static bool keep_fetched(cache_job *job) {
    fsti_cache_entry *entry = job->entry;
    int failed = write_fetched(job);
    if (failed == 0) return true;
    fsti_cache_break(entry, failed);
    if (!entry->is_required) return true;
    job->fetch.result = -failed;
    fsti_error_errno(&job->error, failed, entry->folder, "writing to the cache");
    return false;
}

/// Processes a finished request. False if the job ended.
static bool finish_fetch(cache_job *job) {
    job->is_fetching = false;
    fsti_http_count(&job->read->counts, &job->fetch.counts);
    bool succeeded = job->fetch.result >= 0;
    if (job->claim.last > job->claim.first) {
        uint64_t first = job->claim.first, last = job->claim.last;
        if (succeeded) succeeded = keep_fetched(job);
        fsti_cache_unclaim(job->entry, &job->claim);
        fsti_cache_pool_wake();
        if (succeeded) set_states(job, first, last, BLOCK_DONE);
        job->claim = (cache_claim){0};
    } else if (succeeded) {
        set_states(job, job->first, job->last, BLOCK_DONE);
    }
    if (succeeded) return true;
    *job->read->error = job->error;
    end_job(job, job->fetch.result);
    return false;
}

/// Reads everything that is left without the cache.
static void read_uncached(cache_job *job) {
    fsti_range_read *read = job->read;
    uint64_t first = job->first, last = job->last;
    while (first < last && job->states[first - job->first] == BLOCK_DONE) first++;
    while (last > first && job->states[last - 1 - job->first] == BLOCK_DONE) last--;
    uint64_t begin = fsti_max(block_begin(first), read->offset);
    uint64_t end = fsti_min(block_end(job->entry, last - 1), read->offset + read->size);
    (void)fetch_bytes(job, begin, end); // needs no scratch memory
}

/// Claims missing blocks and starts fetching them. False if others have claimed them all.
static bool fetch_absent(cache_job *job) {
    for (uint64_t first = job->first; first < job->last; first++) {
        if (!is_absent(job, first)) continue;
        uint64_t last = first + 1;
        while (last < job->last && is_absent(job, last)) last++;
        if (fsti_cache_claim(job->entry, first, last, &job->claim)) return true;
        first = last - 1;
    }
    return false;
}

/// With the claim held, checks again: blocks stored since the map was read are not fetched twice.
static bool is_still_absent(cache_job *job) {
    uint64_t first = job->claim.first, count = job->claim.last - first;
    uint64_t *digests = &job->digests[first - job->first];
    if (fsti_cache_map_read(job->entry->map_fd, first, count, digests) != 0) return false;
    for (uint64_t i = first; i < job->claim.last; i++)
        if (!is_absent(job, i)) return false;
    return true;
}

static void drop_claim(cache_job *job) {
    fsti_cache_unclaim(job->entry, &job->claim);
    job->claim = (cache_claim){0};
}

/// Schedules the next step of a job whose missing blocks are all claimed by other jobs. Byte-range
/// locks cannot notify across processes, so the map is polled, with growing pauses. Blocks that
/// this process stores wake the job earlier (fsti_cache_pool_wake()).
static void wait_for_others(cache_job *job) {
    uint64_t now_ns = fsti_now_ns(), first = job->first;
    while (first + 1 < job->last && !is_absent(job, first)) first++;
    if (!job->is_waiting) fsti_cache_wait_begin(job->entry);
    job->is_waiting = true;
    if (job->waiting_ns == 0) {
        job->waiting_ns = now_ns;
        job->pause_ns = PAUSE_NS_MIN;
    }
    job->is_uncached = now_ns - job->waiting_ns > CLAIM_TIMEOUT_NS ||
                       fsti_cache_is_stalled(job->entry, first, &job->stall);
    job->pause_ns = fsti_min(job->pause_ns * 3 / 2, PAUSE_NS_MAX);
    fsti_cache_pool_add(&job->task, now_ns + job->pause_ns);
}

static bool is_done(const cache_job *job) {
    for (uint64_t i = job->first; i < job->last; i++)
        if (job->states[i - job->first] != BLOCK_DONE) return false;
    return true;
}

/// One step of a job. Ends the job, starts a request, or schedules the next step; after each of the
/// three the job may already be freed or run on another thread, so nothing touches it afterwards.
static void run_job(cache_task *task) {
    cache_job *job = (cache_job *)task;
    fsti_cache_entry *entry = job->entry;
    if (job->is_fetching && !finish_fetch(job)) return;
    if (job->read->stop != NULL && atomic_load(job->read->stop)) {
        end_job(job, -ECANCELED);
        return;
    }
    bool has_map = is_done(job) || copy_present(job);
    if (is_done(job)) {
        end_job(job, (int64_t)job->read->size);
        return;
    }
    if (!has_map || job->is_uncached || job->scratch_failed || atomic_load(&entry->is_broken)) {
        read_uncached(job);
    } else if (!fetch_absent(job)) {
        wait_for_others(job);
    } else if (!is_still_absent(job)) {
        drop_claim(job);
        fsti_cache_pool_add(&job->task, 0);
    } else if (!fetch_bytes(job, block_begin(job->claim.first),
                            block_end(entry, job->claim.last - 1))) {
        drop_claim(job);
        read_uncached(job);
    }
}

void fsti_cache_read_begin(fsti_cache_entry *entry, fsti_range_read *read) {
    uint64_t first = read->offset / CACHE_BLOCK_BYTES;
    uint64_t last = fsti_cache_block_count(read->offset + read->size);
    read->counts = (fsti_http_counts){0};
    cache_job *job = NULL;
    bool fits = read->size > 0 && last - first <= CACHE_READ_BLOCKS && fsti_cache_pool_ready();
    if (fits) job = fsti_alloc_zeroed(1, sizeof *job);
    if (job == NULL) { // without the cache, the read is sent to the server directly
        fsti_range_read_begin(read);
        return;
    }
    job->task.run = run_job;
    job->entry = entry;
    job->read = read;
    job->first = first;
    job->last = last;
    fsti_cache_pool_add(&job->task, 0);
}

// ---- blocking reads ----

typedef struct read_wait {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool is_done;
} read_wait;

/// Signals before it unlocks, because after that the reader may return, and `wait` is on its stack.
static void wake_reader(fsti_range_read *read) {
    read_wait *wait = read->context;
    pthread_mutex_lock(&wait->lock);
    wait->is_done = true;
    pthread_cond_signal(&wait->changed);
    pthread_mutex_unlock(&wait->lock);
}

static void read_part(fsti_cache_entry *entry, fsti_range_read *part) {
    read_wait wait = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false};
    part->context = &wait;
    part->done = wake_reader;
    fsti_cache_read_begin(entry, part);
    pthread_mutex_lock(&wait.lock);
    while (!wait.is_done) pthread_cond_wait(&wait.changed, &wait.lock);
    pthread_mutex_unlock(&wait.lock);
    fsti_cache_lock();
    fsti_http_count(&entry->counts, &part->counts);
    fsti_cache_unlock();
}

fst_status fsti_cache_read(fsti_cache_entry *entry, fsti_range_read *read, fst_error *error) {
    fst_error cause = {.status = FST_E_IO};
    for (size_t done = 0; done < read->size;) {
        fsti_range_read part = *read;
        part.offset += done;
        part.buffer += done;
        part.size = (size_t)fsti_min(read->size - done, PART_BYTES);
        part.error = &cause;
        read_part(entry, &part);
        if (part.result < 0) {
            if (error != NULL) *error = cause;
            return cause.status;
        }
        done += part.size;
    }
    return FST_OK;
}
