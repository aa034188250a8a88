// SPDX-License-Identifier: Apache-2.0
/// The interface of a fuzz target: libFuzzer's entry point, also called by replay_main.c.
#ifndef FUZZ_TARGET_H
#define FUZZ_TARGET_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
