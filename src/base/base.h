// SPDX-License-Identifier: Apache-2.0
/// The door of the base room: errors, memory, checked arithmetic, text, time, reference counts.
#ifndef FSTI_BASE_H
#define FSTI_BASE_H

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fastsafetensors/base.h"

/// Forwards a failing status to the caller.
#define FST_TRY(expression)                                                                        \
    do {                                                                                           \
        fst_status fst_try_status = (expression);                                                  \
        if (fst_try_status != FST_OK) return fst_try_status;                                       \
    } while (0)

// ---- errors: written once, where they happen ----

const char *fsti_status_name(fst_status status);
const char *fsti_status_meaning(fst_status status);

/// Where a failure happened; fields not known stay zero (and byte_offset FST_NO_OFFSET).
typedef struct fsti_error_place {
    const char *file;
    const char *tensor;
    size_t tensor_size;
    uint64_t byte_offset;
    int os_errno;
} fsti_error_place;

#define FSTI_NOWHERE ((fsti_error_place){.byte_offset = FST_NO_OFFSET})

/// Fills `error` (NULL allowed) with a message made of `format`, then file, tensor, offset and
/// errno as far as `place` knows them. Returns `status`.
__attribute__((format(printf, 4, 5))) fst_status fsti_error_set(fst_error *error, fst_status status,
                                                                fsti_error_place place,
                                                                const char *format, ...);

/// Adds tensor and position to an error that a room below could not know them for.
void fsti_error_locate(fst_error *error, const fsti_error_place *place);

/// A failing system call on `path`: picks the status by errno and says it in words.
fst_status fsti_error_errno(fst_error *error, int os_errno, const char *path, const char *what);

/// FST_E_NO_MEMORY for `size_bytes` bytes.
fst_status fsti_error_memory(fst_error *error, uint64_t size_bytes);

/// Replaces control bytes (C0, DEL, and C1 in UTF-8) by '?': text of files and paths must not write
/// on a terminal.
void fsti_text_make_printable(char *text);
/// Appends what fits of `words` to a text in a buffer of `size` bytes.
void fsti_append(char *text, size_t size, const char *words);

// ---- addresses, where paths are expected ----

/// Whether a path is an address, or what a path object has made of one ("https:/host").
bool fsti_path_is_address(const char *path);
/// An address as it may be told: without query, user and password. Cut off at `size`.
void fsti_url_tell(const char *text, char *out, size_t size);
/// FST_E_UNSUPPORTED: `what` can't be done with an address.
fst_status fsti_address_refuse(const char *path, const char *what, fst_error *error);

// ---- the log: what was decided, to the program's callback ----

void fsti_log_set(fst_log_callback callback, void *context, fst_log_level level);
/// A line, made only when somebody wants it.
__attribute__((format(printf, 2, 3))) void fsti_log(fst_log_level level, const char *format, ...);

// ---- memory: the only callers of malloc; a test can make the n-th call fail ----

void *fsti_alloc(size_t size_bytes);
void *fsti_alloc_zeroed(size_t count, size_t size_bytes);
void *fsti_realloc(void *pointer, size_t size_bytes);
void fsti_free(void *pointer);
char *fsti_string_copy(const char *bytes, size_t size_bytes);
bool fsti_ends_with(const char *text, const char *ending);

/// The next `countdown` allocations succeed and all later ones fail; negative: never fail.
void fsti_alloc_fail_after(long countdown);
/// True when the injected failure is due: for memory that does not come from malloc.
bool fsti_alloc_fails(void);
/// Blocks allocated and not yet freed.
long fsti_alloc_live(void);
/// Counts blocks that do not come from malloc, and the end of them (-1).
void fsti_alloc_count(long blocks);

/// Memory for credentials, zeroed: pages of their own, which core dumps leave out. NULL without
/// memory. (secret.c)
void *fsti_secret_alloc(size_t size_bytes);
/// Wipes it first. NULL is allowed.
void fsti_secret_free(void *block, size_t size_bytes);
/// fsti_free() of a text that may have credentials in it: wiped first. NULL is allowed.
void fsti_secret_text_free(char *text);

/// Makes room for one more element of `element_bytes` in a growing array, at most `limit`.
bool fsti_array_reserve(void **array, size_t *capacity, size_t count, size_t element_bytes,
                        size_t limit);

// ---- checked arithmetic: true when the result fits ----

static inline bool fsti_add(uint64_t a, uint64_t b, uint64_t *out) {
    return !__builtin_add_overflow(a, b, out);
}
static inline bool fsti_mul(uint64_t a, uint64_t b, uint64_t *out) {
    return !__builtin_mul_overflow(a, b, out);
}
static inline uint64_t fsti_min(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t fsti_max(uint64_t a, uint64_t b) { return a > b ? a : b; }
/// `alignment` is a power of two.
static inline uint64_t fsti_align_down(uint64_t value, uint64_t alignment) {
    return value & ~(alignment - 1);
}
static inline uint64_t fsti_align_up(uint64_t value, uint64_t alignment) {
    return (value + alignment - 1) & ~(alignment - 1);
}

/// Makes fork() wait for a lock of the process (a pthread_mutex_t that lives for ever), so that the
/// child finds it free. To be called before it is first held, any number of times.
void fsti_fork_lock(void *mutex);

// ---- time ----

/// Monotonic nanoseconds.
uint64_t fsti_now_ns(void);

/// The system's page; a power of two.
uint64_t fsti_page_bytes(void);

/// Processors that this process may use; at least 1.
uint32_t fsti_cpu_count(void);
/// Bytes that the cgroup's limit leaves, counting pages of files as free; UINT64_MAX: no limit.
uint64_t fsti_memory_available(void);
/// The same, and no more than what the machine has left.
uint64_t fsti_memory_left(void);
/// All the memory that the machine has, with its swap; UINT64_MAX: nobody knows.
uint64_t fsti_memory_machine(void);
/// Bytes that the process may still map; UINT64_MAX: there is no limit, or nobody tells.
uint64_t fsti_address_space_left(void);
/// The first number behind `name` in a text file of the kernel's; false where it is not there.
bool fsti_proc_number(const char *path, const char *name, uint64_t *out);
/// For tests: another cgroup tree and another list of this process's groups; NULL: the real ones.
void fsti_cgroup_fake(const char *root, const char *self);

// ---- threads ----

/// pthread_create() for a thread of the library's: signals go to the program's own threads, only
/// faults of our own instructions come here. Returns 0 or an errno.
int fsti_thread_start(pthread_t *out, void *(*run)(void *context), void *context);

// ---- libraries that are found at run time ----

/// A function of a library, and where its address goes.
typedef struct fsti_library_symbol {
    const char *name; ///< NULL: the end of the list
    void *field;
} fsti_library_symbol;

/// Opens the first library of `names` (ended by NULL) that has all symbols; it stays open. False
/// when there is none; *missing is then what the last one lacks, or as it was.
bool fsti_library_bind(const char *const *names, const fsti_library_symbol *symbols,
                       const char **missing);

// ---- reference counts ----

typedef struct fsti_refcount {
    atomic_uint_fast32_t count;
} fsti_refcount;

static inline void fsti_refcount_init(fsti_refcount *refs) { atomic_init(&refs->count, 1); }
static inline void fsti_refcount_ref(fsti_refcount *refs) {
    atomic_fetch_add_explicit(&refs->count, 1, memory_order_relaxed);
}
/// True when the last reference went.
static inline bool fsti_refcount_unref(fsti_refcount *refs) {
    return atomic_fetch_sub_explicit(&refs->count, 1, memory_order_acq_rel) == 1;
}

// ---- names: hash and compare ----

/// A hash of `size` bytes, keyed so that a hostile file cannot aim at collisions.
uint64_t fsti_hash(const void *bytes, size_t size, uint64_t key);
/// A key that differs from process to process.
uint64_t fsti_hash_key(void);

typedef struct fsti_name {
    const char *bytes;
    size_t size;
} fsti_name;
typedef fsti_name (*fsti_name_at)(const void *context, size_t index);

/// Places of names. What they are the names of may grow to `capacity` (below 2^31) while it is
/// used.
typedef struct fsti_name_table {
    fsti_name_at name_at;
    const void *context;
    uint32_t *slots;
    size_t slot_count;
    uint64_t key;
} fsti_name_table;

/// Empty. False without memory; fsti_name_table_clear() frees in any case.
bool fsti_name_table_make(fsti_name_table *table, fsti_name_at name_at, const void *context,
                          size_t capacity);
/// Notes the place of a name. Returns the one that it had before, which is forgotten, or SIZE_MAX.
size_t fsti_name_table_put(fsti_name_table *table, size_t index);
/// The place of a name, or SIZE_MAX.
size_t fsti_name_table_find(const fsti_name_table *table, fsti_name name);
void fsti_name_table_clear(fsti_name_table *table);

/// The first of `count` names (below 2^31) that came before; SIZE_MAX: they differ. False without
/// memory.
bool fsti_names_twice(fsti_name_at name_at, const void *context, size_t count, size_t *twice);

#endif
