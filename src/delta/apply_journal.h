// SPDX-License-Identifier: Apache-2.0
/// The journal of an application to files: a mapped file in .weight_sync that says, at every
/// moment, which blocks of which tensors are new. A killed process leaves it in the page cache, so
/// the next one can finish or undo the work. It is not synced: a power cut is noticed by the boot's
/// id.
///
/// For each thread there is a slot: one word (tensor, block, whether the block is being written)
/// and the block's old bytes. The word is stored before the block is written and after it was read,
/// so whatever the file holds of that block, the slot can put it right.
#ifndef FSTI_APPLY_JOURNAL_H
#define FSTI_APPLY_JOURNAL_H

#include "sync_folder.h"

/// What is known of a tensor whose blocks no slot is about. The undo values begin at undo_at - 1.
typedef struct journal_record {
    uint64_t changed; ///< blocks [undone, changed) are new
    uint64_t undone;
    uint64_t undo_at; ///< 0: none assigned
    uint64_t is_done; ///< all blocks are new and the checksum was verified
} journal_record;

/// The begin of the file. It is read back by the same program on the same machine.
typedef struct journal_head {
    char magic[16];
    uint64_t map_bytes, text_bytes, tensor_count;
    uint32_t slot_count, version_count, had_state;
    atomic_uint_least32_t is_backward;
    atomic_uint_least64_t undo_end;
    uint64_t order_hash; ///< of the tensors and where they lie
    char boot_id[40];
    unsigned char index_digests[DELTA_FOLD_MAX][16];
} journal_head;

typedef struct apply_journal {
    char *map;
    journal_head *head;
    const char *text; ///< base version, new version, folders: each ended by NUL
    journal_record *records;
    atomic_uint_least64_t *words; ///< one a cache line
    unsigned char *blocks;
    int undo_fd;
} apply_journal;

#define JOURNAL_WORD_STRIDE 8u ///< words between those of two slots
/// A slot's word: 0 for none.
static inline uint64_t journal_word(size_t tensor, uint64_t block, bool is_dirty) {
    return ((uint64_t)tensor + 1) << 40 | block << 1 | is_dirty;
}

/// What a journal is begun for.
typedef struct journal_plan {
    const fst_delta *delta;
    delta_span span;
    uint64_t tensor_count, order_hash;
    uint32_t slot_count;
    bool had_state;
} journal_plan;

/// Makes the journal, with room on the disk for all of it, and gives it its name.
fst_status fsti_journal_create(const sync_folder *sync, const journal_plan *plan,
                               apply_journal *out, fst_error *error);
/// Opens the one that is there: out->map is NULL where none is. FST_E_CORRUPT for one that is
/// damaged, FST_E_VERSION for one of before the machine was started.
fst_status fsti_journal_open(const sync_folder *sync, apply_journal *out, fst_error *error);
void fsti_journal_close(apply_journal *journal);
/// Text number `index` of the journal.
const char *fsti_journal_text(const apply_journal *journal, size_t index);

#endif
