// SPDX-License-Identifier: Apache-2.0
/// Seals a complete object: verifies all blocks, syncs the file and renames it. From then on it is
/// read as a plain file.
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cache_private.h"

/// Blocks read and digested together.
#define CHECK_BLOCKS 32u
/// How long to wait for another process that is sealing it.
#define SEAL_PATIENCE_NS ((uint64_t)60000000000)
#define SEAL_PAUSE_US 5000

/// Whether all blocks are cached.
static bool has_all(const fsti_cache_entry *entry) {
    uint64_t digests[512];
    for (uint64_t at = 0; at < entry->block_count; at += sizeof digests / sizeof *digests) {
        uint64_t count = fsti_min(entry->block_count - at, sizeof digests / sizeof *digests);
        if (fsti_cache_map_read(entry->map_fd, at, count, digests) != 0) return false;
        for (uint64_t i = 0; i < count; i++)
            if (digests[i] == 0) return false;
    }
    return true;
}

/// Whether the blocks [first, first + count) match the map. Blocks that do not are removed from it.
static bool check_blocks(const fsti_cache_entry *entry, uint64_t first, uint64_t count,
                         char *buffer) {
    uint64_t digests[CHECK_BLOCKS], begin = first * CACHE_BLOCK_BYTES;
    uint64_t size = fsti_min(count * CACHE_BLOCK_BYTES, entry->size_bytes - begin);
    bool is_intact = true;
    if (fsti_cache_map_read(entry->map_fd, first, count, digests) != 0 ||
        fsti_read_at(entry->data_fd, buffer, (size_t)size, begin) != 0)
        return false;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t at = i * CACHE_BLOCK_BYTES, left = fsti_min(CACHE_BLOCK_BYTES, size - at);
        if (fsti_cache_digest(buffer + at, (size_t)left) == digests[i]) continue;
        const uint64_t absent = 0;
        (void)fsti_cache_map_write(entry->map_fd, first + i, 1, &absent);
        is_intact = false;
    }
    return is_intact;
}

static bool check_all(const fsti_cache_entry *entry) {
    char *buffer = fsti_alloc(CHECK_BLOCKS * CACHE_BLOCK_BYTES);
    bool is_intact = buffer != NULL;
    for (uint64_t at = 0; is_intact && at < entry->block_count; at += CHECK_BLOCKS)
        is_intact =
            check_blocks(entry, at, fsti_min(entry->block_count - at, CHECK_BLOCKS), buffer);
    fsti_free(buffer);
    return is_intact;
}

static bool is_sealed(const cache_folder *folder, const char *name) {
    char data[CACHE_FILE_NAME_BYTES];
    struct stat info;
    fsti_cache_file_name(data, name, ".data");
    return fstatat(folder->fd, data, &info, AT_SYMLINK_NOFOLLOW) == 0;
}

/// Whether a name in the folder still refers to the open file.
static bool is_named(const cache_folder *folder, const char *name, const char *ending, int fd) {
    char file[CACHE_FILE_NAME_BYTES];
    struct stat named, opened;
    fsti_cache_file_name(file, name, ending);
    return fstatat(folder->fd, file, &named, AT_SYMLINK_NOFOLLOW) == 0 && fstat(fd, &opened) == 0 &&
           named.st_dev == opened.st_dev && named.st_ino == opened.st_ino;
}

/// Renames the verified file. If the folder was cleared meanwhile, the name may belong to a new,
/// mostly empty file, which must not be renamed.
static bool rename_checked(const fsti_cache_entry *entry, cache_folder *folder, const char *name) {
    char part[CACHE_FILE_NAME_BYTES], data[CACHE_FILE_NAME_BYTES];
    fsti_cache_file_name(part, name, ".part");
    fsti_cache_file_name(data, name, ".data");
    if (fsti_cache_folder_lock(folder) != 0) return false;
    bool is_own = is_named(folder, name, ".part", entry->data_fd) &&
                  is_named(folder, name, ".map", entry->map_fd);
    bool is_renamed = is_own && renameat(folder->fd, part, folder->fd, data) == 0;
    fsti_cache_folder_unlock(folder);
    return is_renamed;
}

/// Runs with all blocks claimed, so there are no writers.
static bool seal_claimed(fsti_cache_entry *entry, cache_folder *folder, const char *name) {
    if (is_sealed(folder, name)) return true;
    // The digests cover the kernel's copy; fdatasync() ensures that the device has it too.
    // The map shows later that the file belongs to the cache.
    return check_all(entry) && fdatasync(entry->data_fd) == 0 && fdatasync(entry->map_fd) == 0 &&
           rename_checked(entry, folder, name);
}

static bool seal(fsti_cache_entry *entry, cache_folder *folder, const char *name) {
    uint64_t begun_ns = fsti_now_ns();
    cache_stall stall = {0};
    while (!atomic_load(&entry->is_broken) && has_all(entry)) {
        cache_claim claim;
        bool is_claimed = fsti_cache_claim(entry, 0, entry->block_count, &claim);
        bool is_all = is_claimed && claim.first == 0 && claim.last == entry->block_count;
        bool is_done = is_all && seal_claimed(entry, folder, name);
        if (is_claimed) fsti_cache_unclaim(entry, &claim);
        if (is_all || is_sealed(folder, name)) return is_done || is_sealed(folder, name);
        // Claims of others start at the first block, or after the blocks that were free.
        uint64_t taken = is_claimed && claim.first == 0 ? claim.last : 0;
        if (fsti_now_ns() - begun_ns > SEAL_PATIENCE_NS ||
            fsti_cache_is_stalled(entry, taken, &stall))
            return false;
        usleep(SEAL_PAUSE_US);
    }
    return false;
}

bool fsti_cache_seal(fsti_cache_entry *entry, cache_folder *folder, const char *name) {
    fsti_cache_wait_begin(entry);
    bool is_done = seal(entry, folder, name);
    fsti_cache_wait_end(entry);
    return is_done;
}
