// SPDX-License-Identifier: Apache-2.0
/// Errors of a chunk's bytes: the file, the position, and the tensor to which they belong.
#include "pipeline.h"

fsti_error_location fsti_pipeline_locate(const fsti_pipeline *pipeline,
                                         const fsti_plan_extent *extent, uint64_t offset) {
    const fsti_job *job = &pipeline->job;
    fsti_error_location location = {.byte_offset = offset};
    size_t index = fsti_plan_first_segment(job->plan, extent, offset);
    if (index < extent->segment_first + extent->segment_count) {
        const fsti_header *header = job->files[extent->file].header;
        const fsti_plan_item *item = &job->plan->items[job->plan->segments[index].item];
        const fsti_tensor *tensor = &header->tensors[item->tensor];
        location.tensor = fsti_header_name(header, tensor);
        location.tensor_size = tensor->name_size;
    }
    return location;
}

void fsti_pipeline_describe(const fsti_pipeline *pipeline, const fsti_plan_extent *extent,
                            uint64_t offset, fst_status status, int os_errno, fst_error *error) {
    fsti_error_location location = fsti_pipeline_locate(pipeline, extent, offset);
    location.file = fsti_file_path(pipeline->job.files[extent->file].file);
    location.os_errno = os_errno;
    fsti_error_set(error, status, location, "%s", fsti_status_meaning(status));
}

fst_status fsti_pipeline_check_file(const fsti_pipeline *pipeline, const fsti_plan_extent *extent,
                                    uint64_t offset, fst_error *error) {
    fst_status status = fsti_file_check(pipeline->job.files[extent->file].file, error);
    if (status == FST_OK) return FST_OK;
    fsti_error_location location = fsti_pipeline_locate(pipeline, extent, offset);
    fsti_error_locate(error, &location);
    return status;
}
