// SPDX-License-Identifier: Apache-2.0
/// URLs: https:// and http://, s3://, gs://, az:// and hf://. Every function that reads from a path
/// accepts one. This header configures how they are accessed.
///
///     fst_remote_options options = FST_STRUCT_INIT(fst_remote_options);
///     options.endpoint = "http://127.0.0.1:9000";
///     options.cache_dir = "auto";
///     if (fst_remote_configure(&options, NULL) != FST_OK) return 1;
///     fst_model *model;
///     if (fst_model_open("s3://models/llama", NULL, &model, NULL) != FST_OK) return 1;
///     fst_model_close(model);
///
/// **Redirects.** The library follows a redirect to a public host, and to any port of the requested
/// host. A redirect to another host with a private, link-local or loopback address, or to the
/// metadata service of a cloud, is FST_E_IO before anything is sent, whether the URL has the
/// address or a name resolves to it. `private_redirects`, or FASTSAFETENSORS_PRIVATE_REDIRECTS=1 in
/// the environment, allows it: for a server on a private network that redirects to its storage
/// there.
///
/// **Offline.** With `offline`, or FASTSAFETENSORS_OFFLINE=1 in the environment (which applies even
/// if `offline` is 0), the library opens no connection: it requests no credentials from a metadata
/// service and does not check whether a cached object is current. Objects that are complete in the
/// disk cache are returned in the version that was cached last. Other URLs are FST_E_NOT_FOUND, and
/// saving to a URL is FST_E_IO. Requests that are already running end normally.
///
/// **Disk cache.** With `cache_dir`, the library keeps downloaded bytes in files of that folder for
/// all processes of the user; opening the object again sends one request for its version. A process
/// that needs a block which another process is downloading waits for it, so each byte is downloaded
/// once. A completely cached object is read like a local file, in every mode. Each cached block has
/// a digest, and an object counts as complete only after it was synced, so damage by a kill or a
/// power cut is detected. Without `cache_dir`, FASTSAFETENSORS_CACHE_DIR applies; "auto" is that or
/// else fastsafetensors/objects in XDG_CACHE_HOME or ~/.cache. The folder is created with mode
/// 0700. A folder of another user, a folder that its group or others may write to, and a symbolic
/// link are not used; if the root of a shared volume is such a folder, name a subfolder.
#ifndef FASTSAFETENSORS_REMOTE_H
#define FASTSAFETENSORS_REMOTE_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif

/// Where requests to S3 have the bucket's name.
typedef enum fst_bucket_style {
    FST_BUCKET_STYLE_AUTO = 0, ///< in the path if an endpoint is set or the name has dots
    FST_BUCKET_STYLE_PATH = 1, ///< https://endpoint/bucket/key
    FST_BUCKET_STYLE_HOST = 2, ///< https://bucket.endpoint/key
} fst_bucket_style;
#define FST_BUCKET_STYLE_COUNT 3

/// How URLs are accessed. All fields except struct_size may be zero: then the environment variables
/// of the stores' own tools apply (docs/remote.md), or else the default, which is the number behind
/// the semicolon below. Times are in milliseconds.
typedef struct fst_remote_options {
    size_t struct_size;     ///< sizeof(fst_remote_options)
    const char *endpoint;   ///< for s3://, gs://, az:// and hf://: "http://127.0.0.1:9000"
    const char *region;     ///< for s3://
    const char *access_key; ///< for s3://, or an HMAC key for gs://; together with secret_key
    const char *secret_key;
    const char *session_token; ///< NULL: none
    const char *bearer_token;  ///< for gs:// and hf://
    const char *sas_token;     ///< for az://
    const char *account;       ///< for az://
    const char *account_key;   ///< for az://, in base64
    const char *ca_file;       ///< certificates to trust instead of the system's
    int anonymous;             ///< 1: sign nothing and look for no credentials
    fst_bucket_style bucket_style;
    uint32_t connect_ms;    ///< time limit to connect; 5,000
    uint32_t first_byte_ms; ///< time limit for the first byte of a response; 10,000
    uint32_t stall_ms;      ///< time limit without a byte; 5,000
    uint32_t retry_base_ms; ///< the first retry waits at most twice this; 100
    /// The longest wait before a retry, even if the server's Retry-After is longer; 20,000.
    uint32_t retry_cap_ms;
    uint32_t tries_max;       ///< consecutive tries without progress; 8
    uint32_t connections_max; ///< to one host; 64
    const char *cache_dir;    ///< the folder of the disk cache, "auto" or "off"
    uint64_t cache_bytes_max; ///< its largest size; 0: 80 % of the space that is free for it
    int cache_required;    ///< 1: an unusable cache is an error; 0: it is not used, with a warning
    int create_only;       ///< 1: saving over an existing object fails (FST_E_IO, EEXIST)
    int offline;           ///< 1: do not use the network
    int private_redirects; ///< 1: follow redirects to private addresses
} fst_remote_options;

/// Configures access to all objects that this process opens from now on, and replaces all earlier
/// settings; NULL: the environment alone. Strings are copied. Objects that are open keep their
/// credentials; time limits and counts change for them, too. From any thread. On an error nothing
/// changes: FST_E_ARGUMENT for an invalid text, an empty cache_dir or half of a key pair; for a
/// ca_file that can't be read, the status of the system's error.
FST_API FST_NODISCARD fst_status fst_remote_configure(const fst_remote_options *options,
                                                      fst_error *error);

#ifdef __cplusplus
}
#endif

#endif
