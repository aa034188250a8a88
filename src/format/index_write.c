// SPDX-License-Identifier: Apache-2.0
/// Writes *.safetensors.index.json.
#include <stdlib.h>
#include <string.h>

#include "format.h"
#include "text_out.h"

static int compare_rows(const void *a_pointer, const void *b_pointer) {
    const fsti_index_row *a = *(const fsti_index_row *const *)a_pointer;
    const fsti_index_row *b = *(const fsti_index_row *const *)b_pointer;
    size_t size = a->name_size < b->name_size ? a->name_size : b->name_size;
    int order = memcmp(a->name, b->name, size);
    if (order != 0) return order;
    return a->name_size < b->name_size ? -1 : a->name_size > b->name_size;
}

static void put_rows(text_out *text, const fsti_index_row *const *rows, size_t row_count) {
    for (size_t i = 0; i < row_count; i++) {
        fsti_text_puts(text, i == 0 ? "\n    " : ",\n    ");
        fsti_text_put_ascii_json(text, rows[i]->name, rows[i]->name_size);
        fsti_text_puts(text, ": ");
        fsti_text_put_ascii_json(text, rows[i]->file, strlen(rows[i]->file));
    }
    fsti_text_puts(text, row_count == 0 ? "}" : "\n  }");
}

fst_status fsti_index_write(const fsti_index_row *rows, size_t row_count, uint64_t total_bytes,
                            char **out, size_t *size_bytes, fst_error *error) {
    const fsti_index_row **sorted = fsti_alloc((row_count + 1) * sizeof(fsti_index_row *));
    if (sorted == NULL) return fsti_error_memory(error, row_count * sizeof(fsti_index_row *));
    for (size_t i = 0; i < row_count; i++) sorted[i] = &rows[i];
    qsort(sorted, row_count, sizeof(fsti_index_row *), compare_rows);
    text_out text = {0};
    fsti_text_puts(&text, "{\n  \"metadata\": {\n    \"total_size\": ");
    fsti_text_put_number(&text, total_bytes);
    fsti_text_puts(&text, "\n  },\n  \"weight_map\": {");
    put_rows(&text, sorted, row_count);
    fsti_text_puts(&text, "\n}\n");
    fsti_free(sorted);
    if (text.failed) {
        fsti_free(text.bytes);
        return fsti_error_memory(error, text.size);
    }
    *out = text.bytes;
    *size_bytes = text.size;
    return FST_OK;
}
