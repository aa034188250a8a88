// SPDX-License-Identifier: Apache-2.0
/// No list of digests and no signature is made of a folder whose files are replaced meanwhile.
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "fastsafetensors.h"
#include "fixture.h"

static char folder[512], second[600], spare[600], key[600], target[600];
static atomic_int is_replaced;

static bool run(const char *format, const char *a, const char *b) {
    char command[1600];
    snprintf(command, sizeof command, format, a, b);
    return system(command) == 0;
}

/// A folder of two files, another file for the second one's place, and a key.
static bool make_folder(void) {
    const char *first = fixture_tensors("replaced", 3, 50000);
    snprintf(folder, sizeof folder, "%s.folder", first);
    snprintf(spare, sizeof spare, "%s.spare", first);
    snprintf(key, sizeof key, "%s.key", first);
    snprintf(target, sizeof target, "%s.made", first);
    snprintf(second, sizeof second, "%s/model-00002-of-00002.safetensors", folder);
    atomic_store(&is_replaced, 0);
    return run("rm -rf '%s' && mkdir -p '%s'", folder, folder) &&
           run("cp '%s' '%s/model-00001-of-00002.safetensors'", first, folder) &&
           run("cp '%s' '%s'", first, second) && run("cp '%s' '%s'", first, spare) &&
           run("rm -f '%s' '%s'", target, key) &&
           run("openssl ecparam -name prime256v1 -genkey -noout -out '%s' 2>/dev/null%s", key, "");
}

/// A save of the same model replaces a file.
static void replace_file(void) { (void)rename(spare, second); }

/// A save with another number of files adds one.
static void add_file(void) {
    char added[700];
    snprintf(added, sizeof added, "%s/model.safetensors", folder);
    (void)rename(spare, added);
}

/// A backup makes a hard link, which changes no file.
static void link_file(void) {
    char added[700];
    snprintf(added, sizeof added, "%s.link", spare);
    (void)!link(second, added);
}

static void (*change)(void); ///< what happens while the files are read; NULL: nothing

static int change_once(void *context, uint64_t done, uint64_t total, size_t tensors_done,
                       size_t tensors_total) {
    (void)context, (void)done, (void)total, (void)tensors_done, (void)tensors_total;
    if (change != NULL && atomic_exchange(&is_replaced, 1) == 0) change();
    return 0;
}

static fst_status make_list(uint32_t flags, fst_error *error) {
    fst_manifest_options options = FST_STRUCT_INIT(fst_manifest_options);
    options.flags = flags;
    options.digest = FST_DIGEST_SHA256;
    options.progress = change_once;
    return fst_manifest_write(folder, target, &options, NULL, error);
}

static fst_status sign(fst_error *error) {
    fst_bundle_files files = FST_STRUCT_INIT(fst_bundle_files);
    files.folder = folder;
    files.signature = target;
    files.key = key;
    files.progress = change_once;
    return fst_bundle_sign(&files, NULL, error);
}

/// Makes a manifest, a list like sha256sum's or a signature while `meanwhile` happens.
static fst_status make(unsigned kind, void (*meanwhile)(void), fst_error *error) {
    change = meanwhile;
    return kind == 2 ? sign(error) : make_list(kind == 1 ? FST_MANIFEST_SUMS : 0, error);
}

TEST(file_replaced_while_digests_are_made)
{
    for (unsigned kind = 0; kind < 3; kind++) {
        fst_error error = {0};
        CHECK(make_folder());
        CHECK_INT(make(kind, replace_file, &error), FST_E_FILE_CHANGED);
        CHECK(atomic_load(&is_replaced) == 1);
        CHECK_CONTAINS(error.message, "Try again");
        CHECK(access(target, F_OK) != 0);
        CHECK_INT(make(kind, NULL, &error), FST_OK);
        CHECK(access(target, F_OK) == 0);
    }
}

TEST(file_added_while_digests_are_made)
{
    for (unsigned kind = 0; kind < 2; kind++) {
        fst_error error = {0};
        CHECK(make_folder());
        CHECK_INT(make(kind, add_file, &error), FST_E_FILE_CHANGED);
        CHECK_CONTAINS(error.message, "added or removed");
        CHECK(access(target, F_OK) != 0);
    }
}

TEST(file_that_gets_a_link_is_unchanged)
{
    for (unsigned kind = 0; kind < 3; kind++) {
        fst_error error = {0};
        char added[700];
        CHECK(make_folder());
        snprintf(added, sizeof added, "%s.link", spare);
        (void)unlink(added);
        CHECK_INT(make(kind, link_file, &error), FST_OK);
        CHECK(access(added, F_OK) == 0);
    }
}

TEST(folder_with_a_file_of_a_running_save_is_not_signed)
{
    fst_error error = {0};
    char hidden[700];
    CHECK(make_folder());
    snprintf(hidden, sizeof hidden, "%s/.model-00002-of-00002.safetensors.0123456789abcdef.tmp",
             folder);
    CHECK_INT(rename(spare, hidden), 0);
    CHECK_INT(make(2, NULL, &error), FST_E_FILE_CHANGED);
    CHECK(access(target, F_OK) != 0);
    CHECK_INT(unlink(hidden), 0);
    CHECK_INT(make(2, NULL, &error), FST_OK);
}
