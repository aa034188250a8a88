// SPDX-License-Identifier: Apache-2.0
/// Temporary files with known bytes.
#include "fixture.h"

#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <grp.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static char folder[256];

static int remove_entry(const char *path, const struct stat *info, int type, struct FTW *walk) {
    (void)info;
    (void)type;
    (void)walk;
    return remove(path);
}

static void remove_folder(void) { nftw(folder, remove_entry, 16, FTW_DEPTH | FTW_PHYS); }

const char *fixture_path(const char *name) {
    static char paths[8][512];
    static unsigned next;
    if (folder[0] == '\0') {
        const char *base = getenv("TMPDIR");
        snprintf(folder, sizeof folder, "%s/fst-test-XXXXXX", base != NULL ? base : "/tmp");
        if (mkdtemp(folder) == NULL) abort();
        atexit(remove_folder);
    }
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static void write_all(int fd, const void *bytes, size_t size) {
    for (size_t done = 0; done < size;) {
        ssize_t result = write(fd, (const char *)bytes + done, size - done);
        if (result <= 0) abort();
        done += (size_t)result;
    }
}

static int create(const char *path) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0) abort();
    return fd;
}

const char *fixture_file(const char *name, const void *bytes, size_t size) {
    const char *path = fixture_path(name);
    int fd = create(path);
    write_all(fd, bytes, size);
    close(fd);
    return path;
}

#define MIXER 0x9e3779b97f4a7c15u

uint8_t fixture_byte(uint64_t offset) { return (uint8_t)((offset + 1) * MIXER >> 56); }

/// fixture_byte() of bytes in a row. Nobody else sees the block: a sanitizer of threads would only
/// slow this down.
__attribute__((no_sanitize("thread"))) static void fill(uint8_t *block, uint64_t offset,
                                                        size_t size) {
    uint64_t mixed = (offset + 1) * MIXER;
    for (size_t i = 0; i < size; i++, mixed += MIXER) block[i] = (uint8_t)(mixed >> 56);
}

int fixture_matches(const void *bytes, uint64_t offset, uint64_t size) {
    uint8_t block[4096];
    for (uint64_t done = 0; done < size;) {
        size_t part = size - done < sizeof block ? (size_t)(size - done) : sizeof block;
        fill(block, offset + done, part);
        if (memcmp((const uint8_t *)bytes + done, block, part) != 0) return 0;
        done += part;
    }
    return 1;
}

bool fixture_is_loaded(fst_loader *loader, size_t tensor_count, uint64_t tensor_bytes) {
    bool good = true;
    for (size_t i = 0; good && i < tensor_count; i++) {
        fst_tensor *tensor = NULL;
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        good = fst_loader_tensor_at(loader, i, -1, &tensor, NULL) == FST_OK &&
               fst_tensor_view_get(tensor, &view, NULL) == FST_OK &&
               fixture_matches(view.data, i * tensor_bytes, tensor_bytes);
        fst_tensor_unref(tensor);
    }
    return good;
}

const char *fixture_model(const char *name, const char *json, uint64_t data_bytes) {
    const char *path = fixture_path(name);
    int fd = create(path);
    uint64_t length = strlen(json);
    static uint8_t block[1 << 16];
    write_all(fd, &length, 8);
    write_all(fd, json, length);
    for (uint64_t done = 0; done < data_bytes;) {
        size_t size = data_bytes - done < sizeof block ? (size_t)(data_bytes - done) : sizeof block;
        fill(block, done, size);
        write_all(fd, block, size);
        done += size;
    }
    fsync(fd);
    close(fd);
    return path;
}

const char *fixture_tensors(const char *name, size_t tensor_count, uint64_t tensor_bytes) {
    char *json = malloc(tensor_count * 120 + 16), *end = json;
    if (json == NULL) abort();
    *end++ = '{';
    for (size_t i = 0; i < tensor_count; i++)
        end += sprintf(
            end, "%s\"t%zu\":{\"dtype\":\"U8\",\"shape\":[%llu],\"data_offsets\":[%llu,%llu]}",
            i > 0 ? "," : "", i, (unsigned long long)tensor_bytes,
            (unsigned long long)(i * tensor_bytes), (unsigned long long)((i + 1) * tensor_bytes));
    *end++ = '}';
    while ((end - json) % 8 != 0) *end++ = ' ';
    *end = '\0';
    const char *path = fixture_model(name, json, tensor_count * tensor_bytes);
    free(json);
    return path;
}

void fixture_evict(const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) abort();
    fsync(fd);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
}

void fixture_warm(const char *path) {
    static char block[1 << 16];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) abort();
    while (read(fd, block, sizeof block) > 0) {
    }
    close(fd);
}

#define STRANGER_ID 65534

int fixture_as_other_user(int (*work)(void *context), void *context) {
    int status = 0;
    if (geteuid() != 0) return -1;
    fixture_path("");
    if (chmod(folder, 0755) != 0) abort();
    fflush(NULL);
    pid_t child = fork();
    if (child < 0) abort();
    if (child == 0) {
        if (setgroups(0, NULL) != 0 || setgid(STRANGER_ID) != 0 || setuid(STRANGER_ID) != 0)
            _exit(101);
        _exit(work(context));
    }
    if (waitpid(child, &status, 0) != child || !WIFEXITED(status)) return 102;
    return WEXITSTATUS(status) == 101 ? -1 : WEXITSTATUS(status);
}

/// Finds the line of a field in what the system reports about the mapping that holds `address`.
static int find_mapping_field(const void *address, const char *field, char *line, int size) {
    int inside = 0, found = 0;
    FILE *maps = fopen("/proc/self/smaps", "re");
    while (maps != NULL && !found && fgets(line, size, maps) != NULL) {
        unsigned long begin, end, at = (unsigned long)(uintptr_t)address;
        if (sscanf(line, "%lx-%lx ", &begin, &end) == 2) inside = at >= begin && at < end;
        found = inside && strncmp(line, field, strlen(field)) == 0;
    }
    if (maps != NULL) fclose(maps);
    return found;
}

int fixture_mapping_has(const void *address, const char *flag) {
    char line[512], wanted[16];
    snprintf(wanted, sizeof wanted, " %s", flag);
    return find_mapping_field(address, "VmFlags:", line, sizeof line) &&
           strstr(line, wanted) != NULL;
}

uint64_t fixture_mapped_bytes(const void *address) {
    char line[512];
    if (!find_mapping_field(address, "Rss:", line, sizeof line)) return 0;
    return strtoull(line + strlen("Rss:"), NULL, 10) * 1024;
}

uint64_t fixture_random(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    uint64_t value = *state ^ (*state >> 29);
    return value * 0xbf58476d1ce4e5b9u >> 16;
}

#define TUNING(member, value) [value] = {.struct_size = sizeof(fst_load_tuning), .member = value}

const fst_load_tuning *fixture_engine(fst_engine engine) {
    static const fst_load_tuning engines[FST_ENGINE_COUNT] = {
        TUNING(engine, FST_ENGINE_AUTO), TUNING(engine, FST_ENGINE_URING),
        TUNING(engine, FST_ENGINE_DIRECT), TUNING(engine, FST_ENGINE_PREAD),
        TUNING(engine, FST_ENGINE_MMAP)};
    return &engines[engine];
}

const fst_load_tuning *fixture_gds(fst_gds gds) {
    static const fst_load_tuning choices[FST_GDS_COUNT] = {
        TUNING(gds, FST_GDS_AUTO), TUNING(gds, FST_GDS_OFF), TUNING(gds, FST_GDS_STRICT)};
    return &choices[gds];
}

const fst_load_tuning *fixture_populate(void) {
    static const fst_load_tuning tuning = {.struct_size = sizeof tuning, .map_populate = 1};
    return &tuning;
}

size_t fixture_live_buffers(void) {
    size_t count;
    fst_memory_live(&count, NULL);
    for (int i = 0; count > 0 && i < 5000; i++, fst_memory_live(&count, NULL)) usleep(1000);
    return count;
}

void fixture_syscall_arguments(long number, va_list list, long arguments[6]) {
    int count = number == SYS_io_uring_enter || number == SYS_mbind ? 6 : 5;
    for (int i = 0; i < 6; i++) arguments[i] = i < count ? va_arg(list, long) : 0;
}

void fixture_limit_descriptors(bool is_limited) {
    static struct rlimit before;
    int next = dup(STDOUT_FILENO);
    if (next >= 0) close(next);
    if (is_limited) getrlimit(RLIMIT_NOFILE, &before);
    struct rlimit limit = before;
    if (is_limited) limit.rlim_cur = (rlim_t)next;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) abort();
}
