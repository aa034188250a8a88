// SPDX-License-Identifier: Apache-2.0
/// Files opened one by one while a save replaces their set: a reader gets files of one save or an
/// error, at every system call of the save.
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "fastsafetensors.h"
#include "fastsafetensors/experimental.h"
#include "fault_calls.h"
#include "fixture.h"
#include "io/io.h"
#include "model_saves.h"

#define FILE_COUNT_OF_SET 3u

typedef struct save_case {
    const char *name;
    uint32_t old_files, new_files;
    bool no_links;
} save_case;

static const save_case cases[] = {
    {"a set over a set", 3, 3, false},
    {"a set over a set, without hard links", 3, 3, true},
    {"ranks without an index over the same", 3 | RANKS_NO_INDEX, 3 | RANKS_NO_INDEX, false},
    {"ranks over a set", 3, 3 | RANKS, false},
    {"a set with a manifest over a set", 3, 3 | MANIFEST, false},
};

static char folder[300], names[FILE_COUNT_OF_SET][400];
static const char *paths[FILE_COUNT_OF_SET];

/// An empty folder, and the paths of the set that is to be in it.
static void make_folder(void) {
    static unsigned number;
    char name[40];
    snprintf(name, sizeof name, "list-%u", ++number);
    snprintf(folder, sizeof folder, "%s", fixture_path(name));
    mkdir(folder, 0700);
    for (unsigned i = 0; i < FILE_COUNT_OF_SET; i++) {
        snprintf(names[i], sizeof names[i], "%s/model-%05u-of-%05u.safetensors", folder, i + 1,
                 FILE_COUNT_OF_SET);
        paths[i] = names[i];
    }
}

/// The value that all tensors of some models hold, or NOT_WHOLE.
static int value_of(fst_model *const *models, size_t count) {
    int found = NO_MODEL;
    for (size_t m = 0; m < count; m++) {
        fst_loader *loader;
        fst_tensor *tensor;
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        if (fst_loader_open(models[m], NULL, &loader, NULL) != FST_OK) return NOT_WHOLE;
        while (fst_loader_next(loader, -1, &tensor, NULL) == FST_OK) {
            if (fst_tensor_view_get(tensor, &view, NULL) != FST_OK) return NOT_WHOLE;
            int value = ((const unsigned char *)view.data)[0];
            if (found == NO_MODEL) found = value;
            if (found != value) found = NOT_WHOLE;
            fst_tensor_unref(tensor);
        }
        fst_loader_close(loader);
    }
    return found;
}

static fst_model *models[FILE_COUNT_OF_SET];

static void open_one(unsigned index) {
    if (fst_model_open(paths[index], NULL, &models[index], NULL) != FST_OK) models[index] = NULL;
}

static void close_models(void) {
    for (unsigned i = 0; i < FILE_COUNT_OF_SET; i++) {
        fst_model_close(models[i]);
        models[i] = NULL;
    }
}

/// The value of models that were opened one by one, or 0 if the check refuses them.
static int look_at_models(void) {
    for (unsigned i = 0; i < FILE_COUNT_OF_SET; i++)
        if (models[i] == NULL) return 0;
    fst_status status =
        fst_models_check_save((const fst_model *const *)models, FILE_COUNT_OF_SET, NULL);
    return status == FST_OK ? value_of(models, FILE_COUNT_OF_SET) : 0;
}

/// The same of a list that is opened at once.
static int look_at_list(fst_status *status) {
    fst_model *model;
    *status = fst_model_open_files(paths, FILE_COUNT_OF_SET, NULL, &model, NULL);
    if (*status != FST_OK) return 0;
    int value = value_of(&model, 1);
    fst_model_close(model);
    return value;
}

/// What the reader opens at one call of the concurrent save; it opens the rest after the save.
enum { OPEN_LIST, OPEN_FIRST, OPEN_OTHERS, OPEN_ALL };
static int at_call;
static int met;
static fst_status met_status;

static void meet_save(void) {
    switch (at_call) {
    case OPEN_LIST: met = look_at_list(&met_status); break;
    case OPEN_FIRST: open_one(0); break;
    case OPEN_ALL: open_one(0); // falls through
    case OPEN_OTHERS:
        for (unsigned i = 1; i < FILE_COUNT_OF_SET; i++) open_one(i);
        met = look_at_models();
        break;
    }
}

static bool is_one_save(int value) { return value == 0 || value == 'o' || value == 'n'; }

/// Saves over an old set; the reader runs at the n-th call. False if there are fewer calls.
static bool meet_call(const save_case *one, long nth, long *accepted) {
    fst_error error = {0};
    save_model(folder, one->old_files, 'o', FST_SAVE_QUICK, &error);
    if (at_call == OPEN_OTHERS) open_one(0);
    met = 0;
    met_status = FST_OK;
    fault_plan plan = {
        .kind = FAULT_ACTION, .nth = nth, .no_links = one->no_links, .action = meet_save};
    fault_calls_begin(&plan);
    fst_status status = save_model(folder, one->new_files, 'n', FST_SAVE_QUICK, &error);
    fault_report report = fault_calls_end();
    if (at_call == OPEN_FIRST)
        for (unsigned i = 1; i < FILE_COUNT_OF_SET; i++) open_one(i);
    int after = at_call == OPEN_LIST ? 0 : look_at_models();
    close_models();
    bool told = met_status == FST_OK || met_status == FST_E_FILE_CHANGED;
    if (status != FST_OK || !told || !is_one_save(met) || !is_one_save(after))
        check_fail(__FILE__, __LINE__,
                   "%s, reader %d, before call %ld (%s): save %d, list %d, values %d and %d",
                   one->name, (int)at_call, nth, report.failed, (int)status, (int)met_status, met,
                   after);
    *accepted += (met != 0) + (after != 0);
    return report.failed != NULL;
}

TEST(list_opened_during_a_save_is_consistent)
{
    fsti_io_test_disable(FSTI_TEST_NO_LOCK_WAIT);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
        for (int how = OPEN_LIST; how <= OPEN_ALL; how++) {
            long accepted = 0;
            make_folder();
            at_call = how;
            long step = how != OPEN_LIST ? (long)check_share() : CHECK_SANITIZED ? 3 : 1;
            for (long nth = 1; meet_call(&cases[c], nth, &accepted) && !check_failed;) nth += step;
            CHECK(!check_failed);
            CHECK(accepted > 0); // a check that refuses everything would pass as well
        }
    fsti_io_test_disable(0);
}

/// What a save leaves that is killed before its n-th call.
static bool kill_save(const save_case *one, long nth) {
    pid_t child = fork();
    if (child == 0) {
        fault_plan plan = {.kind = FAULT_KILL, .nth = nth, .no_links = one->no_links};
        fault_calls_begin(&plan);
        fst_status status = save_model(folder, one->new_files, 'n', FST_SAVE_QUICK, NULL);
        _exit(status == FST_OK ? 0 : 1);
    }
    int status = 0;
    while (waitpid(child, &status, 0) != child) continue;
    return WIFEXITED(status) && WEXITSTATUS(status) == 9;
}

TEST(list_after_a_killed_save_is_consistent)
{
    fsti_io_test_disable(FSTI_TEST_NO_LOCK_WAIT);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const save_case *one = &cases[c];
        make_folder();
        for (long nth = 1;; nth += check_share()) {
            fst_status status;
            CHECK_INT(save_model(folder, one->old_files, 'o', FST_SAVE_QUICK, NULL), FST_OK);
            CHECK_INT(look_at_list(&status), 'o');
            if (!kill_save(one, nth)) break;
            int value = look_at_list(&status);
            bool told = status == FST_OK || status == FST_E_FILE_CHANGED;
            if (!told || !is_one_save(value))
                check_fail(__FILE__, __LINE__, "%s: killed before call %ld: status %d, value %d",
                           one->name, nth, (int)status, value);
            CHECK(!check_failed);
        }
    }
    fsti_io_test_disable(0);
}

TEST(files_without_an_index_are_opened_as_given)
{
    fst_model *pair[2], *list;
    const char *both[2] = {fixture_tensors("one.safetensors", 1, 64), NULL};
    char other[400], text[] = "{\"weight_map\":{\"x\":\".two.safetensors.0123456789abcdef.tmp\"}}";
    mkdir(fixture_path("elsewhere"), 0700);
    snprintf(other, sizeof other, "%s",
             fixture_model("elsewhere/two.safetensors",
                           "{\"x\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4));
    both[1] = other;
    // An unfinished save of another file does not concern this list, nor does a bad index.
    fixture_file("two.safetensors.index.json", text, sizeof text - 1);
    fixture_file("elsewhere/bad.safetensors.index.json", ".tmp\"", 5);
    CHECK_INT(fst_model_open_files(both, 2, NULL, &list, NULL), FST_OK);
    fst_model_close(list);
    for (int i = 0; i < 2; i++) CHECK_INT(fst_model_open(both[i], NULL, &pair[i], NULL), FST_OK);
    CHECK_INT(fst_models_check_save((const fst_model *const *)pair, 2, NULL), FST_OK);
    // Beside the file it is: the error names the index.
    fst_error error = {0};
    fixture_file("elsewhere/two.safetensors.index.json", text, sizeof text - 1);
    CHECK_INT(fst_models_check_save((const fst_model *const *)pair, 2, &error), FST_E_FILE_CHANGED);
    CHECK_CONTAINS(error.message, "elsewhere/two.safetensors.index.json");
    for (int i = 0; i < 2; i++) fst_model_close(pair[i]);
}

TEST(the_check_refuses_bad_arguments)
{
    const fst_model *none[1] = {NULL};
    CHECK_INT(fst_models_check_save(NULL, 1, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_models_check_save(none, 1, NULL), FST_E_ARGUMENT);
    CHECK_INT(fst_models_check_save(NULL, 0, NULL), FST_OK);
}
