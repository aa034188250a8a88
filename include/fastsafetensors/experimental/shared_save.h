// SPDX-License-Identifier: Apache-2.0
/// A set that several processes write together, and temporary files that killed saves have left.
///
/// Either each process writes separate files (one writer per file, then fst_writer_hand_over()),
/// and one process publishes all of them with fst_set_publish(). Or one process creates the files
/// (fst_save_options.others_write, fst_writer_hand_over()), the others write parts of them
/// (fst_writer_join()), and the first one commits. The processes must exchange the paths and
/// signal when they are done. Until everything is published the old model stays, whichever process
/// dies.
///
///     if (fst_writer_hand_over(writer, &error) != FST_OK) return 1;
///     const char *path = fst_writer_hidden_path(writer, 0); // send it to the publishing process
///     // there:
///     if (fst_set_publish(folder, paths, path_count, NULL, NULL, &error) != FST_OK) return 1;
///     // here, afterwards:
///     fst_writer_close(writer);
#ifndef FASTSAFETENSORS_SHARED_SAVE_H
#define FASTSAFETENSORS_SHARED_SAVE_H

#include "../writer.h"

#ifdef __cplusplus
extern "C" {
#endif

/// Returns the path of file `file_index`, or of the index of a set of several files (file_index ==
/// file_count); NULL for another index. It belongs to the writer.
FST_API const char *fst_writer_path(const fst_writer *writer, uint32_t file_index);

/// Maps the bytes of a tensor without data in the new file, to be filled before
/// fst_writer_finish(). The memory is valid until the writer is finished or closed. FST_E_ARGUMENT
/// if bytes of the tensor were written before. Where the file system can't reserve space (no
/// fallocate), zeros are written to it first, so that a full disk is FST_E_NO_SPACE here.
FST_API FST_NODISCARD fst_status fst_writer_map(fst_writer *writer, size_t tensor_index, void **out,
                                                fst_error *error);

/// Finishes if necessary, and gives the files temporary names under which other processes find them
/// until they are published: fst_writer_hidden_path(). Keep the writer open until then: when it is
/// closed or its process dies, the files are removed unless an index already refers to them.
FST_API FST_NODISCARD fst_status fst_writer_hand_over(fst_writer *writer, fst_error *error);

/// Returns the temporary path of file `file_index` after fst_writer_hand_over(); NULL before. It
/// belongs to the writer.
FST_API const char *fst_writer_hidden_path(const fst_writer *writer, uint32_t file_index);

/// Opens a file that another process has handed over with others_write, to write parts of it with
/// fst_writer_write() or fst_writer_map(). Tensors are numbered as fst_model_open() numbers those
/// of `path`. FST_E_ARGUMENT if the name is not one of fst_writer_hidden_path(), if the file has
/// other hard links, if it was not handed over with others_write, and if its owner has ended or
/// closed the writer; FST_E_UNSUPPORTED for a compressed file.
///
/// Not checked: that every byte is written once; that no process writes after the owner has
/// committed; that a file with such a name, on which another program holds a shared flock(), was
/// handed over. On network and user-space file systems a file without a lock is accepted, because
/// these need not show the locks of other machines.
///
/// fst_writer_finish() syncs if `options` (may be NULL; only promise and progress are used) say so.
/// Closing the writer does not remove the file. On success *out is a writer.
FST_API FST_NODISCARD fst_status fst_writer_join(const char *path, const fst_save_options *options,
                                                 fst_writer **out, fst_error *error);

/// How to publish. All fields except struct_size may be zero.
typedef struct fst_publish_options {
    size_t struct_size; ///< sizeof(fst_publish_options)
    fst_save_promise promise;
    /// 1: readers find the set by the names of its files. An index exists while it is published,
    /// and stays only if the set had one; files of sets with other file counts stay.
    int names_only;
    const char *stem; ///< NULL: "model"
    /// A manifest of the set, as fst_save_options.manifest. The set is read for it. NULL: none, and
    /// a manifest of the old model is removed. Not with names_only.
    const char *manifest;
    fst_digest digest; ///< of the manifest
} fst_publish_options;

/// Publishes files that were handed over, in the given order, as one set in their folder, with the
/// file names and guarantees of fst_writer_open(). The index is made from the headers. `paths` are
/// temporary paths in `folder` (else FST_E_ARGUMENT); a tensor in two files is FST_E_ARGUMENT.
/// Afterwards, also on failure, the temporary names are removed or an index refers to them, except
/// those of files that were refused. `stats` may be NULL.
FST_API FST_NODISCARD fst_status fst_set_publish(const char *folder, const char *const *paths,
                                                 size_t path_count,
                                                 const fst_publish_options *options,
                                                 fst_save_stats *stats, fst_error *error);

/// A temporary file of a save: ".NAME.<16 hex digits>.tmp".
typedef struct fst_leftover {
    size_t struct_size; ///< set by the library
    const char *path;   ///< valid during the call
    uint64_t size_bytes;
    int in_use; ///< 1: its save is running, or an index refers to it; 0: its save was killed
} fst_leftover;

/// Receives one temporary file.
typedef void (*fst_leftover_callback)(void *context, const fst_leftover *leftover);

/// Lists the temporary files of saves in a folder, or those of one target if `path` is not a
/// folder, on the calling thread. A save removes unused ones of the same target. FST_E_TIMEOUT
/// while another save is being published.
FST_API FST_NODISCARD fst_status fst_leftovers_visit(const char *path, fst_leftover_callback visit,
                                                     void *context, fst_error *error);

/// Removes the temporary files that fst_leftovers_visit() reports as not in use. Sets *count and
/// *size_bytes (either may be NULL) to the number of removed files and their bytes.
FST_API FST_NODISCARD fst_status fst_leftovers_remove(const char *path, size_t *count,
                                                      uint64_t *size_bytes, fst_error *error);

#ifdef __cplusplus
}
#endif

#endif
