// SPDX-License-Identifier: Apache-2.0
/// Small texts put in their place: private to the verify room.
#ifndef FSTI_MANIFEST_TEXT_H
#define FSTI_MANIFEST_TEXT_H

#include "base/base.h"

/// Puts a text at `path`, all of it or nothing, on the disk when it returns.
fst_status fsti_text_place(const char *path, const char *bytes, size_t size, fst_error *error);

#endif
