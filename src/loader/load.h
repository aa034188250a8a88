// SPDX-License-Identifier: Apache-2.0
/// A load's inside: private to the loader room.
#ifndef FSTI_LOAD_H
#define FSTI_LOAD_H

#include "fastsafetensors/experimental.h"
#include "loader.h"
#include "model/model.h"
#include "plan/plan.h"
#include "transfer/transfer.h"

/// What threads that decode take beside the buffers of batches.
typedef struct load_rooms {
    uint64_t bytes;        ///< of each; 0: nothing is decoded
    uint32_t thread_count; ///< the threads to ask for; 0: by the machine
} load_rooms;

/// How a plan's files are read, and what is known of threads to do it.
typedef struct load_ways {
    fsti_file_route *routes; ///< by file of the model
    fsti_thread_facts threads;
} load_ways;

typedef struct item_read item_read;

struct fst_loader {
    fst_model *model;
    fst_load_options options; ///< without its pointers to items and globs
    fst_load_tuning tuning;
    fst_load_mode mode;   ///< what AUTO became
    fsti_device *device;  ///< NULL: the processors
    fst_device device_id; ///< of tensors
    bool locks_memory;    ///< tensors lie in locked memory of the processors
    fsti_load_facts facts;
    uint32_t processor_count; ///< 0: not asked for yet
    fsti_load_policy policy;
    load_ways ways;
    fsti_plan_want *wants;
    uint64_t *slices; ///< the numbers that wants point to
    const fsti_header **headers;
    fsti_file **files;
    /// By file, what it is held against; NULL when the model is not verified.
    const fsti_digest_list **digests;
    uint64_t *file_bytes;
    uint64_t *made_bytes; ///< see fsti_plan_rules
    fsti_buffer **views;  ///< FST_MODE_MAP: mappings by file
    char **mappings;      ///< their addresses
    fst_allocator allocator;
    load_rooms rooms;
    fsti_plan plan;
    fsti_pipeline *pipeline;
    pthread_mutex_t allocator_lock; ///< the caller's allocator is called by one thread at a time
    pthread_mutex_t place_lock;     ///< a destination is read to once
    pthread_mutex_t lock;           ///< for what follows
    bool is_cancelled;
    item_read *reads;           ///< items that are read by themselves now
    fst_load_stats read_counts; ///< what those have cost that are over
    size_t next_delivery;
    uint32_t next_batch;      ///< batches before it have been handed out
    uint32_t *item_of_tensor; ///< by tensor index, item + 1 or 0; made when a name is asked for
    uint64_t plan_ns, wait_ns;
};

/// Fills loader->wants from the options' items, or from its selection.
fst_status fsti_loader_resolve(fst_loader *loader, const fst_load_options *options,
                               fst_error *error);

/// Fills loader->facts but for the budget: of the request, and of the machine as it is. (facts.c)
void fsti_loader_look(fst_loader *loader);
/// The same of a load by default of all of a model, whose first file is `file`.
void fsti_loader_look_at_file(fsti_file *file, uint64_t model_bytes, fsti_load_facts *out);
/// Whether some item's memory is given with the request.
bool fsti_loader_has_destinations(const fst_loader *loader);
/// Processors that this process may use, asked for once a load.
uint32_t fsti_loader_processors(fst_loader *loader);

typedef struct load_route_wish {
    fst_engine engine;
    bool guard_allowed, keeps_cache, clears_cache;
    bool is_small;         ///< nothing is probed for it
    uint64_t buffer_bytes; ///< of address space that the load's buffers will take
} load_route_wish;
/// What reads a file's bytes to memory: by what works for it, and what policy makes of that.
fst_status fsti_loader_find_route(fsti_file *file, const load_route_wish *wish,
                                  fsti_file_route *out, fst_error *error);
/// Looks at the files of a plan, of views or of memory. out->routes is the caller's to free,
/// whatever comes of it.
fst_status fsti_loader_find_ways(fst_loader *loader, const fsti_plan *plan, bool is_view,
                                 load_ways *out, fst_error *error);

/// Plans wants, by the policy that was chosen.
fst_status fsti_loader_plan(const fst_loader *loader, const fsti_plan_want *wants, size_t count,
                            bool is_view, fsti_plan *out, fst_error *error);
/// What the pipeline of a plan is told; it points to all three.
fsti_job fsti_loader_job(fst_loader *loader, const fsti_plan *plan, const load_ways *ways);

/// What is left of a time limit since `start_ns`. (wait_time.c)
int64_t fsti_loader_time_left(int64_t timeout_ms, uint64_t start_ns);
/// Counts the caller's time since `start_ns` as waited.
void fsti_loader_add_wait(fst_loader *loader, uint64_t start_ns);

/// Whether an item of a map can't be a view: it is not one piece of its file, or its dtype allows
/// no such address.
bool fsti_loader_is_apart(const fst_loader *loader, const fsti_plan_item *item);
/// Reads an item beside the load, to memory of its own or to its destination. (item_read.c)
fst_status fsti_loader_read_item(fst_loader *loader, uint32_t item, int64_t timeout_ms,
                                 fst_tensor **out, fst_error *error);
void fsti_loader_cancel_reads(fst_loader *loader);
/// Adds what reads beside the load have cost so far. The lock is held.
void fsti_loader_add_read_counts(fst_loader *loader, fst_load_stats *stats);
/// Nobody waits for any of them.
void fsti_loader_end_reads(fst_loader *loader);

/// Fills loader->rooms, with a budget of no more threads that decode than it has room for, and
/// what that leaves for buffers, among loader->facts.
void fsti_loader_share_budget(fst_loader *loader);
/// FST_E_BUDGET with the numbers when a batch of the plan does not fit.
fst_status fsti_loader_check_budget(const fst_loader *loader, fst_error *error);

/// FST_E_UNSUPPORTED for what can't be loaded verified.
fst_status fsti_loader_check_verified(const fst_loader *loader, fst_error *error);

/// An item whose bytes are in place, and the buffer (NULL where the item has a destination, or is a
/// view).
typedef struct tensor_source {
    const fsti_plan_item *item;
    const fsti_plan_want *want;
    fsti_buffer *buffer;
} tensor_source;
fst_status fsti_tensor_make(fst_loader *loader, const tensor_source *source, fst_tensor **out,
                            fst_error *error);

#endif
