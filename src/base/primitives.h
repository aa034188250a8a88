// SPDX-License-Identifier: Apache-2.0
/// Interface of the base module: errors, memory, checked arithmetic, text, time, reference counts.
///
/// Knows: errors, memory, text, time, threads; nothing of models.
/// Does not know: the environment, other than for remote access; any other module.
/// Main types: fst_error, fsti_refcount, fsti_name_table.
#ifndef FSTI_PRIMITIVES_H
#define FSTI_PRIMITIVES_H

#include <dirent.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <time.h>

#include "fastsafetensors/base.h"

/// Returns a failing status to the caller.
#define FST_TRY(expression)                                                                        \
    do {                                                                                           \
        fst_status fst_try_status = (expression);                                                  \
        if (fst_try_status != FST_OK) return fst_try_status;                                       \
    } while (0)

// ---- errors: filled once, where they happen ----

const char *fsti_status_name(fst_status status);
const char *fsti_status_meaning(fst_status status);

/// Where a failure happened. Unknown fields are zero, an unknown byte_offset is FST_NO_OFFSET.
typedef struct fsti_error_location {
    const char *file;
    const char *tensor;
    size_t tensor_size;
    uint64_t byte_offset;
    int os_errno;
} fsti_error_location;

#define FSTI_NO_LOCATION ((fsti_error_location){.byte_offset = FST_NO_OFFSET})

/// Fills `error` (may be NULL) with "FILE: message, tensor `x`, at byte N: errno's text"; fields
/// that are unknown in `location` are left out. Returns `status`.
__attribute__((format(printf, 4, 5))) fst_status fsti_error_set(fst_error *error, fst_status status,
                                                                fsti_error_location location,
                                                                const char *format, ...);
/// The message without its leading file, for callers that print the file themselves.
const char *fsti_error_text(const fst_error *error);

/// Adds tensor and position to an error from a lower module, which does not know them.
void fsti_error_locate(fst_error *error, const fsti_error_location *location);

/// Reports a failed system call on `path`. The status and the text follow from the errno.
fst_status fsti_error_errno(fst_error *error, int os_errno, const char *path, const char *what);

/// FST_E_NO_MEMORY for `size_bytes` bytes.
fst_status fsti_error_memory(fst_error *error, uint64_t size_bytes);

/// FST_E_IO: a thread could not be started. The message has the errno and the limit on threads.
/// `path`: the file or URL that needed the thread.
fst_status fsti_error_thread(fst_error *error, int os_errno, const char *path);

/// Implements fst_text_step(), the only place that decides which characters a terminal may get.
size_t fsti_text_step(const char *text, size_t left, uint32_t *code, int *columns);
/// Replaces each character that fst_text_step() rejects, and each byte that is not UTF-8, by '?' in
/// place. All messages and log lines pass through here.
void fsti_text_make_printable(char *text);
/// Implements fst_size_parse().
bool fsti_size_parse(const char *text, uint64_t *size_bytes);
/// Removes "/" and "/." from the end of a folder's path. With them, O_NOFOLLOW would follow a
/// symbolic link of that name.
void fsti_path_trim(char *path);
/// Appends as much of `words` as fits into a buffer of `size` bytes.
void fsti_append(char *text, size_t size, const char *words);

// ---- URLs in place of paths, for messages; see location.h for the rest ----

/// The schemes of URLs that can be read; https is FSTI_SCHEME_HTTP as well.
typedef enum fsti_scheme {
    FSTI_SCHEME_NONE,
    FSTI_SCHEME_HTTP,
    FSTI_SCHEME_S3,
    FSTI_SCHEME_GS,
    FSTI_SCHEME_AZ,
    FSTI_SCHEME_HF
} fsti_scheme;
/// The scheme with which a path begins, up to the first slash: path objects such as pathlib.Path
/// collapse the second one.
fsti_scheme fsti_url_scheme(const char *path);
/// Copies a URL for messages, without query, user and password. Truncated to `size`.
void fsti_url_redact(const char *text, char *out, size_t size);

// ---- log lines, delivered to the program's callback ----

void fsti_log_set(fst_log_callback callback, void *context, fst_log_level level);
/// Whether a callback wants lines of that level. Ask before collecting expensive details.
bool fsti_log_wants(fst_log_level level);
/// Logs a line, formatted only if a callback wants it. The caller must hold no lock: the callback
/// may wait for a lock of the program, such as the GIL.
__attribute__((format(printf, 2, 3))) void fsti_log(fst_log_level level, const char *format, ...);

// ---- memory: the only callers of malloc; tests can make the n-th call fail ----

void *fsti_alloc(size_t size_bytes);
/// The same for memory that the caller fills at once: a large block has its pages, which one system
/// call provides in less time than a page fault for each of them.
void *fsti_alloc_filled(size_t size_bytes);
void *fsti_alloc_zeroed(size_t count, size_t size_bytes);
void *fsti_realloc(void *pointer, size_t size_bytes);
void fsti_free(void *pointer);
char *fsti_string_copy(const char *bytes, size_t size_bytes);
bool fsti_ends_with(const char *text, const char *ending);

/// The next `countdown` allocations succeed and all later ones fail; negative: never fail.
void fsti_alloc_fail_after(long countdown);
/// Whether the injected failure is due. For memory that does not come from malloc.
bool fsti_alloc_fails(void);
/// Number of blocks allocated and not yet freed.
long fsti_alloc_live(void);
/// Counts blocks that do not come from malloc; a negative number counts freed ones.
void fsti_alloc_count(long blocks);

/// Zeroed memory for credentials, on separate pages that core dumps exclude. NULL without memory.
/// (secret.c)
void *fsti_secret_alloc(size_t size_bytes);
/// Wipes and frees the block. NULL is allowed.
void fsti_secret_free(void *block, size_t size_bytes);
/// Wipes and frees a text that may contain credentials. NULL is allowed.
void fsti_secret_text_free(char *text);

/// Grows an array, if necessary, so that it has space for one more element. At most `limit`
/// elements.
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
/// A little-endian number of up to 8 bytes.
static inline uint64_t fsti_number_load(const void *bytes, size_t size) {
    uint64_t value = 0;
    for (size_t i = 0; i < size; i++) value |= (uint64_t)((const unsigned char *)bytes)[i] << 8 * i;
    return value;
}
/// Returns the end of the bytes.
static inline unsigned char *fsti_number_store(void *bytes, uint64_t value, size_t size) {
    unsigned char *at = bytes;
    for (size_t i = 0; i < size; i++) at[i] = (unsigned char)(value >> 8 * i);
    return at + size;
}
/// `alignment` is a power of two.
static inline uint64_t fsti_align_down(uint64_t value, uint64_t alignment) {
    return value & ~(alignment - 1);
}
static inline uint64_t fsti_align_up(uint64_t value, uint64_t alignment) {
    return (value + alignment - 1) & ~(alignment - 1);
}

/// Registers a process-wide mutex (pthread_mutex_t, never destroyed) so that fork() acquires it
/// first and the child finds it unlocked. Call it before the first use; repeated calls are
/// harmless.
void fsti_fork_lock(void *mutex);
/// Opens a file that will be locked, as open(2) does, with O_CLOEXEC and mode 0666. A child of
/// fork() does not have the file: its copy of the descriptor is closed, because it would share the
/// lock. Returns -1 and sets errno.
int fsti_lockable_open(const char *path, int flags);
/// The same, as openat(2), for local file systems: a fork() waits meanwhile, so that no child has
/// the descriptor at all.
int fsti_lockable_open_at(int folder_fd, const char *name, int flags, mode_t mode);
/// The same for any file: calls `open_file`, which returns a new descriptor or -1 with errno, while
/// a fork() waits. Close it with fsti_lockable_close().
int fsti_unforked_open(int (*open_file)(void));
/// Locks it (flock(2), exclusive), without waiting. Returns 0 or an errno: EWOULDBLOCK if another
/// open file has the lock.
int fsti_lockable_lock(int fd);
/// Unlocks and closes it. In a child, nothing is left to do.
void fsti_lockable_close(int fd);
/// Closes a folder whose descriptor is of fsti_lockable_open_at().
void fsti_lockable_close_folder(DIR *folder);
/// Like fsti_fork_lock(), for the few locks that may be taken while any other is held, and under
/// which no other is taken. Call it once for each.
void fsti_fork_last_lock(void *mutex);

// ---- file descriptors ----

/// Reads or writes all bytes from `offset` on, also after signals and short calls. Returns 0 or an
/// errno: EIO if a file ends before.
int fsti_read_at(int fd, void *target, size_t size, uint64_t offset);
int fsti_write_at(int fd, const void *bytes, size_t size, uint64_t offset);

// ---- time ----

/// Monotonic nanoseconds.
uint64_t fsti_now_ns(void);
/// The time on the monotonic clock in `timeout_ms`, for waits on a condition with that clock.
struct timespec fsti_deadline_after(int64_t timeout_ms);

/// The system's page size, a power of two.
uint64_t fsti_page_bytes(void);

/// CPUs that this process may use, at least 1. The quota of a cgroup may be a second old.
uint32_t fsti_cpu_count(void);
/// Free bytes within the cgroup's limit; file pages count as free. UINT64_MAX: no limit.
uint64_t fsti_memory_available(void);
/// The same, but at most the free memory of the machine.
uint64_t fsti_memory_left(void);
/// Memory and swap of the machine; UINT64_MAX: unknown.
uint64_t fsti_memory_total(void);
/// Remaining address space and writable memory (RLIMIT_AS, RLIMIT_DATA): the smaller one.
/// UINT64_MAX: unlimited or unknown.
uint64_t fsti_address_space_left(void);
/// The largest file that this process may write, or UINT64_MAX. Writing more sends SIGXFSZ.
uint64_t fsti_file_size_max(void);
/// Reads the first number after `name` in a text file of the kernel. False if the name is missing.
bool fsti_proc_number(const char *path, const char *name, uint64_t *out);
/// For tests: replaces the cgroup tree and the list of this process's groups. NULL: the real ones.
void fsti_cgroup_fake(const char *root, const char *self);

// ---- threads ----

/// pthread_create() for a library thread with all signals blocked except those of faults and of
/// abort(), so that signals reach the program's threads. Returns 0 or an errno.
int fsti_thread_start(pthread_t *out, void *(*run)(void *context), void *context);

// ---- libraries loaded at run time ----

/// Calls `load`, which loads and initialises libraries, unless *is_loaded; then sets it. fork()
/// waits for the end of the call: a child that is forked meanwhile would have a dynamic linker, or
/// a library, in an inconsistent state, and crash or hang when it loads a library itself. From any
/// thread; `load` must not call it.
void fsti_library_once(atomic_bool *is_loaded, void (*load)(void));
/// Whether the calling thread is in such a `load`.
bool fsti_library_is_loading(void);
/// For library_start.c: the calling thread initialises a library.
void fsti_library_set_loading(bool loads);

/// The initialisation of a library that may take long, or never return.
typedef struct fsti_library_start {
    void (*run)(void *context); ///< initialises; its results are valid when the wait returns true
    void *context;
    enum { FSTI_START_NEVER, FSTI_START_RUNNING, FSTI_START_DONE } state;
    uint64_t deadline_ns;
    struct fsti_library_start *next; ///< begun before
} fsti_library_start;
/// Calls start->run once, on a separate thread, and waits until it returns, at most `limit_ms`
/// from the first call. False if it has not returned: a later call checks again without waiting.
/// Holds no lock meanwhile, and keeps `start`, which must live as long as the process. fork() waits
/// for a running start until the same limit. From any thread. (library_start.c)
bool fsti_library_start_within(fsti_library_start *start, uint32_t limit_ms);

/// Called by fork()'s handlers of fork_locks.c: wait until no start runs within its limit; take and
/// give back the lock; and, with the lock, whether such a start runs.
void fsti_library_start_wait(void);
void fsti_library_start_before_fork(void);
void fsti_library_start_after_fork(void);
bool fsti_library_start_is_running(void);
void fsti_library_before_fork(void);
void fsti_library_after_fork(void);

/// A function of a library, and the field that receives its address.
typedef struct fsti_library_symbol {
    const char *name; ///< NULL ends the list
    void *field;
} fsti_library_symbol;

/// Whether a library can be used.
typedef enum fsti_library_state {
    FSTI_LIBRARY_UNKNOWN, ///< not tried, or failed for a reason that may pass, such as EMFILE
    FSTI_LIBRARY_FOUND,
    FSTI_LIBRARY_ABSENT, ///< not installed, or too old
} fsti_library_state;

/// A library that some calls need.
typedef struct fsti_library {
    const char *need; ///< who needs which library: begins the error
    /// Binds the functions. On failure *reason continues the error, with a comma first.
    fsti_library_state (*find)(char *reason, size_t reason_size);
    _Atomic(fsti_library_state) state;
    char reason[200];
} fsti_library;

/// Loads the library at the first call, and at later ones while its state is unknown.
/// FST_E_UNSUPPORTED without it. From any thread; `find` must not call it.
fst_status fsti_library_require(fsti_library *library, fst_error *error);
/// For `find`: opens the first library of `names` (NULL-terminated) that has all symbols, and never
/// closes it.
fsti_library_state fsti_library_bind(const char *const *names, const fsti_library_symbol *symbols,
                                     char *reason, size_t reason_size);

// ---- reference counts ----
//
// A new reference is made from an existing one, so the increment needs no ordering. The decrement
// is acquire and release: the thread that drops the last reference frees the object and must see
// the other threads' accesses to it.

typedef struct fsti_refcount {
    atomic_uint_fast32_t count;
} fsti_refcount;

static inline void fsti_refcount_init(fsti_refcount *refs) { atomic_init(&refs->count, 1); }
static inline void fsti_refcount_ref(fsti_refcount *refs) {
    atomic_fetch_add_explicit(&refs->count, 1, memory_order_relaxed);
}
/// Returns true when it drops the last reference.
static inline bool fsti_refcount_unref(fsti_refcount *refs) {
    return atomic_fetch_sub_explicit(&refs->count, 1, memory_order_acq_rel) == 1;
}

// ---- names: hashing and comparing ----

/// Hashes `size` bytes with a secret key, so that a hostile file cannot cause collisions.
uint64_t fsti_hash(const void *bytes, size_t size, uint64_t key);
/// A random key for this process.
uint64_t fsti_hash_key(void);
/// A random number, different in each call.
uint64_t fsti_random(void);

typedef struct fsti_name {
    const char *bytes;
    size_t size;
} fsti_name;
typedef fsti_name (*fsti_name_at)(const void *context, size_t index);

/// A hash table from names to their indices. The underlying names may grow up to `capacity` (below
/// 2^31).
typedef struct fsti_name_table {
    fsti_name_at name_at;
    const void *context;
    uint32_t *slots;
    size_t slot_count;
    uint64_t key;
} fsti_name_table;

/// Makes an empty table. False without memory; call fsti_name_table_clear() in any case.
bool fsti_name_table_make(fsti_name_table *table, fsti_name_at name_at, const void *context,
                          size_t capacity);
/// Stores the index of a name. Returns the previous index, which is replaced, or SIZE_MAX.
size_t fsti_name_table_put(fsti_name_table *table, size_t index);
/// The index of a name, or SIZE_MAX.
size_t fsti_name_table_find(const fsti_name_table *table, fsti_name name);
void fsti_name_table_clear(fsti_name_table *table);

/// Finds the first duplicate among `count` names (below 2^31). *twice is SIZE_MAX if all differ.
/// False without memory.
bool fsti_names_twice(fsti_name_at name_at, const void *context, size_t count, size_t *twice);

#endif
