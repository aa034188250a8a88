// SPDX-License-Identifier: Apache-2.0
/// Opens the models to rewrite: one, or several as one.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "rewrite.h"

/// The URL or path to open a file of `source`. The model's paths lack queries, but a presigned URL
/// is refused without its query, and a versioned URL selects another version. NULL: no memory.
static char *name_file(const char *source, const char *display) {
    size_t bare = cli_is_address(source) ? strcspn(source, "?") : strlen(source);
    bool is_same = strlen(display) == bare && strncmp(display, source, bare) == 0;
    bool is_web = strncasecmp(source, "http", 4) == 0; // its query applies to all files of an index
    const char *query = is_same || is_web ? source + bare : "";
    size_t size = strlen(display) + strlen(query) + 1;
    char *name = malloc(size);
    if (name != NULL) snprintf(name, size, "%s%s", display, query);
    return name;
}

/// Appends the file names of a source to a growing list.
static int gather_files(fst_model *model, const char *source, char ***paths, size_t *count) {
    size_t more = fst_model_file_count(model);
    char **grown = realloc(*paths, (*count + more) * sizeof *grown);
    if (grown == NULL) return cli_no_memory();
    *paths = grown;
    for (size_t f = 0; f < more; f++) {
        fst_file_info info = FST_STRUCT_INIT(fst_file_info);
        fst_error error;
        if (fst_model_file_info(model, f, &info, &error) != FST_OK) return cli_fail(&error);
        if ((grown[*count] = name_file(source, info.path)) == NULL) return cli_no_memory();
        (*count)++;
    }
    return EXIT_OK;
}

int cli_open_sources(const char *const *sources, size_t source_count,
                     const fst_open_options *options, fst_model **model) {
    fst_error error;
    if (source_count == 1)
        return fst_model_open(sources[0], options, model, &error) == FST_OK ? EXIT_OK
                                                                            : cli_fail(&error);
    char **paths = NULL;
    size_t path_count = 0;
    fst_model **models = calloc(source_count + 1, sizeof(fst_model *));
    int code = EXIT_OK;
    if (models == NULL) return cli_no_memory();
    for (size_t i = 0; i < source_count && code == EXIT_OK; i++) {
        code = fst_model_open(sources[i], options, &models[i], &error) == FST_OK
                   ? gather_files(models[i], sources[i], &paths, &path_count)
                   : cli_fail(&error);
    }
    if (code == EXIT_OK && fst_model_open_files((const char *const *)paths, path_count, options,
                                                model, &error) != FST_OK)
        code = cli_fail(&error);
    for (size_t i = 0; models != NULL && i < source_count; i++) fst_model_close(models[i]);
    for (size_t i = 0; i < path_count; i++) free(paths[i]);
    free(models);
    free(paths);
    return code;
}
