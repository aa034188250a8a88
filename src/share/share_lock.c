// SPDX-License-Identifier: Apache-2.0
/// Locks on bytes of a segment, and its header.
#include <fcntl.h>
#include <string.h>

#include "digest/digest.h"
#include "share_private.h"

static const char magic[16] = "fst-segment 1\n";

/// Locks belong to the open file description, so that two loads of one process exclude each other
/// as two processes do.
bool fsti_share_set_lock(int fd, int type, off_t at, off_t count) {
    struct flock range = {
        .l_type = (short)type, .l_whence = SEEK_SET, .l_start = at, .l_len = count};
    return fcntl(fd, F_OFD_SETLK, &range) == 0;
}

bool fsti_share_is_unused(int fd) {
    struct flock other = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = SHARE_USERS_AT, .l_len = 1};
    return fcntl(fd, F_OFD_GETLK, &other) == 0 && other.l_type == F_UNLCK;
}

static uint64_t check_of(const share_header *head) {
    uint64_t digest = 0;
    fsti_digest_xxh3_64.hash(head, offsetof(share_header, check), (unsigned char *)&digest);
    return digest;
}

void fsti_share_header_make(share_header *head) {
    memcpy(head->magic, magic, sizeof magic);
    head->check = check_of(head);
}

bool fsti_share_header_has_magic(const share_header *head) {
    return memcmp(head->magic, magic, sizeof magic) == 0;
}

/// The sizes are checked too, so that no mapping is longer than its file.
bool fsti_share_header_is_valid(const share_header *head, uint64_t file_bytes) {
    uint64_t states = (uint64_t)head->chunk_count + head->batch_count;
    return fsti_share_header_has_magic(head) && head->check == check_of(head) &&
           head->chunk_count <= SHARE_CHUNK_COUNT_MAX &&
           head->batch_count <= SHARE_CHUNK_COUNT_MAX && head->data_bytes <= SHARE_DATA_BYTES_MAX &&
           head->control_bytes == fsti_align_up(SHARE_HEADER_BYTES + states, SHARE_PAGE_BYTES) &&
           head->control_bytes + head->data_bytes == file_bytes &&
           memchr(head->name, '\0', sizeof head->name) != NULL &&
           memchr(head->label, '\0', sizeof head->label) != NULL;
}
