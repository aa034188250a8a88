// SPDX-License-Identifier: Apache-2.0
/// Stamps that recognise unchanged files. Private to the verify module.
#ifndef FSTI_FILE_STAMP_H
#define FSTI_FILE_STAMP_H

#include <sys/stat.h>
#include <time.h>

#include "format/format.h"

fsti_file_stamp fsti_file_stamp_of(const struct stat *info);
bool fsti_file_stamp_equals(const fsti_file_stamp *a, const fsti_file_stamp *b);
/// Whether every change of the file after `begun` changes its stamp. If a file was changed shortly
/// before, another change may keep the same time, because some file systems have coarse timestamps.
bool fsti_file_stamp_is_settled(const struct stat *info, const struct timespec *begun);

#endif
