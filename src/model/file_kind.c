// SPDX-License-Identifier: Apache-2.0
/// Recognises files that are not safetensors files. Most files that fail to open are intact files
/// of another kind, which their first bytes identify.
#include <stdio.h>
#include <string.h>

#include "open_model.h"

/// How much text to quote.
#define QUOTE_BYTES 60

#define ARCHIVE "compressed. Decompress it first"
#define CONVERT "'fastsafetensors convert' converts it"

/// File signatures.
static const struct {
    size_t at, size;
    const char *bytes, *text;
} beginnings[] = {
    {0, 4, "GGUF", "a GGUF file (llama.cpp). Use the model's safetensors files instead"},
    {0, 6, "\x93NUMPY", "a NumPy array (.npy). Load it with NumPy and save it with save_file"},
    {0, 8, "\x89HDF\r\n\x1a\n", "an HDF5 file (Keras, .h5). Load it with h5py or Keras"},
    {0, 2, "\x1f\x8b", "gzip-" ARCHIVE},
    {0, 4, "\x28\xb5\x2f\xfd", "zstd-" ARCHIVE},
    {0, 6, "\xfd\x37zXZ", "xz-" ARCHIVE},
    {0, 3, "BZh", "bzip2-" ARCHIVE},
    {0, 6, "7z\xbc\xaf\x27\x1c", "7z-" ARCHIVE},
    {257, 5, "ustar", "a tar archive. Unpack it first"},
    {0, 4,
     "\x7f"
     "ELF",
     "a program or library (ELF), not a model"},
    {4, 4, "TFL3", "a TensorFlow Lite model"},
};

typedef struct file_start {
    const char *bytes;
    size_t size;
} file_start;

static bool holds(const file_start *file, const char *word) {
    return memmem(file->bytes, file->size, word, strlen(word)) != NULL;
}

/// Whether it is JSON white space.
static bool is_space(char byte) {
    return byte == ' ' || byte == '\t' || byte == '\r' || byte == '\n';
}

/// Whether the text starts with a word, after white space and a byte order mark, ignoring case.
static bool begins(const file_start *file, const char *word) {
    size_t at = file->size >= 3 && memcmp(file->bytes, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
    while (at < file->size && is_space(file->bytes[at])) at++;
    for (; *word != '\0'; word++, at++) {
        if (at == file->size) return false;
        char byte = file->bytes[at];
        if (byte >= 'A' && byte <= 'Z') byte = (char)(byte - 'A' + 'a');
        if (byte != *word) return false;
    }
    return true;
}

static bool is_zeros(const file_start *file) {
    for (size_t i = 0; i < file->size; i++)
        if (file->bytes[i] != 0) return false;
    return true;
}

/// The start of the first line; "" if it is not text.
static void quote_line(const file_start *file, char *quote) {
    size_t size = 0;
    while (size < file->size && size < QUOTE_BYTES && file->bytes[size] != '\n' &&
           file->bytes[size] != '\r') {
        unsigned char byte = (unsigned char)file->bytes[size];
        if ((byte < 0x20 && byte != '\t') || byte >= 0x7f) {
            size = 0;
            break;
        }
        quote[size++] = (char)byte;
    }
    quote[size] = '\0';
}

static const char *zip_kind(const file_start *file) {
    if (holds(file, "data.pkl") || holds(file, "/byteorder") || holds(file, "/.format_version"))
        return "a torch.save file (.bin, .pt, .ckpt): " CONVERT;
    if (holds(file, ".npy"))
        return "a NumPy archive (.npz). Load it with NumPy and save it with save_file";
    if (holds(file, "config.json")) return "a Keras archive (.keras). Load it with Keras";
    return "a zip archive. Unpack it, or if torch.save wrote it, " CONVERT;
}

static bool name_pointer(const file_start *file, char *text, size_t text_size) {
    static const char first[] = "version https://git-lfs.github.com/";
    if (!begins(file, first)) return false;
    char copy[512];
    snprintf(copy, sizeof copy, "%.*s", (int)file->size, file->bytes);
    const char *size = strstr(copy, "\nsize ");
    int digits = size == NULL ? 0 : (int)strspn(size + 6, "0123456789");
    if (digits > 0 && digits < 20)
        snprintf(text, text_size,
                 "a git-lfs pointer for a file of %.*s bytes. Run 'git lfs pull' in its folder",
                 digits, size + 6);
    else
        snprintf(text, text_size, "a git-lfs pointer. Run 'git lfs pull' in its folder");
    return true;
}

static const char *name_json(const file_start *file) {
    if (holds(file, "\"weight_map\""))
        return "an index of shards. Open it alone, as *.safetensors.index.json, or open its folder";
    if (holds(file, "\"data_offsets\"")) return "a header without the 8-byte length field";
    if (holds(file, "\"error\"") || holds(file, "\"message\""))
        return "a server's JSON response, probably an error";
    return begins(file, "{") ? "a JSON file, maybe an index or a config" : NULL;
}

static const char *name_markup(const file_start *file) {
    if (begins(file, "<!doctype html") || begins(file, "<html") || begins(file, "<head"))
        return "a web page (HTML). The download may need a login, or the URL is that of a page";
    if (begins(file, "<?xml") || begins(file, "<error"))
        return "a server's XML response, probably an error. Read it and download again";
    return NULL;
}

static const char *name_binary(const file_start *file) {
    for (size_t i = 0; i < sizeof beginnings / sizeof *beginnings; i++)
        if (file->size >= beginnings[i].at + beginnings[i].size &&
            memcmp(file->bytes + beginnings[i].at, beginnings[i].bytes, beginnings[i].size) == 0)
            return beginnings[i].text;
    if (file->size >= 4 && memcmp(file->bytes, "PK\x03\x04", 4) == 0) return zip_kind(file);
    if (file->size >= 2 && file->bytes[0] == '\x80' && file->bytes[1] >= 2 && file->bytes[1] <= 5)
        return "a pickle (an old torch.save file?): " CONVERT;
    return NULL;
}

/// A plausible length followed by a brace: a safetensors file with another fault.
static bool begins_as_header(const file_start *file) {
    return file->size > FSTI_FORMAT_LENGTH_BYTES && memcmp(file->bytes + 4, "\0\0\0", 4) == 0 &&
           (file->bytes[FSTI_FORMAT_LENGTH_BYTES] == '{' ||
            is_space(file->bytes[FSTI_FORMAT_LENGTH_BYTES]));
}

bool fsti_model_index_kind(const char *bytes, size_t byte_count, uint64_t file_size, char *text,
                           size_t text_size) {
    file_start file = {bytes, byte_count};
    if (begins_as_header(&file)) {
        snprintf(text, text_size, "a safetensors file. Rename it to *.safetensors");
        return true;
    }
    // For JSON that fails as an index, the parser has a precise error, unless a server has sent the
    // file.
    if (begins(&file, "{") && (holds(&file, "\"weight_map\"") || !holds(&file, "\"error\"")))
        return false;
    return fsti_model_file_kind(bytes, byte_count, file_size, text, text_size);
}

bool fsti_model_file_kind(const char *bytes, size_t byte_count, uint64_t file_size, char *text,
                          size_t text_size) {
    file_start file = {bytes, byte_count};
    char quote[QUOTE_BYTES + 1];
    if (begins_as_header(&file)) return false;
    if (file_size == 0) {
        snprintf(text, text_size, "empty. Its download or save was probably interrupted");
        return true;
    }
    if (is_zeros(&file)) {
        snprintf(text, text_size,
                 "filled with zeros. Its download or save was probably interrupted");
        return true;
    }
    if (name_pointer(&file, text, text_size)) return true;
    const char *kind = name_binary(&file);
    if (kind == NULL) kind = name_markup(&file);
    quote_line(&file, quote);
    bool is_text = strlen(quote) >= 8;
    // The first line of JSON may be only its opening brace.
    if (kind == NULL && (is_text || begins(&file, "{"))) kind = name_json(&file);
    if (kind == NULL && is_text) {
        snprintf(text, text_size, "a text file that begins with '%s'", quote);
        return true;
    }
    if (kind != NULL) snprintf(text, text_size, "%s", kind);
    return kind != NULL;
}
