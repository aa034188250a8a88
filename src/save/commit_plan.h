// SPDX-License-Identifier: Apache-2.0
/// What the plans of a commit share, for files and for objects. Private to the save module.
#ifndef FSTI_COMMIT_PLAN_H
#define FSTI_COMMIT_PLAN_H

#include "journal_steps.h"
#include "save_state.h"

/// Writes an index and, in `out`, the output that will place it. `hidden`: it names the temporary
/// files.
fst_status fsti_commit_make_index(fst_writer *writer, bool hidden, fsti_output **out,
                                  fst_error *error);
/// Writes the manifest's text, if requested. It includes the final index of a sharded model.
fst_status fsti_commit_make_manifest(fst_writer *writer, fst_error *error);
/// Adds a step for every file.
fst_status fsti_commit_add_files(fst_writer *writer, const fsti_step_kind *kind, fst_error *error);

/// Plans the commit of files, and of objects.
fst_status fsti_commit_plan_files(fst_writer *writer, fst_error *error);
fst_status fsti_commit_plan_objects(fst_writer *writer, fst_error *error);

#endif
