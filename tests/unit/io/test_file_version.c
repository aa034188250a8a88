// SPDX-License-Identifier: Apache-2.0
/// Versions of files: two disk images with equal files, mounted one after the other, as the kernel
/// would report them.
#include <fastsafetensors.h>
#include <fastsafetensors/experimental.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/primitives.h"
#include "check.h"
#include "fixture.h"
#include "io/io.h"

// ---- what the kernel reports ----

static struct {
    bool is_on;
    long nanoseconds; ///< of the times of all regular files
    uint64_t file_system, mount;
    bool has_unique_mounts; ///< Linux 6.8
} kernel;

int __real_fstat64(int fd, struct stat64 *out);
int __wrap_fstat64(int fd, struct stat64 *out);
int __real_fstatfs64(int fd, struct statfs64 *out);
int __wrap_fstatfs64(int fd, struct statfs64 *out);
long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);

int __wrap_fstat64(int fd, struct stat64 *out) {
    int result = __real_fstat64(fd, out);
    if (!kernel.is_on || result != 0 || !S_ISREG(out->st_mode)) return result;
    out->st_ino = 12;
    out->st_mtim = out->st_ctim = (struct timespec){.tv_nsec = kernel.nanoseconds};
    return 0;
}

int __wrap_fstatfs64(int fd, struct statfs64 *out) {
    int result = __real_fstatfs64(fd, out);
    if (kernel.is_on) memcpy(&out->f_fsid, &kernel.file_system, sizeof out->f_fsid);
    return result;
}

/// Answers statx() for a mount's number; passes on other calls.
long __wrap_syscall(long number, ...) {
    long values[6];
    va_list list;
    va_start(list, number);
    fixture_syscall_arguments(number, list, values);
    va_end(list);
    unsigned wanted = (unsigned)values[3];
    if (!kernel.is_on || number != SYS_statx || (wanted & 0x5000) == 0)
        return __real_syscall(number, values[0], values[1], values[2], values[3], values[4],
                              values[5]);
    char *out = (char *)values[4]; // NOLINT(performance-no-int-to-ptr)
    uint32_t mask = wanted & (kernel.has_unique_mounts ? 0x5000u : 0x1000u);
    memcpy(out, &mask, sizeof mask);
    memcpy(out + 144, &kernel.mount, sizeof kernel.mount);
    return 0;
}

/// The version's text; a static buffer of 2 in turn.
static const char *version_of(const char *path) {
    static char texts[2][4096];
    static unsigned turn;
    char *text = texts[turn++ % 2];
    fsti_file *file;
    if (fsti_file_open(path, &file, NULL) != FST_OK) abort();
    if (!fsti_file_version_text(file, text, sizeof texts[0])) abort();
    fsti_file_unref(file);
    return text;
}

TEST(files_of_two_images_have_two_versions)
{
    const char *path = fixture_tensors("image", 1, 100);
    kernel.is_on = true;
    for (int round = 0; round < 2; round++) {
        kernel.has_unique_mounts = round == 0;
        kernel.nanoseconds = 0;
        kernel.mount = 1;
        const char *first = version_of(path);
        CHECK(strcmp(first, version_of(path)) == 0);
        first = version_of(path);
        kernel.mount = 2;
        CHECK(strcmp(first, version_of(path)) != 0);
        kernel.mount = 1;
        first = version_of(path);
        kernel.file_system++;
        CHECK(strcmp(first, version_of(path)) != 0);
        // Containers have mounts of their own; a file whose times the kernel wrote is the same.
        kernel.nanoseconds = 1;
        first = version_of(path);
        kernel.mount = 2;
        CHECK(strcmp(first, version_of(path)) == 0);
    }
    kernel.is_on = false;
}

/// Writes a model whose tensor has one value and this name, of one letter, and loads it shared.
/// Returns the first byte that was loaded.
static int load_shared(const char *name, int value) {
    enum { BYTES = 4 << 20 };
    char json[128];
    snprintf(json, sizeof json,
             "{\"%s\":{\"dtype\":\"U8\",\"shape\":[%d],\"data_offsets\":[0,%d]}}", name, BYTES,
             BYTES);
    const char *path = fixture_model("model", json, BYTES);
    FILE *file = fopen(path, "r+b");
    fseek(file, (long)(8 + strlen(json)), SEEK_SET);
    for (size_t i = 0; i < BYTES; i++) putc(value, file);
    fclose(file);
    fst_model *model;
    fst_loader *loader;
    fst_tensor *tensor;
    fst_tensor_view view = {.struct_size = sizeof view};
    fst_load_options options = {.struct_size = sizeof options, .mode = FST_MODE_LOAD};
    options.share = FST_SHARE_NODE;
    options.share_grace_s = 100;
    kernel.is_on = true;
    if (fst_model_open(path, NULL, &model, NULL) != FST_OK) abort();
    if (fst_loader_open(model, &options, &loader, NULL) != FST_OK) abort();
    if (fst_loader_next(loader, 60000, &tensor, NULL) != FST_OK) abort();
    kernel.is_on = false;
    if (fst_tensor_view_get(tensor, &view, NULL) != FST_OK) abort();
    int got = *(const unsigned char *)view.data;
    fst_tensor_unref(tensor);
    fst_loader_close(loader);
    fst_model_close(model);
    return got;
}

TEST(a_segment_belongs_to_one_header)
{
    setenv("FASTSAFETENSORS_SHARE_DIR", fixture_path("segments"), 1);
    kernel.nanoseconds = 5;
    CHECK_INT(load_shared("a", 1), 1);
    CHECK_INT(load_shared("a", 2), 1); // nothing differs: the segment is used
    CHECK_INT(load_shared("b", 3), 3);
    CHECK_INT(fst_segment_drop(NULL, NULL, NULL, NULL), FST_OK);
}
