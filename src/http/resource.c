// SPDX-License-Identifier: Apache-2.0
/// The state that all requests for one URL share: the target of its redirects, and counts of
/// retries.
#include "resource.h"

#include <string.h>

void fsti_resource_init(http_resource *resource) { pthread_mutex_init(&resource->lock, NULL); }

void fsti_resource_clear(http_resource *resource) {
    pthread_mutex_destroy(&resource->lock);
    fsti_secret_text_free(resource->target);
}

char *fsti_resource_target(http_resource *resource, const char *url, bool *is_redirected) {
    pthread_mutex_lock(&resource->lock);
    *is_redirected = resource->target != NULL;
    const char *target = *is_redirected ? resource->target : url;
    char *copy = fsti_string_copy(target, strlen(target));
    pthread_mutex_unlock(&resource->lock);
    return copy;
}

void fsti_resource_redirect(http_resource *resource, const char *target) {
    char *copy = target == NULL ? NULL : fsti_string_copy(target, strlen(target));
    pthread_mutex_lock(&resource->lock);
    fsti_secret_text_free(resource->target);
    resource->target = copy; // NULL without memory: the next request is redirected again
    atomic_store(&resource->has_redirected, true);
    pthread_mutex_unlock(&resource->lock);
}

void fsti_resource_note_retry(http_resource *resource, fsti_retry_cause cause, uint32_t status) {
    atomic_fetch_add(&resource->retry_counts[cause], 1);
    if (status != 0) atomic_store(&resource->retry_status, status);
}

void fsti_resource_note_wait(http_resource *resource, uint64_t wait_ns) {
    atomic_fetch_add(&resource->retry_wait_ns, wait_ns);
}

void fsti_resource_take_retries(http_resource *resource, fsti_retries *sum) {
    for (unsigned i = 0; i < FSTI_RETRY_CAUSE_COUNT; i++)
        sum->counts[i] += atomic_exchange(&resource->retry_counts[i], 0);
    sum->wait_ns += atomic_exchange(&resource->retry_wait_ns, 0);
    uint32_t status = atomic_load(&resource->retry_status);
    if (status != 0) sum->status = status;
}
