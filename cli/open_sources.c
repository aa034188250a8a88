// SPDX-License-Identifier: Apache-2.0
/// Opening what is to be rewritten: one model, or several as one.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "rewrite.h"

/// What a file of `source` is opened by: paths are told without queries, which a presigned address
/// is refused without, and a version's address means another version without. NULL: no memory.
static char *name_file(const char *source, const char *told) {
    size_t bare = cli_is_address(source) ? strcspn(source, "?") : strlen(source);
    bool is_same = strlen(told) == bare && strncmp(told, source, bare) == 0;
    bool is_web = strncasecmp(source, "http", 4) == 0; // its query is for all files of an index
    const char *query = is_same || is_web ? source + bare : "";
    size_t size = strlen(told) + strlen(query) + 1;
    char *name = malloc(size);
    if (name != NULL) snprintf(name, size, "%s%s", told, query);
    return name;
}

/// Appends the names of a source's files to a list that grows.
static int gather_files(fst_model *model, const char *source, char ***paths, size_t *count) {
    size_t more = fst_model_file_count(model);
    char **grown = realloc(*paths, (*count + more) * sizeof *grown);
    if (grown == NULL) return cli_no_memory();
    *paths = grown;
    for (size_t f = 0; f < more; f++) {
        fst_file_info info;
        fst_error error;
        if (fst_model_file_info(model, f, &info, &error) != FST_OK) return cli_fail(&error);
        if ((grown[*count] = name_file(source, info.path)) == NULL) return cli_no_memory();
        (*count)++;
    }
    return EXIT_GOOD;
}

int cli_open_sources(const char *const *sources, size_t source_count,
                     const fst_open_options *options, fst_model **model) {
    fst_error error;
    if (source_count == 1)
        return fst_model_open(sources[0], options, model, &error) == FST_OK ? EXIT_GOOD
                                                                            : cli_fail(&error);
    char **paths = NULL;
    size_t path_count = 0;
    fst_model **models = calloc(source_count + 1, sizeof(fst_model *));
    int code = EXIT_GOOD;
    if (models == NULL) return cli_no_memory();
    for (size_t i = 0; i < source_count && code == EXIT_GOOD; i++) {
        code = fst_model_open(sources[i], options, &models[i], &error) == FST_OK
                   ? gather_files(models[i], sources[i], &paths, &path_count)
                   : cli_fail(&error);
    }
    if (code == EXIT_GOOD && fst_model_open_files((const char *const *)paths, path_count, options,
                                                  model, &error) != FST_OK)
        code = cli_fail(&error);
    for (size_t i = 0; models != NULL && i < source_count; i++) fst_model_close(models[i]);
    for (size_t i = 0; i < path_count; i++) free(paths[i]);
    free(models);
    free(paths);
    return code;
}
