// SPDX-License-Identifier: Apache-2.0
/// Where the bytes of a save come from: one table of functions per kind of source. Private to the
/// save module.
#ifndef FSTI_SAVE_SOURCE_H
#define FSTI_SAVE_SOURCE_H

#include "format/format.h"
#include "io/io.h"
#include "save.h"
#include "snapshot/snapshot.h"

typedef struct fsti_source_kind {
    /// Writes the bytes of a file. Called once per file, on any thread.
    fst_status (*fill)(fst_writer *writer, uint32_t file_index, fst_error *error);
    /// Before the first file: whether all bytes are there. NULL: always.
    fst_status (*ready)(const fst_writer *writer, fst_error *error);
    /// Before anything is published: whether the source is still what it was. NULL: nothing can
    /// change it.
    fst_status (*unchanged)(const fst_writer *writer, fst_error *error);
} fsti_source_kind;

/// The tensors' own memory, and what the caller has written.
extern const fsti_source_kind fsti_source_memory;
/// A snapshot of the tensors.
extern const fsti_source_kind fsti_source_snapshot;
/// The data of an existing file, behind a new header.
extern const fsti_source_kind fsti_source_edited;
/// A whole existing file, unchanged or compressed.
extern const fsti_source_kind fsti_source_copied, fsti_source_compressed;
/// What `plain` has written, compressed.
extern const fsti_source_kind fsti_source_packed;

typedef struct save_source {
    const fsti_source_kind *kind;
    const fsti_source_kind *plain; ///< of a packed source: writes the file to compress

    fsti_file *origin;                ///< an existing file; the caller keeps it open. Else NULL
    uint64_t origin_begin;            ///< offset of its data
    const fsti_header *origin_header; ///< of a file that is compressed
    bool is_whole; ///< the new file has all bytes of the origin, possibly compressed

    fsti_snapshot *snapshot;
    fsti_extent *extents; ///< of `snapshot`: of all files, in their order
    fsti_snapshot_file *snapshot_files;
} save_source;

/// Makes the snapshot of a writer that is planned. All of its tensors have data.
fst_status fsti_snapshot_source_open(fst_writer *writer, const fsti_snapshot_options *options,
                                     fst_error *error);
/// Frees it. No thread may be copying.
void fsti_snapshot_source_close(save_source *source);

#endif
