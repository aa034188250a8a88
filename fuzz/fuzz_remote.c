// SPDX-License-Identifier: Apache-2.0
/// Fuzzes the parsers of server responses (headers, redirect URLs, listings, credentials, the Hub),
/// and the string that Azure signs.
#include <string.h>

#include "fuzz_target.h"
#include "http/response.h"
#include "store/hub.h"
#include "store/listing.h"
#include "store/store.h"
#include "store/shared_key.h"
#include "store/token_text.h"
#include "location/url.h"

static void read_head(const char *text, size_t size) {
    http_response answer;
    fsti_response_begin(&answer);
    for (size_t at = 0; at < size;) {
        const char *end = memchr(text + at, '\n', size - at);
        size_t line = end == NULL ? size - at : (size_t)(end - text) - at + 1;
        if (!fsti_response_line(&answer, text + at, line, 1000000000)) return;
        at += line;
    }
    fsti_response_read_code(&answer, text, size);
    const char *why = NULL;
    response_expectation wish = {.is_range = true, .begin = 10, .end = 20};
    if (fsti_response_evaluate(&answer, &wish, &why) == HTTP_OK &&
        (answer.range_begin != 10 || answer.range_end > 20))
        __builtin_trap();
}

static void read_url(const char *text) {
    url_parts url;
    char redacted[128];
    fsti_url_redact(text, redacted, sizeof redacted);
    if (fsti_url_parse(text, &url) != NULL) return;
    // The query is redacted, and control characters are replaced by question marks.
    if (strlen(redacted) > strcspn(text, "?#") || url.host.size == 0) __builtin_trap();
    char *sibling = fsti_url_sibling(text, "a b");
    fsti_free(sibling);
}

static bool see_key(void *context, const char *key) {
    size_t *count = context;
    if (strlen(key) >= LISTING_KEY_BYTES_MAX) __builtin_trap();
    return ++*count < 1000;
}

static bool see_text(void *context, const char *text) {
    size_t *count = context;
    if (strlen(text) >= 4096) __builtin_trap();
    return ++*count < 1000;
}

/// Responses of credential providers and of the Hub.
static void read_tokens(const char *text, size_t size) {
    char value[64], form[128] = "";
    unsigned char bytes[96];
    size_t count = 0;
    if (fsti_json_find(text, size, "sha", value, sizeof value) && strlen(value) >= sizeof value)
        __builtin_trap();
    const json_list list = {text, size, "siblings", "rfilename"};
    (void)fsti_json_visit(&list, see_text, &count);
    (void)fsti_date_read(text);
    (void)fsti_form_add(form, sizeof form, "a", text);
    int64_t length = fsti_base64_read(text, bytes, sizeof bytes);
    if (length > (int64_t)sizeof bytes || strlen(form) >= sizeof form) __builtin_trap();
    if (length < 0) return;
    // Encoding the decoded bytes gives the same text.
    char again[BASE64_BYTES(sizeof bytes)];
    unsigned char twice[sizeof bytes];
    fsti_base64_write(bytes, (size_t)length, false, again);
    if (fsti_base64_read(again, twice, sizeof twice) != length ||
        memcmp(bytes, twice, (size_t)length) != 0)
        __builtin_trap();
}

static void read_hub(const char *text) {
    url_parts url;
    hub_name name;
    if (fsti_url_parse(text, &url) != NULL || fsti_hub_parse(&url, &name) != NULL) return;
    if (name.path.size == 0 || name.repository.size == 0 || name.revision[0] == '\0')
        __builtin_trap();
}

static void sign_address(const char *text) {
    char line[SHARED_KEY_LINE_BYTES];
    url_parts url;
    if (fsti_url_parse(text, &url) != NULL) return;
    const char *const lines[] = {"x-ms-date: Sun, 22 Nov 2026 10:00:00 GMT",
                                 "x-ms-version: 2021-12-02"};
    const shared_key_request request = {.method = "GET",
                                        .account = "account",
                                        .path = url.path,
                                        .query = url.query,
                                        .lines = lines,
                                        .line_count = 2,
                                        .type = "",
                                        .range = "bytes=0-1",
                                        .match = "",
                                        .none_match = "",
                                        .key = (const unsigned char *)"key",
                                        .key_size = 3};
    if (fsti_shared_key_sign(&request, line, sizeof line) && strlen(line) >= sizeof line)
        __builtin_trap();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    listing page;
    size_t count = 0;
    char *text = fsti_string_copy((const char *)data, size);
    if (text == NULL) return 0;
    read_head(text, size);
    read_url(text);
    read_tokens(text, size);
    read_hub(text);
    sign_address(text);
    (void)fsti_listing_read(text, size, see_key, &count, &page);
    fsti_free(text);
    return 0;
}
