// SPDX-License-Identifier: Apache-2.0
/// The map of an object: which blocks are cached, and which process fetches each of the others.
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cache_private.h"
#include "digest/digest.h"

uint64_t fsti_cache_digest(const void *bytes, size_t size) {
    uint64_t digest = 0;
    fsti_digest_xxh3_64.hash(bytes, size, (unsigned char *)&digest);
    return digest == 0 ? 1 : digest;
}

void fsti_cache_name_of(const char *text, size_t size, char name[CACHE_NAME_BYTES]) {
    unsigned char digest[FSTI_DIGEST_BYTES_MAX];
    fsti_digest_blake3.hash(text, size, digest);
    fsti_digest_print(digest, (CACHE_NAME_BYTES - 1) / 2, name);
}

static uint64_t check_of(const cache_map_header *head) {
    const size_t begin = offsetof(cache_map_header, size_bytes);
    return fsti_cache_digest((const char *)head + begin, sizeof *head - begin);
}

int fsti_cache_map_write_header(int fd, cache_map_header *head) {
    memcpy(head->magic, CACHE_MAP_MAGIC, sizeof head->magic);
    head->block_bytes = CACHE_BLOCK_BYTES;
    head->check = check_of(head);
    return fsti_write_at(fd, head, sizeof *head, 0);
}

int fsti_cache_map_read_header(int fd, cache_map_header *head) {
    int failed = fsti_read_at(fd, head, sizeof *head, 0);
    if (failed != 0) return failed;
    bool is_valid = memcmp(head->magic, CACHE_MAP_MAGIC, sizeof head->magic) == 0 &&
                    head->block_bytes == CACHE_BLOCK_BYTES && head->check == check_of(head);
    return is_valid ? 0 : EINVAL;
}

int fsti_cache_map_read(int fd, uint64_t first, uint64_t count, uint64_t *digests) {
    return fsti_read_at(fd, digests, (size_t)count * sizeof *digests,
                        CACHE_MAP_HEADER_BYTES + first * sizeof *digests);
}

int fsti_cache_map_write(int fd, uint64_t first, uint64_t count, const uint64_t *digests) {
    return fsti_write_at(fd, digests, (size_t)count * sizeof *digests,
                         CACHE_MAP_HEADER_BYTES + first * sizeof *digests);
}

// ---- claims ----

/// After a fork the parent's claims do not belong to the child, and locks through the inherited
/// file description would not separate the two. Reopens the map; false on failure.
static bool reopen_map(fsti_cache_entry *entry) {
    if (entry->owner == getpid()) return true;
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", entry->map_fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return false;
    bool has_own_map = dup3(fd, entry->map_fd, O_CLOEXEC) >= 0;
    close(fd);
    if (has_own_map) {
        entry->claims = NULL;
        entry->owner = getpid();
    }
    return has_own_map;
}

/// The first claim of this process that overlaps [first, last).
static const cache_claim *find_claim(const fsti_cache_entry *entry, uint64_t first, uint64_t last) {
    const cache_claim *found = NULL;
    for (const cache_claim *claim = entry->claims; claim != NULL; claim = claim->next)
        if (claim->first < last && claim->last > first &&
            (found == NULL || claim->first < found->first))
            found = claim;
    return found;
}

/// The lock of a block is on the byte with its number. Locks need no data at their offsets.
static struct flock range_lock(short type, uint64_t first, uint64_t last) {
    return (struct flock){.l_type = type,
                          .l_whence = SEEK_SET,
                          .l_start = (off_t)first,
                          .l_len = (off_t)(last - first)};
}

/// Shrinks [*first, *last) to the part before [taken, end), or after it.
static void exclude_range(uint64_t *first, uint64_t *last, uint64_t taken, uint64_t end) {
    if (taken > *first)
        *last = fsti_min(*last, taken);
    else
        *first = end;
}

/// Excludes blocks that another process has claimed. False if the locks cannot be queried.
static bool exclude_claimed(int fd, uint64_t *first, uint64_t *last) {
    struct flock other = range_lock(F_WRLCK, *first, *last);
    if (fcntl(fd, F_OFD_GETLK, &other) != 0) return false;
    if (other.l_type == F_UNLCK) return true; // released in the meantime
    uint64_t begin = (uint64_t)other.l_start;
    exclude_range(first, last, begin,
                  other.l_len == 0 ? UINT64_MAX : begin + (uint64_t)other.l_len);
    return true;
}

/// Claims the first run of free blocks in [first, last). Locks on an open file description separate
/// processes, but not the threads of one, which share the description. So the process also has a
/// list of its claims, which the module's lock protects.
static bool claim_blocks(fsti_cache_entry *entry, uint64_t first, uint64_t last,
                         cache_claim *claim) {
    const cache_claim *own;
    while ((own = find_claim(entry, first, last)) != NULL)
        exclude_range(&first, &last, own->first, own->last);
    while (first < last) {
        struct flock range = range_lock(F_WRLCK, first, last);
        if (fcntl(entry->map_fd, F_OFD_SETLK, &range) == 0) {
            *claim = (cache_claim){first, last, entry->claims};
            entry->claims = claim;
            fsti_cache_heartbeat_start(entry, claim);
            return true;
        }
        bool is_taken = errno == EAGAIN || errno == EACCES;
        if (is_taken && exclude_claimed(entry->map_fd, &first, &last)) continue;
        // Without locks, processes could overwrite each other's blocks.
        fsti_cache_break(entry, errno);
        return false;
    }
    return false;
}

bool fsti_cache_claim(fsti_cache_entry *entry, uint64_t first, uint64_t last, cache_claim *claim) {
    fsti_cache_lock();
    bool has_own_map = reopen_map(entry);
    if (!has_own_map) fsti_cache_break(entry, errno);
    bool is_claimed = has_own_map && claim_blocks(entry, first, last, claim);
    fsti_cache_unlock();
    return is_claimed;
}

void fsti_cache_unclaim(fsti_cache_entry *entry, cache_claim *claim) {
    fsti_cache_lock();
    cache_claim **at = &entry->claims;
    while (*at != NULL && *at != claim) at = &(*at)->next;
    if (*at != NULL) {
        *at = claim->next;
        struct flock range = range_lock(F_UNLCK, claim->first, claim->last);
        // If unlocking fails, waiters give up on the lock after a time limit.
        if (fcntl(entry->map_fd, F_OFD_SETLK, &range) != 0) fsti_cache_break(entry, errno);
    }
    fsti_cache_unlock();
}
