// SPDX-License-Identifier: Apache-2.0
/// Streams and events: queues of work, each processed by its own thread.
#include "fake_stream.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "fake_numbers.h"

typedef struct queued {
    fake_work work;
    long delay_us;
    struct queued *next;
} queued;

struct fake_stream {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    queued *first, **last;
    const queued *running;
    bool is_blocking, is_closing;
    int64_t over_ns; ///< of a simulated bus: when what is queued is over
    unsigned seed;
    fake_stream *next; ///< of all that are open
};

struct fake_event {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    long recorded, done;
    int64_t over_ns; ///< of a simulated bus: when it will have happened
    int refs;        ///< its owner's and those of work in queues
    bool blocks;
};

static atomic_uint next_seed = 1;
static struct {
    pthread_mutex_t lock;
    fake_stream *first, *legacy;
} streams = {.lock = PTHREAD_MUTEX_INITIALIZER};

static bool is_simulated(void) { return fake_number(BUS_MBPS) != 0; }

/// Sleeps with microsecond precision, because the system's sleep overruns are not the driver's.
static void sleep_until(int64_t time_ns) {
    struct timespec time = {time_ns / 1000000000, time_ns % 1000000000};
    prctl(PR_SET_TIMERSLACK, 1ul);
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL);
    prctl(PR_SET_TIMERSLACK, 0ul);
}

/// What is queued on the stream from now on is over after that.
static int64_t hold_until(fake_stream *stream, int64_t time_ns) {
    pthread_mutex_lock(&stream->lock);
    if (time_ns > stream->over_ns) stream->over_ns = time_ns;
    int64_t over_ns = stream->over_ns;
    pthread_mutex_unlock(&stream->lock);
    return over_ns;
}

static void event_unref(fake_event *event) {
    pthread_mutex_lock(&event->lock);
    bool is_last = --event->refs == 0;
    pthread_mutex_unlock(&event->lock);
    if (!is_last) return;
    pthread_mutex_destroy(&event->lock);
    pthread_cond_destroy(&event->changed);
    free(event);
}

static void *run_stream(void *argument) {
    fake_stream *stream = argument;
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (stream->first == NULL && !stream->is_closing)
            pthread_cond_wait(&stream->changed, &stream->lock);
        queued *item = stream->first;
        if (item == NULL) break;
        stream->first = item->next;
        if (stream->first == NULL) stream->last = &stream->first;
        stream->running = item;
        stream->seed = stream->seed * 1103515245u + 12345u;
        unsigned chance = stream->seed >> 16;
        pthread_mutex_unlock(&stream->lock);
        if (item->delay_us > 0) usleep((useconds_t)(chance % (unsigned long)item->delay_us));
        item->work.run(&item->work);
        pthread_mutex_lock(&stream->lock);
        stream->running = NULL;
        free(item);
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

static fake_stream *open_stream(bool blocking) {
    fake_stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL) return NULL;
    stream->is_blocking = blocking;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    stream->last = &stream->first;
    stream->seed = atomic_fetch_add(&next_seed, 1);
    if (pthread_create(&stream->thread, NULL, run_stream, stream) == 0) return stream;
    free(stream);
    return NULL;
}

fake_stream *fake_stream_open(bool blocking) {
    fake_stream *stream = open_stream(blocking);
    if (stream == NULL) return NULL;
    pthread_mutex_lock(&streams.lock);
    stream->next = streams.first;
    streams.first = stream;
    pthread_mutex_unlock(&streams.lock);
    return stream;
}

fake_stream *fake_stream_legacy(void) {
    pthread_mutex_lock(&streams.lock);
    if (streams.legacy == NULL) streams.legacy = open_stream(false);
    fake_stream *legacy = streams.legacy;
    pthread_mutex_unlock(&streams.lock);
    if (legacy == NULL) abort();
    return legacy;
}

void fake_stream_close(fake_stream *stream) {
    pthread_mutex_lock(&streams.lock);
    for (fake_stream **place = &streams.first; *place != NULL; place = &(*place)->next) {
        if (*place != stream) continue;
        *place = stream->next;
        break;
    }
    pthread_mutex_unlock(&streams.lock);
    pthread_mutex_lock(&stream->lock);
    stream->is_closing = true;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->thread, NULL);
    pthread_mutex_destroy(&stream->lock);
    pthread_cond_destroy(&stream->changed);
    free(stream);
}

void fake_stream_sync(fake_stream *stream) {
    if (stream == NULL) return;
    if (is_simulated()) sleep_until(hold_until(stream, 0));
    pthread_mutex_lock(&stream->lock);
    while (stream->first != NULL || stream->running != NULL)
        pthread_cond_wait(&stream->changed, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
}

void fake_streams_sync(void) {
    pthread_mutex_lock(&streams.lock);
    fake_stream_sync(streams.legacy);
    for (fake_stream *one = streams.first; one != NULL; one = one->next) fake_stream_sync(one);
    pthread_mutex_unlock(&streams.lock);
}

static bool overlaps(const fake_work *work, const char *begin, size_t size) {
    const char *target = work->target, *source = work->source;
    bool writes = target < begin + size && begin < target + work->size;
    return work->is_copy && (writes || (source < begin + size && begin < source + work->size));
}

static bool stream_uses(fake_stream *stream, const char *begin, size_t size) {
    if (stream == NULL) return false;
    pthread_mutex_lock(&stream->lock);
    bool uses = stream->running != NULL && overlaps(&stream->running->work, begin, size);
    for (const queued *item = stream->first; item != NULL && !uses; item = item->next)
        uses = overlaps(&item->work, begin, size);
    pthread_mutex_unlock(&stream->lock);
    return uses;
}

bool fake_streams_use(const void *begin, size_t size) {
    pthread_mutex_lock(&streams.lock);
    bool uses = stream_uses(streams.legacy, begin, size);
    for (fake_stream *one = streams.first; one != NULL && !uses; one = one->next)
        uses = stream_uses(one, begin, size);
    pthread_mutex_unlock(&streams.lock);
    return uses;
}

static void queue_work(fake_stream *stream, const fake_work *work, long delay_us) {
    queued *item = malloc(sizeof *item);
    if (item == NULL) abort();
    *item = (queued){*work, delay_us, NULL};
    pthread_mutex_lock(&stream->lock);
    *stream->last = item;
    stream->last = &item->next;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
}

fake_event *fake_event_open(bool blocks) {
    fake_event *event = calloc(1, sizeof *event);
    if (event == NULL) return NULL;
    pthread_mutex_init(&event->lock, NULL);
    pthread_cond_init(&event->changed, NULL);
    event->refs = 1;
    event->blocks = blocks;
    return event;
}

bool fake_event_blocks(const fake_event *event) { return event->blocks; }

void fake_event_close(fake_event *event) { event_unref(event); }

static void happen(fake_work *work) {
    pthread_mutex_lock(&work->event->lock);
    if (work->event_turn > work->event->done) work->event->done = work->event_turn;
    pthread_cond_broadcast(&work->event->changed);
    pthread_mutex_unlock(&work->event->lock);
    event_unref(work->event);
}

void fake_event_record(fake_event *event, fake_stream *stream, long delay_us) {
    if (is_simulated()) {
        int64_t over_ns = hold_until(stream, 0);
        pthread_mutex_lock(&event->lock);
        event->over_ns = over_ns;
        pthread_mutex_unlock(&event->lock);
        return;
    }
    pthread_mutex_lock(&event->lock);
    fake_work work = {.run = happen, .event = event, .event_turn = ++event->recorded};
    event->refs++;
    pthread_mutex_unlock(&event->lock);
    queue_work(stream, &work, delay_us);
}

static void wait_for(fake_event *event, long turn) {
    pthread_mutex_lock(&event->lock);
    while (event->done < turn) pthread_cond_wait(&event->changed, &event->lock);
    pthread_mutex_unlock(&event->lock);
}

static void hold_stream(fake_work *work) {
    wait_for(work->event, work->event_turn);
    event_unref(work->event);
}

static int64_t event_over_ns(fake_event *event) {
    pthread_mutex_lock(&event->lock);
    int64_t over_ns = event->over_ns;
    pthread_mutex_unlock(&event->lock);
    return over_ns;
}

void fake_event_follow(fake_event *event, fake_stream *stream) {
    if (is_simulated()) {
        hold_until(stream, event_over_ns(event));
        return;
    }
    pthread_mutex_lock(&event->lock);
    fake_work work = {.run = hold_stream, .event = event, .event_turn = event->recorded};
    event->refs++;
    pthread_mutex_unlock(&event->lock);
    queue_work(stream, &work, 0);
}

bool fake_event_done(fake_event *event) {
    pthread_mutex_lock(&event->lock);
    bool done = event->done >= event->recorded;
    int64_t over_ns = event->over_ns;
    pthread_mutex_unlock(&event->lock);
    return done && (over_ns == 0 || over_ns <= fake_now_ns());
}

void fake_event_sync(fake_event *event) {
    if (is_simulated()) {
        sleep_until(event_over_ns(event));
        return;
    }
    pthread_mutex_lock(&event->lock);
    long turn = event->recorded;
    pthread_mutex_unlock(&event->lock);
    wait_for(event, turn);
}

/// New work on `later` waits for the work already queued on `earlier`.
static void order_streams(fake_stream *earlier, fake_stream *later) {
    fake_event *event = fake_event_open(false);
    if (event == NULL) abort();
    fake_event_record(event, earlier, 0);
    fake_event_follow(event, later);
    fake_event_close(event);
}

void fake_stream_add(fake_stream *stream, const fake_work *work, long delay_us) {
    if (is_simulated()) {
        if (work->is_copy) hold_until(stream, fake_bus_take(work->size, hold_until(stream, 0)));
        return;
    }
    pthread_mutex_lock(&streams.lock);
    fake_stream *legacy = streams.legacy;
    if (stream->is_blocking && legacy != NULL) order_streams(legacy, stream);
    for (fake_stream *one = streams.first; one != NULL && stream == legacy; one = one->next)
        if (one->is_blocking) order_streams(one, legacy);
    pthread_mutex_unlock(&streams.lock);
    queue_work(stream, work, delay_us);
}
