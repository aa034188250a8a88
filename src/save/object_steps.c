// SPDX-License-Identifier: Apache-2.0
/// Steps of a commit that complete and delete objects of a store.
#include "journal_steps.h"
#include "store/store.h"

static fst_status place_object(save_journal *journal, journal_step *step, fst_error *error) {
    (void)journal;
    return fsti_output_place(step->output, false, error);
}

/// If a store's response was lost, the object may be the new one or the old one.
static fst_status undo_place(journal_step *step, fst_error *error) {
    if (fsti_output_is_placed(step->output) == 0) return FST_OK;
    return fsti_output_may_replace(step->output) ? fsti_step_refuse_undo(step, error)
                                                 : fsti_output_displace(step->output, error);
}

static void forget_object(journal_step *step, bool deletes) {
    (void)deletes;
    fsti_object_forget(step->kept_object);
    step->kept_object = NULL;
}

static fst_status hide_object(save_journal *journal, journal_step *step, fst_error *error) {
    (void)journal;
    return fsti_object_hide(step->path, JOURNAL_MANIFEST_WORD, step->watch, &step->kept_object,
                            error);
}

/// Moves the manifest at the new one's address aside. Another object there is not replaced.
static fst_status clear_target(save_journal *journal, journal_step *step, fst_error *error) {
    fsti_precondition left;
    fsti_error_location where = {.file = step->path, .byte_offset = FST_NO_OFFSET};
    FST_TRY(hide_object(journal, step, error));
    FST_TRY(fsti_store_stat(step->path, step->watch, &left, error));
    if (left.kind == FSTI_PRECONDITION_ABSENT) return FST_OK;
    return fsti_error_set(error, FST_E_ARGUMENT, where,
                          "the manifest would overwrite an object that is not a manifest. Choose "
                          "another path");
}

/// Restores the object, even if the step failed halfway.
static fst_status undo_hide(journal_step *step, fst_error *error) {
    if (step->kept_object != NULL)
        FST_TRY(fsti_object_restore(step->path, step->watch, step->kept_object, error));
    forget_object(step, false);
    return FST_OK;
}

static fst_status remove_object(save_journal *journal, journal_step *step, fst_error *error) {
    (void)journal;
    return fsti_store_remove(step->path, step->expected, step->watch, NULL, error);
}

static fst_status displace(save_journal *journal, journal_step *step, fst_error *error) {
    (void)journal;
    return fsti_output_displace(step->output, error);
}

const fsti_step_kind fsti_step_place_object = {.name = "the new file in place",
                                               .run = place_object,
                                               .undo = undo_place,
                                               .reports_undo = true,
                                               .only_after_success = true};
const fsti_step_kind fsti_step_hide_object = {
    .name = "the manifest or digests of an earlier save moved aside",
    .run = hide_object,
    .undo = undo_hide,
    .release = forget_object};
const fsti_step_kind fsti_step_clear_object = {.name =
                                                   "the manifest of an earlier save moved aside",
                                               .run = clear_target,
                                               .undo = undo_hide,
                                               .release = forget_object};
const fsti_step_kind fsti_step_remove_object = {
    .name = "a file of an earlier save removed", .run = remove_object, .is_independent = true};
const fsti_step_kind fsti_step_remove_new_index = {
    .name = "the index of this save removed", .run = displace, .only_after_success = true};
