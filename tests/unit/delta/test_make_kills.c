// SPDX-License-Identifier: Apache-2.0
/// Makers of deltas that are killed before each system call: the next call removes what they left,
/// and nothing else.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "delta_fixture.h"
#include "fault_calls.h"
#include "fixture.h"

#define MINE "model-00007-of-00008.safetensors"

static char old[600], made[600], folder[600], mine[700];

static fst_status make(fst_error *error) {
    fst_delta_make_options options = FST_STRUCT_INIT(fst_delta_make_options);
    options.checkpoint = made;
    options.base_version = "0";
    options.version = "1";
    options.thread_count = 1; // one shard, whichever thread takes which tensor
    return fst_delta_make(old, folder, &options, NULL, error);
}

/// A maker that is killed before its n-th call. False if there are fewer calls.
static bool kill_maker(long nth) {
    pid_t child = fork();
    if (child == 0) {
        fault_plan plan = {.kind = FAULT_KILL, .nth = nth};
        fault_calls_begin(&plan);
        _exit(make(NULL) == FST_OK ? 0 : 1);
    }
    int status = 0;
    while (waitpid(child, &status, 0) != child) continue;
    return WIFEXITED(status) && WEXITSTATUS(status) == 9;
}

/// Counts the files of the folder; *has_index: the version is complete.
static int count_files(bool *has_index) {
    int count = 0;
    DIR *list = opendir(folder);
    *has_index = false;
    for (struct dirent *entry; list != NULL && (entry = readdir(list)) != NULL;) {
        count += entry->d_name[0] != '.';
        if (strcmp(entry->d_name, "model.safetensors.index.json") == 0) *has_index = true;
    }
    if (list != NULL) closedir(list);
    return count;
}

TEST(remains_of_a_killed_maker_are_removed_and_nothing_else)
{
    fst_error error = {0};
    bool has_index;
    snprintf(old, sizeof old, "%s", fixture_path("kills-old"));
    snprintf(made, sizeof made, "%s", fixture_path("kills-new"));
    snprintf(folder, sizeof folder, "%s", fixture_path("kills-delta"));
    snprintf(mine, sizeof mine, "%s/" MINE, folder);
    delta_write_checkpoint(old, 0);
    delta_write_checkpoint(made, 1);
    CHECK_INT(make(&error), FST_OK);
    int complete = count_files(&has_index);
    int with_remains = 0;
    delta_remove(folder);
    for (long nth = 1; !check_failed && kill_maker(nth); nth++) {
        int count = count_files(&has_index);
        if (!has_index) {
            with_remains += count > 1;
            mkdir(folder, 0777);
            CHECK(link(fixture_tensors("mine", 1, 10), mine) == 0);
            CHECK_INT(make(&error), FST_E_ARGUMENT);
            CHECK(access(mine, F_OK) == 0);
            unlink(mine);
            CHECK_INT(make(&error), FST_OK);
            CHECK_INT(count_files(&has_index), complete);
        }
        delta_remove(folder);
    }
    CHECK(with_remains > 2);
}
