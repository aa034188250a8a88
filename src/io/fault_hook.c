// SPDX-License-Identifier: Apache-2.0
/// Test hooks: change results of reads, and hide features of the system.
#include "io_private.h"

static _Atomic(fsti_io_fault_hook) fault_hook;

void fsti_io_fault_hook_set(fsti_io_fault_hook hook) { atomic_store(&fault_hook, hook); }

void fsti_io_finish(fsti_io_op *read) {
    // Relaxed, because tests set the hook before they start reads.
    fsti_io_fault_hook hook = atomic_load_explicit(&fault_hook, memory_order_relaxed);
    if (hook != NULL) hook(read);
}

static unsigned hidden_features;

void fsti_io_test_disable(unsigned features) { hidden_features = features; }
bool fsti_io_test_disables(unsigned feature) { return (hidden_features & feature) != 0; }
