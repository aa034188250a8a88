// SPDX-License-Identifier: Apache-2.0
/// Checkpoints of three states and the deltas between them, for tests of the delta module.
#ifndef DELTA_FIXTURE_H
#define DELTA_FIXTURE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fastsafetensors.h"
#include "fastsafetensors/experimental.h"

#define DELTA_TENSORS 4
#define DELTA_STATES 3

/// Tensor names and sizes of every state: the last one never changes.
extern const char *const delta_names[DELTA_TENSORS];
extern const size_t delta_sizes[DELTA_TENSORS];
/// The bytes of each state's tensors.
extern unsigned char *delta_states[DELTA_STATES][DELTA_TENSORS];

/// Fills the states, deterministically; once.
void delta_fill_states(void);
/// Writes the checkpoint (two files) of a state into a folder, which is emptied first.
void delta_write_checkpoint(const char *folder, int state);
/// Makes the delta from state `version - 1` to `version` in a folder of the fixture; returns its
/// path, which stays valid.
const char *delta_make_version(int version, fst_delta_encoding encoding, fst_digest digest);
/// The state whose bytes the checkpoint has, or -1.
int delta_find_state(const char *folder);
/// Opens versions 1 to 2.
fst_delta *delta_open_chain(fst_delta_encoding encoding, fst_digest digest);
/// Removes a folder and all that is in it.
void delta_remove(const char *folder);

#endif
