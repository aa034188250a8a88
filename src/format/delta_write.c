// SPDX-License-Identifier: Apache-2.0
/// Writing the index of a weight delta, and the note of the version that a folder has.
#include <stdio.h>
#include <string.h>

#include "delta_text.h"
#include "text_out.h"

void fsti_delta_shard_name(uint32_t shard, uint32_t shard_count, char *name) {
    snprintf(name, FSTI_DELTA_SHARD_NAME_BYTES, "model-%05u-of-%05u.safetensors", shard,
             shard_count);
}

static void put_text(text_out *text, const char *string) {
    fsti_text_put_ascii_json(text, string, strlen(string));
}

static fst_status give_text(text_out *text, char **out, size_t *size_bytes, fst_error *error) {
    if (text->failed) {
        fsti_free(text->bytes);
        return fsti_error_memory(error, text->size);
    }
    *out = text->bytes;
    *size_bytes = text->size;
    return FST_OK;
}

fst_status fsti_delta_text_write(const fsti_delta_draft *draft, char **out, size_t *size_bytes,
                                 fst_error *error) {
    const char *comma = draft->is_compact ? "," : ", ", *colon = draft->is_compact ? ":" : ": ";
    const char *const fields[][2] = {{"base_version", draft->base},
                                     {"checksum_format", draft->checksum},
                                     {"compression_format", "zstd"},
                                     {"delta_encoding", draft->encoding},
                                     {"version", draft->version}};
    text_out text = {0};
    fsti_text_puts(&text, "{\"metadata\"");
    fsti_text_puts(&text, colon);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        fsti_text_puts(&text, i == 0 ? "{" : comma);
        put_text(&text, fields[i][0]);
        fsti_text_puts(&text, colon);
        put_text(&text, fields[i][1]);
    }
    fsti_text_puts(&text, "}");
    fsti_text_puts(&text, comma);
    fsti_text_puts(&text, "\"weight_map\"");
    fsti_text_puts(&text, colon);
    fsti_text_puts(&text, "{");
    for (size_t i = 0; i < draft->row_count; i++) {
        char shard[FSTI_DELTA_SHARD_NAME_BYTES];
        if (i > 0) fsti_text_puts(&text, comma);
        fsti_text_put_ascii_json(&text, draft->rows[i].name, draft->rows[i].name_size);
        fsti_text_puts(&text, colon);
        fsti_delta_shard_name(draft->rows[i].shard, draft->shard_count, shard);
        put_text(&text, shard);
    }
    fsti_text_puts(&text, "}}");
    return give_text(&text, out, size_bytes, error);
}

fst_status fsti_delta_state_write(const fsti_delta_state *state, char **out, size_t *size_bytes,
                                  fst_error *error) {
    text_out text = {0};
    fsti_text_puts(&text, "{\"version\": ");
    put_text(&text, state->version);
    fsti_text_puts(&text, ", \"files\": {");
    for (size_t i = 0; i < state->file_count; i++) {
        if (i > 0) fsti_text_puts(&text, ", ");
        put_text(&text, state->files[i].name);
        fsti_text_puts(&text, ": [");
        fsti_text_put_number(&text, state->files[i].size_bytes);
        fsti_text_puts(&text, ", ");
        fsti_text_put_number(&text, state->files[i].modified_ns);
        fsti_text_puts(&text, "]");
    }
    fsti_text_puts(&text, "}}\n");
    return give_text(&text, out, size_bytes, error);
}
