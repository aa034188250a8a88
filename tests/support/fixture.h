// SPDX-License-Identifier: Apache-2.0
/// Files for tests, in a temporary folder that is deleted at exit.
#ifndef FIXTURE_H
#define FIXTURE_H

#include <fastsafetensors/experimental.h>
#include <fastsafetensors/loader.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/// A path in this program's temporary folder; a static buffer of 8 in turn.
const char *fixture_path(const char *name);

/// Writes a file of `size` bytes; returns its path.
const char *fixture_file(const char *name, const void *bytes, size_t size);

/// Writes a safetensors file: length, JSON, and `data_bytes` bytes of fixture_byte().
const char *fixture_model(const char *name, const char *json, uint64_t data_bytes);

/// Writes a safetensors file of `tensor_count` U8 tensors "t0".."tN" of `tensor_bytes` each.
const char *fixture_tensors(const char *name, size_t tensor_count, uint64_t tensor_bytes);

/// The byte of the data section at `offset`: differs from its neighbours at every distance that
/// a misplaced copy could have.
uint8_t fixture_byte(uint64_t offset);

/// True when `size` bytes are the data section's from `offset` on.
int fixture_matches(const void *bytes, uint64_t offset, uint64_t size);

/// Whether a loader returns the tensors of fixture_tensors() with their bytes.
bool fixture_is_loaded(fst_loader *loader, size_t tensor_count, uint64_t tensor_bytes);

/// Tells the kernel to drop the file's pages from the cache.
void fixture_evict(const char *path);
/// Reads the file into the cache.
void fixture_warm(const char *path);

/// Runs `work` in a child that is neither root nor the owner of the fixture's files, which it may
/// read. Returns the result of `work` (0 to 100), or -1 if this process can't change its user.
int fixture_as_other_user(int (*work)(void *context), void *context);

/// Whether the system reports a flag of the mapping that holds `address`: "hg" (huge pages were
/// advised) or "nh" (small ones), see proc(5), smaps.
int fixture_mapping_has(const void *address, const char *flag);

/// Bytes of the mapping that holds `address` that are mapped in the process's page tables.
uint64_t fixture_mapped_bytes(const void *address);

/// The number of live buffers of the library. Waits up to five seconds for it to become 0, because
/// the thread that maps cached pages of views may still hold a reference to the mapping.
size_t fixture_live_buffers(void);

/// Reads the arguments of a call of syscall(2), for wrappers. Most calls have no sixth one, which
/// would be on the stack of the caller.
void fixture_syscall_arguments(long number, va_list list, long arguments[6]);

/// Deterministic pseudo-random numbers.
uint64_t fixture_random(uint64_t *state);

/// fst_load_options.tuning that has nothing but an engine, a use of GPUDirect Storage, or
/// map_populate; valid for the whole run.
const fst_load_tuning *fixture_engine(fst_engine engine);
const fst_load_tuning *fixture_gds(fst_gds gds);
const fst_load_tuning *fixture_populate(void);

/// Lets the process open no further descriptors, or as many as before.
void fixture_limit_descriptors(bool is_limited);

#endif
