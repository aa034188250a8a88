// SPDX-License-Identifier: Apache-2.0
/// What a file is that is no safetensors file: most files that fail to open are whole files of
/// another kind, and their first bytes tell which.
#include <stdio.h>
#include <string.h>

#include "model.h"

/// How much of a text is quoted.
#define QUOTE_BYTES 60

#define ARCHIVE "compressed: unpack it first"
#define CONVERT "'fastsafetensors convert' makes a safetensors file of it"

/// Beginnings that say all.
static const struct {
    size_t at, size;
    const char *bytes, *text;
} beginnings[] = {
    {0, 4, "GGUF", "a GGUF file (llama.cpp): get the model's safetensors files instead"},
    {0, 6, "\x93NUMPY", "a NumPy array (.npy): load it with NumPy and save it with save_file"},
    {0, 8, "\x89HDF\r\n\x1a\n", "an HDF5 file (Keras, .h5): load it with h5py or Keras"},
    {0, 2, "\x1f\x8b", "gzip-" ARCHIVE},
    {0, 4, "\x28\xb5\x2f\xfd", "zstd-" ARCHIVE},
    {0, 6, "\xfd\x37zXZ", "xz-" ARCHIVE},
    {0, 3, "BZh", "bzip2-" ARCHIVE},
    {0, 6, "7z\xbc\xaf\x27\x1c", "7z-" ARCHIVE},
    {257, 5, "ustar", "a tar archive: unpack it first"},
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

/// White space as JSON has it.
static bool is_space(char byte) {
    return byte == ' ' || byte == '\t' || byte == '\r' || byte == '\n';
}

/// Whether the text begins so: after white space and a byte order mark, in small or large letters.
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

/// The beginning of the first line; "" when it is no text.
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
        return "NumPy's archive (.npz): load it with NumPy, save with save_file";
    if (holds(file, "config.json")) return "a Keras archive (.keras): load it with Keras";
    return "a zip archive: unpack it, or if it is of torch.save, " CONVERT;
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
                 "a git-lfs pointer; the file itself has %.*s bytes: run 'git lfs pull' there",
                 digits, size + 6);
    else
        snprintf(text, text_size, "a git-lfs pointer: run 'git lfs pull' there");
    return true;
}

static const char *name_json(const file_start *file) {
    if (holds(file, "\"weight_map\""))
        return "an index of shards: name it *.safetensors.index.json, or open its folder";
    if (holds(file, "\"data_offsets\"")) return "a header without the 8 bytes of its length";
    if (holds(file, "\"error\"") || holds(file, "\"message\""))
        return "a server's answer in JSON, probably an error";
    return begins(file, "{") ? "a JSON text, not a model" : NULL;
}

static const char *name_markup(const file_start *file) {
    if (begins(file, "<!doctype html") || begins(file, "<html") || begins(file, "<head"))
        return "a web page (HTML): the download needs a login, or the address is of a page";
    if (begins(file, "<?xml") || begins(file, "<error"))
        return "a server's answer in XML, probably an error: look into it and download again";
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

/// A length that is none too large, and the brace behind it: safetensors with a fault of its own.
static bool begins_as_header(const file_start *file) {
    return file->size > FSTI_FORMAT_LENGTH_BYTES && memcmp(file->bytes + 4, "\0\0\0", 4) == 0 &&
           (file->bytes[FSTI_FORMAT_LENGTH_BYTES] == '{' ||
            is_space(file->bytes[FSTI_FORMAT_LENGTH_BYTES]));
}

bool fsti_model_index_kind(const char *bytes, size_t byte_count, uint64_t file_size, char *text,
                           size_t text_size) {
    file_start file = {bytes, byte_count};
    if (begins_as_header(&file)) {
        snprintf(text, text_size, "a safetensors file itself: name it *.safetensors");
        return true;
    }
    // JSON that fails as an index has a place of its own to tell, unless a server has sent it.
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
        snprintf(text, text_size, "empty: what wrote or downloaded it did not get to it");
        return true;
    }
    if (is_zeros(&file)) {
        snprintf(text, text_size,
                 "zeros as far as was looked: space was reserved and never written");
        return true;
    }
    if (name_pointer(&file, text, text_size)) return true;
    const char *kind = name_binary(&file);
    if (kind == NULL) kind = name_markup(&file);
    quote_line(&file, quote);
    bool is_text = strlen(quote) >= 8;
    if (kind == NULL && is_text) kind = name_json(&file);
    if (kind == NULL && is_text) {
        snprintf(text, text_size, "a text that begins with '%s'", quote);
        return true;
    }
    if (kind != NULL) snprintf(text, text_size, "%s", kind);
    return kind != NULL;
}
