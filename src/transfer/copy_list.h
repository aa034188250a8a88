// SPDX-License-Identifier: Apache-2.0
/// How a chunk in a slot gets to the device. Private to the transfer module. Repeated runs are
/// merged into pieces. Up to eight plain pieces become separate copies. More pieces, or converted
/// ones, are copied as one chunk and scattered by the kernel on the device. Without the kernel the
/// CPU scatters.
#ifndef FSTI_COPY_LIST_H
#define FSTI_COPY_LIST_H

#include "pipeline.h"

typedef struct copy_list_builder copy_list_builder;

/// Starts a list for the slot whose memory is `data`. Must be closed.
fst_status fsti_copy_list_open(fsti_staging_ring *ring, uint32_t slot, char *data, bool has_kernels,
                               copy_list_builder **out, fst_error *error);
/// Sets how many bytes of the slot belong to the chunk. The table of pieces follows them, so this
/// is the first call for a list.
void fsti_copy_list_set_size(copy_list_builder *builder, uint64_t size_bytes);
/// A callback for scatter_order.emit; `source` is in the slot.
void fsti_copy_list_add(void *builder, const fsti_plan_item *item, char *target, const char *source,
                        uint64_t size);
/// Sends the remaining pieces, returns the result, and frees the builder.
fst_status fsti_copy_list_close(copy_list_builder *builder, worker_counts *counts,
                                fst_error *error);

#endif
