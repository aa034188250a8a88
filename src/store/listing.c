// SPDX-License-Identifier: Apache-2.0
/// Reads listings from XML: the text of a few elements, ignoring the rest. No document type; only
/// XML's five entities and numbers below 128.
#include "listing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct xml_text {
    const char *at, *end;
} xml_text;

/// Decodes one XML entity after its &. Returns its size with the semicolon; 0: invalid.
static size_t read_entity(const char *at, const char *end, char *out) {
    static const struct {
        const char *name;
        char byte;
    } names[] = {{"amp;", '&'}, {"lt;", '<'}, {"gt;", '>'}, {"quot;", '"'}, {"apos;", '\''}};
    size_t left = (size_t)(end - at);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        size_t size = strlen(names[i].name);
        *out = names[i].byte;
        if (left >= size && memcmp(at, names[i].name, size) == 0) return size;
    }
    const char *semicolon = memchr(at, ';', left < 8 ? left : 8);
    if (semicolon == NULL || left < 2 || at[0] != '#') return 0;
    bool is_hex = at[1] == 'x';
    char digits[8] = "", *digits_end;
    size_t skip = is_hex ? 2 : 1, count = (size_t)(semicolon - at) - skip;
    if ((size_t)(semicolon - at) <= skip) return 0;
    memcpy(digits, at + skip, count);
    unsigned long number = strtoul(digits, &digits_end, is_hex ? 16 : 10);
    *out = (char)number;
    bool is_valid =
        *digits_end == '\0' && digits[0] != '-' && digits[0] != '+' && number > 0 && number < 128;
    return is_valid ? (size_t)(semicolon - at) + 1 : 0;
}

/// The text of an element, unescaped.
static bool read_text(xml_text raw, char *out, size_t size) {
    size_t used = 0;
    while (raw.at < raw.end) {
        char byte = *raw.at++;
        if (byte == '<' || byte == '\0') return false;
        if (byte == '&') {
            size_t skipped = read_entity(raw.at, raw.end, &byte);
            if (skipped == 0) return false;
            raw.at += skipped;
        }
        if (used + 1 >= size) return false;
        out[used++] = byte;
    }
    out[used] = '\0';
    return true;
}

/// Finds the next element of that name in *rest, and moves *rest past it.
static bool find_element(xml_text *rest, const char *name, xml_text *inside) {
    char open[48], close[48];
    int open_size = snprintf(open, sizeof open, "<%s>", name);
    int close_size = snprintf(close, sizeof close, "</%s>", name);
    const char *begin = memmem(rest->at, (size_t)(rest->end - rest->at), open, (size_t)open_size);
    if (begin == NULL) return false;
    begin += open_size;
    const char *end = memmem(begin, (size_t)(rest->end - begin), close, (size_t)close_size);
    if (end == NULL) return false;
    *inside = (xml_text){begin, end};
    rest->at = end + close_size;
    return true;
}

static const char *visit_entries(xml_text text, const char *entry, const char *key_name,
                                 listing_visitor visit, void *context) {
    xml_text inside, key;
    char name[LISTING_KEY_BYTES_MAX];
    while (find_element(&text, entry, &inside)) {
        if (!find_element(&inside, key_name, &key)) return "an entry of the listing has no key";
        if (!read_text(key, name, sizeof name)) return "the listing has an invalid key";
        if (!visit(context, name)) return NULL;
    }
    char open[48];
    int open_size = snprintf(open, sizeof open, "<%s>", entry);
    bool is_cut = memmem(text.at, (size_t)(text.end - text.at), open, (size_t)open_size) != NULL;
    return is_cut ? "an entry of the listing is incomplete" : NULL;
}

/// Whether the text ends with its outermost closing tag; a truncated one does not.
static bool is_whole(const char *text, size_t size, const char *end) {
    while (size > 0 && strchr(" \t\r\n", text[size - 1]) != NULL) size--;
    size_t end_size = strlen(end);
    return size >= end_size && memcmp(text + size - end_size, end, end_size) == 0;
}

bool fsti_xml_find(const char *text, size_t size, const char *name, char *out, size_t out_size) {
    xml_text rest = {text, text + size}, inside;
    return find_element(&rest, name, &inside) && read_text(inside, out, out_size);
}

/// Whether a listing says that it is truncated.
static bool is_truncated_list(xml_text all) {
    xml_text text;
    return find_element(&all, "IsTruncated", &text) && text.end - text.at == 4 &&
           memcmp(text.at, "true", 4) == 0;
}

const char *fsti_listing_read(const char *text, size_t size, listing_visitor visit, void *context,
                              listing *out) {
    const xml_text all = {text, text + size};
    xml_text token, rest = all;
    out->next[0] = '\0';
    if (memmem(text, size, "<!", 2) != NULL)
        return "the listing contains a document type declaration";
    bool is_azure = memmem(text, size, "<EnumerationResults", 19) != NULL;
    if (!is_azure && memmem(text, size, "<ListBucketResult", 17) == NULL)
        return "the response is not a listing";
    if (!is_whole(text, size, is_azure ? "</EnumerationResults>" : "</ListBucketResult>"))
        return "the listing is truncated";
    const char *why = visit_entries(all, is_azure ? "Blob" : "Contents", is_azure ? "Name" : "Key",
                                    visit, context);
    if (why != NULL) return why;
    const char *token_name = is_azure ? "NextMarker" : "NextContinuationToken";
    if (find_element(&rest, token_name, &token) && !read_text(token, out->next, sizeof out->next))
        return "the listing's continuation token is invalid";
    if (out->next[0] == '\0' && is_truncated_list(all))
        return "the listing is incomplete and has no continuation token";
    return NULL;
}
