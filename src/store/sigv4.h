// SPDX-License-Identifier: Apache-2.0
/// Signatures for S3 and compatible stores (AWS Signature Version 4). Private to the store module.
/// Pure: the caller passes the time.
#ifndef FSTI_SIGV4_H
#define FSTI_SIGV4_H

#include "base/primitives.h"

#define SIGV4_UNSIGNED "UNSIGNED-PAYLOAD"
#define SIGV4_DATE_BYTES 17u
#define SIGV4_LINE_BYTES 640u

typedef struct sigv4_request {
    const char *method, *host; ///< host: as in the Host header
    const char *path, *query;  ///< escaped; parameters sorted by name, or ""
    const char *range;         ///< a Range header to sign; NULL: none
    const char *payload_hash;  ///< hexadecimal digits, or SIGV4_UNSIGNED
    const char *token;         ///< session token; NULL: none
    const char *date;          ///< "20130524T000000Z"
    const char *region, *service;
    const char *access_key, *secret_key;
} sigv4_request;

/// Writes the value of the Authorization header. False if it is too long.
bool fsti_sigv4_sign(const sigv4_request *request, char *line, size_t size);
/// Unix time in the format of signatures.
void fsti_sigv4_date(int64_t now_s, char date[SIGV4_DATE_BYTES]);

#endif
