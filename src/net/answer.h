// SPDX-License-Identifier: Apache-2.0
/// A server's answers, looked at before a byte of them counts: private to the net room. Pure.
#ifndef FSTI_ANSWER_H
#define FSTI_ANSWER_H

#include "base/base.h"

/// The most of a head; more is refused.
#define ANSWER_HEAD_BYTES_MAX 65536u
#define ANSWER_TEXT_BYTES 192u
#define ANSWER_UNKNOWN UINT64_MAX

/// What a head has said. Texts that are longer than their field are as good as absent.
typedef struct net_answer {
    uint32_t status;
    size_t head_bytes;
    bool is_broken; ///< a line of it can't be what it claims: `broken` says which
    const char *broken;
    bool has_range;
    uint64_t range_begin, range_end; ///< of Content-Range; equal where it has "*"
    uint64_t total_bytes;            ///< ANSWER_UNKNOWN: not told, or "*"
    uint64_t length_bytes;           ///< Content-Length; ANSWER_UNKNOWN
    bool is_encoded, is_multipart;
    char etag[ANSWER_TEXT_BYTES];
    char modified[64];
    char generation[32]; ///< x-goog-generation
    char request_id[80]; ///< the store's
    char code[64];       ///< x-ms-error-code, or what its body says
    char region[40];     ///< x-amz-bucket-region
    char date[48];
    int64_t retry_after_ms; ///< -1: not told
} net_answer;

void fsti_answer_begin(net_answer *answer);
/// One line of the head, with its end; `now_s`: Unix time, for dates. False: too much of it.
bool fsti_answer_line(net_answer *answer, const char *line, size_t size, int64_t now_s);
/// Milliseconds since 1970 divided by 1000 of an HTTP date; -1 for what is none.
int64_t fsti_answer_date(const char *text);
/// The text between <Code> and </Code> of a store's XML error, to answer->code.
void fsti_answer_read_code(net_answer *answer, const char *body, size_t size);

/// The version of an object, as its first answer gave it.
typedef struct net_pin {
    bool is_set;
    uint64_t total_bytes;
    char etag[ANSWER_TEXT_BYTES]; ///< "" where there is none
    char modified[64];
    char generation[32];
} net_pin;
/// Whether its ETag alone proves the version, and can be demanded.
bool fsti_pin_is_strong(const net_pin *pin);
void fsti_pin_set(net_pin *pin, const net_answer *answer);
/// NULL when the answer is of the pinned version; else what differs.
const char *fsti_pin_differs(const net_pin *pin, const net_answer *answer);

/// What an answer means for who asked for [begin, end).
typedef enum net_verdict {
    NET_GOOD,      ///< its body are the bytes
    NET_UNCHANGED, ///< it is the version that is known: there is no body
    NET_AGAIN,     ///< the server may do better later
    NET_SLOWER,    ///< the same, and it asks for less at a time
    NET_ELSEWHERE, ///< a redirect
    NET_CHANGED,   ///< another version
    NET_MISSING,
    NET_FORBIDDEN,
    NET_REFUSED, ///< any other status
    NET_WRONG,   ///< it breaks the rules: nothing of it can be believed
} net_verdict;

typedef struct answer_wish {
    bool is_range;
    bool is_first; ///< the size is not known yet: [begin, end) may reach beyond it
    uint64_t begin, end;
    const net_pin *pin;   ///< NULL: none
    const net_pin *known; ///< NULL, or the version of which nothing is wanted
} answer_wish;
/// *why (may stay as it is): words for errors.
net_verdict fsti_answer_judge(const net_answer *answer, const answer_wish *wish, const char **why);

#endif
