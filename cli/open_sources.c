// SPDX-License-Identifier: Apache-2.0
/// Opening what is to be rewritten: one model, or several as one.
#include <stdlib.h>

#include "rewrite.h"

/// Appends the paths of a source's files to a list that grows; the models stay open meanwhile.
static int gather_files(fst_model *model, const char ***paths, size_t *count) {
    size_t more = fst_model_file_count(model);
    const char **grown = realloc(*paths, (*count + more) * sizeof *grown);
    if (grown == NULL) return cli_no_memory();
    *paths = grown;
    for (size_t f = 0; f < more; f++) {
        fst_file_info info;
        fst_error error;
        if (fst_model_file_info(model, f, &info, &error) != FST_OK) return cli_fail(&error);
        grown[(*count)++] = info.path;
    }
    return EXIT_GOOD;
}

int cli_open_sources(const char *const *sources, size_t source_count,
                     const fst_open_options *options, fst_model **model) {
    fst_error error;
    if (source_count == 1)
        return fst_model_open(sources[0], options, model, &error) == FST_OK ? EXIT_GOOD
                                                                            : cli_fail(&error);
    const char **paths = NULL;
    size_t path_count = 0;
    fst_model **models = calloc(source_count + 1, sizeof(fst_model *));
    int code = EXIT_GOOD;
    if (models == NULL) return cli_no_memory();
    for (size_t i = 0; i < source_count && code == EXIT_GOOD; i++) {
        code = fst_model_open(sources[i], options, &models[i], &error) == FST_OK
                   ? gather_files(models[i], &paths, &path_count)
                   : cli_fail(&error);
    }
    if (code == EXIT_GOOD &&
        fst_model_open_files(paths, path_count, options, model, &error) != FST_OK)
        code = cli_fail(&error);
    for (size_t i = 0; models != NULL && i < source_count; i++) fst_model_close(models[i]);
    free(models);
    free(paths);
    return code;
}
