// SPDX-License-Identifier: Apache-2.0
/// The 64-bit counters of fst_load_stats as a table.
#include "load_handle.h"

#define COUNTER(field) {#field, offsetof(fst_load_stats, field)}

static const fst_load_counter counters[] = {
    COUNTER(bytes_requested),
    COUNTER(bytes_read),
    COUNTER(bytes_direct),
    COUNTER(bytes_mapped),
    COUNTER(bytes_copied),
    COUNTER(bytes_converted),
    COUNTER(read_count),
    COUNTER(chunk_count),
    COUNTER(chunks_resident),
    COUNTER(buffer_bytes),
    COUNTER(buffer_bytes_peak),
    COUNTER(bounce_bytes),
    COUNTER(plan_ns),
    COUNTER(first_tensor_ns),
    COUNTER(total_ns),
    COUNTER(read_ns),
    COUNTER(copy_ns),
    COUNTER(wait_ns),
    COUNTER(populate_ns),
    COUNTER(device_bytes),
    COUNTER(device_copies),
    COUNTER(device_launches),
    COUNTER(device_wait_ns),
    COUNTER(gds_bytes),
    COUNTER(cache_bytes),
    COUNTER(verified_bytes),
    COUNTER(digest_ns),
    COUNTER(stored_bytes),
    COUNTER(decoded_bytes),
    COUNTER(decode_ns),
    COUNTER(network_requests),
    COUNTER(network_retries),
    COUNTER(network_hedges),
    COUNTER(network_connections),
    COUNTER(network_bytes),
    COUNTER(disk_cache_bytes),
    COUNTER(disk_cache_written),
    COUNTER(network_retry_wait_ns),
    COUNTER(network_first_byte_ns),
    COUNTER(shared_bytes),
};

#define COUNTER_COUNT (sizeof counters / sizeof *counters)

// They are all fields from the first counter to the end of the struct: none is missing here.
_Static_assert(COUNTER_COUNT * sizeof(uint64_t) ==
                   sizeof(fst_load_stats) - offsetof(fst_load_stats, bytes_requested),
               "the table lists every counter of fst_load_stats");

const fst_load_counter *fsti_load_counters(size_t *count) {
    *count = COUNTER_COUNT;
    return counters;
}
