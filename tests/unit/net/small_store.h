// SPDX-License-Identifier: Apache-2.0
/// A store of this process for tests: objects in memory, as S3 speaks of them, for whoever asks.
/// Its memory is not the library's.
#ifndef SMALL_STORE_H
#define SMALL_STORE_H

#include <stdbool.h>
#include <stddef.h>

/// Serves on a free port of the loopback interface until the process ends: "http://127.0.0.1:N".
const char *small_store_begin(void);
/// The bytes of an object ("/bucket/key"), a copy for free(); NULL: there is none.
char *small_store_get(const char *path, size_t *size);
/// Objects, and uploads that were begun and not ended.
size_t small_store_count(void);
size_t small_store_upload_count(void);
/// Forgets all of both.
void small_store_clear(void);

#endif
