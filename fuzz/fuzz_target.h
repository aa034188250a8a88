// SPDX-License-Identifier: Apache-2.0
/// What a fuzz target offers: libFuzzer's entry point, called by replay_main.c as well.
#ifndef FUZZ_TARGET_H
#define FUZZ_TARGET_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
