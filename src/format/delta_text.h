// SPDX-License-Identifier: Apache-2.0
/// The texts of weight deltas: a version's index, and the note of which version a folder has. Part
/// of the format module's interface, by way of format.h.
#ifndef FSTI_DELTA_TEXT_H
#define FSTI_DELTA_TEXT_H

#include "base/primitives.h"

struct fsti_index;

/// The index of a version. Texts are NUL-terminated; NULL where the index lacks them.
typedef struct fsti_delta_text {
    char *bytes;
    const char *version, *base, *encoding, *compression, *checksum;
    struct fsti_index *index; ///< its weight_map
} fsti_delta_text;

/// Parses the index of a version; `bytes` as for fsti_header_parse(). Numbers for versions are
/// texts afterwards. A version without delta_encoding is a full one: encoding stays NULL. Shard
/// names with a slash are FST_E_PATH_ESCAPES, a tensor name given twice FST_E_DUPLICATE_TENSOR,
/// other faults FST_E_INDEX_JSON.
fst_status fsti_delta_text_parse(char *bytes, size_t byte_count, const char *path,
                                 fsti_delta_text *out, fst_error *error);
void fsti_delta_text_clear(fsti_delta_text *text);

/// The version without the leading zeros of a decimal one, so that equal versions have equal text.
/// Points into `version`.
const char *fsti_version_plain(const char *version);
/// Compares two version names: decimal ones as numbers, others only for equality.
typedef enum fsti_version_order {
    FSTI_VERSION_SAME,
    FSTI_VERSION_OLDER, ///< the first one
    FSTI_VERSION_NEWER,
    FSTI_VERSION_OTHER, ///< they differ, and have no order
} fsti_version_order;
fsti_version_order fsti_version_compare(const char *a, const char *b);

/// The state of a file of a folder after a version was applied.
typedef struct fsti_delta_stamp {
    const char *name;
    uint64_t size_bytes, modified_ns;
} fsti_delta_stamp;

/// Which version a folder has: .weight_sync/state.json.
typedef struct fsti_delta_state {
    char *bytes;
    const char *version;
    fsti_delta_stamp *files; ///< none where another program wrote the text
    size_t file_count;
} fsti_delta_state;

/// FST_E_INDEX_JSON for anything else than {"version": text or number, "files": {name: [size,
/// modification time in nanoseconds]}}; `files` may be absent, further keys are ignored.
fst_status fsti_delta_state_parse(char *bytes, size_t byte_count, const char *path,
                                  fsti_delta_state *out, fst_error *error);
void fsti_delta_state_clear(fsti_delta_state *state);

/// *out is from fsti_alloc.
fst_status fsti_delta_state_write(const fsti_delta_state *state, char **out, size_t *size_bytes,
                                  fst_error *error);

/// One changed tensor of an index to be written.
typedef struct fsti_delta_row {
    const char *name;
    size_t name_size;
    uint32_t shard; ///< below shard_count
} fsti_delta_row;

typedef struct fsti_delta_draft {
    const char *version, *base, *encoding, *checksum;
    const fsti_delta_row *rows; ///< in the order of the index
    size_t row_count;
    uint32_t shard_count;
    bool is_compact; ///< sorted keys without spaces, as ModelExpress writes it
} fsti_delta_draft;
/// *out is from fsti_alloc.
fst_status fsti_delta_text_write(const fsti_delta_draft *draft, char **out, size_t *size_bytes,
                                 fst_error *error);
/// Room for a shard's name.
#define FSTI_DELTA_SHARD_NAME_BYTES 40u
/// "model-00000-of-00004.safetensors"
void fsti_delta_shard_name(uint32_t shard, uint32_t shard_count, char *name);

#endif
