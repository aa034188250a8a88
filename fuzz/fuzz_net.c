// SPDX-License-Identifier: Apache-2.0
/// Fuzzes what reads bytes of servers: heads, addresses of redirects, listings.
#include <string.h>

#include "fuzz_target.h"
#include "net/answer.h"
#include "net/listing.h"
#include "net/net.h"
#include "net/url.h"

static void read_head(const char *text, size_t size) {
    net_answer answer;
    fsti_answer_begin(&answer);
    for (size_t at = 0; at < size;) {
        const char *end = memchr(text + at, '\n', size - at);
        size_t line = end == NULL ? size - at : (size_t)(end - text) - at + 1;
        if (!fsti_answer_line(&answer, text + at, line, 1000000000)) return;
        at += line;
    }
    fsti_answer_read_code(&answer, text, size);
    const char *why = NULL;
    answer_wish wish = {.is_range = true, .begin = 10, .end = 20};
    if (fsti_answer_judge(&answer, &wish, &why) == NET_GOOD &&
        (answer.range_begin != 10 || answer.range_end > 20))
        __builtin_trap();
}

static void read_url(const char *text) {
    net_url url;
    char told[128];
    fsti_url_tell(text, told, sizeof told);
    if (fsti_url_parse(text, &url) != NULL) return;
    // A query is never told; control bytes, which are, become question marks.
    if (strlen(told) > strcspn(text, "?#") || url.host.size == 0) __builtin_trap();
    char *beside = fsti_url_beside(text, "a b");
    fsti_free(beside);
}

static bool see_key(void *context, const char *key) {
    size_t *count = context;
    if (strlen(key) >= LISTING_KEY_BYTES_MAX) __builtin_trap();
    return ++*count < 1000;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    listing page;
    size_t count = 0;
    char *text = fsti_string_copy((const char *)data, size);
    if (text == NULL) return 0;
    read_head(text, size);
    read_url(text);
    (void)fsti_listing_read(text, size, see_key, &count, &page);
    fsti_free(text);
    return 0;
}
