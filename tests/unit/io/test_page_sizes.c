// SPDX-License-Identifier: Apache-2.0
/// Loads on a system with 64 KiB pages, as on some aarch64 kernels: addresses passed to the kernel
/// must be aligned to such pages. Releasing memory must not block other threads.
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "fastsafetensors.h"
#include "fixture.h"
#include "memory/memory.h"

#define PAGE_BYTES ((uintptr_t)65536)
#define TENSOR_COUNT 24
#define TENSOR_BYTES ((uint64_t)700001)
#define ASKED_COUNT 3 ///< of the tensors, so that there are gaps
#define MAPPING_COUNT_MAX 64

int __real_madvise(void *address, size_t size, int advice);
int __real_munmap(void *address, size_t size);
long __real_sysconf(int name);
void *__real_mmap64(void *address, size_t size, int rights, int flags, int fd, off_t offset);
int __wrap_madvise(void *address, size_t size, int advice);
int __wrap_munmap(void *address, size_t size);
long __wrap_sysconf(int name);
void *__wrap_mmap64(void *address, size_t size, int rights, int flags, ...);

static atomic_bool has_large_pages;
static atomic_int asked, refused;

static struct {
    pthread_mutex_t lock;
    size_t count;
    struct {
        uintptr_t begin, end;
    } at[MAPPING_COUNT_MAX];
} mappings = {.lock = PTHREAD_MUTEX_INITIALIZER};

long __wrap_sysconf(int name) {
    bool is_page = name == _SC_PAGESIZE && atomic_load(&has_large_pages);
    return is_page ? (long)PAGE_BYTES : __real_sysconf(name);
}

/// Notes mappings of files, whose addresses would be multiples of the large page.
void *__wrap_mmap64(void *address, size_t size, int rights, int flags, ...) {
    va_list more;
    va_start(more, flags);
    int fd = va_arg(more, int);
    off_t offset = va_arg(more, off_t);
    va_end(more);
    char *made = __real_mmap64(address, size, rights, flags, fd, offset);
    if (fd < 0 || made == MAP_FAILED || !atomic_load(&has_large_pages)) return made;
    pthread_mutex_lock(&mappings.lock);
    if (mappings.count == MAPPING_COUNT_MAX || (uintptr_t)offset % PAGE_BYTES != 0) abort();
    mappings.at[mappings.count].begin = (uintptr_t)made;
    mappings.at[mappings.count++].end = (uintptr_t)made + size;
    pthread_mutex_unlock(&mappings.lock);
    return made;
}

static bool is_at_a_page(uintptr_t address) {
    bool is_good = true;
    pthread_mutex_lock(&mappings.lock);
    for (size_t i = 0; i < mappings.count; i++)
        if (mappings.at[i].begin <= address && address < mappings.at[i].end) {
            atomic_fetch_add(&asked, 1);
            is_good = (address - mappings.at[i].begin) % PAGE_BYTES == 0;
        }
    pthread_mutex_unlock(&mappings.lock);
    return is_good;
}

int __wrap_madvise(void *address, size_t size, int advice) {
    if (is_at_a_page((uintptr_t)address)) return __real_madvise(address, size, advice);
    atomic_fetch_add(&refused, 1);
    errno = EINVAL;
    return -1;
}

static fst_status load(const char *path, fst_load_mode mode, fst_cache cache, fst_engine engine) {
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    fst_model *model = NULL;
    fst_loader *loader = NULL;
    fst_tensor *tensor = NULL;
    options.mode = mode;
    options.cache = cache;
    options.tuning = mode == FST_MODE_MAP ? fixture_populate() : fixture_engine(engine);
    static const size_t wanted[ASKED_COUNT] = {3, 4, 17};
    fst_part items[ASKED_COUNT];
    for (size_t i = 0; i < ASKED_COUNT; i++)
        items[i] = (fst_part){.struct_size = sizeof *items, .tensor_index = wanted[i]};
    options.parts = items;
    options.part_count = ASKED_COUNT;
    fst_status status = fst_model_open(path, NULL, &model, NULL);
    if (status == FST_OK) status = fst_loader_open(model, &options, &loader, NULL);
    if (status == FST_OK) status = fst_loader_wait(loader, -1, NULL);
    for (size_t i = 0; status == FST_OK && i < ASKED_COUNT; i++) {
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        uint64_t at = items[i].tensor_index * TENSOR_BYTES;
        status = fst_loader_tensor_at(loader, i, -1, &tensor, NULL);
        if (status != FST_OK) break;
        status = fst_tensor_view_get(tensor, &view, NULL);
        if (status == FST_OK && !fixture_matches(view.data, at, TENSOR_BYTES))
            status = (fst_status)9999;
        fst_tensor_unref(tensor);
    }
    fst_loader_close(loader);
    fst_model_close(model);
    return status;
}

TEST(mincore_is_called_with_whole_pages)
{
    static const fst_load_mode modes[] = {FST_MODE_AUTO, FST_MODE_MAP, FST_MODE_LOAD};
    const char *path = fixture_tensors("model", TENSOR_COUNT, TENSOR_BYTES);
    atomic_store(&has_large_pages, true);
    for (int warm = 0; warm < 2; warm++)
        for (size_t m = 0; m < sizeof modes / sizeof *modes; m++)
            for (int cache = 0; cache < FST_CACHE_COUNT; cache++) {
                warm ? fixture_warm(path) : fixture_evict(path);
                mappings.count = 0;
                bool forces_copies = modes[m] == FST_MODE_LOAD && cache == 0;
                CHECK_INT(load(path, modes[m], (fst_cache)cache,
                               forces_copies ? FST_ENGINE_MMAP : FST_ENGINE_AUTO),
                          FST_OK);
            }
    atomic_store(&has_large_pages, false);
    CHECK(atomic_load(&asked) > 0);
    CHECK_INT(atomic_load(&refused), 0);
}

// ---- memory that is returned to the system ----

#define ARENA_BYTES ((uint64_t)64 << 20)

static atomic_bool holds_up, has_allocated;

static void *allocate(void *context) {
    fsti_buffer *buffer = NULL;
    (void)context;
    bool is_there = fsti_buffer_arena(ARENA_BYTES / 2, &buffer, NULL) == FST_OK;
    fsti_buffer_unref(buffer);
    atomic_store(&has_allocated, is_there);
    return NULL;
}

/// Does not end before another thread has got memory, and has given it back.
int __wrap_munmap(void *address, size_t size) {
    if (size >= ARENA_BYTES && atomic_exchange(&holds_up, false)) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, allocate, NULL) != 0) abort();
        for (int i = 0; i < 30000 && !atomic_load(&has_allocated); i++)
            nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
        pthread_detach(thread);
    }
    return __real_munmap(address, size);
}

TEST(munmap_does_not_block_other_threads)
{
    fsti_buffer *buffer = NULL;
    fsti_arena_keep_max(UINT64_MAX);
    CHECK_INT(fsti_buffer_arena(ARENA_BYTES, &buffer, NULL), FST_OK);
    fsti_buffer_unref(buffer);
    atomic_store(&holds_up, true);
    CHECK(fsti_arena_trim() <= ARENA_BYTES);
    CHECK(!atomic_load(&holds_up)); // it went by there
    CHECK(atomic_load(&has_allocated));
    fsti_arena_trim();
}
