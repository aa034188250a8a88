// SPDX-License-Identifier: Apache-2.0
/// Fuzzes the parsers of weight deltas' texts: a version's index and a folder's version note. What
/// is read can be written, and read again as the same.
#include <string.h>

#include "format/format.h"
#include "fuzz_input.h"
#include "fuzz_target.h"

static char *padded(const void *data, size_t size) {
    char *bytes = fsti_alloc_zeroed(size + FSTI_FORMAT_PADDING_BYTES, 1);
    if (bytes != NULL && size > 0) memcpy(bytes, data, size);
    return bytes;
}

static void fuzz_state(const uint8_t *data, size_t size) {
    fsti_delta_state state, again;
    char *bytes = padded(data, size), *text;
    size_t text_size;
    if (bytes == NULL || fsti_delta_state_parse(bytes, size, "fuzz", &state, NULL) != FST_OK)
        return;
    for (size_t i = 0; i < state.file_count; i++)
        require(fsti_path_stays_inside(state.files[i].name, strlen(state.files[i].name)));
    if (fsti_delta_state_write(&state, &text, &text_size, NULL) == FST_OK) {
        char *copy = padded(text, text_size);
        require(copy == NULL ||
                fsti_delta_state_parse(copy, text_size, "fuzz", &again, NULL) == FST_OK);
        if (copy != NULL) {
            require(strcmp(again.version, state.version) == 0);
            require(again.file_count == state.file_count);
            fsti_delta_state_clear(&again);
        }
        fsti_free(text);
    }
    fsti_delta_state_clear(&state);
}

static void write_again(const fsti_delta_text *text) {
    fsti_delta_text again;
    fsti_delta_row row = {"name", 4, 0};
    fsti_delta_draft draft = {text->version, text->base, "xor", "adler32", &row, 1, 1, false};
    char *bytes;
    size_t size;
    if (fsti_delta_text_write(&draft, &bytes, &size, NULL) != FST_OK) return;
    char *copy = padded(bytes, size);
    fsti_free(bytes);
    if (copy == NULL) return;
    require(fsti_delta_text_parse(copy, size, "fuzz", &again, NULL) == FST_OK);
    require(strcmp(again.version, text->version) == 0 && strcmp(again.base, text->base) == 0);
    require(fsti_version_compare(again.version, text->version) == FSTI_VERSION_SAME);
    fsti_delta_text_clear(&again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fsti_delta_text text;
    if (size == 0) return 0;
    if (data[0] == 's') {
        fuzz_state(data + 1, size - 1);
        return 0;
    }
    char *bytes = padded(data, size);
    if (bytes == NULL || fsti_delta_text_parse(bytes, size, "fuzz", &text, NULL) != FST_OK)
        return 0;
    for (size_t i = 0; i < text.index->file_count; i++) {
        const char *name = text.index->bytes + text.index->files[i].at;
        require(fsti_path_stays_inside(name, text.index->files[i].size));
        require(memchr(name, '/', text.index->files[i].size) == NULL);
    }
    if (text.version != NULL && text.base != NULL) {
        (void)fsti_version_compare(text.version, text.base);
        write_again(&text);
    }
    fsti_delta_text_clear(&text);
    return 0;
}
