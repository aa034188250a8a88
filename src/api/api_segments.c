// SPDX-License-Identifier: Apache-2.0
/// The public functions of shared_segments.h.
#include <string.h>

#include "api_check.h"
#include "fastsafetensors/experimental.h"
#include "share/share.h"

/// The folder and name may be NULL, but not empty: an empty name would match all segments.
static fst_status check_words(const char *folder, const char *name, fst_error *error) {
    API_CHECK_PATH(folder, "folder", error);
    API_REQUIRE(name == NULL || name[0] != '\0', error, "name is empty");
    return FST_OK;
}

fst_status fst_segment_visit(const char *folder, fst_segment_visitor visit, void *context,
                             fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(visit != NULL, error, "visit is NULL");
    FST_TRY(check_words(folder, NULL, error));
    return fsti_share_visit(folder, visit, context, error);
}

fst_status fst_segment_drop(const char *folder, const char *name, fst_segments_dropped *out,
                            fst_error *error) {
    API_DEFER_CANCEL;
    fst_segments_dropped full = {.struct_size = sizeof full};
    if (out != NULL) FST_TRY(fsti_api_check_size(out->struct_size, error));
    FST_TRY(check_words(folder, name, error));
    FST_TRY(fsti_share_drop(folder, name, &full, error));
    return out == NULL ? FST_OK
                       : fsti_api_give_struct(out, out->struct_size, &full, sizeof full, error);
}

fst_status fst_segment_pin(const char *folder, const char *name, int is_pinned, fst_error *error) {
    API_DEFER_CANCEL;
    API_REQUIRE(name != NULL, error, "name is NULL");
    API_REQUIRE_SWITCH(is_pinned, "is_pinned", error);
    FST_TRY(check_words(folder, name, error));
    return fsti_share_pin(folder, name, is_pinned != 0, error);
}
