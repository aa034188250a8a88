// SPDX-License-Identifier: Apache-2.0
/// Streams and events: queues of work, each done by a thread of its own.
#include "fake_stream.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
    bool is_busy, is_closing;
    unsigned seed;
};

struct fake_event {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    long recorded, done;
    int refs; ///< its owner's and those of work in queues
};

static atomic_uint next_seed = 1;

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
        stream->is_busy = true;
        stream->seed = stream->seed * 1103515245u + 12345u;
        unsigned chance = stream->seed >> 16;
        pthread_mutex_unlock(&stream->lock);
        if (item->delay_us > 0) usleep((useconds_t)(chance % (unsigned long)item->delay_us));
        item->work.run(&item->work);
        free(item);
        pthread_mutex_lock(&stream->lock);
        stream->is_busy = false;
        pthread_cond_broadcast(&stream->changed);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}

fake_stream *fake_stream_open(void) {
    fake_stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL) return NULL;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->changed, NULL);
    stream->last = &stream->first;
    stream->seed = atomic_fetch_add(&next_seed, 1);
    if (pthread_create(&stream->thread, NULL, run_stream, stream) == 0) return stream;
    free(stream);
    return NULL;
}

void fake_stream_close(fake_stream *stream) {
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
    pthread_mutex_lock(&stream->lock);
    while (stream->first != NULL || stream->is_busy)
        pthread_cond_wait(&stream->changed, &stream->lock);
    pthread_mutex_unlock(&stream->lock);
}

void fake_stream_add(fake_stream *stream, const fake_work *work, long delay_us) {
    queued *item = stream == NULL ? NULL : malloc(sizeof *item);
    if (item == NULL) {
        fake_work now = *work;
        now.run(&now);
        return;
    }
    *item = (queued){*work, delay_us, NULL};
    pthread_mutex_lock(&stream->lock);
    *stream->last = item;
    stream->last = &item->next;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
}

fake_event *fake_event_open(void) {
    fake_event *event = calloc(1, sizeof *event);
    if (event == NULL) return NULL;
    pthread_mutex_init(&event->lock, NULL);
    pthread_cond_init(&event->changed, NULL);
    event->refs = 1;
    return event;
}

void fake_event_close(fake_event *event) { event_unref(event); }

static void happen(fake_work *work) {
    pthread_mutex_lock(&work->event->lock);
    if (work->event_turn > work->event->done) work->event->done = work->event_turn;
    pthread_cond_broadcast(&work->event->changed);
    pthread_mutex_unlock(&work->event->lock);
    event_unref(work->event);
}

void fake_event_record(fake_event *event, fake_stream *stream, long delay_us) {
    pthread_mutex_lock(&event->lock);
    fake_work work = {.run = happen, .event = event, .event_turn = ++event->recorded};
    event->refs++;
    pthread_mutex_unlock(&event->lock);
    fake_stream_add(stream, &work, delay_us);
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

void fake_event_follow(fake_event *event, fake_stream *stream) {
    pthread_mutex_lock(&event->lock);
    fake_work work = {.run = hold_stream, .event = event, .event_turn = event->recorded};
    event->refs++;
    pthread_mutex_unlock(&event->lock);
    fake_stream_add(stream, &work, 0);
}

bool fake_event_done(fake_event *event) {
    pthread_mutex_lock(&event->lock);
    bool done = event->done >= event->recorded;
    pthread_mutex_unlock(&event->lock);
    return done;
}

void fake_event_sync(fake_event *event) {
    pthread_mutex_lock(&event->lock);
    long turn = event->recorded;
    pthread_mutex_unlock(&event->lock);
    wait_for(event, turn);
}
