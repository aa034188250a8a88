// SPDX-License-Identifier: Apache-2.0
/// Digests: what a model's bytes should be, made once and held against what is loaded.
///
/// A *manifest* is a text with the size of each file, a digest of its header and a digest of every
/// chunk of it (docs/verify.md has the format). A model that is opened with FST_OPEN_VERIFY or
/// fst_open_options.manifest is verified in the pass that loads: each chunk is digested in the
/// memory that is handed out, by the thread that has read it, and no tensor that touches a chunk
/// whose digest differs is handed out, by no call: FST_E_DIGEST.
#ifndef FASTSAFETENSORS_VERIFY_H
#define FASTSAFETENSORS_VERIFY_H

#include "base.h"
#include "loader.h"
#include "model.h"

#ifdef __cplusplus
extern "C" {
#endif

/// How digests are computed.
typedef enum fst_digest {
    FST_DIGEST_XXH3_128 = 0, ///< "xxh3-128": against accidents, at the speed of memory
    FST_DIGEST_BLAKE3 = 1,   ///< "blake3": against forgery as well
    /// "sha256": against forgery as well; by OpenSSL's libcrypto, found at run time
    FST_DIGEST_SHA256 = 2,
    /// "xxh3", of 64 bits: what `fastsafetensors hash` keeps of files and tensors; not of manifests
    FST_DIGEST_XXH3_64 = 3,
} fst_digest;
/// How many digests manifests are made of.
#define FST_DIGEST_COUNT 3

/// "xxh3-128", "blake3", "sha256", "xxh3"; "unknown" for numbers that are none.
FST_API const char *fst_digest_name(fst_digest digest);

// ---- digests of bytes ----

/// A digest in progress: of one thread at a time.
typedef struct fst_digest_state fst_digest_state;

/// The most bytes that a digest has.
#define FST_DIGEST_BYTES_MAX 32

/// Begins a digest of bytes that come in pieces; *out is to be ended. FST_E_UNSUPPORTED without the
/// library that FST_DIGEST_SHA256 needs, FST_E_NO_MEMORY.
FST_API FST_NODISCARD fst_status fst_digest_begin(fst_digest digest, fst_digest_state **out,
                                                  fst_error *error);
/// The next `size_bytes` bytes; `bytes` may be NULL where there are none.
FST_API FST_NODISCARD fst_status fst_digest_update(fst_digest_state *state, const void *bytes,
                                                   size_t size_bytes, fst_error *error);
/// Ends it and frees the state, also where that fails. `digest`: FST_DIGEST_BYTES_MAX bytes of room
/// for the digest (XXH3's in its canonical order, big-endian), *size_bytes of it.
FST_API FST_NODISCARD fst_status fst_digest_end(fst_digest_state *state, unsigned char *digest,
                                                size_t *size_bytes, fst_error *error);

/// Frees a state whose digest is not wanted any more; NULL does nothing.
FST_API void fst_digest_drop(fst_digest_state *state);

/// What a model is held against. All but a manifest says something of whole files, or of tensors:
/// each file is read once when it is opened, through the descriptor that it is loaded from, held
/// against that, and a BLAKE3 of each chunk is kept in memory; loads are held against those, so
/// that what was verified is what is used here as well.
typedef enum fst_verified_by {
    FST_VERIFIED_BY_MANIFEST = 0, ///< chunk by chunk, without reading anything twice
    FST_VERIFIED_BY_BUNDLE =
        1,                    ///< a signed bundle that lists the files, where there is no manifest
    FST_VERIFIED_BY_SUMS = 2, ///< a list of sha256sum's: FILE.sha256, or SHA256SUMS of the folder
    FST_VERIFIED_BY_HUB = 3,  ///< the SHA-256 that is a file's name in the Hub's cache
    FST_VERIFIED_BY_SIDECAR = 4, ///< FILE.digest, which `fastsafetensors hash --write` makes
    FST_VERIFIED_BY_TENSORS = 5, ///< digests of tensors in the file's metadata
} fst_verified_by;

/// The pointers belong to the model.
typedef struct fst_verification {
    size_t struct_size;   ///< sizeof(fst_verification), set by the caller
    const char *manifest; ///< the path of what was found; NULL: the model is not verified
    fst_digest digest;    ///< of FST_VERIFIED_BY_TENSORS: that of the file opened last
    uint32_t chunk_bytes; ///< bytes of a file that a digest is of; 0: whole files or tensors
    size_t file_count;    ///< files that it lists; 0: it lists none
    fst_verified_by source;
} fst_verification;

/// What `model` is held against, found or given when it was opened.
FST_API FST_NODISCARD fst_status fst_model_verification(const fst_model *model,
                                                        fst_verification *out, fst_error *error);

// ---- making manifests ----

/// fst_manifest_options.flags: also a digest of every tensor's bytes, for programs that compare
/// tensors of several files. Loads do not need them; tensors are read once more for it.
#define FST_MANIFEST_TENSORS 1u
/// fst_manifest_options.flags, alone: no manifest, but the SHA-256 of each whole file, in a text
/// that "sha256sum -c" reads in the folder: FILE.sha256, or SHA256SUMS of a folder. It is of
/// FST_DIGEST_SHA256 and without `keep` and `chunk_bytes`, else FST_E_ARGUMENT.
/// fst_manifest_check() takes it; loads read the file once more for it.
#define FST_MANIFEST_SUMS 2u

typedef struct fst_manifest_options {
    size_t struct_size; ///< sizeof(fst_manifest_options)
    fst_digest digest;
    uint32_t chunk_bytes;  ///< 64 KiB to 1 MiB, a power of two; 0: 1 MiB
    uint32_t thread_count; ///< 0: as many as the process may use, at least 4
    uint32_t flags;        ///< FST_MANIFEST_* or 0
    /// An older manifest, or NULL. What it says of a file stands where that still is the same inode
    /// with the size, the modification time and the change time (ctime) that the manifest has
    /// noted: the file is not read. That trusts the file system: bytes that went bad on the disk,
    /// or were changed behind its back, keep their times. Files that were changed within two
    /// seconds before their manifest was begun, and copies, are read. FST_E_ARGUMENT for one of
    /// another digest or chunk_bytes.
    const char *keep;
    /// Tells of bytes that were digested, of how many; tensors are 0 of 0. One call at a time, from
    /// threads of the work; it must not call the library. Not 0: FST_E_CANCELLED, and nothing is
    /// made. NULL: nobody is told.
    fst_progress_callback progress;
    void *progress_context;
} fst_manifest_options;

/// What making or checking a manifest took. struct_size is set by the caller.
typedef struct fst_manifest_stats {
    size_t struct_size;    ///< sizeof(fst_manifest_stats)
    uint64_t file_count;   ///< files listed
    uint64_t files_kept;   ///< of them not read: the older manifest's word
    uint64_t bytes_read;   ///< from files
    uint64_t bytes_hashed; ///< digested; those of tensors count twice with FST_MANIFEST_TENSORS
    uint64_t total_ns;     ///< from begin to end
} fst_manifest_stats;

/// Makes the manifest of the model at `path` and puts it at `target` (NULL: where FST_OPEN_VERIFY
/// looks for it: FILE.manifest, or model.manifest in the folder), all of it or nothing. A file's
/// lists that file; a folder's, and an index's, every file directly in the folder but hidden ones
/// and *.manifest, *.digest and *.sig, and what the index names. `options` and `stats` may be NULL:
/// XXH3 of 128 bits. Besides the errors of opening: FST_E_FILE_CHANGED, FST_E_UNSUPPORTED without
/// libcrypto.
FST_API FST_NODISCARD fst_status fst_manifest_write(const char *path, const char *target,
                                                    const fst_manifest_options *options,
                                                    fst_manifest_stats *stats, fst_error *error);

/// Tells of one thing that is not as a manifest says; FST_E_DIGEST, or why a file can't be read.
/// One call at a time, from threads of the check; it must not call the library.
typedef void (*fst_manifest_callback)(void *context, const fst_error *difference);

typedef struct fst_check_options {
    size_t struct_size; ///< sizeof(fst_check_options)
    /// NULL: the one that FST_OPEN_VERIFY finds. May be a list that sha256sum has made: names in it
    /// are relative to the model's folder.
    const char *manifest;
    fst_manifest_callback callback; ///< is told of differences; NULL: nobody is
    void *context;                  ///< of `callback`
    fst_progress_callback progress; ///< as fst_manifest_options.progress
    void *progress_context;
} fst_check_options;

/// Reads every file that the manifest lists for the model at `path` and tells each difference:
/// files that are missing, sizes, each chunk that differs. FST_OK when there is none, FST_E_DIGEST
/// when there was one. With options->manifest, `path` may be a folder without a model. `options`
/// and `stats` may be NULL.
FST_API FST_NODISCARD fst_status fst_manifest_check(const char *path,
                                                    const fst_check_options *options,
                                                    fst_manifest_stats *stats, fst_error *error);

// ---- signatures: OpenSSF model signing 1.0 with a key ----

/// What signing and its check are about.
typedef struct fst_bundle_files {
    size_t struct_size; ///< sizeof(fst_bundle_files)
    const char *folder; ///< whose files, and those of the folders below, are signed
    const char *bundle; ///< NULL: model.sig in the folder
    const char *key;    ///< PEM without a password, of the curve P-256, P-384 or P-521
    /// For fst_bundle_sign(): an older bundle of the folder, signed with the same key
    /// (FST_E_SIGNATURE for another), or NULL. What it says of a file stands as an older manifest's
    /// word does (fst_manifest_options.keep), and the file is not read.
    const char *keep;
    fst_manifest_callback callback; ///< of fst_bundle_check(): is told of differences; or NULL
    void *context;                  ///< of `callback`
    fst_progress_callback progress; ///< as fst_manifest_options.progress
    void *progress_context;
} fst_bundle_files;

/// Signs a folder with a private key. The bundle is what the model_signing package verifies: a
/// SHA-256 of each file, but of .git, .github, .gitignore, .gitattributes and the bundle itself.
/// Make the manifest first: it is signed with the rest, and loads can then be verified by key.
/// `stats` may be NULL. FST_E_UNSUPPORTED without libcrypto.
FST_API FST_NODISCARD fst_status fst_bundle_sign(const fst_bundle_files *files,
                                                 fst_manifest_stats *stats, fst_error *error);

/// Verifies a bundle's signature with a public key, and then that the folder has all of the files
/// that it lists, as they were, and no others; each difference is told as by fst_manifest_check().
/// FST_E_SIGNATURE before any file is read, FST_E_DIGEST after. Bundles that were signed by
/// certificates, or list shards, are FST_E_SIGNATURE, too: model_signing knows them.
FST_API FST_NODISCARD fst_status fst_bundle_check(const fst_bundle_files *files,
                                                  fst_manifest_stats *stats, fst_error *error);

#ifdef __cplusplus
}
#endif

#endif
