// SPDX-License-Identifier: Apache-2.0
/// A save in progress: private to the save room.
#ifndef FSTI_WRITER_H
#define FSTI_WRITER_H

#include <pthread.h>

#include "device/device.h"
#include "layout.h"
#include "stage.h"
#include "output/output.h"
#include "save.h"

/// A tensor of a save.
typedef struct save_tensor {
    const char *name;
    size_t name_size;
    const char *data;
    fst_device device;           ///< whose address `data` is
    uint32_t file, index;        ///< index: in the file's layout
    uint64_t offset, size_bytes; ///< in the file
    atomic_uint_fast64_t bytes_put;
    atomic_bool is_mapped; ///< the caller fills it in place
} save_tensor;

/// A file of a save.
typedef struct save_file {
    fst_layout layout;
    fsti_target target;
    fsti_output *output;
    save_stage *stage; ///< open while bytes come
    bool header_put;
    bool keeps_hidden; ///< while the index names the hidden one
} save_file;

struct fst_writer {
    fst_save_options options;
    save_tensor *tensors;
    size_t tensor_count;
    uint32_t *members; ///< tensors, grouped by file, in layout index order
    size_t *member_begin;
    char *names;
    save_file *files;
    uint32_t file_count;
    char *folder, *stem;         ///< of a set
    fsti_target index_target;    ///< path NULL: no index
    char **published;            ///< paths for fst_writer_path(), links not followed
    pthread_mutex_t lock;        ///< counters and progress
    pthread_mutex_t stream_lock; ///< the stage that streamed bytes go through
    save_file *stream_file;      ///< whose stage that is
    stage_counts counts;
    uint64_t bytes_total, bytes_done, start_ns, total_ns, sync_ns;
    uint64_t sync_count;
    size_t tensors_done;
    bool is_finished, is_committed, is_broken;
};

/// Syncs an output, counted.
fst_status fsti_save_sync(fst_writer *writer, fsti_output *output, fst_error *error);

/// Puts finished files in place.
fst_status fsti_save_publish(fst_writer *writer, fst_error *error);

#endif
