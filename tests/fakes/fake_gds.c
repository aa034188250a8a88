// SPDX-License-Identifier: Apache-2.0
/// Fake cuFile and (FAKE_HIP) hipFile. The mode is FAKE_GDS_MODE in the environment when the driver
/// opens, or fake_gds_set("mode", N): 0 reads directly to the device (through a mapping, so that no
/// read call is counted), 1 is the compatibility mode (pread), 2 fails to start, 3 rejects files, 4
/// takes the milliseconds of FAKE_GDS_START_MS to start.
/// "fail_at": the n-th read from now fails; "short_at": it is short; "noisy": another process reads
/// during the next n reads. Reads are counted, and must be whole pages of device memory.
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#if defined(FAKE_HIP)
#define NAME(cuda, hip) hip
#else
#define NAME(cuda, hip) cuda
#endif
#define EXPORT __attribute__((visibility("default")))
enum { DRIVER_NOT_INITIALIZED = 5001, IO_NOT_SUPPORTED = 5027, HANDLE_COUNT_MAX = 64 };

typedef struct error {
    int error, driver_error;
} error;

typedef struct descriptor {
    int type;
    union {
        int fd;
        void *handle;
    } handle;
    const void *operations;
} descriptor;

static atomic_long mode, fail_at, short_at, noisy, reads, handles, opens;

/// Another thread of the program reads more than the library does.
static void make_noise(void) {
    static char bytes[200000];
    int fd = atomic_load(&noisy) > 0 && atomic_fetch_sub(&noisy, 1) > 0
                 ? open("/proc/self/exe", O_RDONLY | O_CLOEXEC)
                 : -1;
    if (fd < 0) return;
    (void)!read(fd, bytes, sizeof bytes);
    close(fd);
}

EXPORT void fake_gds_set(const char *name, long value) {
    atomic_long *number = strcmp(name, "mode") == 0      ? &mode
                          : strcmp(name, "fail_at") == 0 ? &fail_at
                          : strcmp(name, "noisy") == 0   ? &noisy
                                                         : &short_at;
    atomic_store(number, value);
}

EXPORT long fake_gds_get(const char *name) {
    if (strcmp(name, "opens") == 0) return atomic_load(&opens);
    return strcmp(name, "reads") == 0 ? atomic_load(&reads) : atomic_load(&handles);
}

EXPORT error NAME(cuFileDriverOpen, hipFileDriverOpen)(void) {
    const char *text = getenv("FAKE_GDS_MODE");
    atomic_fetch_add(&opens, 1);
    if (text != NULL) atomic_store(&mode, atol(text));
    const char *start_ms = getenv("FAKE_GDS_START_MS");
    if (atomic_load(&mode) == 4 && start_ms != NULL) {
        long ms = atol(start_ms);
        nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL);
        atomic_store(&mode, 0);
    }
    return (error){atomic_load(&mode) == 2 ? DRIVER_NOT_INITIALIZED : 0, 0};
}

EXPORT error NAME(cuFileHandleRegister, hipFileHandleRegister)(void **handle, descriptor *file) {
    bool good = file->type == 1 && (fcntl(file->handle.fd, F_GETFL) & O_DIRECT) != 0;
    if (!good || atomic_load(&mode) == 3) return (error){IO_NOT_SUPPORTED, 0};
    atomic_fetch_add(&handles, 1);
    *handle = (void *)(intptr_t)(file->handle.fd + 1);
    return (error){0, 0};
}

EXPORT void NAME(cuFileHandleDeregister, hipFileHandleDeregister)(void *handle) {
    atomic_fetch_sub(&handles, handle != NULL);
}

static ssize_t read_straight(int fd, void *target, size_t size, off_t offset) {
    struct stat info;
    if (fstat(fd, &info) != 0) return -1;
    if (offset >= info.st_size) return 0;
    if ((off_t)size > info.st_size - offset) size = (size_t)(info.st_size - offset);
    char *mapping = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, offset);
    if (mapping == MAP_FAILED) return -1;
    madvise(mapping, size, MADV_RANDOM); // no readahead into the page cache
    memcpy(target, mapping, size);
    munmap(mapping, size);
    posix_fadvise(fd, offset, (off_t)size, POSIX_FADV_DONTNEED);
    return (ssize_t)size;
}

EXPORT ssize_t NAME(cuFileRead, hipFileRead)(void *handle, void *base, size_t size, off_t offset,
                                             off_t base_offset) {
    int fd = (int)(intptr_t)handle - 1;
    char *target = (char *)base + base_offset;
    atomic_fetch_add(&reads, 1);
    make_noise();
    if (((uintptr_t)target | size | (size_t)offset) % 4096 != 0) return -IO_NOT_SUPPORTED;
    if (atomic_load(&fail_at) > 0 && atomic_fetch_sub(&fail_at, 1) == 1) {
        errno = EIO;
        return -1;
    }
    if (atomic_load(&short_at) > 0 && atomic_fetch_sub(&short_at, 1) == 1 && size > 8192)
        size = 10001; // within a page, as the real one may
    return atomic_load(&mode) == 1 ? pread(fd, target, size, offset)
                                   : read_straight(fd, target, size, offset);
}
