// SPDX-License-Identifier: Apache-2.0
/// System calls that fail on request, linked in place of the real ones (--wrap). Only calls between
/// fault_calls_begin() and fault_calls_end() count.
#ifndef FAULT_CALLS_H
#define FAULT_CALLS_H

#include <stdbool.h>
#include <stddef.h>

typedef enum fault_kind {
    FAULT_NONE,    ///< count only
    FAULT_ONCE,    ///< the n-th call fails
    FAULT_FOREVER, ///< and all calls after it
    FAULT_KILL,    ///< the process ends before the n-th call
    FAULT_ACTION,  ///< `action` runs before the n-th call
} fault_kind;

typedef struct fault_plan {
    fault_kind kind;
    long nth;             ///< from 1
    unsigned errno_index; ///< which of the errors that the call can have
    bool no_links;        ///< the file system has no hard links
    bool shares_blocks;   ///< it shares blocks between files
    bool with_reads;      ///< calls that read count as well
    void (*action)(void);
} fault_plan;

/// What happened.
typedef struct fault_report {
    long call_count;
    const char *failed;   ///< the n-th call's name; NULL: there were fewer
    unsigned errno_count; ///< errors that it can have
} fault_report;

void fault_calls_begin(const fault_plan *plan);
fault_report fault_calls_end(void);

#endif
