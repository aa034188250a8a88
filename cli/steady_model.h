// SPDX-License-Identifier: Apache-2.0
/// A model whose files stay the same while a command reads them by the model and by their paths.
#ifndef CLI_STEADY_MODEL_H
#define CLI_STEADY_MODEL_H

#include "cli.h"

/// What the paths of the model's files led to when it was opened.
typedef struct steady_files steady_files;

/// Opens a model. Returns an exit code after printing any error. Close with steady_close().
int steady_open(const char *path, fst_model **model, steady_files **files);
/// Whether the path still leads to the files that were opened, and to no others. Returns an exit
/// code after printing that it does not.
int steady_check(const char *path, const steady_files *files);
void steady_close(fst_model *model, steady_files *files);

#endif
