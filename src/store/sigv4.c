// SPDX-License-Identifier: Apache-2.0
/// AWS Signature Version 4.
#include "sigv4.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#include "sha256.h"

#define DAY_BYTES 8

void fsti_sigv4_date(int64_t now_s, char date[SIGV4_DATE_BYTES]) {
    time_t time = (time_t)now_s;
    struct tm parts;
    gmtime_r(&time, &parts);
    strftime(date, SIGV4_DATE_BYTES, "%Y%m%dT%H%M%SZ", &parts);
}

static void add_header(sha256 *hash, const char *name, const char *value) {
    fsti_sha256_add_text(hash, name);
    fsti_sha256_add_text(hash, value);
    fsti_sha256_add_text(hash, "\n");
}

static void name_headers(const sigv4_request *request, char *names, size_t size) {
    snprintf(names, size, "host%s;x-amz-content-sha256;x-amz-date%s",
             request->range != NULL ? ";range" : "",
             request->token != NULL ? ";x-amz-security-token" : "");
}

/// Digests the canonical request.
static void hash_request(const sigv4_request *request, const char *names, char *hex) {
    unsigned char digest[SHA256_BYTES];
    sha256 hash;
    fsti_sha256_begin(&hash);
    add_header(&hash, request->method, "");
    add_header(&hash, request->path, "");
    add_header(&hash, request->query, "");
    add_header(&hash, "host:", request->host);
    if (request->range != NULL) add_header(&hash, "range:", request->range);
    add_header(&hash, "x-amz-content-sha256:", request->payload_hash);
    add_header(&hash, "x-amz-date:", request->date);
    if (request->token != NULL) add_header(&hash, "x-amz-security-token:", request->token);
    add_header(&hash, "", "");
    add_header(&hash, names, "");
    fsti_sha256_add_text(&hash, request->payload_hash);
    fsti_sha256_end(&hash, digest);
    fsti_sha256_hex(digest, hex);
}

/// Derives the key for a day, region and service.
static bool make_key(const sigv4_request *request, unsigned char key[SHA256_BYTES]) {
    char secret[256];
    int size = snprintf(secret, sizeof secret, "AWS4%s", request->secret_key);
    bool fits = size > 0 && (size_t)size < sizeof secret;
    if (fits) fsti_hmac_sha256((hmac_key){secret, (size_t)size}, request->date, DAY_BYTES, key);
    explicit_bzero(secret, sizeof secret);
    if (!fits) return false;
    hmac_key last = {key, SHA256_BYTES};
    fsti_hmac_sha256(last, request->region, strlen(request->region), key);
    fsti_hmac_sha256(last, request->service, strlen(request->service), key);
    fsti_hmac_sha256(last, "aws4_request", strlen("aws4_request"), key);
    return true;
}

bool fsti_sigv4_sign(const sigv4_request *request, char *line, size_t size) {
    char names[96], scope[160], text[320], hex[SHA256_HEX_BYTES];
    unsigned char key[SHA256_BYTES], signature[SHA256_BYTES];
    name_headers(request, names, sizeof names);
    hash_request(request, names, hex);
    int used = snprintf(scope, sizeof scope, "%.8s/%s/%s/aws4_request", request->date,
                        request->region, request->service);
    if (used < 0 || (size_t)used >= sizeof scope || !make_key(request, key)) return false;
    used = snprintf(text, sizeof text, "AWS4-HMAC-SHA256\n%s\n%s\n%s", request->date, scope, hex);
    fsti_hmac_sha256((hmac_key){key, sizeof key}, text, (size_t)used, signature);
    explicit_bzero(key, sizeof key);
    fsti_sha256_hex(signature, hex);
    used = snprintf(line, size, "AWS4-HMAC-SHA256 Credential=%s/%s,SignedHeaders=%s,Signature=%s",
                    request->access_key, scope, names, hex);
    return used > 0 && (size_t)used < size;
}
