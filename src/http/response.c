// SPDX-License-Identifier: Apache-2.0
/// Parses and evaluates response headers.
#include "response.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#define RETRY_AFTER_MS_MAX ((int64_t)60000)
/// An object with a younger Last-Modified may be replaced without a change of it: dates are whole
/// seconds, and Date may come from another clock (RFC 9110, 8.8.2.2).
#define STRONG_DATE_AGE_S 60

void fsti_response_begin(http_response *answer) {
    *answer = (http_response){
        .total_bytes = RESPONSE_UNKNOWN, .length_bytes = RESPONSE_UNKNOWN, .retry_after_ms = -1};
}

/// Parses a decimal number of at most 2^63 - 1.
static bool read_number(const char *text, size_t size, uint64_t *out) {
    *out = 0;
    for (size_t i = 0; i < size; i++) {
        if (text[i] < '0' || text[i] > '9') return false;
        if (!fsti_mul(*out, 10, out) || !fsti_add(*out, (uint64_t)(text[i] - '0'), out))
            return false;
    }
    return size > 0 && *out <= INT64_MAX;
}

static void fail_line(http_response *answer, const char *what) {
    answer->is_broken = true;
    answer->broken = what;
}

/// Parses "bytes 0-9/100", "bytes 0-9/*" or "bytes */100".
static bool read_range(http_response *answer, const char *value, size_t size) {
    static const char unit[] = "bytes ";
    uint64_t last;
    if (size < sizeof unit || memcmp(value, unit, sizeof unit - 1) != 0) return false;
    value += sizeof unit - 1;
    size -= sizeof unit - 1;
    const char *slash = memchr(value, '/', size);
    if (slash == NULL) return false;
    size_t range_size = (size_t)(slash - value), total_size = size - range_size - 1;
    bool is_open = total_size == 1 && slash[1] == '*';
    if (!is_open && !read_number(slash + 1, total_size, &answer->total_bytes)) return false;
    answer->has_range = true;
    if (range_size == 1 && value[0] == '*') return true;
    const char *dash = memchr(value, '-', range_size);
    if (dash == NULL) return false;
    if (!read_number(value, (size_t)(dash - value), &answer->range_begin) ||
        !read_number(dash + 1, range_size - (size_t)(dash - value) - 1, &last))
        return false;
    answer->range_end = last + 1;
    return last >= answer->range_begin;
}

/// Copies a header value if it fits and has no control characters; else nothing.
static void keep_text(char *field, size_t field_size, const char *value, size_t size) {
    bool fits = size < field_size;
    // An ETag is sent back in a header, so it must not contain line breaks.
    for (size_t i = 0; i < size && fits; i++) fits = (unsigned char)value[i] >= ' ';
    memcpy(field, value, fits ? size : 0);
    field[fits ? size : 0] = '\0';
}

/// Copies a request ID or error code if its characters are harmless everywhere; else nothing.
static void keep_code(char *field, size_t field_size, const char *value, size_t size) {
    keep_text(field, field_size, value, size);
    for (const char *at = field; *at != '\0'; at++)
        if (!((*at >= 'a' && *at <= 'z') || (*at >= 'A' && *at <= 'Z') ||
              (*at >= '0' && *at <= '9') || strchr("._:/+=-", *at) != NULL))
            field[0] = '\0';
}

static bool is_name(const char *line, size_t name_size, const char *name) {
    return strlen(name) == name_size && strncasecmp(line, name, name_size) == 0;
}

/// Whether `text` matches a form: 0 for a digit, a for a letter, other characters for themselves.
static bool has_form(const char *text, const char *form) {
    for (; *form != '\0'; text++, form++) {
        bool is_digit = *text >= '0' && *text <= '9';
        bool is_letter = (*text >= 'A' && *text <= 'Z') || (*text >= 'a' && *text <= 'z');
        if (*form == '0' ? !is_digit : *form == 'a' ? !is_letter : *text != *form) return false;
    }
    return *text == '\0';
}

static int two_digits(const char *text) { return (text[0] - '0') * 10 + text[1] - '0'; }

int64_t fsti_response_date(const char *text) {
    static const char months[] = "JanFebMarAprMayJunJulAugSepOctNovDec";
    // The format that servers must send (RFC 9110, 5.6.7).
    if (!has_form(text, "aaa, 00 aaa 0000 00:00:00 GMT")) return -1;
    const char month[] = {text[8], text[9], text[10], '\0'}, *found = strstr(months, month);
    if (found == NULL || (found - months) % 3 != 0) return -1;
    struct tm date = {.tm_mday = two_digits(text + 5),
                      .tm_mon = (int)(found - months) / 3,
                      .tm_year = two_digits(text + 12) * 100 + two_digits(text + 14) - 1900,
                      .tm_hour = two_digits(text + 17),
                      .tm_min = two_digits(text + 20),
                      .tm_sec = two_digits(text + 23)};
    if (date.tm_year < 70 || date.tm_mday < 1 || date.tm_mday > 31) return -1;
    return (int64_t)timegm(&date);
}

static bool is_digits(const char *text, size_t size) {
    for (size_t i = 0; i < size; i++)
        if (text[i] < '0' || text[i] > '9') return false;
    return size > 0;
}

static void read_retry_after(http_response *answer, const char *value, size_t size, int64_t now_s) {
    char text[64] = "";
    uint64_t seconds;
    keep_text(text, sizeof text, value, size);
    if (is_digits(value, size)) {
        if (!read_number(value, size, &seconds)) seconds = UINT64_MAX; // more than the type holds
        answer->retry_after_ms =
            (int64_t)fsti_min(seconds, (uint64_t)RETRY_AFTER_MS_MAX / 1000) * 1000;
        return;
    }
    int64_t then = fsti_response_date(text);
    if (then < 0) return; // ignore a date that cannot be parsed
    int64_t wait_s = then > now_s ? then - now_s : 0;
    answer->retry_after_ms =
        wait_s > RETRY_AFTER_MS_MAX / 1000 ? RETRY_AFTER_MS_MAX : wait_s * 1000;
}

static void read_field(http_response *answer, const char *line, size_t name_size, const char *value,
                       size_t size) {
    const struct {
        const char *name;
        char *field;
        size_t field_size;
    } texts[] = {{"etag", answer->etag, sizeof answer->etag},
                 {"last-modified", answer->modified, sizeof answer->modified},
                 {"x-goog-generation", answer->generation, sizeof answer->generation},
                 {"x-amz-request-id", answer->request_id, sizeof answer->request_id},
                 {"x-ms-request-id", answer->request_id, sizeof answer->request_id},
                 {"x-guploader-uploadid", answer->request_id, sizeof answer->request_id},
                 {"x-request-id", answer->request_id, sizeof answer->request_id},
                 {"x-ms-error-code", answer->code, sizeof answer->code},
                 {"x-error-code", answer->code, sizeof answer->code},
                 {"x-amz-bucket-region", answer->region, sizeof answer->region},
                 {"date", answer->date, sizeof answer->date}};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (is_name(line, name_size, texts[i].name))
            (texts[i].field == answer->request_id || texts[i].field == answer->code
                 ? keep_code
                 : keep_text)(texts[i].field, texts[i].field_size, value, size);
    if (is_name(line, name_size, "content-range") && !read_range(answer, value, size))
        fail_line(answer, "its Content-Range is invalid");
    uint64_t length;
    if (is_name(line, name_size, "content-length")) {
        if (!read_number(value, size, &length) ||
            (answer->length_bytes != RESPONSE_UNKNOWN && answer->length_bytes != length))
            fail_line(answer, "its Content-Length is invalid");
        else
            answer->length_bytes = length;
    }
    if (is_name(line, name_size, "content-encoding") &&
        !(size == 8 && strncasecmp(value, "identity", 8) == 0))
        answer->is_encoded = true;
    if (is_name(line, name_size, "content-type") && size >= 10 &&
        strncasecmp(value, "multipart/", 10) == 0)
        answer->is_multipart = true;
}

bool fsti_response_line(http_response *answer, const char *line, size_t size, int64_t now_s) {
    size_t head_bytes = answer->head_bytes + size;
    while (size > 0 && (line[size - 1] == '\n' || line[size - 1] == '\r')) size--;
    bool is_status = size >= 5 && memcmp(line, "HTTP/", 5) == 0;
    if (is_status) {
        // A further header block follows: 100 Continue, or a proxy's response.
        const char *space = memchr(line, ' ', size);
        uint64_t status = 0;
        fsti_response_begin(answer);
        answer->received_s = now_s;
        if (space == NULL || line + size - space < 4 || !read_number(space + 1, 3, &status))
            fail_line(answer, "the response has no status line");
        answer->status = (uint32_t)status;
    }
    answer->head_bytes = head_bytes;
    const char *colon = memchr(line, ':', size);
    if (memchr(line, '\0', size) != NULL) fail_line(answer, "the response headers contain a NUL");
    if (colon != NULL && !is_status) {
        const char *value = colon + 1, *end = line + size;
        while (value < end && (*value == ' ' || *value == '\t')) value++;
        while (end > value && (end[-1] == ' ' || end[-1] == '\t')) end--;
        size_t name_size = (size_t)(colon - line), value_size = (size_t)(end - value);
        read_field(answer, line, name_size, value, value_size);
        if (is_name(line, name_size, "retry-after"))
            read_retry_after(answer, value, value_size, now_s);
    }
    return head_bytes <= RESPONSE_HEAD_BYTES_MAX;
}

void fsti_response_read_code(http_response *answer, const char *body, size_t size) {
    const char *begin = memmem(body, size, "<Code>", 6);
    if (begin == NULL || answer->code[0] != '\0') return;
    begin += 6;
    const char *end = memmem(begin, (size_t)(body + size - begin), "</Code>", 7);
    if (end != NULL) keep_code(answer->code, sizeof answer->code, begin, (size_t)(end - begin));
}

// ---- versions ----

bool fsti_version_is_strong(const resource_version *version) {
    return version->etag[0] == '"' && strlen(version->etag) > 2;
}

bool fsti_version_is_exact(const resource_version *version) {
    return fsti_version_is_strong(version) || version->generation[0] != '\0' ||
           version->has_strong_date;
}

/// Whether the date is a strong validator. A response without Date is dated by this machine.
static bool has_strong_date(const http_response *answer) {
    int64_t modified_s = fsti_response_date(answer->modified);
    int64_t sent_s = fsti_response_date(answer->date);
    if (sent_s < 0) sent_s = answer->received_s;
    return modified_s >= 0 && sent_s - modified_s >= STRONG_DATE_AGE_S;
}

void fsti_version_set(resource_version *version, const http_response *answer) {
    *version = (resource_version){.is_set = true, .total_bytes = answer->total_bytes};
    memcpy(version->etag, answer->etag, sizeof version->etag);
    memcpy(version->modified, answer->modified, sizeof version->modified);
    memcpy(version->generation, answer->generation, sizeof version->generation);
    version->has_strong_date = has_strong_date(answer);
}

/// Returns NULL if the response has the required version; else the difference.
static const char *find_difference(const resource_version *version, const http_response *answer) {
    if (answer->total_bytes != version->total_bytes) return "its size changed";
    if (strcmp(version->generation, answer->generation) != 0) return "its generation changed";
    // Equal weak ETags prove nothing, but different ones prove a change.
    bool has_etag = version->etag[0] != '\0';
    if (has_etag && strcmp(version->etag, answer->etag) != 0) return "its ETag changed";
    if (has_etag && fsti_version_is_strong(version)) return NULL;
    return strcmp(version->modified, answer->modified) == 0 ? NULL
                                                            : "its modification date changed";
}

// ---- evaluation ----

static http_verdict evaluate_body(const http_response *answer, const response_expectation *expected,
                                  const char **why) {
    *why = "the response has a Content-Encoding that was not requested";
    if (answer->is_encoded) return HTTP_WRONG;
    *why = "the response is multipart";
    if (answer->is_multipart) return HTTP_WRONG;
    *why = "the response has no Content-Range";
    if (!answer->has_range) return HTTP_WRONG;
    *why = "the response does not give the object's size";
    if (answer->total_bytes == RESPONSE_UNKNOWN) return HTTP_WRONG;
    if (expected->required != NULL && expected->required->is_set) {
        *why = find_difference(expected->required, answer);
        if (*why != NULL) return HTTP_CHANGED;
    }
    uint64_t end = fsti_min(expected->end, answer->total_bytes);
    *why = "the response has a different range than requested";
    if (answer->range_begin != expected->begin || answer->range_end != end ||
        end == expected->begin)
        return HTTP_WRONG;
    *why = "the response's length does not match its range";
    if (answer->length_bytes != RESPONSE_UNKNOWN && answer->length_bytes != end - expected->begin)
        return HTTP_WRONG;
    return HTTP_OK;
}

/// 200 returns the complete object: correct if it was requested completely and is small.
static http_verdict evaluate_complete(const http_response *answer,
                                      const response_expectation *expected, const char **why) {
    *why = "the server does not support range requests";
    bool is_whole = expected->is_first && expected->begin == 0 &&
                    answer->length_bytes <= expected->end && !answer->is_encoded &&
                    !answer->is_multipart;
    if (!is_whole) return HTTP_WRONG;
    *why = NULL;
    if (expected->required != NULL && expected->required->is_set)
        *why = find_difference(expected->required, answer);
    return *why == NULL ? HTTP_OK : HTTP_CHANGED;
}

/// 304 is valid only for a conditional request, and only for that version.
static http_verdict evaluate_unchanged(const http_response *answer,
                                       const response_expectation *expected, const char **why) {
    *why = "the response is 304 (not modified) for a different version than requested";
    if (expected->known == NULL) return HTTP_REFUSED;
    bool is_same_version =
        answer->etag[0] == '\0' || strcmp(answer->etag, expected->known->etag) == 0;
    return is_same_version ? HTTP_UNCHANGED : HTTP_WRONG;
}

http_verdict fsti_response_evaluate(const http_response *answer,
                                    const response_expectation *expected, const char **why) {
    *why = answer->broken;
    if (answer->is_broken) return HTTP_WRONG;
    *why = NULL;
    switch (answer->status) {
    case 200:
    case 201:
    case 204: return expected->is_range ? evaluate_complete(answer, expected, why) : HTTP_OK;
    case 206: return expected->is_range ? evaluate_body(answer, expected, why) : HTTP_WRONG;
    case 304: return evaluate_unchanged(answer, expected, why);
    case 301:
    case 302:
    case 303:
    case 307:
    case 308: return HTTP_REDIRECT;
    case 401:
    case 403:
    case 407: return HTTP_FORBIDDEN;
    case 404:
    case 410: return HTTP_NOT_FOUND;
    case 412: *why = "the object was replaced"; return HTTP_CHANGED;
    case 416:
        *why = "the object became smaller";
        return expected->required != NULL && expected->required->is_set ? HTTP_CHANGED
                                                                        : HTTP_REFUSED;
    case 429:
    case 503: return HTTP_SLOWER;
    case 408:
    case 500:
    case 502:
    case 504: return HTTP_RETRY;
    default: return HTTP_REFUSED;
    }
}
