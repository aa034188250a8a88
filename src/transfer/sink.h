// SPDX-License-Identifier: Apache-2.0
/// Where chunks go: memory of the processors, views of the file, a device. A worker reads chunks
/// and knows these five functions, not what is behind them. From any worker's thread. The others
/// are the pipeline's, when it begins and ends; NULL: there is nothing to do.
#ifndef FSTI_SINK_H
#define FSTI_SINK_H

#include "pipeline.h"

typedef enum sink_answer {
    SINK_READY, ///< its blocks may be read
    SINK_BUSY,  ///< no room now: ask again when something of yours is finished, or with `wait`
    SINK_DONE,  ///< nothing is to be read: the sink has finished the chunk, or the work stops
} sink_answer;

/// What a chunk gets: where `origin` of its file is to be read to. NULL: the worker reads to slots
/// of its own, from where place() takes it.
typedef struct sink_room {
    bool wait; ///< in: for room, whatever it takes
    sink_answer answer;
    char *base;
    uint64_t origin;
} sink_room;

/// Bytes [begin, end) of a chunk, found at `source`; up to `needed_end` may be looked at.
typedef struct sink_block {
    uint32_t chunk;
    uint64_t begin, end, needed_end;
    const char *source;
    bool is_mapped; ///< a mapping: its pages may fail to come
} sink_block;

struct fsti_sink {
    bool is_view;   ///< there is no memory to be made, and chunks that are in memory are done
    bool has_slots; ///< the room of a chunk takes every read, so that workers need no slots
    /// Chunks are looked at while others are on their way, and not all at once before any is.
    bool looks_ahead;
    fst_status (*prepare)(fsti_pipeline *pipeline, uint32_t chunk, sink_room *room,
                          worker_counts *counts, fst_error *error);
    fst_status (*place)(fsti_pipeline *pipeline, const sink_block *block, worker_counts *counts,
                        fst_error *error);
    /// All blocks are placed: the chunk is finished, now or when reap() finds that it has arrived.
    fst_status (*complete)(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts,
                           fst_error *error);
    /// Waits for a chunk that is on its way; *any is false when none is.
    fst_status (*reap)(fsti_pipeline *pipeline, bool *any, worker_counts *counts, fst_error *error);
    /// The work stops: wakes who waits for room.
    void (*wake)(fsti_pipeline *pipeline);
    /// Makes what chunks go through.
    fst_status (*open)(fsti_pipeline *pipeline, fst_error *error);
    /// Looks for ways that want the first batch's memory, before any thread runs.
    fst_status (*probe)(fsti_pipeline *pipeline, fst_error *error);
    /// No worker runs any more; also where open() has failed.
    void (*close)(fsti_pipeline *pipeline);
    /// How bytes came, for the statistics; "" when there is nothing to tell.
    void (*explain)(fsti_pipeline *pipeline, char *text, size_t size);
};

extern const fsti_sink fsti_sink_host, fsti_sink_view, fsti_sink_device;

/// The sink that a job wants.
const fsti_sink *fsti_sink_choose(const fsti_job *job);

/// Runs `copy(context)`, which reads the block; FST_E_IO or FST_E_FILE_CHANGED when pages of a
/// mapping could not be had.
fst_status fsti_sink_copy(fsti_pipeline *pipeline, const sink_block *block,
                          void (*copy)(void *context), void *context, fst_error *error);

/// How absent bytes of views, and of what is copied from a mapping, come into the page cache.
fsti_view_way fsti_bring_way(fsti_pipeline *pipeline, uint32_t chunk);
/// Brings a chunk into the page cache and into the file's shared mapping.
fst_status fsti_bring_chunk(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts,
                            fst_error *error);
/// The two halves of the way by huge pages: before the pages are made present, and after.
void fsti_bring_expect(fsti_pipeline *pipeline, uint32_t chunk, char *mapping);
void fsti_bring_look(fsti_pipeline *pipeline, uint32_t chunk);
/// How they came so far: "in huge pages", ..; "" when none did.
const char *fsti_bring_words(fsti_pipeline *pipeline);

/// For sinks that have nothing to wait for.
fst_status fsti_sink_finish(fsti_pipeline *pipeline, uint32_t chunk, worker_counts *counts,
                            fst_error *error);
fst_status fsti_sink_reap_none(fsti_pipeline *pipeline, bool *any, worker_counts *counts,
                               fst_error *error);
void fsti_sink_wake_none(fsti_pipeline *pipeline);

#endif
