// SPDX-License-Identifier: Apache-2.0
/// Whether a selection includes a tensor: one of its globs matches, and the predicate agrees.
#include <fnmatch.h>
#include <string.h>

#include "plan.h"

bool fsti_plan_selects(const fsti_plan_selection *selection, const fst_tensor_info *info) {
    bool kept = selection->glob_count == 0;
    for (size_t i = 0; i < selection->glob_count && !kept; i++)
        kept = strlen(info->name) == info->name_size &&
               fnmatch(selection->globs[i], info->name, 0) == 0;
    if (kept && selection->predicate != NULL)
        kept = selection->predicate(selection->predicate_context, info) != 0;
    return kept;
}
