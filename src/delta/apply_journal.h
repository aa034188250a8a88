// SPDX-License-Identifier: Apache-2.0
/// The journal of an update of files: a memory-mapped file in .weight_sync that records at
/// every moment which blocks of which tensors are new. A killed process leaves it in the page
/// cache, so the next one can finish or undo the work. It is not synced. After a power cut the boot
/// ID in it differs from the current one, and it is refused.
///
/// For each thread there is a slot: one word (tensor, block, whether the block is being written)
/// and the block's old and new bytes. The word is stored after the block was read and before it is
/// written, so the slot can restore the block whether it was written completely, partly or not at
/// all.
///
/// Between a kill and the recovery, other programs may replace the files or write into them. The
/// journal therefore also has the identity of each file and a hash of each block that was written.
/// A hash of its old bytes shows in a roll-back whether the delta still gives these back.
#ifndef FSTI_APPLY_JOURNAL_H
#define FSTI_APPLY_JOURNAL_H

#include "sync_folder.h"

/// The state of a tensor that no thread is working on. Its undo values begin at undo_at - 1 in the
/// undo file.
typedef struct journal_record {
    uint64_t changed; ///< blocks [undone, changed) are new
    uint64_t undone;
    uint64_t undo_at; ///< 0: none assigned
    uint64_t is_done; ///< all blocks are new and the checksum was verified
} journal_record;

/// A file of the checkpoint, in the state in which the journal found it.
typedef struct journal_file {
    uint64_t device, inode, size_bytes;
    uint64_t modified_ns;                ///< means nothing after the first write
    atomic_uint_least64_t is_written_to; ///< set before the first write
} journal_file;

/// The beginning of the file. Only the same program on the same machine reads it, so it has the
/// machine's byte order.
typedef struct journal_head {
    char magic[16];
    uint64_t map_bytes, text_bytes, file_count, tensor_count, block_count;
    uint32_t slot_count, version_count, had_state;
    atomic_uint_least32_t is_backward;
    atomic_uint_least64_t undo_end;
    uint64_t order_hash; ///< of the tensors and their positions
    char boot_id[40];
    unsigned char index_digests[DELTA_FOLD_MAX][16];
} journal_head;

typedef struct apply_journal {
    char *map;
    journal_head *head;
    const char *text;    ///< base version, new version, folders, file names: each ended by NUL
    journal_file *files; ///< in the order of the model's files
    journal_record *records;
    uint64_t *hashes;     ///< of every block of every tensor: valid where the block was written
    uint64_t *old_hashes; ///< of the blocks before that
    atomic_uint_least64_t *words; ///< one per cache line
    unsigned char *blocks;        ///< for each slot the old bytes, then the new bytes
    int undo_fd;
    const char *undo_path; ///< borrowed from the folder
} apply_journal;

/// The bytes of a slot.
#define JOURNAL_SLOT_BYTES (2 * DELTA_BLOCK_BYTES)
#define JOURNAL_WORD_STRIDE 8u ///< the words of two slots are this many words apart
/// The word of a slot that holds a block of a tensor. An unused slot has 0. From the highest bit
/// on: the tensor's number + 1 (24 bits), the block (31), a CRC of the other bits (8), is_dirty
/// (1).
static inline uint64_t journal_word_crc(uint64_t word) {
    uint64_t rest = word & ~((uint64_t)0xff << 1);
    for (int bit = 63; bit >= 8; bit--)
        if ((rest >> bit & 1) != 0) rest ^= (uint64_t)0x107 << (bit - 8);
    return rest & 0xff;
}
static inline uint64_t journal_word(size_t tensor, uint64_t block, bool is_dirty) {
    uint64_t word = ((uint64_t)tensor + 1) << 40 | block << 9 | is_dirty;
    return word | journal_word_crc(word) << 1;
}

/// False if the word was damaged: every change of one bit is found.
static inline bool journal_word_is_valid(uint64_t word) {
    return word == 0 || (word >> 1 & 0xff) == journal_word_crc(word);
}
static inline uint64_t journal_word_tensor(uint64_t word) { return (word >> 40) - 1; }
static inline uint64_t journal_word_block(uint64_t word) {
    return (word & (((uint64_t)1 << 40) - 1)) >> 9;
}

/// The hash of a block, as `hashes` and `old_hashes` have it.
uint64_t fsti_journal_hash(const void *bytes, size_t size);

/// The update that a new journal describes.
typedef struct journal_plan {
    const fst_delta *delta;
    delta_span span;
    const fst_model *base;
    const int *descriptors; ///< of the files that are changed; -1 for others
    uint64_t tensor_count, block_count, order_hash;
    uint32_t slot_count;
    bool had_state;
} journal_plan;

/// Creates the journal with all of its disk space allocated, and renames it to its final name.
fst_status fsti_journal_create(const sync_folder *sync, const journal_plan *plan,
                               apply_journal *out, fst_error *error);
/// Opens the existing journal; out->map is NULL if there is no journal. FST_E_CORRUPT if it is
/// damaged, FST_E_VERSION if it was written before the machine was started.
fst_status fsti_journal_open(const sync_folder *sync, apply_journal *out, fst_error *error);
void fsti_journal_close(apply_journal *journal);
/// Text number `index` of the journal.
const char *fsti_journal_text(const apply_journal *journal, size_t index);
/// FST_E_FILE_CHANGED if a path of the checkpoint names another file than when the journal was
/// created, or a file that others have changed. Files that this update has written to have
/// other times now: fsti_apply_check() compares their bytes.
fst_status fsti_journal_check_files(const sync_folder *sync, const apply_journal *journal,
                                    fst_error *error);
/// The same error, for a file.
fst_status fsti_journal_refuse_file(const apply_journal *journal, const char *path,
                                    fst_error *error);

#endif
