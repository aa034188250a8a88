// SPDX-License-Identifier: Apache-2.0
/// Rewrites one model as another, as a stream. Shared by convert, extract, merge and split.
#ifndef CLI_REWRITE_H
#define CLI_REWRITE_H

#include "cli.h"

/// A pattern of names and its replacement: one '*' in both stands for the same text.
typedef struct tensor_rename {
    const char *from, *to;
} tensor_rename;

/// Opens one source, or several (files, indexes, folders) as one model of all their files. Returns
/// EXIT_OK, or an exit code after printing the error.
int cli_open_sources(const char *const *sources, size_t source_count,
                     const fst_open_options *options, fst_model **model);

typedef struct rewrite_plan {
    const char *target;
    fst_save_options save; ///< metadata and files are filled in
    int convert; ///< convert floats to `dtype` (and integers to wider ones) where possible
    fst_dtype dtype;
    const char **globs; ///< NULL: all tensors
    size_t glob_count;
    uint64_t file_bytes_max; ///< split by size; 0: no
    uint32_t wanted_files;   ///< split into this many; 0: no
    bool by_layer;           ///< split by the first number in the names
    bool dry_run;
    const char
        *loss; ///< of rescue, for JSON: a message about missing bytes; "": none. Otherwise NULL
    const fst_tensor_rename
        *renames; ///< one per tensor of the model; without a new name: unchanged
    /// Replaces the model's metadata; NULL: keep it.
    const fst_metadata_entry *metadata;
    size_t metadata_count;
} rewrite_plan;

/// The names of fst_save_order and fst_save_engine, in their order.
extern const char *const cli_order_words[], *const cli_engine_words[];
/// The names of digests for manifests, and the option that takes them.
extern const char *const cli_manifest_words[];
#define CLI_MANIFEST_OPTION                                                                        \
    {'m',                                                                                          \
     "manifest",                                                                                   \
     "[=WHICH]",                                                                                   \
     cli_manifest_words,                                                                           \
     "write a manifest of the result, for verified loads (default: xxh3-128)",                     \
     0}
/// Plans a manifest at the default path.
void cli_plan_manifest(rewrite_plan *plan, int digest);

/// Refuses a stream to something other than a pipe: EXIT_USAGE.
int cli_refuse_stream(void);
/// Rewrites an open model and reports it. Returns the exit code.
int cli_rewrite(fst_model *model, const rewrite_plan *plan);

// ---- before a save: rewrite_target.c ----

/// For a dry run: refuses a target that the save would refuse: without a folder, in one that cannot
/// be written, something other than a file, or a URL. is_copy: of an edited file, which takes no
/// URL.
int cli_check_file_target(const char *target, bool is_copy);
/// Refuses a path at which no file can be created: its folder is missing or may not be written.
int cli_check_file_folder(const char *target);
/// Whether the result is several files, or one in a folder.
bool cli_is_split(const rewrite_plan *plan);
/// For split: refuses a target that is a file, or a folder that would have two indexes afterwards.
int cli_check_folder_target(const rewrite_plan *plan);
/// For a split into one file: refuses a folder with other models' files.
int cli_check_one_file(const rewrite_plan *plan, uint32_t file_count);
/// For split with --select: refuses a folder whose files with the other tensors would be deleted.
int cli_check_selection(const fst_model *model, const rewrite_plan *plan);
/// Prints which files of the folder a split replaces or deletes: as JSON, more fields of an object.
void cli_print_old_files(const rewrite_plan *plan, uint32_t file_count);

/// Whether a plan only compresses one file, whose bytes are then kept.
bool cli_is_compress_only(const rewrite_plan *plan, const char *source);
/// Compresses or decompresses one file and reports it. Returns the exit code.
int cli_pack(const char *source, const rewrite_plan *plan, bool decompress);

/// Applies rename patterns to a model: one element per tensor, with `to` NULL if no pattern
/// matches. EXIT_INVALID for a pattern that matches no tensor. Call cli_renames_free() in any case.
int cli_rename_tensors(const fst_model *model, const tensor_rename *renames, size_t rename_count,
                       fst_tensor_rename **out);
void cli_renames_free(fst_tensor_rename *names, size_t count);

/// Splits a tensor into contiguous slices of at most about `piece_bytes` and calls `take` for each
/// with the bounds of every dimension and the index of its first element. False if `take` returned
/// false.
typedef bool (*piece_callback)(void *context, const uint64_t *begin, const uint64_t *end,
                               uint64_t first_element);
bool cli_cut_tensor(const fst_tensor_info *info, uint64_t bits, uint64_t piece_bytes,
                    piece_callback take, void *context);

/// All pieces of one tensor, as items of a load.
typedef struct piece_list {
    fst_part *items;
    uint64_t *numbers; ///< slice bounds
    size_t count, capacity;
    uint32_t rank;
} piece_list;

/// Splits a tensor like cli_cut_tensor(); an empty one has no pieces. False without memory.
bool cli_pieces_cut(piece_list *list, const fst_tensor_info *info, uint64_t bits,
                    uint64_t piece_bytes);
/// Makes the items refer to tensor `tensor_index`, which has the same shape.
void cli_pieces_of(piece_list *list, size_t tensor_index);
void cli_pieces_clear(piece_list *list);

/// For loads in pieces: cached chunks by pread, since mapped pages would count as memory of this
/// process.
extern const fst_load_tuning cli_unmapped_reads;

// ---- values: tensor_values.c ----

/// The dtype to which values are converted for display: F64, I64, U64 or unchanged.
fst_dtype cli_value_dtype(fst_dtype dtype);
/// Whether that dtype is an integer (I64, U64), which a double may not represent.
bool cli_is_integer(fst_dtype dtype);
/// Element `i` of such a view as a key: unsigned integers in the order of the values.
uint64_t cli_integer_key(const fst_tensor_view *view, uint64_t i);
/// The value of a key as text. `text` has at least 32 bytes and is returned.
char *cli_integer_text(fst_dtype dtype, uint64_t key, char *text);
/// Element `i` of a view of that dtype, or of BOOL. False if it has no numbers.
bool cli_value_at(const fst_tensor_view *view, uint64_t i, double *value);

/// The largest rank that is split; tensors of more dimensions are loaded whole.
#define CLI_RANK_MAX 32

#endif
