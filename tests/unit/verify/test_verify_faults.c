// SPDX-License-Identifier: Apache-2.0
/// Every system call and allocation of manifests, lists and signatures fails once or permanently.
/// The result is the complete old text or a valid new one. A flipped bit never passes a check.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/primitives.h"
#include "check.h"
#include "fastsafetensors.h"
#include "fault_calls.h"
#include "fixture.h"
#include "io/io.h"

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
    files.signature = target;
    files.key = secret;
    files.keep = keep;
    return fst_bundle_sign(&files, NULL, error);
}

static fst_status sign_folder(fst_error *error) { return sign_with(NULL, error); }
static fst_status keep_signed(fst_error *error) { return sign_with(bundle, error); }

static fst_status check_list(fst_error *error) {
    return fst_manifest_check(
        folder, &(fst_check_options){.struct_size = sizeof(fst_check_options), .manifest = target},
        NULL, error);
}

static fst_status check_bundle(fst_error *error) {
    fst_bundle_files files = FST_STRUCT_INIT(fst_bundle_files);
    files.folder = folder;
    files.signature = target;
    files.key = public_key;
    return fst_bundle_check(&files, NULL, error);
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

/// A folder with a model and its old results; new results are outside it.
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

/// Leftover files next to the result, which are deleted.
static unsigned count_leftovers(void) {
    char path[600];
    unsigned count = 0;
    snprintf(path, sizeof path, "%.*s", (int)(strrchr(target, '/') - target), target);
    DIR *made = opendir(path);
    const struct dirent *entry;
    while (made != NULL && (entry = readdir(made)) != NULL)
        if (strcmp(entry->d_name, "made") != 0 && unlinkat(dirfd(made), entry->d_name, 0) == 0)
            count++; // not the folder itself and its parent
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

/// Whether an error says where: all of these files lie in the same folder. Memory lies nowhere.
static bool names_file(fst_status status, const fst_error *error) {
    char place[600];
    snprintf(place, sizeof place, "%.*s", (int)(strrchr(folder, '/') - folder), folder);
    return status == FST_E_NO_MEMORY || strstr(error->message, place) != NULL ||
           strstr(error->message, "model.safetensors") != NULL ||
           strstr(error->message, "text") != NULL;
}

/// Checks the state after a call in which something failed. Returns what is wrong, or NULL.
static const char *judge(const verify_kind *kind, fst_status status, const fst_error *error) {
    if (status == FST_OK)
        return kind->check(NULL) == FST_OK ? NULL : "made, and what it says does not hold";
    // A new text is deleted if the model seems to have changed meanwhile.
    bool seems_changed =
        status == FST_E_FILE_CHANGED && (access(target, F_OK) != 0 || kind->check(NULL) == FST_OK);
    if (!seems_changed && !has_old_text()) return "an error, and the old text is gone";
    return names_file(status, error) ? NULL : "an error that names no file";
}

static void flip_bit(void) {
    unsigned char byte;
    int fd = open(model, O_RDWR | O_CLOEXEC);
    if (fd < 0 || pread(fd, &byte, 1, 100000) != 1) abort();
    byte ^= 16;
    if (pwrite(fd, &byte, 1, 100000) != 1) abort();
    close(fd);
}

/// Runs through the n-th calls and the errors that each can have; false behind the last one.
static bool next_plan(fault_plan *plan, const fault_report *report) {
    if (plan->nth > 0 && report->failed == NULL) return false;
    bool has_more = plan->kind == FAULT_ONCE && plan->errno_index + 1 < report->errno_count;
    plan->errno_index = has_more ? plan->errno_index + 1 : 0;
    if (!has_more) plan->nth = check_next(plan->nth);
    return !check_failed && plan->nth < NTH_MAX;
}

/// One making, in which something fails.
static void make_failing(size_t k, const fault_plan *plan, fault_report *out) {
    fst_error error = {0};
    long live = fsti_alloc_live();
    put_old_text();
    fault_calls_begin(plan);
    fst_status status = kinds[k].make(&error);
    fault_report report = *out = fault_calls_end();
    const char *wrong = judge(&kinds[k], status, &error);
    // If deletions fail, the temporary file stays.
    if (count_leftovers() > 0 && plan->kind == FAULT_ONCE) wrong = "something is left";
    if (wrong != NULL)
        fprintf(stderr, "kind %zu, call %ld (%s, error %u): %s; %s\n", k, plan->nth, report.failed,
                plan->errno_index, wrong, error.message);
    CHECK(wrong == NULL);
    CHECK_INT(fsti_alloc_live(), live);
}

TEST(every_system_call_of_making_digests_may_fail)
{
    if (!make_folder()) SKIP("no openssl command that makes keys");
    for (size_t k = 0; k < KIND_COUNT; k++)
        for (int kind = FAULT_ONCE; kind <= FAULT_FOREVER; kind++) {
            fault_report report = {0};
            fault_plan plan = {.kind = (fault_kind)kind, .with_reads = true};
            while (next_plan(&plan, &report)) make_failing(k, &plan, &report);
        }
}

TEST(every_allocation_of_making_digests_may_fail)
{
    if (!make_folder()) SKIP("no openssl command that makes keys");
    for (size_t k = 0; k < KIND_COUNT; k++) {
        fst_status status = FST_E_NO_MEMORY;
        for (long nth = 0; status != FST_OK && !check_failed; nth = check_next(nth)) {
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

TEST(flipped_bit_is_never_accepted_after_any_failure)
{
    if (!make_folder()) SKIP("no openssl command that makes keys");
    for (size_t k = 0; k < KIND_COUNT; k++) {
        fault_report report = {0};
        fault_plan plan = {.kind = FAULT_ONCE, .with_reads = true};
        CHECK_INT(kinds[k].make(NULL), FST_OK);
        flip_bit();
        while (next_plan(&plan, &report)) {
            fst_error error = {0};
            fault_calls_begin(&plan);
            fst_status status = kinds[k].check(&error);
            report = fault_calls_end();
            CHECK(status != FST_OK && error.message[0] != '\0');
        }
        fst_status status = FST_E_NO_MEMORY;
        for (long nth = 0; status == FST_E_NO_MEMORY && !check_failed; nth = check_next(nth)) {
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

TEST(failed_allocation_never_reports_damage)
{
    if (!make_folder()) SKIP("no openssl command that makes keys");
    for (size_t k = 0; k < KIND_COUNT; k++) {
        fst_status status = FST_E_NO_MEMORY;
        CHECK_INT(kinds[k].make(NULL), FST_OK);
        for (long nth = 0; status == FST_E_NO_MEMORY && !check_failed; nth = check_next(nth)) {
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

/// A check of a valid model with a fault.
static void check_failing(size_t k, const fault_plan *plan, fault_report *out) {
    fst_error error = {0};
    long live = fsti_alloc_live();
    fault_calls_begin(plan);
    fst_status status = kinds[k].check(&error);
    fault_report report = *out = fault_calls_end();
    bool is_shortage = error.os_errno == EMFILE || error.os_errno == ENOMEM;
    bool good = status == FST_OK || names_file(status, &error);
    if (status == FST_E_DIGEST && is_shortage) good = false; // of the process, not of the file
    if (!good)
        fprintf(stderr, "kind %zu, call %ld (%s, error %u): %s\n", k, plan->nth, report.failed,
                plan->errno_index, error.message);
    CHECK(good);
    CHECK_INT(fsti_alloc_live(), live);
}

TEST(intact_folder_passes_or_error_names_a_file)
{
    if (!make_folder()) SKIP("no openssl command that makes keys");
    for (size_t k = 0; k < KIND_COUNT; k++) {
        fault_report report = {0};
        fault_plan plan = {.kind = FAULT_ONCE, .with_reads = true};
        CHECK_INT(kinds[k].make(NULL), FST_OK);
        while (next_plan(&plan, &report)) check_failing(k, &plan, &report);
    }
}

/// A second model file, of which nothing that was made before says anything.
static void add_model(void) {
    char command[2048];
    snprintf(command, sizeof command, "cp '%s' '%s/more.safetensors'", model, folder);
    if (system(command) != 0) abort();
}

TEST(unlisted_model_is_never_accepted_after_any_failure)
{
    if (!make_folder()) SKIP("no openssl command that makes keys");
    for (size_t k = 0; k < KIND_COUNT; k++) {
        char path[700];
        fault_report report = {0};
        fault_plan plan = {.kind = FAULT_ONCE, .with_reads = true};
        CHECK_INT(kinds[k].make(NULL), FST_OK);
        add_model();
        while (next_plan(&plan, &report)) {
            fst_error error = {0};
            fault_calls_begin(&plan);
            fst_status status = kinds[k].check(&error);
            report = fault_calls_end();
            if (status == FST_OK)
                fprintf(stderr, "kind %zu, call %ld (%s, error %u): good\n", k, plan.nth,
                        report.failed, plan.errno_index);
            CHECK(status != FST_OK && error.message[0] != '\0');
        }
        snprintf(path, sizeof path, "%s/more.safetensors", folder);
        unlink(path);
    }
}

// ---- loads ----

static const char *load_list;   ///< NULL: the one in the folder
static const char *load_bundle; ///< a signed one, by whose list the model is loaded; or NULL

/// Loads the model verified with that, and returns the number of tensors returned.
static fst_status load_verified(size_t *handed_out, fst_error *error) {
    fst_open_options options = FST_STRUCT_INIT(fst_open_options);
    fst_load_options wish = {.struct_size = sizeof wish,
                             .tuning = fixture_engine(FST_ENGINE_PREAD)};
    fst_model *opened;
    fst_loader *loader;
    fst_tensor *tensor;
    options.flags = FST_OPEN_VERIFY;
    options.manifest = load_list;
    options.signature = load_bundle;
    options.public_key = load_bundle == NULL ? NULL : public_key;
    *handed_out = 0;
    fst_status status = fst_model_open(model, &options, &opened, error);
    if (status != FST_OK) return status;
    status = fst_loader_open(opened, &wish, &loader, error);
    fst_model_close(opened);
    if (status != FST_OK) return status;
    while ((status = fst_loader_next(loader, -1, &tensor, error)) == FST_OK) {
        ++*handed_out;
        fst_tensor_unref(tensor);
    }
    fst_loader_close(loader);
    return status == FST_END ? FST_OK : status;
}

/// Every call of a load fails in turn. No tensor of a damaged model is returned.
static void sweep_load(const char *what, bool is_good) {
    fault_report report = {0};
    fault_plan plan = {.kind = FAULT_ONCE, .with_reads = true};
    while (next_plan(&plan, &report)) {
        size_t handed_out;
        fst_error error = {0};
        fault_calls_begin(&plan);
        fst_status status = load_verified(&handed_out, &error);
        report = fault_calls_end();
        bool right = is_good ? status == FST_OK || names_file(status, &error)
                             : status != FST_OK && handed_out == 0;
        if (!right)
            fprintf(stderr, "%s, call %ld (%s, error %u), %zu handed out: %s\n", what, plan.nth,
                    report.failed, plan.errno_index, handed_out, error.message);
        CHECK(right);
    }
}

/// Every allocation of a load fails in turn.
static void sweep_load_memory(bool is_good) {
    fst_status status = FST_E_NO_MEMORY;
    for (long nth = 0; status == FST_E_NO_MEMORY && !check_failed; nth = check_next(nth)) {
        size_t handed_out;
        fst_error error = {0};
        long live = fsti_alloc_live();
        fsti_alloc_fail_after(nth);
        status = load_verified(&handed_out, &error);
        fsti_alloc_fail_after(-1);
        CHECK_INT(fsti_alloc_live(), live);
        CHECK(is_good || (status != FST_OK && handed_out == 0));
        CHECK(nth < NTH_MAX);
    }
    CHECK_INT(status, is_good ? FST_OK : FST_E_DIGEST);
}

/// A model that changes after a successful check.
static void sweep_source(const char *what) {
    size_t handed_out;
    CHECK_INT(load_verified(&handed_out, NULL), FST_OK);
    CHECK_INT((long long)handed_out, 3);
    sweep_load(what, true);
    sweep_load_memory(true);
    flip_bit();
    sweep_load(what, false);
    sweep_load_memory(false);
    flip_bit();
}

TEST(loads_never_return_damaged_bytes_after_any_failure)
{
    if (!make_folder()) SKIP("no openssl command that makes keys");
    load_list = target;
    for (size_t k = 0; k <= 2; k += 2) {
        CHECK_INT(kinds[k].make(NULL), FST_OK);
        sweep_source(k == 0 ? "manifest" : "checksum list");
    }
}

TEST(first_digest_source_is_never_skipped_after_any_failure)
{
    char sums[700], others[700];
    fst_manifest_options options = FST_STRUCT_INIT(fst_manifest_options);
    if (!make_folder()) SKIP("no openssl command that makes keys");
    load_list = NULL;
    snprintf(sums, sizeof sums, "%s.sha256", model);
    snprintf(others, sizeof others, "%s/SHA256SUMS", folder);
    // The manifest and then the list of the file are first, and describe the model before the
    // change; the following sources describe it after the change.
    options.digest = FST_DIGEST_SHA256;
    options.flags = FST_MANIFEST_SUMS;
    CHECK_INT(fst_manifest_write(model, NULL, NULL, NULL, NULL), FST_OK);
    flip_bit();
    CHECK_INT(fst_manifest_write(model, sums, &options, NULL, NULL), FST_OK);
    sweep_load("manifest beside", false);
    flip_bit();
    CHECK_INT(fst_manifest_write(model, sums, &options, NULL, NULL), FST_OK);
    flip_bit();
    CHECK_INT(fst_manifest_write(model, others, &options, NULL, NULL), FST_OK);
    snprintf(sums, sizeof sums, "%s.manifest", model);
    CHECK_INT(unlink(sums), 0);
    sweep_load("list of the file", false);
}

/// The model's digest in hexadecimal.
static void digest_model(fst_digest digest, char *hex) {
    static char bytes[1 << 20];
    unsigned char made[FST_DIGEST_BYTES_MAX];
    fst_digest_state *state;
    size_t size;
    int fd = open(model, O_RDONLY | O_CLOEXEC);
    ssize_t got = read(fd, bytes, sizeof bytes);
    if (got <= 0 || fst_digest_begin(digest, &state, NULL) != FST_OK ||
        fst_digest_update(state, bytes, (size_t)got, NULL) != FST_OK ||
        fst_digest_end(state, made, &size, NULL) != FST_OK)
        abort();
    close(fd);
    for (size_t i = 0; i < size; i++) snprintf(hex + 2 * i, 3, "%02x", made[i]);
}

/// The file of `hash --write` next to the model.
static void put_sidecar(char path[700]) {
    char hex[65];
    digest_model(FST_DIGEST_XXH3_64, hex);
    snprintf(path, 700, "%s.digest", model);
    FILE *file = fopen(path, "w");
    if (file == NULL ||
        fprintf(file, "fastsafetensors-digest 1 xxh3\nfile %s \"model.safetensors\"\n", hex) < 0 ||
        fclose(file) != 0)
        abort();
}

/// The model as the Hub's cache has it: a link to a file whose name is its SHA-256.
static void put_in_hub(void) {
    char blob[800], hex[65];
    digest_model(FST_DIGEST_SHA256, hex);
    snprintf(blob, sizeof blob, "%s/blobs", folder);
    mkdir(blob, 0700);
    snprintf(blob, sizeof blob, "%s/blobs/%s", folder, hex);
    if (rename(model, blob) != 0 || symlink(blob, model) != 0) abort();
}

TEST(other_digest_sources_are_enforced_after_any_failure)
{
    char sidecar[700];
    if (!make_folder()) SKIP("no openssl command that makes keys");
    load_list = NULL;
    put_sidecar(sidecar);
    sweep_source("sidecar");
    CHECK(unlink(sidecar) == 0 && sign_folder(NULL) == FST_OK);
    load_bundle = target;
    sweep_source("bundle");
    load_bundle = NULL;
    put_in_hub();
    sweep_source("the Hub's cache");
}

// ---- limits of folders ----

static fst_status sign_path(const char *path, fst_error *error) {
    fst_bundle_files files = FST_STRUCT_INIT(fst_bundle_files);
    files.folder = path;
    files.signature = target;
    files.key = secret;
    return fst_bundle_sign(&files, NULL, error);
}

/// `depth` nested folders, the first of them below `top`.
static void nest_folders(const char *top, unsigned depth) {
    char path[1024];
    snprintf(path, sizeof path, "%s", top);
    for (unsigned i = 0; i < depth; i++) {
        snprintf(path + strlen(path), sizeof path - strlen(path), "/d");
        if (mkdir(path, 0700) != 0 && errno != EEXIST) abort();
    }
}

static void remove_nested(const char *top) {
    char command[1024];
    snprintf(command, sizeof command, "rm -rf '%s/d'", top);
    if (system(command) != 0) abort();
}

TEST(folders_nest_up_to_63_levels)
{
    fst_error error = {0};
    if (!make_folder()) SKIP("no openssl command that makes keys");
    nest_folders(folder, 63);
    CHECK_INT(sign_path(folder, &error), FST_OK);
    nest_folders(folder, 64);
    CHECK_INT(sign_path(folder, &error), FST_E_ARGUMENT);
    remove_nested(folder);
    CHECK(strstr(error.message, "more than 64 nested folders") != NULL);
    CHECK(strstr(error.message, folder) != NULL);
}

/// A tree of `levels` folders, each but the last with `width` links to the next.
static void link_folders(const char *top, unsigned levels, unsigned width) {
    char path[900], to[64];
    for (unsigned level = 0; level < levels; level++) {
        snprintf(path, sizeof path, "%s/%u", top, level);
        if (mkdir(path, 0700) != 0) abort();
        for (unsigned i = 0; i < width && level + 1 < levels; i++) {
            snprintf(path, sizeof path, "%s/%u/%u", top, level, i);
            snprintf(to, sizeof to, "../%u", level + 1);
            if (symlink(to, path) != 0) abort();
        }
    }
}

TEST(link_cycles_are_not_followed)
{
    char path[700];
    fst_error error = {0};
    if (!make_folder()) SKIP("no openssl command that makes keys");
    snprintf(path, sizeof path, "%.*s/tree", (int)(strrchr(target, '/') - target), target);
    if (mkdir(path, 0700) != 0) abort();
    link_folders(path, 5, 17); // 17 to the fourth: 83,521
    snprintf(path + strlen(path), sizeof path - strlen(path), "/0");
    put_old_text();
    CHECK_INT(sign_path(path, &error), FST_E_ARGUMENT);
    CHECK(strstr(error.message, "more than 65536 folders") != NULL);
    CHECK(strstr(error.message, path) != NULL);
    CHECK(has_old_text());
}

static int again_errno;
static atomic_int again_count, good_count;

/// A device that does not have the bytes any more after some reads, and says "again".
static void answer_again(fsti_io_op *op) {
    if (op->is_write || atomic_fetch_sub(&good_count, 1) > 0) return;
    op->result = -again_errno;
    atomic_fetch_add(&again_count, 1);
}

TEST(endless_eagain_is_an_error)
{
    static const int causes[] = {EAGAIN, EINTR};
    if (!make_folder()) SKIP("no openssl command that makes keys");
    for (size_t i = 0; i < 6 * KIND_COUNT; i++) {
        const verify_kind *kind = &kinds[i / 6];
        fst_error error = {.status = FST_OK};
        unlink(target);
        CHECK_INT(kind->make(NULL), FST_OK);
        again_errno = causes[i % 2];
        atomic_store(&again_count, 0);
        atomic_store(&good_count, (int)(i / 2 % 3));
        fsti_io_fault_hook_set(answer_again);
        fst_status status = kind->check(&error);
        fsti_io_fault_hook_set(NULL);
        CHECK(atomic_load(&again_count) == 0 || status != FST_OK);
        CHECK(atomic_load(&again_count) <= 64 * 201);
    }
}
