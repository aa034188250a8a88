// SPDX-License-Identifier: Apache-2.0
/// Every system call of a save fails once, fails permanently, or is the last one of the process,
/// with every possible error and in every kind of save. Afterwards, opening the path gives the
/// complete old model, the complete new one, or an error if there was no old one. The status says
/// which. The next save deletes the leftovers.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/primitives.h"
#include "check.h"
#include "fastsafetensors.h"
#include "fault_calls.h"
#include "fixture.h"
#include "io/io.h"
#include "model_saves.h"

static char root[256]; ///< in memory where that can be had: thousands of saves are synced here

static const char *at(const char *name) {
    static char paths[4][512];
    static unsigned turn;
    char *path = paths[turn++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", root, name);
    return path;
}

static void clear_folder(const char *path) {
    DIR *folder = opendir(path);
    const struct dirent *entry;
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        unlinkat(dirfd(folder), entry->d_name, 0);
    }
    if (folder != NULL) closedir(folder);
}

static int entry_count(const char *path) {
    DIR *folder = opendir(path);
    int count = folder == NULL ? 0 : -2;
    while (folder != NULL && readdir(folder) != NULL) count++;
    if (folder != NULL) closedir(folder);
    return count;
}

// ---- kinds of saves ----

/// The old and the new model: file counts as for save_model().
typedef struct save_kind {
    const char *name;
    int old_files; ///< -1: nothing
    uint32_t new_files;
    void (*prepare)(void); ///< changes the existing files
    int entries;           ///< files afterwards
} save_kind;

static void make_source(void) {
    (void)!save_model(at("source"), 0, NEW_MODEL, FST_SAVE_QUICK, NULL);
}

static void drop_index(void) { unlink(at("set/model.safetensors.index.json")); }

static void add_index(void) {
    // A repository of one file, with an index that names it.
    static const char index[] =
        "{\"weight_map\":{\"a\":\"model.safetensors\",\"b\":\"model.safetensors\","
        "\"c\":\"model.safetensors\",\"d\":\"model.safetensors\"}}";
    FILE *file = fopen(at("set/model.safetensors.index.json"), "we");
    if (file == NULL) return;
    fwrite(index, 1, sizeof index - 1, file);
    fclose(file);
}

static void add_another(void) {
    // A model of another name without an index: with it, and without the set, the folder is whole.
    drop_index();
    rename(at("set/model.safetensors"), at("set/other.safetensors"));
}

static void fold_set(void) {
    // As a kill in the middle of a publication leaves it: the index leads to hidden names.
    fault_plan plan = {.kind = FAULT_KILL};
    for (long nth = 1; nth < 1000; nth++) {
        pid_t child = fork();
        if (child == 0) {
            plan.nth = nth;
            fault_calls_begin(&plan);
            (void)!save_model(at("set"), 3, OLD_MODEL, FST_SAVE_QUICK, NULL);
            _exit(0);
        }
        int status;
        waitpid(child, &status, 0);
        int hidden = entry_count(at("set"));
        if (hidden >= 10 || status == 0) break;
    }
}

static void make_links(void) {
    // As a cache of downloads has it: names that lead to a store.
    static const char *const names[] = {
        "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors", "model.safetensors.index.json"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char from[512], to[512];
        snprintf(from, sizeof from, "%s/%s", at("set"), names[i]);
        snprintf(to, sizeof to, "%s/%zu", at("store"), i);
        rename(from, to);
        (void)!symlink(to, from);
    }
}

static const save_kind kinds[] = {
    {"a file over nothing", -1, 0, NULL, 1},
    {"a file over a file", 0, 0, NULL, 1},
    {"a set over nothing", -1, 3, NULL, 4},
    {"a set over a set of the same names", 3, 3, NULL, 4},
    {"a set over more shards", 4, 2, NULL, 3},
    {"a set over fewer shards", 2, 4, NULL, 5},
    {"a set over a single file", 1, 3, NULL, 4},
    {"a single file over a set", 3, 1, NULL, 1},
    {"a single file over a single file", 1, 1, NULL, 1},
    {"a single file over one that an index names", 1, 1, add_index, 1},
    {"a set over a single file that an index names", 1, 3, add_index, 4},
    {"a set over shards without an index", 3, 3, drop_index, 4},
    {"a single file over shards without an index", 3, 1, drop_index, 1},
    {"a set beside a model of another name", 1, 3, add_another, 5},
    {"a set over one that a kill left half published", 3, 3, fold_set, 4},
    {"a set over links to a store", 3, 3, make_links, 4},
    {"an edit", 0, EDIT, NULL, 1},
    {"ranks over nothing", -1, RANKS | 3, NULL, 4},
    {"ranks over a set of the same names", 3, RANKS | 3, NULL, 4},
    {"ranks over more shards", 4, RANKS | 2, NULL, 3},
    {"ranks over a single file", 1, RANKS | 3, NULL, 4},
    {"ranks over links to a store", 3, RANKS | 3, make_links, 4},
    {"a rank alone over a set", 3, RANKS | 1, NULL, 1},
    {"ranks without an index over nothing", -1, RANKS_NO_INDEX | 3, NULL, 3},
    {"ranks without an index over their like", 3, RANKS_NO_INDEX | 3, drop_index, 3},
    {"ranks without an index over a set with one", 3, RANKS_NO_INDEX | 3, NULL, 4},
    {"a compressed file over nothing", -1, PACKED, NULL, 1},
    {"a compressed file over a plain one", 0, PACKED, NULL, 1},
    {"a compressed set over a plain one", 3, PACKED | 2, NULL, 3},
    {"a file compressed over another", 0, COPY, make_source, 1},
    {"parts over nothing", -1, PARTS | 3, NULL, 4},
    {"parts over a set of the same names", 3, PARTS | 3, NULL, 4},
    {"an asynchronous file over a file", 0, ASYNC, NULL, 1},
    {"an asynchronous set over a set of the same names", 3, ASYNC | 3, NULL, 4},
    {"an asynchronous set with a manifest over one of more files", MANIFEST | 3,
     ASYNC | MANIFEST | 2, NULL, 4},
    {"a file with a manifest over nothing", -1, MANIFEST, NULL, 2},
    {"a file with a manifest over one with its own", MANIFEST, MANIFEST, NULL, 2},
    {"a file over one with a manifest", MANIFEST, 0, NULL, 1},
    {"an edit of a file with a manifest", MANIFEST, EDIT, NULL, 1},
    {"an edit of a file with a manifest, with its own", MANIFEST, LISTED_EDIT, NULL, 2},
    {"a file compressed with a manifest over one with its own", MANIFEST, COPY | MANIFEST,
     make_source, 2},
    {"a set with a manifest over nothing", -1, MANIFEST | 3, NULL, 5},
    {"a set with a manifest over one with its own", MANIFEST | 3, MANIFEST | 3, NULL, 5},
    {"a set over one with a manifest", MANIFEST | 3, 3, NULL, 4},
    {"a set with a manifest over one of more files", MANIFEST | 3, MANIFEST | 2, NULL, 4},
};
#define KIND_COUNT (sizeof kinds / sizeof *kinds)

static const char *target_of(const save_kind *kind) {
    return at(is_file(kind->new_files) ? "set/model.safetensors" : "set");
}

/// The old model, made once: files of it get second names where they are wanted, for a save never
/// changes a file that is there.
static bool make_old(const save_kind *kind) {
    clear_folder(at("set"));
    clear_folder(at("store"));
    clear_folder(at("old"));
    if (kind->old_files < 0) return true;
    mkdir(at("set"), 0700);
    const char *path = at(is_file((uint32_t)kind->old_files) ? "set/model.safetensors" : "set");
    if (save_model(path, (uint32_t)kind->old_files, OLD_MODEL, FST_SAVE_QUICK, NULL) != FST_OK)
        return false;
    if (kind->prepare != NULL) kind->prepare();
    if (model_at(target_of(kind)) != OLD_MODEL) return false;
    rmdir(at("old"));
    return rename(at("set"), at("old")) == 0;
}

static void put_old(const save_kind *kind) {
    clear_folder(at("set"));
    rmdir(at("set"));
    if (kind->old_files < 0 && !is_file(kind->new_files)) return; // saving makes the folder
    mkdir(at("set"), 0700);
    DIR *from = opendir(at("old")), *to = opendir(at("set"));
    const struct dirent *entry;
    while (from != NULL && to != NULL && (entry = readdir(from)) != NULL)
        (void)!linkat(dirfd(from), entry->d_name, dirfd(to), entry->d_name, 0);
    if (from != NULL) closedir(from);
    if (to != NULL) closedir(to);
}

/// How file systems differ.
static const struct {
    const char *name;
    unsigned hidden;
    bool no_links, shares_blocks;
} systems[] = {
    {"all that Linux has", 0, false, true},
    {"no O_TMPFILE", FSTI_TEST_NO_TMPFILE, false, false},
    {"no hard links", FSTI_TEST_NO_TMPFILE, true, false},
    {"no /proc", FSTI_TEST_NO_PROC, false, false},
};
#define SYSTEM_COUNT (sizeof systems / sizeof *systems)

// ---- one fault ----

typedef struct fault_case {
    const save_kind *kind;
    size_t system;
    fst_save_promise promise;
    fault_plan plan;
} fault_case;

static long case_count, new_count, old_count, none_count;

#if defined(__SANITIZE_THREAD__)
#define CAN_FORK_AFTER_THREADS false ///< its children may have no threads
#else
#define CAN_FORK_AFTER_THREADS true
#endif

/// Waits until this is the only thread: that of a finished asynchronous save runs on for an
/// instant. The address sanitizer holds locks while a thread ends, which a child of fork() would
/// inherit.
static void await_other_threads(void) {
    for (int i = 0; i < 5000 && entry_count("/proc/self/task") > 1; i++) usleep(1000);
}

/// Saves under the fault; the status, or -1 of a killed process.
static int save_under_fault(const fault_case *fault, fault_report *report, fst_error *error) {
    const char *path = target_of(fault->kind);
    uint32_t files = fault->kind->new_files;
    pid_t child = -1;
    if (fault->plan.kind == FAULT_KILL) {
        if (CAN_FORK_AFTER_THREADS) await_other_threads();
        child = fork();
    }
    if (child > 0) {
        int status;
        waitpid(child, &status, 0);
        *report = (fault_report){.failed = WEXITSTATUS(status) == 9 ? "kill" : NULL};
        return WEXITSTATUS(status) == 9 ? -1 : FST_OK;
    }
    fsti_io_test_disable(systems[fault->system].hidden);
    fault_calls_begin(&fault->plan);
    fst_status status = save_model(path, files, NEW_MODEL, fault->promise, error);
    *report = fault_calls_end();
    fsti_io_test_disable(0);
    if (child == 0) _exit(status == FST_OK ? 0 : 1);
    return (int)status;
}

/// A manifest never belongs to another model, and matches the outcome: it is that of the new model
/// unless a cleanup step failed, or the old one.
static const char *judge_manifest(const fault_case *fault, int status, int found) {
    const save_kind *kind = fault->kind;
    bool had = kind->old_files > 0 && ((uint32_t)kind->old_files & MANIFEST) != 0;
    bool has = kind->new_files != EDIT && (kind->new_files & MANIFEST) != 0;
    int manifest = manifest_at(target_of(kind));
    if (manifest < 0 && found != NO_MODEL) return "a manifest of another model";
    if (status < 0) return NULL;
    if (status == FST_OK && manifest > 0 && !has) return "the old manifest is there";
    if (status == FST_OK && manifest == 0 && has && is_file(kind->new_files))
        return "saved without its manifest";
    if (status > FST_OK && found == OLD_MODEL && manifest == 0 && had &&
        fault->plan.kind == FAULT_ONCE)
        return "the old model is there without its manifest";
    return NULL;
}

/// Whether the files match the outcome. Returns a description of the fault, or NULL.
static const char *judge(const fault_case *fault, int status, const fst_error *error) {
    bool had_old = fault->kind->old_files >= 0;
    int found = model_at(target_of(fault->kind));
    new_count += found == NEW_MODEL;
    old_count += found == OLD_MODEL;
    none_count += found == NO_MODEL;
    if (found == NOT_WHOLE) return "a model that is not whole opens";
    if (found == NO_MODEL && had_old) return "neither the old model nor the new one";
    if (status == FST_OK && found != NEW_MODEL) return "saved, but the new model is not there";
    if (status > FST_OK && (error->message[0] == '\0' || error->file[0] == '\0'))
        return "an error without words or file";
    // Two failures, the second while undoing: the message says so, and the new model is complete.
    bool could_not_undo = status > FST_OK && strstr(error->message, "undoing the save") != NULL;
    if (status > FST_OK && found == NEW_MODEL && !could_not_undo)
        return "an error, but the old model is gone";
    if (could_not_undo && fault->plan.kind == FAULT_ONCE && !systems[fault->system].no_links)
        return "one failure, and it could not be undone";
    if (fault->plan.kind == FAULT_ONCE && status > FST_OK && !had_old && !could_not_undo &&
        entry_count(at("set")) > 0)
        return "a save over nothing failed and left something";
    return judge_manifest(fault, status, found);
}

/// Whether only the files of the save exist. An index that could not be deleted belongs to the
/// model from then on.
static bool is_tidy(const save_kind *kind) {
    int entries = kind->entries;
    if ((kind->new_files & RANKS_NO_INDEX) != 0 && kind->new_files != EDIT &&
        access(at("set/model.safetensors.index.json"), F_OK) == 0)
        entries = (int)FILE_COUNT(kind->new_files) + 1;
    return entry_count(at("set")) == entries;
}

/// Whether a disk with enough space for the compressed file was refused.
static bool is_needless_refusal(int status, const fst_error *error, const char *failed) {
    static const char refusal[] = "not enough space for ";
    return status == FST_E_NO_SPACE && failed != NULL && strncmp(failed, "fallocate", 9) == 0 &&
           strncmp(error->message, refusal, sizeof refusal - 1) == 0 &&
           strtoull(error->message + sizeof refusal - 1, NULL, 10) > 8192;
}

/// True while the n-th call exists.
static bool try_fault(const fault_case *fault, fault_report *report) {
    static unsigned tries;
    fst_error error = {0};
    put_old(fault->kind);
    int status = save_under_fault(fault, report, &error);
    const char *wrong = judge(fault, status, &error);
    if (fault->kind->new_files == COPY && fault->plan.kind == FAULT_ONCE &&
        is_needless_refusal(status, &error, report->failed))
        wrong = "a disk without room for the plain file is refused";
    if (wrong == NULL && tries++ % 3 == 0) {
        const save_kind *kind = fault->kind;
        fst_status next =
            save_model(target_of(kind), kind->new_files, NEW_MODEL, FST_SAVE_QUICK, &error);
        if (next != FST_OK || model_at(target_of(kind)) != NEW_MODEL)
            wrong = "the next save fails";
        else if (!is_tidy(kind))
            wrong = "the next save does not tidy up";
    }
    case_count++;
    if (wrong != NULL)
        check_fail(__FILE__, __LINE__, "%s, %s, %s, fault %d at call %ld (%s, error %u): %s; %s",
                   fault->kind->name, systems[fault->system].name,
                   fault->promise == FST_SAVE_DURABLE ? "durable" : "quick", (int)fault->plan.kind,
                   fault->plan.nth, report->failed == NULL ? "none" : report->failed,
                   fault->plan.errno_index, wrong, error.message);
    return wrong == NULL && report->failed != NULL;
}

static void try_kind(fault_kind how, const save_kind *kind, size_t system,
                     fst_save_promise promise) {
    fault_case fault = {kind,
                        system,
                        promise,
                        {.kind = how,
                         .nth = 1,
                         .no_links = systems[system].no_links,
                         .shares_blocks = systems[system].shares_blocks}};
    fault_report report = {0};
    // A share of the calls, different ones for each kind and file system, unless all are tested.
    // A sanitizer sees nothing of a killed process.
    long stride = CHECK_SANITIZED ? (how == FAULT_KILL ? 300 : 160) : check_share() > 1 ? 16 : 1;
    long first = kind - kinds + (long)system + (long)promise;
    for (fault.plan.nth = 1 + first % stride;; fault.plan.nth += stride) {
        fault.plan.errno_index = 0;
        do {
            if (!try_fault(&fault, &report)) {
                if (report.failed == NULL && fault.plan.nth < 10)
                    check_fail(__FILE__, __LINE__, "%s: hardly any calls", kind->name);
                return;
            }
        } while (how == FAULT_ONCE && ++fault.plan.errno_index < report.errno_count);
    }
}

static void make_root(void) {
    snprintf(root, sizeof root, "/dev/shm/fst-publish-%d", (int)getpid());
    if (mkdir(root, 0700) != 0) {
        snprintf(root, sizeof root, "%s", fixture_path("publish"));
        mkdir(root, 0700);
    }
    mkdir(at("store"), 0700);
    mkdir(at("old"), 0700);
}

static void drop_root(void) {
    clear_folder(at("set"));
    clear_folder(at("store"));
    clear_folder(at("old"));
    unlink(at("source"));
    rmdir(at("set"));
    rmdir(at("store"));
    rmdir(at("old"));
    rmdir(root);
}

static bool starts_threads(const save_kind *kind) {
    return kind->new_files != EDIT && (kind->new_files & ASYNC) != 0;
}

static void try_all(fault_kind how) {
    make_root();
    case_count = new_count = old_count = none_count = 0;
    for (size_t k = 0; k < KIND_COUNT && !check_failed; k++) {
        if (!can_save(kinds[k].new_files)) continue;
        if (how == FAULT_KILL && starts_threads(&kinds[k]) && !CAN_FORK_AFTER_THREADS) continue;
        if (!make_old(&kinds[k])) check_fail(__FILE__, __LINE__, "%s: no old model", kinds[k].name);
        for (size_t s = 0; s < SYSTEM_COUNT && !check_failed; s++)
            for (int promise = 0; promise < FST_SAVE_PROMISE_COUNT && !check_failed; promise++)
                try_kind(how, &kinds[k], s, (fst_save_promise)promise);
    }
    printf("# %ld cases: the new model %ld times, the old one %ld, none where none was %ld\n",
           case_count, new_count, old_count, none_count);
    drop_root();
}

TEST(every_call_fails_once)
{
    try_all(FAULT_ONCE);
}
TEST(every_call_and_all_later_ones_fail)
{
    try_all(FAULT_FOREVER);
}
TEST(a_kill_before_every_call)
{
    try_all(FAULT_KILL);
}

// ---- readers and other writers meanwhile ----

static const save_kind *acting_kind;

static void save_another(void) {
    fsti_io_test_disable(FSTI_TEST_NO_LOCK_WAIT);
    // On this thread, because an asynchronous save would wait for the running one.
    uint32_t files = acting_kind->new_files;
    if (files != EDIT) files &= ~ASYNC;
    (void)!save_model(target_of(acting_kind), files, NEW_MODEL, FST_SAVE_QUICK, NULL);
    fsti_io_test_disable(0);
}

/// Opens while a whole save happens before the n-th call of opening.
TEST(model_replaced_during_open)
{
    make_root();
    for (size_t k = 0; k < KIND_COUNT && !check_failed; k++) {
        const save_kind *kind = acting_kind = &kinds[k];
        if (kind->old_files < 0 || !can_save(kind->new_files) || !make_old(kind)) continue;
        fault_report report = {.failed = "none yet"};
        for (long nth = 1; report.failed != NULL && !check_failed; nth++) {
            put_old(kind);
            fault_plan plan = {
                .kind = FAULT_ACTION, .nth = nth, .shares_blocks = true, .action = save_another};
            fault_calls_begin(&plan);
            int found = model_at(target_of(kind));
            report = fault_calls_end();
            if (found != OLD_MODEL && found != NEW_MODEL)
                check_fail(__FILE__, __LINE__, "%s: found %d, replaced before call %ld (%s)",
                           kind->name, found, nth, report.failed);
        }
    }
    drop_root();
}

/// Saves while a whole save of others happens before the n-th call of the first.
TEST(concurrent_save_of_the_same_target)
{
    make_root();
    for (size_t k = 0; k < KIND_COUNT && !check_failed; k++) {
        const save_kind *kind = acting_kind = &kinds[k];
        if (!can_save(kind->new_files) || !make_old(kind)) continue;
        fault_report report = {.failed = "none yet"};
        for (long nth = 1; report.failed != NULL && !check_failed; nth++) {
            put_old(kind);
            fault_plan plan = {
                .kind = FAULT_ACTION, .nth = nth, .shares_blocks = true, .action = save_another};
            fault_calls_begin(&plan);
            fst_error error = {0};
            fst_status status =
                save_model(target_of(kind), kind->new_files, 'x', FST_SAVE_DURABLE, &error);
            report = fault_calls_end();
            int found = model_at(target_of(kind));
            bool right = status == FST_OK ? found == 'x' || found == NEW_MODEL
                                          : found == NEW_MODEL || found == OLD_MODEL;
            if (!right)
                check_fail(__FILE__, __LINE__,
                           "%s: found %d, status %d, another before call %ld (%s): %s", kind->name,
                           found, (int)status, nth, report.failed, error.message);
        }
    }
    drop_root();
}
