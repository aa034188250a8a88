// SPDX-License-Identifier: Apache-2.0
/// Models behind addresses: https:// and http://, s3://, gs://, az:// and hf://. Everything that
/// takes a path to read takes an address; here is how they are asked for.
#ifndef FASTSAFETENSORS_REMOTE_H
#define FASTSAFETENSORS_REMOTE_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/// How the bucket is named in requests to S3.
typedef enum fst_bucket_style {
    FST_BUCKET_STYLE_AUTO = 0, ///< in the path where an endpoint is set or the name has dots
    FST_BUCKET_STYLE_PATH = 1,
    FST_BUCKET_STYLE_HOST = 2, ///< as the first part of the host's name
} fst_bucket_style;
#define FST_BUCKET_STYLE_COUNT 3

/// How objects are asked for. Everything but struct_size may be zero: then the environment says it,
/// as the stores' own tools read it (docs/remote.md), else it has the value that is given here.
typedef struct fst_remote_options {
    size_t struct_size;     ///< sizeof(fst_remote_options)
    const char *endpoint;   ///< of s3://, gs://, az:// or hf://: "http://127.0.0.1:9000"
    const char *region;     ///< of s3://
    const char *access_key; ///< of s3://, or an HMAC key of gs://; with secret_key
    const char *secret_key;
    const char *session_token; ///< NULL: none
    const char *bearer_token;  ///< of gs:// or hf://
    const char *sas_token;     ///< of az://
    const char *account;       ///< of az://
    const char *ca_file;       ///< certificates to trust instead of the system's
    int anonymous;             ///< 1: nothing is signed, and no credentials are looked for
    fst_bucket_style bucket_style;
    uint32_t connect_ms;      ///< to have a connection; 5,000
    uint32_t first_byte_ms;   ///< to have an answer's first byte; 10,000
    uint32_t stall_ms;        ///< without a byte; 5,000
    uint32_t retry_base_ms;   ///< the first wait before another try is at most twice that; 100
    uint32_t retry_cap_ms;    ///< the longest one; 20,000
    uint32_t tries_max;       ///< in a row, without progress; 8
    uint32_t connections_max; ///< at one host; 64
    const char *account_key;  ///< of az://, in BASE64
    int no_overwrite;         ///< 1: objects are saved only where there are none (FST_E_IO, EEXIST)
    const char *cache_dir;    ///< a folder to keep what is read in, "auto" or "off"; see below
    uint64_t cache_bytes_max; ///< that it may take; 0: four fifths of what its disk has for it
    int cache_required;       ///< 1: a cache that can't be used is an error, not done without
    int cache_offline;        ///< 1: no server is asked: what is not in the cache is an error
} fst_remote_options;

/// Says how objects are asked for that are opened from now on by this process; NULL: by the
/// environment. Everything is copied. What is open keeps its credentials; times and numbers change
/// for all. From any thread.
FST_API FST_NODISCARD fst_status fst_remote_configure(const fst_remote_options *options,
                                                      fst_error *error);

// ---- the cache on disk ----
//
// With `cache_dir` what is read of objects is left in files of that folder, for all processes of
// this user, and read from there by whoever wants it next: one request for its version instead of
// its bytes. Processes that want the same at once wait for each other, so each byte comes once. An
// object that is whole there is read as any file is, in every mode. A block counts when it holds
// what its digest says, a whole object when the device has it: a process that is killed, or a power
// cut, leaves nothing that is believed. Without `cache_dir` the environment's
// FASTSAFETENSORS_CACHE_DIR counts; "auto" is that, else fastsafetensors/objects in XDG_CACHE_HOME
// or ~/.cache. The folder is made (0700) where it is missing; one that another user owns, that
// everybody may write to, or that is a link, is not used.

/// An object in the cache.
typedef struct fst_cache_object {
    size_t struct_size;
    const char *address; ///< without its query; "" where that is not known. As long as the call
    uint64_t size_bytes; ///< of the object
    uint64_t kept_bytes; ///< of it that are there
    uint64_t disk_bytes; ///< that its files take
    int64_t used_s;      ///< when it was opened last; Unix time
    int is_whole;        ///< all of it is there, and checked
    int in_use;          ///< somebody has it open: it stays
} fst_cache_object;
typedef void (*fst_cache_visitor)(void *context, const fst_cache_object *object);

/// Calls with each object in a cache, the one that was used least recently first. `cache_dir`: as
/// in fst_remote_options; NULL: the one that is configured. FST_E_ARGUMENT where there is none,
/// FST_E_NOT_FOUND where the folder is missing.
FST_API FST_NODISCARD fst_status fst_cache_visit(const char *cache_dir, fst_cache_visitor visit,
                                                 void *context, fst_error *error);

/// What pruning came to.
typedef struct fst_cache_pruned {
    size_t struct_size;
    size_t removed_count;   ///< objects
    uint64_t removed_bytes; ///< on disk
    size_t left_count;
    uint64_t left_bytes;
} fst_cache_pruned;

/// Removes what was used least recently until the cache takes at most `bytes_max`; 0: all. What is
/// in use stays. Also what killed processes have left behind goes.
FST_API FST_NODISCARD fst_status fst_cache_prune(const char *cache_dir, uint64_t bytes_max,
                                                 fst_cache_pruned *out, fst_error *error);

#ifdef __cplusplus
}
#endif

#endif
