// SPDX-License-Identifier: Apache-2.0
/// The door of the memory room: counted buffers of any origin, arenas, NUMA policy.
#ifndef FSTI_MEMORY_H
#define FSTI_MEMORY_H

#include "base/base.h"
#include "fastsafetensors/device.h"
#include "fastsafetensors/experimental.h"
#include "fastsafetensors/loader.h"

/// Buffers are placed at multiples of this when they are that large, in huge pages if the system
/// gives them: a fault then makes 2 MiB, and a 1 MiB request to the disk is one segment.
#define FSTI_HUGE_PAGE_BYTES ((uint64_t)2 << 20)
#define FSTI_BUFFER_ALIGNMENT 4096u
#define FSTI_DEVICE_ALIGNMENT 256u
/// What reads straight to a device keep step with (FSTI_IO_PAGE_BYTES).
#define FSTI_DEVICE_PAGE_BYTES 4096u

/// A GPU that was opened (gpu/gpu.h); NULL stands for the processors. Never closed.
typedef struct fsti_device fsti_device;

/// What is done about the kind of pages of a buffer while they are made.
typedef enum fsti_buffer_pages {
    FSTI_PAGES_LEFT = 0, ///< nothing
    FSTI_PAGES_UNCHOSEN, ///< who makes the first ones chooses
    FSTI_PAGES_WATCHED,  ///< huge ones, measured as they are made
} fsti_buffer_pages;

/// Memory that tensors share by reference count. Safe from any thread.
typedef struct fsti_buffer fsti_buffer;
struct fsti_buffer {
    fsti_refcount refs;
    char *data;
    uint64_t size_bytes;
    bool is_fresh;    ///< its pages are not there yet: populating them ahead pays
    atomic_int pages; ///< fsti_buffer_pages
    bool writable;
    void (*release)(fsti_buffer *buffer); ///< gives `data` back
    fst_allocator allocator;              ///< for release
    char *given;                          ///< what it gave: `data`, or a little before
    uint64_t given_bytes;
    fsti_device *device;                 ///< whose address `data` is, or who has locked it
    fsti_buffer *beneath;                ///< of locked memory: the memory
    atomic_uint_fast64_t promised_bytes; ///< of an arena: not written to yet, as far as is known
};

/// Memory of our own, aligned to FSTI_BUFFER_ALIGNMENT; a kept arena if one fits.
fst_status fsti_buffer_arena(uint64_t size_bytes, fsti_buffer **out, fst_error *error);
/// What that takes: whole pages, huge ones from the size of one on.
uint64_t fsti_buffer_arena_bytes(uint64_t size_bytes);
/// What is wanted of a caller's allocator.
typedef struct fsti_foreign {
    const fst_allocator *allocator; ///< copied
    fsti_device *device;            ///< whose memory it gives; NULL: the processors'
    uint64_t size_bytes;
    bool at_page; ///< beginning at a page; a page more is asked for, as allocators promise less
} fsti_foreign;
fst_status fsti_buffer_foreign(const fsti_foreign *wish, fsti_buffer **out, fst_error *error);
/// Takes over `data` of any origin; `release` gives it back. On failure it is not taken.
fst_status fsti_buffer_wrap(void *data, uint64_t size_bytes, void (*release)(fsti_buffer *buffer),
                            fsti_buffer **out, fst_error *error);

fsti_buffer *fsti_buffer_ref(fsti_buffer *buffer);
void fsti_buffer_unref(fsti_buffer *buffer);

/// Says that `size_bytes` more of the buffer are in use: they are no longer promised but taken, and
/// the system counts them.
void fsti_buffer_use(fsti_buffer *buffer, uint64_t size_bytes);

/// Chooses the kind of pages of an arena that is_fresh: now, or, where it is not urgent, when
/// the first ones are made ahead.
void fsti_buffer_choose_pages(fsti_buffer *buffer, bool is_urgent);
/// Makes the pages of [data + begin, data + end) present; the rest of the buffer gets small ones
/// where huge ones have become dear.
void fsti_buffer_populate(fsti_buffer *buffer, uint64_t begin, uint64_t end);

/// Anonymous memory at a multiple of the huge page, in huge pages where there are any; NULL when
/// there is none. For munmap(2).
char *fsti_pages_map(uint64_t bytes);
/// Makes whole pages present.
void fsti_pages_populate(char *data, uint64_t size_bytes);
/// Chooses huge or small pages for memory of fsti_pages_map() that has none yet: some of them are
/// made, and measured. True: huge ones, which may become dear on the way.
bool fsti_pages_choose(char *data, uint64_t size_bytes);
/// Makes the huge pages of [from, end), which are multiples of one, and measures them. False: they
/// have become dear, and what has none yet before `memory_end` gets small ones.
bool fsti_pages_watch(char *from, char *end, char *memory_end);
/// For tests: what makes the pages of 2 MiB, and what it took; NULL: the real one.
typedef uint64_t (*fsti_pages_measure)(char *data, bool is_huge);
void fsti_pages_fake(fsti_pages_measure fake);

/// Nodes of memory that the machine has; at least 1.
uint32_t fsti_numa_node_count(void);
/// Asks for a policy for pages that are not there yet. False when there is nothing to choose (one
/// node, or the default) or the system refuses.
bool fsti_numa_place(void *address, uint64_t size_bytes, fst_numa policy);
/// The node that a device of the PCI bus hangs on, by its name there ("0000:A0:00.0"); -1 where the
/// system does not say.
int32_t fsti_numa_node_of_bus(const char *name);
/// Asks for a node for pages that are not there yet; where it has none left others' are taken.
/// False as above, and for a node below 0.
bool fsti_numa_prefer(void *address, uint64_t size_bytes, int32_t node);
/// For tests: another folder with `online` and the folders of PCI devices in it, and another
/// mbind(2); NULL: the real ones.
typedef long (*fsti_numa_bind)(void *address, size_t size, int mode, const unsigned long *nodes,
                               unsigned long node_max);
void fsti_numa_fake(const char *folder, fsti_numa_bind bind);

/// Buffers alive, and their bytes.
void fsti_buffer_live(size_t *count, uint64_t *size_bytes);

/// Arenas that were released and are kept for the next load: at most this many bytes.
void fsti_arena_keep_max(uint64_t size_bytes);
/// Gives kept arenas back to the system; returns their bytes.
uint64_t fsti_arena_trim(void);

#endif
