// SPDX-License-Identifier: Apache-2.0
/// Examines the target of a rewrite: what the save would refuse, and what it replaces or deletes.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "rewrite.h"
#include "standard_input.h"

#define FILE_ENDING ".safetensors"
#define INDEX_ENDING ".safetensors.index.json"

static bool ends_with(const char *text, const char *ending) {
    size_t size = strlen(text), ending_size = strlen(ending);
    return size >= ending_size && strcmp(text + size - ending_size, ending) == 0;
}

static const char *stem_of(const rewrite_plan *plan) {
    return plan->save.stem == NULL ? "model" : plan->save.stem;
}

/// The folder of a path, to be freed. NULL without memory.
static char *folder_of(const char *path) {
    const char *slash = strrchr(path, '/');
    if (slash == NULL) return strdup(".");
    return slash == path ? strdup("/") : strndup(path, (size_t)(slash - path));
}

static bool can_write(const char *path) { return faccessat(AT_FDCWD, path, W_OK, AT_EACCESS) == 0; }

/// For a dry run: refuses a URL that the save would refuse. is_copy: the target gets an edited
/// copy.
static int check_url(const char *target, bool is_copy) {
    static const char *const stores[] = {"s3://", "gs://", "az://"};
    const char *rest = strstr(target, "://");
    if (rest == NULL || memchr(target, '/', (size_t)(rest - target)) != NULL) return EXIT_OK;
    for (size_t i = 0; !is_copy && i < sizeof stores / sizeof *stores; i++)
        if (strncasecmp(target, stores[i], strlen(stores[i])) == 0) return EXIT_OK;
    return cli_refuse(EXIT_UNREADABLE, fst_status_name(FST_E_UNSUPPORTED), "%s: %s",
                      cli_display_path(target),
                      is_copy ? "edited files can only be saved to local files"
                              : "models can be saved to s3://, gs:// or az://, or to local files");
}

// ---- one file ----

static int refuse_kind(const char *target, mode_t mode) {
    fst_error error = {.byte_offset = FST_NO_OFFSET, .status = FST_E_NOT_REGULAR};
    snprintf(error.file, sizeof error.file, "%s", target);
    snprintf(error.message, sizeof error.message, "%.400s: not a regular file but a %s", target,
             S_ISDIR(mode) ? "folder" : "device or FIFO");
    error.message[cli_make_printable(error.message, strlen(error.message))] = '\0';
    return cli_fail(&error);
}

int cli_check_file_folder(const char *target) {
    struct stat info;
    char *folder = folder_of(target);
    int code = EXIT_OK;
    if (folder == NULL)
        code = cli_no_memory();
    else if (stat(folder, &info) != 0 || !S_ISDIR(info.st_mode))
        code = cli_refuse(EXIT_UNREADABLE, fst_status_name(FST_E_NOT_FOUND),
                          "%s: the folder '%s' does not exist", target, folder);
    else if (!can_write(folder))
        code = cli_fail_errno("creating the temporary file", target);
    free(folder);
    return code;
}

int cli_check_file_target(const char *target, bool is_copy) {
    struct stat info;
    int refused = check_url(target, is_copy);
    if (refused != EXIT_OK || cli_is_output(target) || cli_is_address(target)) return refused;
    bool is_there = stat(target, &info) == 0;
    if (is_there && !S_ISREG(info.st_mode)) return refuse_kind(target, info.st_mode);
    if (is_there && !can_write(target)) return cli_fail_errno("writing the file", target);
    char *real = realpath(target, NULL); // links are followed
    int code = cli_check_file_folder(real == NULL ? target : real);
    free(real);
    return code;
}

// ---- a folder ----

bool cli_is_split(const rewrite_plan *plan) {
    return plan->file_bytes_max > 0 || plan->wanted_files > 0 || plan->by_layer;
}

/// Calls `is_wanted` for the files of a local folder until it returns true. Returns the name, to be
/// freed; NULL without one.
static char *find_in_folder(const rewrite_plan *plan,
                            bool (*is_wanted)(const char *name, const char *stem)) {
    DIR *folder = cli_is_address(plan->target) ? NULL : opendir(plan->target);
    struct dirent *entry = folder == NULL ? NULL : readdir(folder);
    while (entry != NULL && !is_wanted(entry->d_name, stem_of(plan))) entry = readdir(folder);
    char *name = entry == NULL ? NULL : strdup(entry->d_name);
    if (folder != NULL) closedir(folder);
    return name;
}

/// Whether a file of a folder is the index of a model whose files begin with another name.
static bool is_other_index(const char *name, const char *stem) {
    size_t size = strlen(stem);
    return name[0] != '.' && ends_with(name, INDEX_ENDING) &&
           (strncmp(name, stem, size) != 0 || strcmp(name + size, INDEX_ENDING) != 0);
}

/// For a dry run: the save creates the folder, so the nearest one that exists must be writable.
static int check_writable(const char *target) {
    struct stat info;
    char *folder = strdup(target);
    while (folder != NULL && stat(folder, &info) != 0 && strcmp(folder, ".") != 0) {
        char *outer = folder_of(folder);
        free(folder);
        folder = outer;
    }
    if (folder == NULL) return cli_no_memory();
    int code = EXIT_OK;
    if (!can_write(folder))
        code = cli_fail_errno(strcmp(folder, target) == 0 ? "creating the temporary file"
                                                          : "creating the folder",
                              target);
    free(folder);
    return code;
}

int cli_check_folder_target(const rewrite_plan *plan) {
    bool is_local = !cli_is_address(plan->target);
    struct stat info;
    if (is_local && stat(plan->target, &info) == 0 && !S_ISDIR(info.st_mode))
        return cli_refuse(EXIT_UNREADABLE, fst_status_name(FST_E_UNSUPPORTED),
                          "'%s' is a file, and split writes a folder. Give another name",
                          plan->target);
    char *other = find_in_folder(plan, is_other_index);
    if (other != NULL) {
        int code = cli_refuse(EXIT_UNREADABLE, fst_status_name(FST_E_UNSUPPORTED),
                              "'%s' holds another model, of '%s'. Use another folder, or its name "
                              "as --stem",
                              plan->target, other);
        free(other);
        return code;
    }
    if (!plan->dry_run || cli_is_output(plan->target)) return EXIT_OK;
    int code = check_url(plan->target, false);
    return code == EXIT_OK && is_local ? check_writable(plan->target) : code;
}

/// Whether a file of a folder is a model's, whose name begins with another one than `stem`.
static bool is_other_model(const char *name, const char *stem) {
    size_t stem_size = strlen(stem);
    if (name[0] == '.' || !ends_with(name, FILE_ENDING)) return false;
    return strncmp(name, stem, stem_size) != 0 ||
           (name[stem_size] != '-' && strcmp(name + stem_size, FILE_ENDING) != 0);
}

/// A split into one file has no index. Among other models' files, the folder would be one model of
/// all files.
int cli_check_one_file(const rewrite_plan *plan, uint32_t file_count) {
    char *other = file_count > 1 ? NULL : find_in_folder(plan, is_other_model);
    if (other == NULL) return EXIT_OK;
    int code = cli_refuse(EXIT_UNREADABLE, fst_status_name(FST_E_UNSUPPORTED),
                          "'%s' holds '%s', and without an index a folder is one model of all its "
                          "files. Use another folder",
                          plan->target, other);
    free(other);
    return code;
}

// ---- old files of the folder ----

/// Skips five digits. NULL for other text.
static const char *skip_number(const char *text) {
    return text != NULL && strspn(text, "0123456789") >= 5 ? text + 5 : NULL;
}

static const char *skip_text(const char *text, const char *word) {
    size_t size = strlen(word);
    return text != NULL && strncmp(text, word, size) == 0 ? text + size : NULL;
}

typedef enum file_kind { FILE_OTHER, FILE_SINGLE, FILE_SHARD, FILE_INDEX } file_kind;

/// What a file of a folder is in a model of that stem. *count: of a shard's set.
static file_kind kind_of(const char *name, const char *stem, uint32_t *count) {
    const char *rest = skip_text(name, stem);
    if (rest == NULL) return FILE_OTHER;
    if (strcmp(rest, FILE_ENDING) == 0) return FILE_SINGLE;
    if (strcmp(rest, INDEX_ENDING) == 0) return FILE_INDEX;
    const char *of = skip_text(skip_number(skip_text(rest, "-")), "-of-");
    const char *end = skip_number(of);
    if (end == NULL || strcmp(end, FILE_ENDING) != 0) return FILE_OTHER;
    *count = (uint32_t)strtoul(of, NULL, 10);
    return FILE_SHARD;
}

/// Whether a split into `file_count` files replaces or deletes (is_deleted) a file of its folder.
static bool is_old_file(const char *name, const char *stem, uint32_t file_count, bool is_deleted) {
    uint32_t count = 0;
    switch (kind_of(name, stem, &count)) {
    case FILE_SINGLE: return is_deleted == (file_count > 1);
    case FILE_INDEX: return is_deleted == (file_count == 1);
    case FILE_SHARD: return is_deleted == (file_count == 1 || count != file_count);
    default: return false;
    }
}

/// Prints the names of a list, each as a line or in a JSON array.
static void print_old(const rewrite_plan *plan, uint32_t file_count, bool is_deleted,
                      struct dirent **entries, int entry_count) {
    size_t printed = 0;
    if (cli_wants_json()) printf(", \"%s\": [", is_deleted ? "deleted" : "replaced");
    for (int i = 0; i < entry_count; i++) {
        const char *name = entries[i]->d_name;
        if (!is_old_file(name, stem_of(plan), file_count, is_deleted)) continue;
        printf("%s", !cli_wants_json() ? is_deleted ? "  deletes " : "  replaces "
                     : printed++ > 0   ? ", "
                                       : "");
        if (cli_wants_json())
            cli_print_json(name, strlen(name));
        else
            cli_print_name(name, strlen(name));
        if (!cli_wants_json()) printf("\n");
    }
    if (cli_wants_json()) printf("]");
}

void cli_print_old_files(const rewrite_plan *plan, uint32_t file_count) {
    struct dirent **entries = NULL;
    int count = cli_is_address(plan->target) ? 0 : scandir(plan->target, &entries, NULL, alphasort);
    print_old(plan, file_count, false, entries, count);
    print_old(plan, file_count, true, entries, count);
    for (int i = 0; i < count; i++) free(entries[i]);
    free(entries);
}

/// Whether a path leads to one of the model's files, by any name of it: a link, a descriptor.
static bool is_source(const fst_model *model, const char *path) {
    struct stat target, source;
    if (stat(path, &target) != 0) return false;
    for (size_t f = 0; f < fst_model_file_count(model); f++) {
        fst_file_info info = FST_STRUCT_INIT(fst_file_info);
        if (fst_model_file_info(model, f, &info, NULL) == FST_OK && stat(info.path, &source) == 0 &&
            source.st_dev == target.st_dev && source.st_ino == target.st_ino)
            return true;
    }
    return false;
}

int cli_check_selection(const fst_model *model, const rewrite_plan *plan) {
    if (plan->glob_count == 0 || cli_is_address(plan->target)) return EXIT_OK;
    DIR *folder = opendir(plan->target);
    const struct dirent *entry;
    bool is_found = false;
    while (!is_found && folder != NULL && (entry = readdir(folder)) != NULL) {
        uint32_t count;
        char path[PATH_MAX];
        if (kind_of(entry->d_name, stem_of(plan), &count) == FILE_OTHER) continue;
        snprintf(path, sizeof path, "%s/%s", plan->target, entry->d_name);
        is_found = is_source(model, path);
    }
    if (folder != NULL) closedir(folder);
    return !is_found ? EXIT_OK
                     : cli_usage("split",
                                 "FOLDER '%s' holds SOURCE, whose other tensors would be lost with "
                                 "--select. Give another folder, or another --stem",
                                 plan->target);
}
