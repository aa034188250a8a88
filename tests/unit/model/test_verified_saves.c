// SPDX-License-Identifier: Apache-2.0
/// A save that replaces a model and its manifest while a verified reader opens it: the reader gets
/// the new model or an error that says so, and does not call the files damaged.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "fastsafetensors.h"
#include "fixture.h"
#include "model/open_model.h"

static char before[600], after[600];
static void (*save)(void); ///< once, after the manifest was read; NULL: nothing

fst_status __real_fsti_model_read_text(const char *path, char **bytes, size_t *byte_count,
                                       fst_error *error);
fst_status __wrap_fsti_model_read_text(const char *path, char **bytes, size_t *byte_count,
                                       fst_error *error);
fst_status __wrap_fsti_model_read_text(const char *path, char **bytes, size_t *byte_count,
                                       fst_error *error) {
    fst_status status = __real_fsti_model_read_text(path, bytes, byte_count, error);
    void (*now)(void) = save;
    save = NULL;
    if (now != NULL) now();
    return status;
}

static bool run(const char *format, const char *a, const char *b) {
    char command[1600];
    snprintf(command, sizeof command, format, a, b);
    return system(command) == 0;
}

/// A model with a manifest, and the one that will replace it: of another size, or with other bytes.
static bool make_models(bool is_other_size) {
    const char *model = fixture_tensors("verified", 3, 50000);
    snprintf(before, sizeof before, "%s.before/m.safetensors", model);
    snprintf(after, sizeof after, "%s.after/m.safetensors", model);
    return run("rm -rf '%s.before' '%s.after'", model, model) &&
           run("mkdir '%s.before' '%s.after'", model, model) &&
           run("cp '%s' '%s'", model, before) &&
           run("cp '%s' '%s'", is_other_size ? fixture_tensors("larger", 4, 50000) : model,
               after) &&
           run("printf x | dd of='%s' bs=1 seek=140000 conv=notrunc 2>/dev/null%s", after, "") &&
           fst_manifest_write(before, NULL, NULL, NULL, NULL) == FST_OK &&
           fst_manifest_write(after, NULL, NULL, NULL, NULL) == FST_OK;
}

/// What a save does: removes the manifest, replaces the model, and writes the new manifest.
static void save_model(void) {
    char manifest[700];
    snprintf(manifest, sizeof manifest, "%s.manifest", before);
    CHECK(unlink(manifest) == 0 && rename(after, before) == 0);
}

static void save_model_and_manifest(void) {
    char from[700], to[700];
    save_model();
    snprintf(from, sizeof from, "%s.manifest", after);
    snprintf(to, sizeof to, "%s.manifest", before);
    CHECK(rename(from, to) == 0);
}

/// Loads all tensors of the model, verified. `as_list`: it is opened as a list of files.
static fst_status load(bool as_list, fst_error *error) {
    fst_open_options options = FST_STRUCT_INIT(fst_open_options);
    const char *path = before;
    fst_model *model = NULL;
    fst_loader *loader = NULL;
    options.flags = FST_OPEN_VERIFY;
    fst_status status = as_list ? fst_model_open_files(&path, 1, &options, &model, error)
                                : fst_model_open(path, &options, &model, error);
    if (status == FST_OK) status = fst_loader_open(model, NULL, &loader, error);
    while (status == FST_OK) {
        fst_tensor *tensor = NULL;
        status = fst_loader_next(loader, -1, &tensor, error);
        fst_tensor_unref(tensor);
    }
    if (status == FST_END) status = FST_OK;
    fst_loader_close(loader);
    fst_model_close(model);
    return status;
}

TEST(a_model_saved_while_it_is_opened_is_no_damaged_one)
{
    for (int is_other_size = 0; is_other_size < 2; is_other_size++)
        for (int as_list = 0; as_list < 2; as_list++) {
            fst_error error = {0};
            CHECK(make_models(is_other_size != 0));
            save = save_model_and_manifest;
            CHECK_INT(load(as_list != 0, &error), FST_OK);
            // The save has removed the old manifest, and has not written the new one yet.
            CHECK(make_models(is_other_size != 0));
            save = save_model;
            CHECK_INT(load(as_list != 0, &error), FST_E_NOT_FOUND);
        }
}

TEST(damaged_files_are_told_as_such)
{
    for (int is_other_size = 0; is_other_size < 2; is_other_size++)
        for (int as_list = 0; as_list < 2; as_list++) {
            fst_error error = {0};
            CHECK(make_models(is_other_size != 0));
            CHECK(rename(after, before) == 0);
            CHECK_INT(load(as_list != 0, &error), FST_E_DIGEST);
            CHECK_INT(fst_manifest_check(before, NULL, NULL, &error), FST_E_DIGEST);
        }
}

TEST(a_comparison_with_a_replaced_manifest_says_so)
{
    fst_error error = {0};
    CHECK(make_models(false));
    save = save_model_and_manifest;
    CHECK_INT(fst_manifest_check(before, NULL, NULL, &error), FST_E_FILE_CHANGED);
    CHECK_CONTAINS(error.message, "a save replaced the manifest");
    CHECK_INT(fst_manifest_check(before, NULL, NULL, &error), FST_OK);
}
