// SPDX-License-Identifier: Apache-2.0
/// Signatures of requests to S3 and what is compatible with it (AWS Signature Version 4): private
/// to the net room. Pure: the time is passed in.
#ifndef FSTI_SIGV4_H
#define FSTI_SIGV4_H

#include "base/base.h"

#define SIGV4_UNSIGNED "UNSIGNED-PAYLOAD"
#define SIGV4_DATE_BYTES 17u
#define SIGV4_LINE_BYTES 640u

typedef struct sigv4_request {
    const char *method, *host; ///< host as the Host header has it
    const char *path, *query;  ///< escaped; the query's names in order, or ""
    const char *range;         ///< a Range header that is signed as well; NULL: none is
    const char *payload_hash;  ///< in hexadecimal digits, or SIGV4_UNSIGNED
    const char *token;         ///< of a session; NULL: none
    const char *date;          ///< "20130524T000000Z"
    const char *region, *service;
    const char *access_key, *secret_key;
} sigv4_request;

/// The value of the Authorization header; false where it does not fit.
bool fsti_sigv4_sign(const sigv4_request *request, char *line, size_t size);
/// Seconds since 1970 as a date of signatures.
void fsti_sigv4_date(int64_t now_s, char date[SIGV4_DATE_BYTES]);

#endif
