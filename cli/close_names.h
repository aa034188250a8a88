// SPDX-License-Identifier: Apache-2.0
/// Names of tensors that may have been meant.
#ifndef CLI_CLOSE_NAMES_H
#define CLI_CLOSE_NAMES_H

#include "cli.h"

#define CLOSE_NAMES_TEXT_MAX 640

/// The names of a model's tensors that are closest to `name`, at most three, separated by commas;
/// "" where none is close. `text` has CLOSE_NAMES_TEXT_MAX bytes.
void cli_close_names(const fst_model *model, const char *name, char *text);

#endif
