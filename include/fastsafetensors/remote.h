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
    int no_overwrite;         ///< 1: objects are saved only where there are none (FST_E_IO, EEXIST)
} fst_remote_options;

/// Says how objects are asked for that are opened from now on by this process; NULL: by the
/// environment. Everything is copied. What is open keeps its credentials; times and numbers change
/// for all. From any thread.
FST_API FST_NODISCARD fst_status fst_remote_configure(const fst_remote_options *options,
                                                      fst_error *error);

#ifdef __cplusplus
}
#endif

#endif
