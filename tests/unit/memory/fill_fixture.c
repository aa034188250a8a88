// SPDX-License-Identifier: Apache-2.0
#include "fill_fixture.h"

#include <errno.h>
#include <linux/userfaultfd.h>
#include <stdarg.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>

#include "fixture.h"

atomic_uint_fast64_t fill_created_bytes;
int fill_failure;
atomic_int fill_copies_left;
bool fill_is_refused;

int __real_ioctl(int fd, unsigned long request, ...);
int __wrap_ioctl(int fd, unsigned long request, ...);
int __wrap_ioctl(int fd, unsigned long request, ...) {
    va_list list;
    va_start(list, request);
    void *argument = va_arg(list, void *);
    va_end(list);
    if (request != UFFDIO_COPY) return __real_ioctl(fd, request, argument);
    struct uffdio_copy *copy = argument;
    if (fill_failure != 0 && atomic_fetch_sub(&fill_copies_left, 1) == 0) {
        copy->copy = -fill_failure;
        errno = fill_failure;
        return -1;
    }
    int result = __real_ioctl(fd, request, argument);
    if (copy->copy > 0) atomic_fetch_add(&fill_created_bytes, (uint64_t)copy->copy);
    return result;
}

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);
long __wrap_syscall(long number, ...) {
    long words[6];
    va_list list;
    va_start(list, number);
    fixture_syscall_arguments(number, list, words);
    va_end(list);
    if (number == SYS_userfaultfd && fill_is_refused) {
        errno = EPERM;
        return -1;
    }
    return __real_syscall(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}

uint64_t fill_slow_huge_pages(char *data, bool is_huge) {
    (void)data;
    return is_huge ? 4000000 : 1000;
}
