// SPDX-License-Identifier: Apache-2.0
/// The state of a load. Private to the loader module.
#ifndef FSTI_LOAD_H
#define FSTI_LOAD_H

#include "load_handle.h"
#include "model/open_model.h"
#include "plan/plan.h"
#include "transfer/transfer.h"

/// Decoder memory, in addition to the buffers of batches.
typedef struct load_workspaces {
    uint64_t bytes;        ///< per thread; 0: nothing is decoded
    uint32_t thread_count; ///< threads to use; 0: chosen from the machine
} load_workspaces;

/// How the files of a plan are read, and the facts for the number of threads.
typedef struct load_methods {
    fsti_file_route *routes; ///< by file of the model
    fsti_thread_facts threads;
} load_methods;

typedef struct item_read item_read;

struct fst_loader {
    fst_model *model;
    fst_load_options options; ///< without pointers to items and globs
    fst_load_tuning tuning;
    fst_load_mode mode;       ///< AUTO is resolved
    fsti_device *device;      ///< NULL: the CPU
    fst_device device_id;     ///< of the tensors
    uint32_t processor_count; ///< 0: not determined yet
    fsti_load_facts facts;
    fsti_load_policy policy;
    load_methods methods;
    fsti_plan_want *wants;
    uint64_t *slices;           ///< slice bounds that `wants` points to
    fsti_plan_file *plan_files; ///< by file of the model: what the plan must know
    fsti_job_file *files;       ///< by file of the model: what the pipeline must know
    bool verifies;              ///< some file has digests
    fst_allocator allocator;
    load_workspaces workspaces;
    fsti_plan plan;
    fsti_pipeline *pipeline;
    fsti_allocator_lock allocator_lock;
    pthread_mutex_t place_lock; ///< a destination is written by one read
    pthread_mutex_t lock;       ///< protects the fields below
    item_read *reads;           ///< running and parked reads of single items
    fst_load_stats read_counts; ///< counts of finished ones
    size_t next_delivery;
    uint32_t next_batch;      ///< earlier batches were returned completely
    uint32_t *item_of_tensor; ///< by tensor index, item + 1 or 0; made on the first access by name
    uint64_t plan_ns, wait_ns;
    fsti_share *share;      ///< NULL: the load has its own memory
    char share_reason[192]; ///< why, if it was to be shared
    uint64_t begun_ns;
    bool pins_memory; ///< tensors are in pinned CPU memory
    bool is_cancelled;
    atomic_bool is_logged; ///< the end was logged
};

/// Logs what a load is going to do, at debug level. (load_log.c)
void fsti_loader_log_begin(const fst_loader *loader);
/// Logs the end of a load once: retries and disk cache failures as warnings, and one line of
/// information. `error` (or NULL) belongs to a status other than FST_OK and FST_END. FST_E_TIMEOUT
/// does not end a load. The caller must hold no lock.
void fsti_loader_log_end(fst_loader *loader, fst_status status, const fst_error *error);
/// Logs the end of a load that is being closed, with its error, if any.
void fsti_loader_log_close(fst_loader *loader);

/// Fills loader->wants from the options' items or selection.
fst_status fsti_loader_resolve(fst_loader *loader, const fst_load_options *options,
                               fst_error *error);

/// Fills loader->facts except for the budget, from the request and the machine. (facts.c)
void fsti_loader_gather_facts(fst_loader *loader);
/// The same for a load of a whole model with default options, whose first file is `file`.
void fsti_loader_file_facts(fsti_file *file, uint64_t model_bytes, fsti_load_facts *out);
/// Whether some item has a destination.
bool fsti_loader_has_destinations(const fst_loader *loader);
/// CPUs that this process may use, determined once per load.
uint32_t fsti_loader_processors(fst_loader *loader);

typedef struct load_route_request {
    fst_engine engine;
    const char *no_mapping; ///< see fsti_io_request
    bool keeps_cache, clears_cache;
    bool must_keep_cache;  ///< the program asked for it, even if the next open drops it
    bool is_small;         ///< probing is not worth it
    uint64_t buffer_bytes; ///< address space that the load's buffers will take
} load_route_request;
/// Chooses the route of a file into memory: probes what works, and asks the policy.
fst_status fsti_loader_find_route(fsti_file *file, const load_route_request *request,
                                  fsti_file_route *out, fst_error *error);
/// Probes the files of a plan, for views or memory. The caller frees out->routes, also on failure.
fst_status fsti_loader_find_methods(fst_loader *loader, const fsti_plan *plan, bool is_view,
                                    load_methods *out, fst_error *error);

/// Plans requests according to the policy.
fst_status fsti_loader_plan(const fst_loader *loader, const fsti_plan_want *wants, size_t count,
                            bool is_view, fsti_plan *out, fst_error *error);
/// The pipeline job of a plan; it points to all three arguments.
fsti_job fsti_loader_job(fst_loader *loader, const fsti_plan *plan, const load_methods *methods);

/// Whether the address space has room for two mappings of all batches: a shared load maps its
/// segment once to fill it and once for the tensors.
bool fsti_loader_can_map_twice(const fst_loader *loader);
/// Opens loader->share if the request wants it and it is possible. (shared_load.c)
void fsti_loader_open_share(fst_loader *loader);

/// The rest of a timeout that started at `start_ns`. (wait_time.c)
int64_t fsti_loader_time_left(int64_t timeout_ms, uint64_t start_ns);
/// Counts the time since `start_ns` as waiting time.
void fsti_loader_add_wait(fst_loader *loader, uint64_t start_ns);

/// Whether an item of a mapped load cannot be a view, because it is not contiguous or misaligned
/// for its dtype.
bool fsti_loader_needs_copy(const fst_loader *loader, const fsti_plan_item *item);
/// Reads an item in parallel to the load, into owned memory or to its destination. (item_read.c)
fst_status fsti_loader_read_item(fst_loader *loader, uint32_t item, int64_t timeout_ms,
                                 fst_tensor **out, fst_error *error);
void fsti_loader_cancel_reads(fst_loader *loader);
/// Adds the counts of single reads so far. The lock must be held.
void fsti_loader_add_read_counts(fst_loader *loader, fst_load_stats *stats);
/// Ends all single reads. No caller may be waiting.
void fsti_loader_end_reads(fst_loader *loader);

/// Fills loader->workspaces and the budget for buffers in loader->facts. With a budget, limits the
/// number of decoding threads to what it allows.
void fsti_loader_share_budget(fst_loader *loader);
/// FST_E_BUDGET with figures if a batch of the plan does not fit.
fst_status fsti_loader_check_budget(const fst_loader *loader, fst_error *error);

/// FST_E_UNSUPPORTED for requests that cannot be verified.
fst_status fsti_loader_check_verified(const fst_loader *loader, fst_error *error);

/// An item whose bytes are complete, with its buffer (NULL if it has a destination or is a view).
typedef struct tensor_source {
    const fsti_plan_item *item;
    const fsti_plan_want *want;
    fsti_buffer *buffer;
} tensor_source;
fst_status fsti_tensor_make(fst_loader *loader, const tensor_source *source, fst_tensor **out,
                            fst_error *error);

#endif
