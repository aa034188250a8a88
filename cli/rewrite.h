// SPDX-License-Identifier: Apache-2.0
/// One model into another, as a stream: what convert, extract, merge and split share.
#ifndef CLI_REWRITE_H
#define CLI_REWRITE_H

#include "cli.h"

/// A pattern of names and what it becomes: one '*' in both stands for the same text.
typedef struct tensor_rename {
    const char *from, *to;
} tensor_rename;

/// Opens one source as it is, or several (files, indexes, folders) as one model of all their files.
/// EXIT_GOOD, or an exit code after saying what is wrong.
int cli_open_sources(const char *const *sources, size_t source_count,
                     const fst_open_options *options, fst_model **model);

typedef struct rewrite_plan {
    const char *target;
    fst_save_options save; ///< metadata and files are filled in
    int convert;           ///< floats become `dtype` (integers wider ones) where that is possible
    fst_dtype dtype;
    const char **globs; ///< NULL: all tensors
    size_t glob_count;
    uint64_t file_bytes_max; ///< split by size; 0: not
    uint32_t wanted_files;   ///< split into this many; 0: not
    bool by_layer;           ///< split by the first number in the names
    bool dry_run;
    const fst_tensor_rename *renames; ///< one a tensor of the model, without a new name: as it is
    /// Metadata instead of the model's own; NULL: that.
    const fst_metadata_entry *metadata;
    size_t metadata_count;
} rewrite_plan;

/// The words of fst_save_order and fst_save_engine, in their order.
extern const char *const cli_order_words[], *const cli_engine_words[];
/// Those of fst_digest that manifests are of, in its order, and the option that takes them.
extern const char *const cli_manifest_words[];
#define CLI_MANIFEST_OPTION                                                                        \
    {'m',                                                                                          \
     "manifest",                                                                                   \
     "[=WHICH]",                                                                                   \
     cli_manifest_words,                                                                           \
     "make a manifest of what is written, for verified loads, in the same pass (xxh3-128)",        \
     0}
/// The option was given: the manifest lies where loads look for it.
void cli_plan_manifest(rewrite_plan *plan, int digest);

/// A file that is asked for as a stream, but not one to a pipe: EXIT_USAGE.
int cli_refuse_stream(void);
/// Rewrites an opened model; says what was done. Returns the exit code.
int cli_rewrite(fst_model *model, const rewrite_plan *plan);

/// Whether a plan asks for nothing but that one file be compressed: then its bytes are kept.
bool cli_packs_alone(const rewrite_plan *plan, const char *source);
/// Compresses or decompresses one file; says what was done. Returns the exit code.
int cli_pack(const char *source, const rewrite_plan *plan, bool decompress);

/// The new names that patterns give the tensors of a model: one element a tensor, `to` is NULL
/// where none does. A pattern without a tensor is EXIT_INVALID. cli_renames_free() in any case.
int cli_rename_tensors(const fst_model *model, const tensor_rename *renames, size_t rename_count,
                       fst_tensor_rename **out);
void cli_renames_free(fst_tensor_rename *names, size_t count);

/// Cuts a tensor in slices of at most about `piece_bytes`, each contiguous; calls `take` for each
/// with begin and end of every dimension and the index of its first element. False when `take`
/// returned false.
typedef bool (*piece_callback)(void *context, const uint64_t *begin, const uint64_t *end,
                               uint64_t first_element);
bool cli_cut_tensor(const fst_tensor_info *info, uint64_t bits, uint64_t piece_bytes,
                    piece_callback take, void *context);

/// All pieces of one tensor, as items of a load.
typedef struct piece_list {
    fst_request_item *items;
    uint64_t *numbers; ///< of the slices
    size_t count, capacity;
    uint32_t rank;
} piece_list;

/// Cuts a tensor as cli_cut_tensor() does; none of one without bytes. False without memory.
bool cli_pieces_cut(piece_list *list, const fst_tensor_info *info, uint64_t bits,
                    uint64_t piece_bytes);
/// Makes the items those of tensor `tensor_index`, which has that shape.
void cli_pieces_of(piece_list *list, size_t tensor_index);
void cli_pieces_clear(piece_list *list);

// ---- values: tensor_values.c ----

/// What values of a dtype are converted to for looking at them: F64, I64, U64 or itself.
fst_dtype cli_value_dtype(fst_dtype dtype);
/// Whether that dtype is one of whole numbers (I64, U64), which doubles do not all have.
bool cli_is_whole(fst_dtype dtype);
/// Element `i` of such a view as a key: natural numbers in the order of the values.
uint64_t cli_whole_key(const fst_tensor_view *view, uint64_t i);
/// The value behind a key, as text; `text` has at least 32 bytes; returns `text`.
char *cli_whole_text(fst_dtype dtype, uint64_t key, char *text);
/// Element `i` of a view of that dtype, or of BOOL; false when it has no numbers.
bool cli_value_at(const fst_tensor_view *view, uint64_t i, double *value);

/// The greatest rank that pieces are cut for; tensors of more dimensions come whole.
#define CLI_RANK_MAX 32

#endif
