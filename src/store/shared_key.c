// SPDX-License-Identifier: Apache-2.0
/// Azure SharedKey signatures: HMAC-SHA256 over the canonical request.
#include "shared_key.h"

#include <stdio.h>
#include <string.h>

#include "sha256.h"
#include "token_text.h"

#define TEXT_BYTES 16384u
#define PARAMETER_COUNT_MAX 16u

typedef struct text_room {
    char *text;
    size_t size, used;
    bool is_full;
} text_room;

static void add(text_room *room, const char *bytes, size_t size) {
    room->is_full = room->is_full || size >= room->size - room->used;
    if (room->is_full) return;
    memcpy(room->text + room->used, bytes, size);
    room->used += size;
    room->text[room->used] = '\0';
}

static void add_line(text_room *room, const char *text) {
    add(room, text, strlen(text));
    add(room, "\n", 1);
}

/// Adds headers in canonical form, "x-ms-date:now".
static void add_headers(text_room *room, const shared_key_request *request) {
    for (size_t i = 0; i < request->line_count; i++) {
        const char *line = request->lines[i], *colon = strchr(line, ':');
        if (strncmp(line, "x-ms-", 5) != 0 || colon == NULL) continue;
        add(room, line, (size_t)(colon - line) + 1);
        add_line(room, colon + 1 + strspn(colon + 1, " "));
    }
}

/// Adds query parameters, sorted by name and unescaped.
static void add_query(text_room *room, url_part query) {
    url_part parts[PARAMETER_COUNT_MAX];
    char value[2048];
    size_t count = 0;
    for (size_t at = 0; at < query.size;) {
        const char *end = memchr(query.at + at, '&', query.size - at);
        size_t size = end == NULL ? query.size - at : (size_t)(end - query.at) - at;
        room->is_full = room->is_full || count == PARAMETER_COUNT_MAX;
        if (room->is_full) return;
        size_t index = count++;
        for (; index > 0 && memcmp(parts[index - 1].at, query.at + at,
                                   fsti_min(parts[index - 1].size, size)) > 0;
             index--)
            parts[index] = parts[index - 1];
        parts[index] = (url_part){query.at + at, size};
        at += size + 1;
    }
    for (size_t i = 0; i < count; i++) {
        const char *equals = memchr(parts[i].at, '=', parts[i].size);
        size_t name_size = equals == NULL ? parts[i].size : (size_t)(equals - parts[i].at);
        url_part raw = {parts[i].at + name_size + (equals != NULL),
                        parts[i].size - name_size - (equals != NULL)};
        room->is_full = room->is_full || !fsti_url_unescape(raw, value, sizeof value);
        if (room->is_full) return;
        add(room, "\n", 1);
        add(room, parts[i].at, name_size);
        add(room, ":", 1);
        add(room, value, strlen(value));
    }
}

static void write_request(text_room *room, const shared_key_request *request) {
    char length[24] = "";
    if (request->body_bytes > 0) snprintf(length, sizeof length, "%zu", request->body_bytes);
    const char *const fields[] = {request->method,
                                  "",
                                  "",
                                  length,
                                  "",
                                  request->type,
                                  "",
                                  "",
                                  request->match,
                                  request->none_match,
                                  "",
                                  request->range};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) add_line(room, fields[i]);
    add_headers(room, request);
    add(room, "/", 1);
    add(room, request->account, strlen(request->account));
    add(room, request->path.at, request->path.size);
    add_query(room, request->query);
}

bool fsti_shared_key_sign(const shared_key_request *request, char *line, size_t size) {
    unsigned char digest[SHA256_BYTES];
    char signature[BASE64_BYTES(SHA256_BYTES)];
    text_room room = {fsti_alloc(TEXT_BYTES), TEXT_BYTES, 0, false};
    if (room.text == NULL) return false;
    write_request(&room, request);
    if (!room.is_full)
        fsti_hmac_sha256((hmac_key){request->key, request->key_size}, room.text, room.used, digest);
    fsti_free(room.text);
    if (room.is_full) return false;
    fsti_base64_write(digest, sizeof digest, false, signature);
    int used = snprintf(line, size, "SharedKey %s:%s", request->account, signature);
    return used > 0 && (size_t)used < size;
}
