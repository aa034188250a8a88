// SPDX-License-Identifier: Apache-2.0
/// Versions of objects as conditions: an ETag, or a generation at Google.
#include <stdio.h>
#include <string.h>

#include "upload.h"

void fsti_precondition_read(fsti_location_kind kind, const http_response *answer,
                            fsti_precondition *out) {
    const char *mark = kind == FSTI_LOCATION_GCS ? answer->generation : answer->etag;
    *out = (fsti_precondition){.kind = FSTI_PRECONDITION_NONE};
    // A weak ETag cannot be used as a condition.
    bool is_usable = kind == FSTI_LOCATION_GCS ? strspn(mark, "0123456789") == strlen(mark)
                                               : strncmp(mark, "W/", 2) != 0;
    if (mark[0] == '\0' || !is_usable) return;
    out->kind = FSTI_PRECONDITION_VERSION;
    snprintf(out->mark, sizeof out->mark, "%s", mark);
}

bool fsti_precondition_equals(const fsti_precondition *one, const fsti_precondition *other) {
    return one->kind == other->kind && strcmp(one->mark, other->mark) == 0;
}

bool fsti_precondition_header(fsti_location_kind kind, const fsti_precondition *precondition,
                              char *out, size_t size) {
    bool is_google = kind == FSTI_LOCATION_GCS,
         must_be_absent = precondition->kind == FSTI_PRECONDITION_ABSENT;
    if (precondition->kind == FSTI_PRECONDITION_NONE) return false;
    if (is_google)
        snprintf(out, size, "x-goog-if-generation-match: %s",
                 must_be_absent ? "0" : precondition->mark);
    else if (must_be_absent)
        snprintf(out, size, "If-None-Match: *");
    else
        snprintf(out, size, "If-Match: %s", precondition->mark);
    return true;
}
