// SPDX-License-Identifier: Apache-2.0
/// Writes headers.
#include <string.h>

#include "format.h"
#include "text_out.h"

static void put_pairs(text_out *text, const fsti_header_draft *draft) {
    fsti_text_puts(text, "\"__metadata__\":{");
    for (size_t i = 0; i < draft->metadata_count; i++) {
        const fst_metadata_entry *entry = &draft->metadata[i];
        if (i > 0) fsti_text_put(text, ",", 1);
        fsti_text_put_json(text, entry->key, entry->key_size);
        fsti_text_put(text, ":", 1);
        fsti_text_put_json(text, entry->value, entry->value_size);
    }
    fsti_text_put(text, "}", 1);
}

static void put_entry(text_out *text, const fsti_header_entry *entry) {
    fsti_text_put_json(text, entry->name, entry->name_size);
    fsti_text_puts(text, ":{\"dtype\":\"");
    fsti_text_puts(text, fsti_dtype_name(entry->dtype));
    fsti_text_puts(text, "\",\"shape\":[");
    for (uint32_t i = 0; i < entry->rank; i++) {
        if (i > 0) fsti_text_put(text, ",", 1);
        fsti_text_put_number(text, entry->shape[i]);
    }
    fsti_text_puts(text, "],\"data_offsets\":[");
    fsti_text_put_number(text, entry->begin);
    fsti_text_put(text, ",", 1);
    fsti_text_put_number(text, entry->end);
    fsti_text_puts(text, "]}");
}

static void put_header(text_out *text, const fsti_header_draft *draft) {
    bool first = true;
    fsti_text_put(text, "{", 1);
    if (draft->has_metadata && !draft->metadata_last) {
        put_pairs(text, draft);
        first = false;
    }
    for (size_t i = 0; i < draft->entry_count; i++) {
        if (!first) fsti_text_put(text, ",", 1);
        put_entry(text, &draft->entries[draft->order[i]]);
        first = false;
    }
    if (draft->has_metadata && draft->metadata_last) {
        if (!first) fsti_text_put(text, ",", 1);
        put_pairs(text, draft);
    }
    fsti_text_put(text, "}", 1);
}

void fsti_header_put_length(char *field, uint64_t json_bytes) {
    (void)fsti_number_store(field, json_bytes, FSTI_FORMAT_LENGTH_BYTES);
}

fst_status fsti_header_write(const fsti_header_draft *draft, char **out, size_t *size_bytes,
                             fst_error *error) {
    text_out text = {0};
    // Typical size of an entry, so that most headers need one allocation.
    fsti_text_reserve(&text, 256 + draft->entry_count * 128);
    fsti_text_put(&text, "\0\0\0\0\0\0\0\0", FSTI_FORMAT_LENGTH_BYTES);
    put_header(&text, draft);
    while (!text.failed && text.size % draft->alignment_bytes != 0) fsti_text_put(&text, " ", 1);
    if (text.failed) {
        fsti_free(text.bytes);
        return fsti_error_memory(error, text.size);
    }
    uint64_t json_bytes = text.size - FSTI_FORMAT_LENGTH_BYTES;
    if (json_bytes > FSTI_FORMAT_HEADER_BYTES_MAX) {
        fsti_free(text.bytes);
        return fsti_error_set(error, FST_E_HEADER_TOO_LARGE, FSTI_NO_LOCATION,
                              "the header would have %llu bytes, more than the limit of readers, "
                              "%u. Save several files",
                              (unsigned long long)json_bytes, FSTI_FORMAT_HEADER_BYTES_MAX);
    }
    fsti_header_put_length(text.bytes, json_bytes);
    *out = text.bytes;
    *size_bytes = text.size;
    return FST_OK;
}
