// SPDX-License-Identifier: Apache-2.0
/// What can be used on this machine or for one file, for people to read.
#include <stdio.h>

#include "io/io.h"
#include "loader.h"

static void describe_engine(fst_engine number, fsti_file *file, const fsti_io_choice *choice,
                            fst_engine_info *out) {
    const fsti_io_engine *engine = fsti_io_engine_get(number);
    *out = (fst_engine_info){.name = engine->name};
    out->usable = engine->usable(file, out->reason, sizeof out->reason);
    out->chosen = choice != NULL && (choice->absent == engine || choice->resident == engine);
    if (!out->chosen) return;
    char reason[sizeof out->reason];
    snprintf(reason, sizeof reason, "%s", out->reason);
    snprintf(out->reason, sizeof out->reason, "%.130s; used for %s chunks", reason,
             choice->absent != engine     ? "cached"
             : choice->resident != engine ? "absent"
                                          : "all");
}

fst_status fsti_loader_probe(const char *path, fst_engine_info *infos, size_t capacity,
                             size_t *count, fst_error *error) {
    fsti_file *file = NULL;
    fsti_io_choice choice;
    if (path != NULL) {
        FST_TRY(fsti_file_open(path, &file, error));
        fst_status status = fsti_io_choose(file, FST_ENGINE_AUTO, true, &choice, error);
        if (status != FST_OK) {
            fsti_file_unref(file);
            return status;
        }
    }
    *count = 0;
    for (unsigned number = 0; number < FST_ENGINE_COUNT; number++) {
        if (number == FST_ENGINE_AUTO) continue;
        if (*count < capacity)
            describe_engine((fst_engine)number, file, file == NULL ? NULL : &choice,
                            &infos[*count]);
        ++*count;
    }
    fsti_file_unref(file);
    return FST_OK;
}
