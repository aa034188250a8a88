// SPDX-License-Identifier: Apache-2.0
/// What all requests for one URL share. Part of http.h.
#ifndef FSTI_RESOURCE_H
#define FSTI_RESOURCE_H

#include "base/primitives.h"
#include "response.h"

/// Why a request was repeated.
typedef enum fsti_retry_cause {
    FSTI_RETRY_REFUSED, ///< no connection: refused, or unknown host
    FSTI_RETRY_SILENT,  ///< no response in time, or a stalled one
    FSTI_RETRY_BROKEN,  ///< the connection ended before the response
    FSTI_RETRY_CUT,     ///< the response ended early
    FSTI_RETRY_STATUS,  ///< the server reported an error or throttling
    FSTI_RETRY_CAUSE_COUNT
} fsti_retry_cause;
/// Retries of a resource's requests.
typedef struct fsti_retries {
    uint64_t counts[FSTI_RETRY_CAUSE_COUNT];
    uint64_t wait_ns; ///< sum over requests: waiting before retries
    uint32_t status;  ///< the last status for FSTI_RETRY_STATUS
} fsti_retries;
/// A resource of one version: the version of the first response is required of all others. The
/// owner sets it before other threads use the resource; the rest is thread-safe.
typedef struct http_resource {
    resource_version version;   ///< is_set: required of all responses
    pthread_mutex_t lock;       ///< protects `target`
    char *target;               ///< last target of redirects, or NULL
    atomic_bool has_redirected; ///< its URL has redirected
    // Retries since the last fsti_resource_take_retries().
    _Atomic uint64_t retry_counts[FSTI_RETRY_CAUSE_COUNT];
    _Atomic uint64_t retry_wait_ns;
    _Atomic uint32_t retry_status;
} http_resource;

/// Prepares a zeroed resource.
void fsti_resource_init(http_resource *resource);
void fsti_resource_clear(http_resource *resource);
/// The URL to request: `url`, or the target of its redirects (*is_redirected). From fsti_alloc().
char *fsti_resource_target(http_resource *resource, const char *url, bool *is_redirected);
/// Records the target of a redirect; NULL: the redirect no longer works.
void fsti_resource_redirect(http_resource *resource, const char *target);
/// Counts a retry. `status`: of the response that caused it, or 0.
void fsti_resource_note_retry(http_resource *resource, fsti_retry_cause cause, uint32_t status);
/// Adds time spent waiting for retries.
void fsti_resource_note_wait(http_resource *resource, uint64_t wait_ns);
/// Adds the retries since the last call to *sum.
void fsti_resource_take_retries(http_resource *resource, fsti_retries *sum);

#endif
