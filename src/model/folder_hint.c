// SPDX-License-Identifier: Apache-2.0
/// What a folder without safetensors files has instead, and what to do about it.
#include <dirent.h>
#include <stdio.h>
#include <string.h>

#include "model.h"

/// Names that are told; more are counted only.
#define NAME_COUNT_MAX 4
#define SUBFOLDER_COUNT_MAX 64

typedef struct name_list {
    char text[160];
    size_t count;
} name_list;

static bool ends_with(const char *text, const char *ending) {
    size_t size = strlen(text), ending_size = strlen(ending);
    return size >= ending_size && strcmp(text + size - ending_size, ending) == 0;
}

static bool ends_with_any(const char *text, const char *const *endings) {
    for (size_t i = 0; endings[i] != NULL; i++)
        if (ends_with(text, endings[i])) return true;
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

/// Whether a subfolder holds a safetensors file itself.
static bool holds_model(const char *folder, const char *name) {
    char path[1024];
    bool found = false;
    if ((size_t)snprintf(path, sizeof path, "%s/%s", folder, name) >= sizeof path) return false;
    DIR *directory = opendir(path);
    const struct dirent *entry;
    while (directory != NULL && !found && (entry = readdir(directory)) != NULL)
        found = entry->d_name[0] != '.' && ends_with(entry->d_name, ".safetensors");
    if (directory != NULL) closedir(directory);
    return found;
}

void fsti_model_folder_hint(const char *folder, char *text, size_t text_size) {
    static const char *const torch_endings[] = {".bin", ".pt", ".pth", ".ckpt", NULL};
    static const char *const unfinished[] = {".incomplete", ".part", ".crdownload", ".aria2", NULL};
    name_list models = {0}, torch_files = {0}, downloads = {0};
    size_t looked = 0;
    DIR *directory = opendir(folder);
    const struct dirent *entry;
    text[0] = '\0';
    while (directory != NULL && (entry = readdir(directory)) != NULL) {
        bool may_be_folder =
            entry->d_type == DT_DIR || entry->d_type == DT_LNK || entry->d_type == DT_UNKNOWN;
        if (ends_with_any(entry->d_name, unfinished)) add_name(&downloads, entry->d_name);
        if (entry->d_name[0] == '.') continue;
        if (ends_with_any(entry->d_name, torch_endings)) add_name(&torch_files, entry->d_name);
        if (may_be_folder && looked++ < SUBFOLDER_COUNT_MAX && holds_model(folder, entry->d_name))
            add_name(&models, entry->d_name);
    }
    if (directory != NULL) closedir(directory);
    if (models.count > 0)
        snprintf(text, text_size, "; folders in it hold models: %s", models.text);
    else if (downloads.count > 0)
        snprintf(text, text_size, "; a download has not ended: %s", downloads.text);
    else if (torch_files.count > 0)
        snprintf(text, text_size, "; 'fastsafetensors convert' makes one of %s", torch_files.text);
}
