// SPDX-License-Identifier: Apache-2.0
/// Objects of stores being made, as files are: what differs is here.
#include <string.h>

#include "output_private.h"

bool fsti_output_is_object(const fsti_output *output) { return output->upload != NULL; }

bool fsti_output_had_object(const fsti_output *output) { return output->target.had_object; }

const fsti_seen *fsti_output_mark(const fsti_output *output) {
    return fsti_upload_mark(output->upload);
}

fst_status fsti_output_displace(fsti_output *output, fst_error *error) {
    const char *path = output->target.path;
    return output->upload == NULL ? fsti_path_remove(path, error)
                                  : fsti_net_remove(path, fsti_output_mark(output), error);
}

void fsti_output_stop(fsti_output *output) {
    if (output->upload != NULL) fsti_upload_stop(output->upload);
}

void fsti_output_describe(fsti_output *output, char *text, size_t size) {
    text[0] = '\0';
    if (output->upload != NULL) fsti_upload_describe(output->upload, text, size);
}

fst_status fsti_output_refuse_object(const fsti_output *output, fst_error *error) {
    return fsti_address_refuse(
        output->target.path, "an object is sent as it comes, and can't be filled in place", error);
}
