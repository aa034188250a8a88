// SPDX-License-Identifier: Apache-2.0
/// Who may use a writer, and when.
#include "save_state.h"

#include <unistd.h>

fst_status fsti_writer_check_owner(const fst_writer *writer, fst_error *error) {
    if (writer->owner == getpid()) return FST_OK;
    return fsti_error_set(error, FST_E_UNSUPPORTED, FSTI_NO_LOCATION,
                          "the save was opened before fork() and belongs to the parent process");
}

fst_status fsti_writer_check_open(const fst_writer *writer, fst_error *error) {
    FST_TRY(fsti_writer_check_owner(writer, error));
    int state = atomic_load(&writer->state);
    if (state == WRITER_OPEN) return FST_OK;
    return fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION, "the save %s",
                          state == WRITER_FAILED ? "has failed" : "is finished");
}
