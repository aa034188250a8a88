// SPDX-License-Identifier: Apache-2.0
/// The end of the use of a segment.
#include <fcntl.h>
#include <time.h>

#include "share_private.h"

/// Whether the file under the segment's name is still this one: it may have been dropped and made
/// again.
static bool has_name(const fsti_share *share) {
    struct stat named, own;
    return fstatat(share->folder_fd, share->name, &named, AT_SYMLINK_NOFOLLOW) == 0 &&
           fstat(share->lock_fd, &own) == 0 && named.st_dev == own.st_dev &&
           named.st_ino == own.st_ino;
}

/// How long the end of a use may wait for another process: tensors are freed while others wait,
/// such as all threads of a Python program.
#define LEAVE_WAIT_MS 200u

// If the folder cannot be locked, a later load removes the segment.
void fsti_share_leave(fsti_share *share) {
    int lock_fd = fsti_share_folder_lock(share->folder_fd, LEAVE_WAIT_MS);
    atomic_store(&share->control->used_s, (long long)time(NULL));
    if (lock_fd < 0) return;
    bool is_last = fsti_share_set_lock(share->lock_fd, F_WRLCK, SHARE_USERS_AT, 1);
    bool is_kept = atomic_load(&share->control->is_pinned) != 0 ||
                   (atomic_load(&share->control->grace_s) != 0 && fsti_share_is_complete(share));
    if (is_last && !is_kept && has_name(share))
        fsti_share_folder_remove(share->folder_fd, share->name);
    // Another process must not find the lock of this one once the folder is unlocked.
    (void)fsti_share_set_lock(share->lock_fd, F_UNLCK, SHARE_USERS_AT, 1);
    fsti_share_folder_unlock(lock_fd);
}
