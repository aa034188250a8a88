// SPDX-License-Identifier: Apache-2.0
/// The one place that knows all sinks.
#include "sink.h"

const fsti_sink *fsti_sink_choose(const fsti_job *job) {
    if (job->mappings != NULL) return &fsti_sink_view;
    bool is_far = job->device != NULL && !job->locks_memory;
    return is_far ? &fsti_sink_device : &fsti_sink_host;
}
