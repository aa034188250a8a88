// SPDX-License-Identifier: Apache-2.0
/// Distance between names: the number of inserted, deleted and changed characters.
#include "close_names.h"

#include <stdio.h>
#include <string.h>

#define CLOSE_COUNT 3
/// Longer names are compared by their beginning.
#define LETTERS_MAX 200u

typedef struct close_name {
    fst_tensor_info info;
    unsigned distance;
} close_name;

static unsigned least(unsigned a, unsigned b) { return a < b ? a : b; }

static unsigned name_distance(const char *a, unsigned a_size, const char *b, unsigned b_size) {
    unsigned row[LETTERS_MAX + 1];
    for (unsigned i = 0; i <= b_size; i++) row[i] = i;
    for (unsigned j = 1; j <= a_size; j++) {
        unsigned before = row[0];
        row[0] = j;
        for (unsigned i = 1; i <= b_size; i++) {
            unsigned changed = before + (a[j - 1] != b[i - 1]);
            before = row[i];
            row[i] = least(changed, 1 + least(row[i], row[i - 1]));
        }
    }
    return row[b_size];
}

void cli_close_names(const fst_model *model, const char *name, char *text) {
    close_name close[CLOSE_COUNT + 1];
    size_t count = 0, used = 0;
    unsigned size = least((unsigned)strnlen(name, LETTERS_MAX), LETTERS_MAX);
    for (size_t i = 0; i < fst_model_tensor_count(model); i++) {
        close_name own = {.info = FST_STRUCT_INIT(fst_tensor_info)};
        if (fst_model_tensor_info(model, i, &own.info, NULL) != FST_OK) continue;
        unsigned own_length = (unsigned)strnlen(own.info.name, LETTERS_MAX);
        own.distance = name_distance(name, size, own.info.name, own_length);
        // A substring of the name also counts as a match.
        if (size > 2 && strstr(own.info.name, name) != NULL) own.distance = 0;
        if (own.distance > size / 3 + 1) continue;
        size_t at = count;
        for (; at > 0 && own.distance < close[at - 1].distance; at--) close[at] = close[at - 1];
        close[at] = own;
        if (count < CLOSE_COUNT) count++;
    }
    text[0] = '\0';
    for (size_t i = 0; i < count && used < CLOSE_NAMES_TEXT_MAX; i++)
        used += (size_t)snprintf(text + used, CLOSE_NAMES_TEXT_MAX - used, "%s%.200s",
                                 i == 0 ? "" : ", ", close[i].info.name);
}
