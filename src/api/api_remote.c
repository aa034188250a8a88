// SPDX-License-Identifier: Apache-2.0
/// The public functions of remote.h.
#include "api_check.h"
#include "fastsafetensors.h"
#include "net/net.h"

fst_status fst_remote_configure(const fst_remote_options *options, fst_error *error) {
    fst_remote_options known = {.struct_size = sizeof known};
    if (options != NULL)
        FST_TRY(fsti_api_copy_struct(&known, sizeof known, options, options->struct_size, error));
    API_REQUIRE((unsigned)known.bucket_style < FST_BUCKET_STYLE_COUNT, error,
                "unknown bucket style %d", (int)known.bucket_style);
    return fsti_net_configure(&known, error);
}
