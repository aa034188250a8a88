// SPDX-License-Identifier: Apache-2.0
/// Parses stored digests (FILE.digest). Their lines of tensors are only used for comparing.
#include <string.h>

#include "json_reader.h"

/// Reads a word and the space after it.
static bool take_word(json_reader *reader, const char *word) {
    size_t size = strlen(word);
    if (strncmp(reader->cursor, word, size) != 0) return false;
    reader->cursor += size;
    return true;
}

/// Reads "file HEX NAME" or "tensor HEX NAME" with the line end.
static bool read_line(json_reader *reader, const fsti_digest_kind *kind, fsti_signed_file *out,
                      bool *is_file) {
    json_string name;
    *is_file = take_word(reader, "file ");
    if (!*is_file && !take_word(reader, "tensor "))
        return json_fault(reader, "a line for neither a file nor a tensor");
    const char *digits = reader->cursor;
    if ((size_t)(reader->end - digits) < 2 * kind->digest_bytes ||
        !fsti_digest_read(digits, kind->digest_bytes, out->digest) ||
        digits[2 * kind->digest_bytes] != ' ')
        return json_fault(reader, "a digest of a wrong size");
    reader->cursor += 2 * kind->digest_bytes + 1;
    if (!fsti_json_read_string(reader, &name)) return false;
    if (*reader->cursor++ != '\n') return json_fault(reader, "a line without an end");
    char *text = (char *)(uintptr_t)name.text;
    out->name_size = fsti_json_decode(&name, text);
    text[out->name_size] = '\0'; // at or before the closing quote
    out->name = text;
    return !*is_file || fsti_path_stays_inside(text, out->name_size) ||
           json_fault(reader, "a name outside the folder");
}

fst_status fsti_sidecar_parse(char *bytes, size_t byte_count, const fsti_digest_kind *kind,
                              fsti_sums *out, fsti_error_location location, fst_error *error) {
    json_reader reader;
    size_t capacity = 0;
    *out = (fsti_sums){.bytes = bytes};
    bool good = fsti_json_begin(&reader, bytes, byte_count);
    const char *line = good ? strchr(bytes, '\n') : NULL;
    if (line != NULL) reader.cursor = line + 1;
    fst_status status = FST_OK;
    while (good && line != NULL && reader.cursor < reader.end && status == FST_OK) {
        fsti_signed_file file = {0};
        bool is_file;
        good = read_line(&reader, kind, &file, &is_file);
        if (!good || !is_file) continue;
        if (!fsti_array_reserve((void **)&out->files, &capacity, out->file_count,
                                sizeof *out->files, UINT32_MAX))
            status = fsti_error_memory(error, sizeof *out->files);
        else
            out->files[out->file_count++] = file;
    }
    location.byte_offset = (uint64_t)(reader.cursor - bytes);
    if (status == FST_OK && (!good || line == NULL))
        status = fsti_error_set(error, FST_E_MANIFEST, location, "invalid digest file: %s",
                                reader.fault == NULL ? "no line is complete" : reader.fault);
    if (status == FST_OK) status = fsti_sums_check_duplicates(out, location.file, error);
    if (status != FST_OK) fsti_sums_clear(out);
    return status;
}
