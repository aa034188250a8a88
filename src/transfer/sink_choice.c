// SPDX-License-Identifier: Apache-2.0
/// Selects the sink. The only file that knows all of them.
#include "sink.h"

const fsti_sink *fsti_sink_choose(const fsti_job *job) {
    if (job->is_mapped) return &fsti_sink_view;
    if (job->share != NULL) return &fsti_sink_share;
    bool to_device = job->device != NULL && !job->pins_memory;
    return to_device ? &fsti_sink_device : &fsti_sink_host;
}
