// SPDX-License-Identifier: Apache-2.0
/// A server of one model in the fuzzer's process: web server, S3, Google, Azure and the Hub. The
/// fuzzer's input decides which responses are correct, and what the others are.
#ifndef OBJECT_SERVER_H
#define OBJECT_SERVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/// Starts the server on a free port of the loopback interface. The bytes of the model must stay
/// valid until the process ends. Returns its URL, without a slash at the end; NULL without libcurl.
const char *object_server_begin(const void *model, size_t size_bytes);

/// Sets how the next requests are answered. The bytes must stay valid until object_server_end().
/// After their end, all responses are correct.
void object_server_answer(const uint8_t *rules, size_t size);
void object_server_end(void);

#endif
