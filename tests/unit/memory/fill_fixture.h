// SPDX-License-Identifier: Apache-2.0
/// Counts and fails the calls that create pages with their bytes. Programs that use it wrap ioctl
/// and syscall (see meson.build).
#ifndef FILL_FIXTURE_H
#define FILL_FIXTURE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/// Bytes of created pages.
extern atomic_uint_fast64_t fill_created_bytes;
/// The error of the call after `fill_copies_left` more; 0: none fails.
extern int fill_failure;
extern atomic_int fill_copies_left;
/// Whether userfaultfd(2) fails, as in most containers.
extern bool fill_is_refused;

/// For fsti_pages_fake(): buffers get small pages.
uint64_t fill_slow_huge_pages(char *data, bool is_huge);

#endif
