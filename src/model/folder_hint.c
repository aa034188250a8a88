// SPDX-License-Identifier: Apache-2.0
/// Describes a folder without safetensors files, and what to do about it.
#include <stdio.h>
#include <string.h>

#include "open_model.h"

/// Maximum of names in the message; more are only counted.
#define NAME_COUNT_MAX 4
#define SUBFOLDER_COUNT_MAX 64

typedef struct name_list {
    char text[160];
    size_t count;
} name_list;

static bool ends_with_any(const char *text, const char *const *endings) {
    for (size_t i = 0; endings[i] != NULL; i++)
        if (fsti_ends_with(text, endings[i])) return true;
    return false;
}

static void add_name(name_list *list, const char *name) {
    size_t used = strlen(list->text);
    if (list->count < NAME_COUNT_MAX)
        snprintf(list->text + used, sizeof list->text - used, "%s%.40s", used > 0 ? ", " : "",
                 name);
    else if (list->count == NAME_COUNT_MAX)
        snprintf(list->text + used, sizeof list->text - used, ", ..");
    list->count++;
}

static fst_status find_model(void *context, const fsti_folder_entry *entry, fst_error *error) {
    (void)error;
    bool *is_found = context;
    if (entry->name[0] != '.' && fsti_name_is_model(entry->name)) *is_found = true;
    return FST_OK;
}

/// Whether a subfolder contains a safetensors file.
static bool holds_model(const char *folder, const char *name) {
    char path[1024];
    bool is_found = false;
    if ((size_t)snprintf(path, sizeof path, "%s/%s", folder, name) >= sizeof path) return false;
    return fsti_folder_visit(path, find_model, &is_found, NULL) == FST_OK && is_found;
}

/// Other contents of a folder.
typedef struct folder_content {
    const char *folder;
    name_list models, torch_files, downloads;
    size_t looked;
} folder_content;

static fst_status note_entry(void *context, const fsti_folder_entry *entry, fst_error *error) {
    static const char *const torch_endings[] = {".bin", ".pt", ".pth", ".ckpt", NULL};
    static const char *const unfinished[] = {".incomplete", ".part", ".crdownload", ".aria2", NULL};
    folder_content *content = context;
    const char *name = entry->name;
    (void)error;
    if (ends_with_any(name, unfinished)) add_name(&content->downloads, name);
    if (name[0] == '.') return FST_OK;
    if (ends_with_any(name, torch_endings)) add_name(&content->torch_files, name);
    if (entry->may_be_folder && content->looked++ < SUBFOLDER_COUNT_MAX &&
        holds_model(content->folder, name))
        add_name(&content->models, name);
    return FST_OK;
}

void fsti_model_folder_hint(const char *folder, char *text, size_t text_size) {
    folder_content content = {.folder = folder};
    text[0] = '\0';
    // Use what was found, even if listing fails later.
    (void)fsti_folder_visit(folder, note_entry, &content, NULL);
    if (content.models.count > 0)
        snprintf(text, text_size, "; these subfolders contain models: %s", content.models.text);
    else if (content.downloads.count > 0)
        snprintf(text, text_size, "; unfinished download: %s", content.downloads.text);
    else if (content.torch_files.count > 0)
        snprintf(text, text_size, "; 'fastsafetensors convert' can convert %s",
                 content.torch_files.text);
}
