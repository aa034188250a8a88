// SPDX-License-Identifier: Apache-2.0
/// Every system call and every allocation of what makes and checks manifests, lists and signatures
/// fails, once or for good. What is made is the old text, whole, or a new one that holds, and
/// nothing lies beside it; a folder with a flipped bit is never found good.
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/base.h"
#include "check.h"
#include "fastsafetensors.h"
#include "fault_calls.h"
#include "fixture.h"

#define NTH_MAX 100000

static char folder[512], model[600], secret[600], public_key[600], target[600], list[600];
static char bundle[600];

typedef fst_status (*verify_call)(fst_error *error);

static fst_status write_with(fst_digest digest, uint32_t flags, const char *keep,
                             fst_error *error) {
    fst_manifest_options options = FST_STRUCT_INIT(fst_manifest_options);
    options.digest = digest;
    options.flags = flags;
    options.keep = keep;
    return fst_manifest_write(folder, target, &options, NULL, error);
}

static fst_status make_manifest(fst_error *error) {
    return write_with(FST_DIGEST_BLAKE3, FST_MANIFEST_TENSORS, NULL, error);
}

static fst_status keep_manifest(fst_error *error) {
    return write_with(FST_DIGEST_BLAKE3, 0, list, error);
}

static fst_status make_sums(fst_error *error) {
    return write_with(FST_DIGEST_SHA256, FST_MANIFEST_SUMS, NULL, error);
}

static fst_status sign_with(const char *keep, fst_error *error) {
    fst_bundle_files files = FST_STRUCT_INIT(fst_bundle_files);
    files.folder = folder;
    files.bundle = target;
    files.key = secret;
    files.keep = keep;
    return fst_bundle_sign(&files, NULL, error);
}

static fst_status sign_folder(fst_error *error) { return sign_with(NULL, error); }
static fst_status keep_signed(fst_error *error) { return sign_with(bundle, error); }

static fst_status check_list(fst_error *error) {
    return fst_manifest_check(folder, target, NULL, NULL, NULL, error);
}

static fst_status check_bundle(fst_error *error) {
    fst_bundle_files files = FST_STRUCT_INIT(fst_bundle_files);
    files.folder = folder;
    files.bundle = target;
    files.key = public_key;
    return fst_bundle_check(&files, NULL, NULL, NULL, error);
}

typedef struct verify_kind {
    verify_call make, check;
} verify_kind;

static const verify_kind kinds[] = {{make_manifest, check_list},
                                    {keep_manifest, check_list},
                                    {make_sums, check_list},
                                    {sign_folder, check_bundle},
                                    {keep_signed, check_bundle}};
#define KIND_COUNT (sizeof kinds / sizeof *kinds)

/// A folder of a model and what was made of it before; what is made lies outside of it.
static bool make_folder(void) {
    char command[4096];
    const char *source = fixture_tensors("faults", 3, 50000);
    snprintf(folder, sizeof folder, "%s.folder", source);
    snprintf(model, sizeof model, "%s/model.safetensors", folder);
    snprintf(secret, sizeof secret, "%s.key", source);
    snprintf(public_key, sizeof public_key, "%s.pub", source);
    snprintf(list, sizeof list, "%s.old", source);
    snprintf(bundle, sizeof bundle, "%s.oldsig", source);
    snprintf(command, sizeof command,
             "mkdir -p '%s/below' '%s.made' && mv '%s' '%s' && echo text > '%s/below/text' && "
             "openssl ecparam -name prime256v1 -genkey -noout -out '%s' 2>/dev/null && "
             "openssl ec -in '%s' -pubout -out '%s' 2>/dev/null",
             folder, source, source, model, folder, secret, secret, public_key);
    if (system(command) != 0) return false;
    snprintf(target, sizeof target, "%s", list);
    bool good = write_with(FST_DIGEST_BLAKE3, 0, NULL, NULL) == FST_OK;
    snprintf(target, sizeof target, "%s", bundle);
    good = good && sign_folder(NULL) == FST_OK;
    snprintf(target, sizeof target, "%s.made/made", source);
    return good;
}

/// Files beside what is made, which are removed.
static unsigned count_leftovers(void) {
    char path[600];
    unsigned count = 0;
    snprintf(path, sizeof path, "%.*s", (int)(strrchr(target, '/') - target), target);
    DIR *made = opendir(path);
    const struct dirent *entry;
    while (made != NULL && (entry = readdir(made)) != NULL)
        if (entry->d_name[0] != '.' && strcmp(entry->d_name, "made") != 0) {
            unlinkat(dirfd(made), entry->d_name, 0);
            count++;
        }
    if (made != NULL) closedir(made);
    return count;
}

static bool has_old_text(void) {
    char text[8] = "";
    int fd = open(target, O_RDONLY | O_CLOEXEC);
    ssize_t got = read(fd, text, sizeof text);
    close(fd);
    return got == 3 && memcmp(text, "old", 3) == 0;
}

static void put_old_text(void) {
    int fd = open(target, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, "old", 3) != 3) abort();
    close(fd);
}

/// What is there after a call that something failed in. Words of what is wrong, or NULL.
static const char *judge(const verify_kind *kind, fst_status status, const fst_error *error) {
    if (status == FST_OK)
        return kind->check(NULL) == FST_OK ? NULL : "made, and what it says does not hold";
    if (!has_old_text()) return "an error, and the old text is gone";
    return error->message[0] == '\0' ? "an error without words" : NULL;
}

static void flip_bit(void) {
    unsigned char byte;
    int fd = open(model, O_RDWR | O_CLOEXEC);
    if (fd < 0 || pread(fd, &byte, 1, 100000) != 1) abort();
    byte ^= 16;
    if (pwrite(fd, &byte, 1, 100000) != 1) abort();
    close(fd);
}

TEST(a_system_call_fails_while_it_is_made)
{
    if (!make_folder()) SKIP("no openssl command that makes keys");
    for (size_t k = 0; k < KIND_COUNT; k++)
        for (int kind = FAULT_ONCE; kind <= FAULT_FOREVER; kind++) {
            fault_report report = {.failed = ""};
            for (long nth = 1; report.failed != NULL && !check_failed; nth++) {
                fault_plan plan = {.kind = (fault_kind)kind, .nth = nth};
                fst_error error = {0};
                long live = fsti_alloc_live();
                put_old_text();
                fault_calls_begin(&plan);
                fst_status status = kinds[k].make(&error);
                report = fault_calls_end();
                const char *wrong = judge(&kinds[k], status, &error);
                // Who can't remove anything any more leaves what it has begun.
                if (count_leftovers() > 0 && kind == FAULT_ONCE) wrong = "something is left";
                if (wrong != NULL)
                    fprintf(stderr, "kind %zu, call %ld (%s): %s; %s\n", k, nth, report.failed,
                            wrong, error.message);
                CHECK(wrong == NULL);
                CHECK_INT(fsti_alloc_live(), live);
                CHECK(nth < NTH_MAX);
            }
        }
}

TEST(an_allocation_fails_while_it_is_made)
{
    if (!make_folder()) SKIP("no openssl command that makes keys");
    for (size_t k = 0; k < KIND_COUNT; k++) {
        fst_status status = FST_E_NO_MEMORY;
        for (long nth = 0; status != FST_OK && !check_failed; nth++) {
            fst_error error = {0};
            long live = fsti_alloc_live();
            put_old_text();
            fsti_alloc_fail_after(nth);
            status = kinds[k].make(&error);
            fsti_alloc_fail_after(-1);
            const char *wrong = judge(&kinds[k], status, &error);
            if (count_leftovers() > 0) wrong = "something is left";
            if (wrong != NULL) fprintf(stderr, "kind %zu, allocation %ld: %s\n", k, nth, wrong);
            CHECK(wrong == NULL);
            CHECK(status == FST_OK || status == FST_E_NO_MEMORY);
            CHECK_INT(fsti_alloc_live(), live);
            CHECK(nth < NTH_MAX);
        }
    }
}

TEST(a_flipped_bit_is_never_good_whatever_fails)
{
    if (!make_folder()) SKIP("no openssl command that makes keys");
    for (size_t k = 0; k < KIND_COUNT; k++) {
        fault_report report = {.failed = ""};
        CHECK_INT(kinds[k].make(NULL), FST_OK);
        flip_bit();
        for (long nth = 1; report.failed != NULL && !check_failed; nth++) {
            fault_plan plan = {.kind = FAULT_ONCE, .nth = nth};
            fst_error error = {0};
            fault_calls_begin(&plan);
            fst_status status = kinds[k].check(&error);
            report = fault_calls_end();
            CHECK(status != FST_OK && error.message[0] != '\0');
        }
        fst_status status = FST_E_NO_MEMORY;
        for (long nth = 0; status == FST_E_NO_MEMORY && !check_failed; nth++) {
            fst_error error = {0};
            long live = fsti_alloc_live();
            fsti_alloc_fail_after(nth);
            status = kinds[k].check(&error);
            fsti_alloc_fail_after(-1);
            CHECK(status == FST_E_NO_MEMORY || status == FST_E_DIGEST);
            CHECK_INT(fsti_alloc_live(), live);
        }
        flip_bit();
    }
}

TEST(a_good_folder_is_not_called_bad_for_want_of_memory)
{
    if (!make_folder()) SKIP("no openssl command that makes keys");
    for (size_t k = 0; k < KIND_COUNT; k++) {
        fst_status status = FST_E_NO_MEMORY;
        CHECK_INT(kinds[k].make(NULL), FST_OK);
        for (long nth = 0; status == FST_E_NO_MEMORY && !check_failed; nth++) {
            fst_error error = {0};
            fsti_alloc_fail_after(nth);
            status = kinds[k].check(&error);
            fsti_alloc_fail_after(-1);
            if (status != FST_OK && status != FST_E_NO_MEMORY)
                fprintf(stderr, "kind %zu, allocation %ld: %s\n", k, nth, error.message);
            CHECK(status == FST_OK || status == FST_E_NO_MEMORY);
        }
        CHECK_INT(status, FST_OK);
    }
}
