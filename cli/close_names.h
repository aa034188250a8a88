// SPDX-License-Identifier: Apache-2.0
/// Suggestions for misspelled tensor names.
#ifndef CLI_CLOSE_NAMES_H
#define CLI_CLOSE_NAMES_H

#include "cli.h"

#define CLOSE_NAMES_TEXT_MAX 640

/// Up to three names of a model's tensors close to `name`, separated by commas, or "". `text` has
/// CLOSE_NAMES_TEXT_MAX bytes.
void cli_close_names(const fst_model *model, const char *name, char *text);

#endif
