// SPDX-License-Identifier: Apache-2.0
/// File names of models, and the rule for names read from files: indexes, manifests, checksum
/// lists, stored digests and signed statements all use it.
#include <string.h>

#include "format.h"

static bool is_letter(char byte) {
    return (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z');
}

/// Whether the name starts with a URL scheme: letters, digits, "+", "-" and ".", then "://". All
/// schemes are refused, including ones that the library does not read.
static bool has_scheme(const char *name, size_t size) {
    size_t at = 0;
    while (at < size && (is_letter(name[at]) || (name[at] >= '0' && name[at] <= '9') ||
                         name[at] == '+' || name[at] == '-' || name[at] == '.'))
        at++;
    return at > 0 && size - at >= 3 && memcmp(name + at, "://", 3) == 0;
}

bool fsti_path_stays_inside(const char *name, size_t size) {
    if (size == 0 || name[0] == '/' || memchr(name, '\0', size) != NULL) return false;
    if (has_scheme(name, size)) return false;
    for (size_t begin = 0; begin <= size;) {
        const char *slash = memchr(name + begin, '/', size - begin);
        size_t end = slash == NULL ? size : (size_t)(slash - name);
        if (end - begin == 2 && name[begin] == '.' && name[begin + 1] == '.') return false;
        begin = end + 1;
    }
    return true;
}

bool fsti_name_is_model(const char *name) { return fsti_ends_with(name, ".safetensors"); }

bool fsti_name_is_index(const char *name) {
    return fsti_ends_with(name, ".safetensors.index.json");
}

bool fsti_name_leads_to_model(const char *name) {
    return fsti_name_is_model(name) || fsti_name_is_index(name);
}
