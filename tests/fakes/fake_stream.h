// SPDX-License-Identifier: Apache-2.0
/// Streams and events of the fake drivers: one thread per stream. With a simulated bus no thread
/// runs: queued work has an end time, and only the queries take CPU time.
#ifndef FAKE_STREAM_H
#define FAKE_STREAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fake_stream fake_stream;
typedef struct fake_event fake_event;

/// Work of a stream; freed when it is done.
typedef struct fake_work {
    void (*run)(struct fake_work *work);
    fake_event *event;
    long event_turn;
    void *target, *place;
    const void *source;
    size_t size;
    int byte;
    unsigned long long sum; ///< of the source, when the copy was queued; 0: not known
    bool is_copy;           ///< its memory must not go before it is done
} fake_work;

/// `blocking`: in order with the legacy stream, which is the default for streams.
fake_stream *fake_stream_open(bool blocking);
/// The stream that the handle 0 stands for: in order with every blocking one.
fake_stream *fake_stream_legacy(void);
/// Finishes what is queued.
void fake_stream_close(fake_stream *stream);
void fake_stream_sync(fake_stream *stream);
/// Queues work (copied); NULL runs it now. Each piece of work first sleeps up to `delay_us`.
void fake_stream_add(fake_stream *stream, const fake_work *work, long delay_us);

/// Waits for all that is queued anywhere.
void fake_streams_sync(void);
/// Whether a queued copy reads or writes there.
bool fake_streams_use(const void *begin, size_t size);

/// When the bus will have moved `size` bytes that are queued now and wait for what ends at
/// `not_before_ns`: copies of all streams take turns on it. (fake_memory.c)
int64_t fake_bus_take(size_t size, int64_t not_before_ns);
int64_t fake_now_ns(void);

/// `blocks`: waiting threads sleep.
fake_event *fake_event_open(bool blocks);
bool fake_event_blocks(const fake_event *event);
void fake_event_close(fake_event *event);
void fake_event_record(fake_event *event, fake_stream *stream, long delay_us);
void fake_event_follow(fake_event *event, fake_stream *stream);
bool fake_event_done(fake_event *event);
void fake_event_sync(fake_event *event);

#endif
