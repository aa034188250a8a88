// SPDX-License-Identifier: Apache-2.0
/// What becomes of a chunk in a slot: private to the transfer room. Parts of items come one after
/// the other; runs that repeat become one piece. Few plain pieces are copied to their places by the
/// bus, many or converted ones go to the device whole and are taken apart there; where the device
/// has no kernel, the processors do that.
#ifndef FSTI_PARCEL_H
#define FSTI_PARCEL_H

#include "pipeline.h"

typedef struct parcel_maker parcel_maker;

/// For the slot whose memory is `data`. Close it.
fst_status fsti_parcel_open(fsti_ring *ring, uint32_t slot, char *data, bool has_kernels,
                            parcel_maker **out, fst_error *error);
/// How many bytes of the slot are the chunk's.
void fsti_parcel_filled(parcel_maker *maker, uint64_t size_bytes);
/// scatter_order's emit: `source` lies in the slot.
void fsti_parcel_emit(void *maker, const fsti_plan_item *item, char *target, const char *source,
                      uint64_t size);
/// Sends what is left, says what came of it, and frees the maker.
fst_status fsti_parcel_close(parcel_maker *maker, worker_counts *counts, fst_error *error);

#endif
