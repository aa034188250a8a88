// SPDX-License-Identifier: Apache-2.0
/// Interface of the memory module: reference-counted buffers, arenas, NUMA policy.
///
/// Knows: buffers, pages, NUMA nodes.
/// Does not know: files, tensors.
/// Main types: fsti_buffer, fsti_device.
#ifndef FSTI_MEMORY_H
#define FSTI_MEMORY_H

#include "base/primitives.h"
#include "fastsafetensors/device.h"
#include "fastsafetensors/experimental.h"
#include "fastsafetensors/loader.h"

/// Large buffers are aligned to this and use huge pages if available: one fault then allocates 2
/// MiB, and a 1 MiB disk request is one segment.
#define FSTI_HUGE_PAGE_BYTES ((uint64_t)2 << 20)
#define FSTI_BUFFER_ALIGNMENT 4096u
#define FSTI_DEVICE_ALIGNMENT 256u
/// Alignment of GPUDirect reads (FSTI_IO_PAGE_BYTES).
#define FSTI_DEVICE_PAGE_BYTES 4096u

/// An open GPU (gpu/gpu.h), never closed. NULL stands for the CPU.
typedef struct fsti_device fsti_device;

/// How the page size of a buffer is decided while its pages are allocated.
typedef enum fsti_buffer_pages {
    FSTI_PAGES_UNCHANGED = 0, ///< keep the system's choice
    FSTI_PAGES_UNCHOSEN,      ///< the thread that allocates the first pages decides
    FSTI_PAGES_WATCHED,       ///< huge pages, timed while they are allocated
    FSTI_PAGES_SMALL,         ///< huge pages were slow
} fsti_buffer_pages;

/// Memory shared by tensors through a reference count. Thread-safe.
typedef struct fsti_buffer fsti_buffer;
struct fsti_buffer {
    fsti_refcount refs;
    char *data;
    uint64_t size_bytes;
    bool is_fresh;          ///< has no pages yet, so prefaulting pays off
    atomic_int pages;       ///< fsti_buffer_pages
    atomic_int fill_fd;     ///< during a fill: of fsti_fill_open(); otherwise -1
    atomic_uint fill_found; ///< pages that existed before a fill
    bool writable;
    void (*release)(fsti_buffer *buffer); ///< frees `data`
    fst_allocator allocator;              ///< used by release
    char *allocation; ///< the pointer that the allocator returned, at or before `data`
    uint64_t allocation_bytes;
    fsti_device *device;                 ///< the device that owns `data`, or that pinned it
    fsti_buffer *host_buffer;            ///< the memory under a pinned buffer
    atomic_uint_fast64_t reserved_bytes; ///< of an arena: bytes not written yet, as far as known
};

/// Library-allocated memory, aligned to FSTI_BUFFER_ALIGNMENT. Reuses a cached arena if one fits.
fst_status fsti_buffer_arena(uint64_t size_bytes, fsti_buffer **out, fst_error *error);
/// The size of such an arena: whole pages, and whole huge pages from that size on.
uint64_t fsti_buffer_arena_bytes(uint64_t size_bytes);
/// A request to the caller's allocator.
typedef struct fsti_foreign {
    const fst_allocator *allocator; ///< copied
    fsti_device *device;            ///< the device whose memory it allocates; NULL: the CPU
    uint64_t size_bytes;
    bool at_page; ///< page-aligned; asks for one page more, because allocators guarantee less
} fsti_foreign;
fst_status fsti_buffer_foreign(const fsti_foreign *request, fsti_buffer **out, fst_error *error);
/// Wraps `data` of any origin; `release` frees it. On failure the caller keeps it.
fst_status fsti_buffer_wrap(void *data, uint64_t size_bytes, void (*release)(fsti_buffer *buffer),
                            fsti_buffer **out, fst_error *error);

fsti_buffer *fsti_buffer_ref(fsti_buffer *buffer);
void fsti_buffer_unref(fsti_buffer *buffer);
/// Whether the caller holds the only reference.
bool fsti_buffer_is_last_ref(const fsti_buffer *buffer);

/// FST_E_NO_MEMORY if the machine or the cgroup limit has less than this left, after subtracting
/// reservations of running loads.
fst_status fsti_memory_check(uint64_t size_bytes, fst_error *error);

/// Moves `size_bytes` of the buffer from reserved to used: their pages exist, so the system counts
/// them.
void fsti_buffer_use(fsti_buffer *buffer, uint64_t size_bytes);

/// Chooses the page size of a fresh arena: now if it is urgent, else when the first pages are
/// prefaulted.
void fsti_buffer_choose_pages(fsti_buffer *buffer, bool is_urgent);
/// Chooses it before the first bytes are written, unless that was done. `takes_small`: small pages,
/// without a measurement.
void fsti_buffer_choose_late(fsti_buffer *buffer, bool takes_small);
/// Whether a fresh arena gets small pages from now on.
bool fsti_buffer_has_small_pages(fsti_buffer *buffer);
/// Prefaults [data + begin, data + end). If huge pages have become slow, the rest of the buffer
/// gets small ones.
void fsti_buffer_populate(fsti_buffer *buffer, uint64_t begin, uint64_t end);
/// Does so if the page size was measured, before writes to [data + begin, data + end): huge pages
/// are timed in this way, and small ones take less time together than by one page fault each.
void fsti_buffer_prepare(fsti_buffer *buffer, uint64_t begin, uint64_t end);

/// Opens userfaultfd(2), by which small pages are created together with their bytes. -1 if the
/// system lacks or refuses it. A child of fork() does not have it.
int fsti_fill_open(void);
/// Closes it, after all fills have ended. Does nothing for -1.
void fsti_fill_close(int fd);
/// Begins a fill of a fresh arena. Until it ends, only fsti_buffer_fill() may write to the buffer,
/// and only written bytes may be read: an access to a page that does not exist would wait for ever.
/// Does nothing if `fd` is -1.
void fsti_buffer_begin_fill(fsti_buffer *buffer, int fd);
/// Ends a fill. Other threads may be in fsti_buffer_fill(). Harmless without a fill and for NULL.
void fsti_buffer_end_fill(fsti_buffer *buffer);
/// Copies bytes to a buffer, in a fill or not. `target` may also lie outside of it. Thread-safe for
/// separate bytes.
void fsti_buffer_fill(fsti_buffer *buffer, char *target, const char *source, uint64_t size);

/// Maps anonymous memory aligned to a huge page, in huge pages if available. NULL on failure. Free
/// with munmap(2).
char *fsti_pages_map(uint64_t bytes);
/// Prefaults whole pages.
void fsti_pages_populate(char *data, uint64_t size_bytes);
/// Chooses the page size for memory of fsti_pages_map() without pages, by allocating and timing a
/// few. Slow huge pages are not measured again for up to 2 s and 1 GiB.
fsti_buffer_pages fsti_pages_choose(char *data, uint64_t size_bytes);
/// For tests: replaces the function that allocates 2 MiB of pages and returns the time. NULL: the
/// real one.
typedef uint64_t (*fsti_pages_measure)(char *data, bool is_huge);
void fsti_pages_fake(fsti_pages_measure fake);

/// Number of NUMA nodes, at least 1.
uint32_t fsti_numa_node_count(void);
/// Sets a NUMA policy for pages not yet allocated. False if there is no choice (one node, or the
/// default policy) or the system refuses.
bool fsti_numa_set_policy(void *address, uint64_t size_bytes, fst_numa policy);
/// The NUMA node of a PCI device by its bus name ("0000:A0:00.0"); -1: unknown.
int32_t fsti_numa_node_of_bus(const char *name);
/// Prefers a NUMA node for pages not yet allocated; a full node falls back to others. False as
/// above, or for a negative node.
bool fsti_numa_prefer(void *address, uint64_t size_bytes, int32_t node);
/// For tests: replaces the sysfs folder (with `online` and the PCI devices) and mbind(2). NULL: the
/// real ones.
typedef long (*fsti_numa_bind)(void *address, size_t size, int mode, const unsigned long *nodes,
                               unsigned long node_max);
void fsti_numa_fake(const char *folder, fsti_numa_bind bind);

/// Copies large blocks with stores that bypass the cache, and others like memcpy.
void fsti_copy_bytes(void *target, const void *source, size_t size);

/// Number and bytes of live buffers.
void fsti_buffer_live(size_t *count, uint64_t *size_bytes);

/// Sets the limit for released arenas that are cached for the next load.
void fsti_arena_keep_max(uint64_t size_bytes);
/// Unmaps cached arenas. Returns their bytes.
uint64_t fsti_arena_trim(void);

#endif
