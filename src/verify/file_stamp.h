// SPDX-License-Identifier: Apache-2.0
/// By what files are known again that nobody has touched: private to the verify room.
#ifndef FSTI_FILE_STAMP_H
#define FSTI_FILE_STAMP_H

#include <sys/stat.h>
#include <time.h>

#include "format/format.h"

fsti_file_stamp fsti_file_stamp_of(const struct stat *info);
bool fsti_file_stamp_equals(const fsti_file_stamp *a, const fsti_file_stamp *b);
/// Whether another change of the file, from `begun` on, will show in its stamp. What was changed
/// shortly before may be changed again without another one: they are that coarse on some file
/// systems.
bool fsti_file_stamp_is_settled(const struct stat *info, const struct timespec *begun);

#endif
