// SPDX-License-Identifier: Apache-2.0
/// The list of segments that this process has open, for its handlers of fork() and exit().
///
/// A forked child has no descriptors of segments (fsti_lockable_open_at()): the locks belong to the
/// open file description, which the child would share and keep. It keeps its mappings, so tensors
/// stay valid there. Programs often end without freeing their tensors, so the end of the process
/// leaves the segments too; mappings stay until the process is gone.
#include <stdlib.h>

#include "share_private.h"

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static fsti_share *list;
static pthread_once_t register_once = PTHREAD_ONCE_INIT;

/// The list is consistent, because fork() took its lock before the copy (fsti_fork_lock()).
static void forget_in_child(void) {
    for (fsti_share *share = list; share != NULL; share = share->next)
        share->lock_fd = share->data_fd = share->folder_fd = -1;
    list = NULL;
}

static void leave_at_exit(void) {
    pthread_mutex_lock(&list_lock);
    for (fsti_share *share = list; share != NULL; share = share->next) fsti_share_leave(share);
    pthread_mutex_unlock(&list_lock);
}

/// When the library is loaded, behind the handlers of fork_locks.c and before those of most
/// programs, which may free tensors or load in a child.
__attribute__((constructor(102))) static void follow_forks(void) {
    fsti_fork_lock(&list_lock);
    pthread_atfork(NULL, NULL, forget_in_child);
}

static void register_exit(void) {
    (void)atexit(leave_at_exit); // if this fails, the next load removes what is left
}

void fsti_share_list_add(fsti_share *share) {
    pthread_once(&register_once, register_exit);
    pthread_mutex_lock(&list_lock);
    share->next = list;
    list = share;
    pthread_mutex_unlock(&list_lock);
}

void fsti_share_list_remove(fsti_share *share) {
    pthread_mutex_lock(&list_lock);
    fsti_share **at = &list;
    while (*at != NULL && *at != share) at = &(*at)->next;
    if (*at != NULL) *at = share->next;
    pthread_mutex_unlock(&list_lock);
}
