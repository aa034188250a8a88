// SPDX-License-Identifier: Apache-2.0
/// Maps cached pages of views on a separate thread while the program goes on.
///
/// A page fault maps all cached pages of an aligned block of 64 KiB. One access to each block in a
/// row takes half or a third of the time of the same faults between accesses to all other pages (25
/// MB: 0.34 ms instead of 0.93 on ext4, 1.1 instead of 2.2 on tmpfs, Linux 6.18), and the program
/// is not interrupted.
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>

#include "sink.h"

/// After so many bytes the thread looks for tensors that the program has freed.
#define STEP_BYTES ((uint64_t)2 << 20)
/// What the beginning of a range costs, in bytes.
#define RANGE_BYTES ((uint64_t)32 << 10)
/// For less, a thread does not pay off.
#define MAP_AHEAD_BYTES_MIN ((uint64_t)8 << 20)
/// Mapped pages need page tables, 1/512 of this.
#define MAP_AHEAD_BYTES_MAX ((uint64_t)16 << 30)
/// Threads at once. Without a limit they become many where the program's own threads take all CPUs,
/// and each one keeps its mappings.
#define THREAD_COUNT_MAX 4u
/// How often the start of a thread tries to take the lock.
#define LOCK_TRIES 50

/// Part of a mapping whose pages are cached.
typedef struct cached_range {
    size_t file;
    uint64_t begin, end;
} cached_range;

/// What one thread maps.
struct fsti_map_ahead {
    fsti_map_ahead *next;
    uint64_t size_bytes;
    uint64_t unchecked_bytes; ///< mapped since the thread looked for freed tensors
    fsti_buffer **views; ///< by file: a reference to its mapping; NULL: none, or it is released
    size_t view_count, range_count;
    cached_range ranges[];
};

/// All that are running.
static struct {
    pthread_mutex_t lock; ///< also for the references of each
    fsti_map_ahead *first;
    unsigned count;
} running = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void free_ahead(fsti_map_ahead *ahead) {
    for (size_t i = 0; i < ahead->view_count; i++) fsti_buffer_unref(ahead->views[i]);
    fsti_free(ahead);
}

/// A forked child has none of the threads and frees what they hold. The list is consistent, because
/// fork() took its lock before the copy (fsti_fork_lock()).
static void free_in_child(void) {
    for (fsti_map_ahead *ahead = running.first, *next; ahead != NULL; ahead = next) {
        next = ahead->next;
        free_ahead(ahead);
    }
    running.first = NULL;
    running.count = 0;
}

/// When the library is loaded, behind the handlers of fork_locks.c, and before those of most
/// programs.
__attribute__((constructor(102))) static void follow_forks(void) {
    fsti_fork_lock(&running.lock);
    pthread_atfork(NULL, NULL, free_in_child);
}

static size_t file_of(const fsti_pipeline *pipeline, uint32_t chunk) {
    return fsti_chunk_extent(pipeline, chunk)->file;
}

/// Adds a chunk, to the last range if it continues that.
static void add_chunk(fsti_map_ahead *ahead, const fsti_pipeline *pipeline, uint32_t index) {
    const fsti_plan_chunk *chunk = &pipeline->job.plan->chunks[index];
    size_t file = file_of(pipeline, index);
    cached_range *last = ahead->range_count > 0 ? &ahead->ranges[ahead->range_count - 1] : NULL;
    ahead->size_bytes += chunk->end - chunk->begin;
    if (ahead->views[file] == NULL)
        ahead->views[file] = fsti_buffer_ref(pipeline->job.files[file].view);
    if (last != NULL && last->file == file && last->end == chunk->begin)
        last->end = chunk->end;
    else
        ahead->ranges[ahead->range_count++] = (cached_range){file, chunk->begin, chunk->end};
}

static bool is_wanted(const fsti_pipeline *pipeline) {
    const fsti_job *job = &pipeline->job;
    return pipeline->sink->is_view && !job->populate && !job->verifies && !job->others_read &&
           job->guard_allowed && job->threads.wanted != 1 && !job->threads.is_limited &&
           pipeline->chunks_resident > 0 && fsti_io_guard_ready();
}

/// Without ranges. NULL without memory.
static fsti_map_ahead *alloc_ahead(const fsti_pipeline *pipeline) {
    size_t view_count = 0, range_bytes = pipeline->chunks_resident * sizeof(cached_range);
    for (uint32_t i = 0; i < pipeline->chunks_known; i++)
        view_count = (size_t)fsti_max(view_count, file_of(pipeline, i) + 1);
    fsti_map_ahead *ahead =
        fsti_alloc_zeroed(1, sizeof *ahead + range_bytes + view_count * sizeof(fsti_buffer *));
    if (ahead == NULL) return NULL;
    ahead->views = (fsti_buffer **)((char *)ahead->ranges + range_bytes);
    ahead->view_count = view_count;
    return ahead;
}

fsti_map_ahead *fsti_map_ahead_find(const fsti_pipeline *pipeline) {
    const fsti_plan *plan = pipeline->job.plan;
    fsti_map_ahead *ahead = is_wanted(pipeline) ? alloc_ahead(pipeline) : NULL;
    if (ahead == NULL) return NULL;
    for (uint32_t i = 0; i < pipeline->chunks_known; i++) {
        const fsti_plan_chunk *chunk = &plan->chunks[i];
        if (!pipeline->chunks[i].is_resident) continue;
        if (ahead->size_bytes + (chunk->end - chunk->begin) > MAP_AHEAD_BYTES_MAX) break;
        add_chunk(ahead, pipeline, i);
    }
    if (ahead->size_bytes >= MAP_AHEAD_BYTES_MIN) return ahead;
    free_ahead(ahead);
    return NULL;
}

/// Releases the mappings whose tensors the program has freed.
static void release_unused(fsti_map_ahead *ahead) {
    for (size_t i = 0; i < ahead->view_count; i++) {
        fsti_buffer *view = ahead->views[i];
        if (view == NULL || !fsti_buffer_is_last_ref(view)) continue;
        pthread_mutex_lock(&running.lock);
        ahead->views[i] = NULL;
        fsti_buffer_unref(view);
        pthread_mutex_unlock(&running.lock);
    }
}

/// Page faults of this thread that had to read.
static long count_reads(void) {
    struct rusage usage = {.ru_majflt = 0};
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_majflt;
}

/// False if there is no use in going on: pages were evicted since the load opened, so that accesses
/// would read them one by one, or can't be read.
static bool map_range(fsti_map_ahead *ahead, const cached_range *range) {
    ahead->unchecked_bytes += RANGE_BYTES;
    for (uint64_t at = range->begin, end; at < range->end; at = end) {
        end = fsti_min(fsti_align_down(at, STEP_BYTES) + STEP_BYTES, range->end);
        if (ahead->unchecked_bytes >= STEP_BYTES) {
            release_unused(ahead);
            ahead->unchecked_bytes = 0;
        }
        const fsti_buffer *view = ahead->views[range->file];
        if (view == NULL) return true;
        long reads = count_reads();
        if (!fsti_view_touch(view->data + at, end - at, FSTI_VIEW_BLOCK_BYTES)) return false;
        if (count_reads() != reads) return false;
        ahead->unchecked_bytes += end - at;
    }
    return true;
}

static void remove_ahead(fsti_map_ahead *ahead) {
    fsti_map_ahead **link = &running.first;
    while (*link != ahead) link = &(*link)->next;
    *link = ahead->next;
    running.count--;
    free_ahead(ahead);
}

static void *map_ranges(void *context) {
    fsti_map_ahead *ahead = context;
    ahead->unchecked_bytes = STEP_BYTES; // the program may have freed everything already
    for (size_t i = 0; i < ahead->range_count && map_range(ahead, &ahead->ranges[i]); i++);
    pthread_mutex_lock(&running.lock);
    remove_ahead(ahead);
    pthread_mutex_unlock(&running.lock);
    return NULL;
}

/// Not for long: a fork handler of the program may load a model, or wait for a thread that does,
/// while fork() holds the lock.
static bool try_lock(void) {
    for (int i = 0; i < LOCK_TRIES; i++) {
        if (pthread_mutex_trylock(&running.lock) == 0) return true;
        sched_yield();
    }
    return false;
}

/// False: the program maps the pages.
static bool start_thread(fsti_map_ahead *ahead) {
    pthread_t thread;
    if (!try_lock()) return false;
    bool is_started =
        running.count < THREAD_COUNT_MAX && fsti_thread_start(&thread, map_ranges, ahead) == 0;
    if (is_started) {
        running.count++;
        ahead->next = running.first;
        running.first = ahead;
        pthread_detach(thread);
    }
    pthread_mutex_unlock(&running.lock);
    return is_started;
}

void fsti_map_ahead_start(fsti_map_ahead *ahead) {
    sigset_t all, before;
    if (ahead == NULL) return;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // a handler that forks would wait for the lock
    bool is_started = start_thread(ahead);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!is_started) free_ahead(ahead);
}

void fsti_map_ahead_drop(fsti_map_ahead *ahead) {
    if (ahead != NULL) free_ahead(ahead);
}
