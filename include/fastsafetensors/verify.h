// SPDX-License-Identifier: Apache-2.0
/// Verifying models: manifests and signatures.
///
/// A *manifest* is a text file with the size of each file of a model, a digest of its header and a
/// digest of each of its chunks (format: docs/verify.md). A model that is opened with
/// FST_OPEN_VERIFY or fst_open_options.manifest is verified while it is loaded: the thread that
/// reads a chunk computes its digest in the memory of the tensor. If the digest differs, every call
/// that would return a tensor with bytes of this chunk is FST_E_DIGEST.
///
///     fst_error error;
///     if (fst_manifest_write("model", NULL, NULL, NULL, &error) != FST_OK) return 1;
///     if (fst_manifest_check("model", NULL, NULL, &error) != FST_OK)
///         fprintf(stderr, "%s\n", error.message);
#ifndef FASTSAFETENSORS_VERIFY_H
#define FASTSAFETENSORS_VERIFY_H

#include "base.h"
#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

/// Digest algorithms.
typedef enum fst_digest {
    FST_DIGEST_XXH3_128 = 0, ///< "xxh3-128": detects accidents, at the speed of memory
    FST_DIGEST_BLAKE3 = 1,   ///< "blake3": also protects against forgery
    FST_DIGEST_SHA256 = 2,   ///< "sha256": also protects against forgery; needs OpenSSL's libcrypto
    FST_DIGEST_XXH3_64 = 3,  ///< "xxh3": printed by `fastsafetensors hash`; not for manifests
    FST_DIGEST_ADLER32 = 4,  ///< "adler32": for weight deltas only
} fst_digest;
#define FST_DIGEST_COUNT 5

/// Returns "xxh3-128", "blake3", "sha256", "xxh3" or "adler32"; "unknown" for other values.
FST_API const char *fst_digest_name(fst_digest digest);

/// What a model is verified against. Sources other than a manifest have digests of whole files or
/// tensors: each file is read once when it is opened, compared with them, and a BLAKE3 digest of
/// each chunk is kept in memory, which loads are verified against.
typedef enum fst_verified_by {
    FST_VERIFIED_BY_MANIFEST = 0, ///< a manifest; nothing is read twice
    FST_VERIFIED_BY_BUNDLE = 1,   ///< a signed bundle that lists the files
    FST_VERIFIED_BY_SUMS = 2,     ///< FILE.sha256, or SHA256SUMS in the folder (sha256sum format)
    FST_VERIFIED_BY_HUB = 3,      ///< the SHA-256 in a file name of the Hugging Face Hub's cache
    FST_VERIFIED_BY_SIDECAR = 4,  ///< FILE.digest, written by `fastsafetensors hash --write`
    FST_VERIFIED_BY_TENSORS = 5,  ///< digests of tensors in the file's metadata
} fst_verified_by;
#define FST_VERIFIED_BY_COUNT 6

/// How a model is verified. The pointers belong to the model.
typedef struct fst_verification {
    size_t struct_size;   ///< sizeof(fst_verification)
    const char *manifest; ///< path of the manifest or other source; NULL: not verified
    fst_digest digest;    ///< FST_VERIFIED_BY_TENSORS: that of the last file
    uint32_t chunk_bytes; ///< bytes of a file per digest; 0: whole files or tensors
    size_t file_count;    ///< files that the source lists
    fst_verified_by source;
} fst_verification;

/// Describes how a model is verified.
FST_API FST_NODISCARD fst_status fst_model_verification(const fst_model *model,
                                                        fst_verification *out, fst_error *error);

/// fst_manifest_options.flags: add a digest of every tensor, for programs that compare tensors of
/// several files. Loads don't need it; tensors are read once more for it.
#define FST_MANIFEST_TENSORS 1u

/// fst_manifest_options.flags, on its own: write the SHA-256 of each whole file instead, in the
/// format of sha256sum: FILE.sha256, or SHA256SUMS in the folder. Needs FST_DIGEST_SHA256 and
/// neither `keep` nor `chunk_bytes`, else FST_E_ARGUMENT. fst_manifest_check() accepts the result;
/// loads read each file once more to verify it.
#define FST_MANIFEST_SUMS 2u

/// How to make a manifest. All fields except struct_size may be zero.
typedef struct fst_manifest_options {
    size_t struct_size; ///< sizeof(fst_manifest_options)
    fst_digest digest;
    uint32_t chunk_bytes;  ///< a power of two from 64 KiB to 1 MiB; 0: 1 MiB
    uint32_t thread_count; ///< 0: the number of CPUs that the process may use, at least 4
    uint32_t flags;        ///< FST_MANIFEST_* or 0
    /// An older manifest, or NULL. A file that still has the inode, size, modification time and
    /// ctime of that manifest is not read; its digests are taken from there. This trusts the file
    /// system: damage on the disk does not change these. Files that were changed less than two
    /// seconds before the older manifest was begun are read, and so are copies. FST_E_ARGUMENT for
    /// a manifest with another digest or chunk_bytes.
    const char *keep;
    fst_progress_callback progress; ///< called from threads of the work; must not call the library
    void *progress_context;
    /// Receives the path of the written file, truncated to its size and NUL-terminated. May be
    /// NULL.
    char *written_path;
    size_t written_path_size; ///< of `written_path`, in bytes
} fst_manifest_options;

/// What making or checking a manifest did.
typedef struct fst_manifest_stats {
    size_t struct_size;    ///< sizeof(fst_manifest_stats)
    uint64_t file_count;   ///< files listed
    uint64_t files_kept;   ///< files that were not read because of `keep`
    uint64_t bytes_read;   ///< from files
    uint64_t bytes_hashed; ///< with FST_MANIFEST_TENSORS, those of tensors count twice
    uint64_t total_ns;     ///< duration of the call
} fst_manifest_stats;

/// Makes the manifest of the model at `path` and writes it to `target` (NULL: where FST_OPEN_VERIFY
/// finds it: FILE.manifest, or model.manifest in the folder), completely or not at all. The
/// manifest of a file lists that file. That of a folder or an index lists all files directly in the
/// folder, except hidden ones and *.manifest, *.digest and *.sig, and the files that the index
/// names. `options` and `stats` may be NULL; the digest is then XXH3-128. Errors are those of
/// opening, FST_E_FILE_CHANGED, FST_E_UNSUPPORTED without libcrypto, and FST_E_ARGUMENT if `target`
/// is a model or an index, by its name or its content, or if a file's name is not UTF-8 (checksum
/// lists may have any name). FST_E_FILE_CHANGED also if another process saves a model at `target`
/// meanwhile; that model stays. A URL can be read (then `target` is required), but not written to:
/// FST_E_UNSUPPORTED.
FST_API FST_NODISCARD fst_status fst_manifest_write(const char *path, const char *target,
                                                    const fst_manifest_options *options,
                                                    fst_manifest_stats *stats, fst_error *error);

/// Receives one difference: FST_E_DIGEST, or the error of a file that can't be read. One call at a
/// time, from threads of the check; must not call the library.
typedef void (*fst_manifest_callback)(void *context, const fst_error *difference);

/// How to check a manifest. All fields except struct_size may be zero.
typedef struct fst_check_options {
    size_t struct_size; ///< sizeof(fst_check_options)
    /// NULL: the one that FST_OPEN_VERIFY finds. May also be a list in the format of sha256sum,
    /// with names relative to the model's folder.
    const char *manifest;
    fst_manifest_callback callback; ///< receives all differences; may be NULL
    void *context;                  ///< of `callback`
    fst_progress_callback progress; ///< called from threads of the work; must not call the library
    void *progress_context;
} fst_check_options;

/// Reads all files that the manifest of the model at `path` lists, and reports each difference:
/// missing files, sizes, and each chunk. FST_E_DIGEST if there was one. With options->manifest,
/// `path` may be a folder without a model. `options` and `stats` may be NULL.
FST_API FST_NODISCARD fst_status fst_manifest_check(const char *path,
                                                    const fst_check_options *options,
                                                    fst_manifest_stats *stats, fst_error *error);

/// What to sign or to verify with OpenSSF model signing 1.0 and a key.
typedef struct fst_bundle_files {
    size_t struct_size;    ///< sizeof(fst_bundle_files)
    const char *folder;    ///< its files, subfolders included
    const char *signature; ///< the bundle; NULL: model.sig in the folder
    const char *key;       ///< PEM file without a password; curve P-256, P-384 or P-521
    /// For fst_bundle_sign(): an older bundle of the folder, signed with the same key (another key:
    /// FST_E_SIGNATURE), or NULL. Unchanged files are not read, as for fst_manifest_options.keep.
    const char *keep;
    fst_manifest_callback callback; ///< for fst_bundle_check(): receives differences; may be NULL
    void *context;                  ///< of `callback`
    fst_progress_callback progress; ///< called from threads of the work; must not call the library
    void *progress_context;
} fst_bundle_files;

/// Signs a folder with a private key. The bundle can be verified with the model_signing package: a
/// SHA-256 of each file except .git, .github, .gitignore, .gitattributes and the bundle itself.
/// Make the manifest first: it is signed with the rest, and loads can then be verified with the
/// key. `stats` may be NULL. FST_E_UNSUPPORTED without libcrypto, FST_E_ARGUMENT if the folder is a
/// file or has no file, if the bundle would overwrite a model, an index or the key, or if a file's
/// name is not UTF-8.
FST_API FST_NODISCARD fst_status fst_bundle_sign(const fst_bundle_files *files,
                                                 fst_manifest_stats *stats, fst_error *error);

/// Verifies the signature of a bundle with a public key, and then that the folder has exactly the
/// listed files with their content. FST_E_SIGNATURE before any file is read, FST_E_DIGEST after.
/// Bundles that were signed with certificates, or that list shards, are FST_E_SIGNATURE; the
/// model_signing package verifies those.
FST_API FST_NODISCARD fst_status fst_bundle_check(const fst_bundle_files *files,
                                                  fst_manifest_stats *stats, fst_error *error);

#ifdef __cplusplus
}
#endif

#endif
