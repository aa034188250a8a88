# SPDX-License-Identifier: Apache-2.0
"""The disk cache with failing system calls and dying processes."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import numpy
import pytest
from web_server import web_server

from fastsafetensors import numpy as fst_numpy

# A library that counts system calls on files in $FAULT_FOLDER. The n-th call fails, or that and all
# later calls fail, or the process ends before it.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long count, nth;
static int kind, number; /* 0 off, 1 once, 2 for ever, 3 killed */
static char folder[PATH_MAX];

void fault_begin(const char *where, int wanted_kind, long wanted_nth, int wanted_errno) {
    snprintf(folder, sizeof folder, "%s", where);
    kind = wanted_kind, nth = wanted_nth, number = wanted_errno, count = 0;
}
long fault_end(void) { kind = 0; return count; }

static int is_watched_path(const char *path) {
    return kind != 0 && strncmp(path, folder, strlen(folder)) == 0;
}
static int is_watched(int fd) {
    char link[64], path[PATH_MAX];
    if (kind == 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    path[size < 0 ? 0 : size] = '\0';
    return is_watched_path(path);
}
static int fails(int watched) {
    if (!watched) return 0;
    pthread_mutex_lock(&lock);
    long at = ++count;
    pthread_mutex_unlock(&lock);
    if (kind == 3 && at == nth) kill(getpid(), SIGKILL);
    if (!(kind == 1 && at == nth) && !(kind == 2 && at >= nth)) return 0;
    errno = number;
    return 1;
}
#define WRAP(type, name, watched, parameters, arguments)                      \
    type name parameters {                                                    \
        if (fails(watched)) return -1;                                        \
        return ((type (*) parameters)dlsym(RTLD_NEXT, #name)) arguments;      \
    }
WRAP(ssize_t, pread64, is_watched(fd), (int fd, void *data, size_t size, off_t at),
     (fd, data, size, at))
WRAP(ssize_t, pwrite64, is_watched(fd), (int fd, const void *data, size_t size, off_t at),
     (fd, data, size, at))
WRAP(int, ftruncate64, is_watched(fd), (int fd, off_t size), (fd, size))
WRAP(int, fdatasync, is_watched(fd), (int fd), (fd))
WRAP(int, flock, is_watched(fd), (int fd, int what), (fd, what))
WRAP(int, renameat, is_watched(a), (int a, const char *from, int b, const char *to),
     (a, from, b, to))
WRAP(int, unlinkat, is_watched(fd), (int fd, const char *path, int flags), (fd, path, flags))
WRAP(int, fstat64, is_watched(fd), (int fd, struct stat64 *info), (fd, info))
WRAP(int, fstatat64, is_watched(fd), (int fd, const char *path, struct stat64 *info, int flags),
     (fd, path, info, flags))
WRAP(int, mkdir, is_watched_path(path), (const char *path, mode_t mode), (path, mode))
int openat64(int fd, const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    if (fails(is_watched(fd))) return -1;
    return ((int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, "openat64"))(fd, path, flags,
                                                                               mode);
}
int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    mode_t mode = va_arg(rest, mode_t);
    va_end(rest);
    if (fails(is_watched_path(path))) return -1;
    return ((int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open64"))(path, flags, mode);
}
int fcntl64(int fd, int what, ...) {
    va_list rest;
    va_start(rest, what);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    int is_lock = what == F_OFD_SETLK || what == F_OFD_GETLK;
    if (fails(is_lock && is_watched(fd))) return -1;
    return ((int (*)(int, int, ...))dlsym(RTLD_NEXT, "fcntl64"))(fd, what, argument);
}
"""

# In a child for each case: two starts with the fault, then one without. Prints the number of calls,
# and the cases in which bytes were wrong or an error was of an unexpected class.
PROGRAM = """
import ctypes, errno, hashlib, json, os, shutil, sys
from fastsafetensors import SafetensorError, numpy as fst_numpy, remote
shim, url, place, wanted, share = sys.argv[1:6]
shim, share = ctypes.CDLL(shim), int(share)
remote.configure(cache_dir=place, retry_base_ms=2)

def load():
    tensors = fst_numpy.load_file(url)
    held = b"".join(tensors[name].tobytes() for name in sorted(tensors))
    return hashlib.sha256(held).hexdigest() == wanted

def run(kind, nth, number, required):
    shutil.rmtree(place, ignore_errors=True)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        remote.configure(cache_dir=place, retry_base_ms=2, cache_required=required)
        shim.fault_begin(place.encode(), kind, ctypes.c_long(nth), number)
        words = ""
        for _ in range(2):
            try:
                words += "" if load() else "wrong bytes; "
            except (SafetensorError, OSError) as error:
                # A whole object is a file: when it can't be read that is an error as of any file.
                is_file = any(name.endswith(".data") for name in os.listdir(place))
                words += "" if required or is_file else f"failed: {error}; "
        count = shim.fault_end()
        os.write(write, json.dumps([count, words]).encode())
        os._exit(0)
    os.close(write)
    text = b""
    while part := os.read(read, 65536):
        text += part
    os.close(read)
    os.waitpid(child, 0)
    count, words = json.loads(text) if text else [0, ""]
    return count, words

faults, cases, most = [], 0, run(1, 0, 0, False)[0]
for kind, number, required in ((1, errno.EIO, False), (2, errno.ENOSPC, False),
                               (1, errno.EINTR, False), (2, errno.ENOLCK, True), (3, 0, False)):
    for nth in range(1 + cases % share, most + 1, share):
        cases += 1
        _, words = run(kind, nth, number, required)
        child = os.fork()  # what is there now is used, or not, but never wrongly
        if child == 0:
            os._exit(0 if load() else 1)
        if os.waitpid(child, 0)[1] != 0:
            words += "wrong bytes afterwards"
        if words:
            faults.append([kind, number, nth, words])
print(json.dumps([most, cases, faults]))
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The library to preload."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", folder / "shim.so", folder / "shim.c", "-ldl"],
        check=True,
    )
    return folder / "shim.so"


def test_each_call_may_fail(shim: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Whatever call fails, once or permanently, the load returns the right bytes, or a clear error
    if the cache is required."""
    import hashlib

    generator = numpy.random.default_rng(1)
    tensors = {f"t{i}": generator.random((100, 1000), numpy.float32) for i in range(3)}
    fst_numpy.save_file(tensors, tmp_path / "model.safetensors")
    held = b"".join(tensors[name].tobytes() for name in sorted(tensors))
    share = 1 if os.environ.get("FASTSAFETENSORS_TESTS") == "all" else 9
    with web_server(tmp_path) as server:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                textwrap.dedent(PROGRAM),
                shim,
                server.url + "model.safetensors",
                tmp_path / "cache",
                hashlib.sha256(held).hexdigest(),
                str(share),
            ],
            env={**os.environ, "LD_PRELOAD": os.fspath(shim)},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    most, cases, faults = json.loads(done.stdout)
    assert most > 50 and cases > 20 and faults == [], (most, cases, faults[:5])
