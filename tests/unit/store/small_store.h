// SPDX-License-Identifier: Apache-2.0
/// An S3-compatible store in the test process, with objects in memory. It does not use the
/// library's memory.
#ifndef SMALL_STORE_H
#define SMALL_STORE_H

#include <stdbool.h>
#include <stddef.h>

/// Serves on a free port of the loopback interface until the process ends: "http://127.0.0.1:N".
const char *small_store_begin(void);
/// The bytes of an object ("/bucket/key"), a copy for free(); NULL if it does not exist.
char *small_store_get(const char *path, size_t *size);
/// Objects, and uploads that were begun and not ended.
size_t small_store_count(void);
size_t small_store_upload_count(void);
/// Deletes all objects and uploads.
void small_store_clear(void);

#endif
