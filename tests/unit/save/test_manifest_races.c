// SPDX-License-Identifier: Apache-2.0
/// Another process saves a model at the path of a manifest, list or signature, before each system
/// call of the call that writes there. The model is never lost. Or a model is saved while its
/// manifest is made, or the other way round. No manifest stays next to another model.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "fastsafetensors.h"
#include "fault_calls.h"
#include "fixture.h"
#include "model_saves.h"

static char folder[512], model[600], target[620], secret[600];

typedef fst_status (*writing_call)(fst_error *error);

static fst_status save_with_manifest(fst_error *error) {
    static const float values[2] = {1, 2};
    uint64_t shape = 2;
    fst_save_tensor tensor = FST_STRUCT_INIT(fst_save_tensor);
    fst_save_options options = FST_STRUCT_INIT(fst_save_options);
    tensor.name = "w";
    tensor.name_size = 1;
    tensor.dtype = FST_DTYPE_F32;
    tensor.rank = 1;
    tensor.shape = &shape;
    tensor.data = values;
    options.manifest = target;
    return fst_save(model, &tensor, 1, &options, NULL, error);
}

static fst_status write_manifest(fst_error *error) {
    return fst_manifest_write(model, target, NULL, NULL, error);
}

static fst_status write_sums(fst_error *error) {
    fst_manifest_options options = FST_STRUCT_INIT(fst_manifest_options);
    options.flags = FST_MANIFEST_SUMS;
    options.digest = FST_DIGEST_SHA256;
    return fst_manifest_write(model, target, &options, NULL, error);
}

static fst_status write_signature(fst_error *error) {
    fst_bundle_files files = FST_STRUCT_INIT(fst_bundle_files);
    files.folder = folder;
    files.signature = target;
    files.key = secret;
    return fst_bundle_sign(&files, NULL, error);
}

/// Saves a model at the target.
static void save_there(void) {
    if (save_model(target, 0, NEW_MODEL, FST_SAVE_QUICK, NULL) != FST_OK) abort();
}

static bool make_folder(void) {
    char command[1400];
    snprintf(folder, sizeof folder, "%s", fixture_path("races"));
    snprintf(model, sizeof model, "%s/model.safetensors", folder);
    snprintf(target, sizeof target, "%s.there", folder);
    snprintf(secret, sizeof secret, "%s.key", folder);
    mkdir(folder, 0700);
    snprintf(command, sizeof command,
             "openssl ecparam -name prime256v1 -genkey -noout -out '%s' 2>/dev/null", secret);
    return system(command) == 0 && save_model(model, 0, OLD_MODEL, FST_SAVE_QUICK, NULL) == FST_OK;
}

static void put_old_text(void) {
    int fd = open(target, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0 || write(fd, "old", 3) != 3) abort();
    close(fd);
}

/// A model is saved before the n-th call. False if there are fewer calls.
static bool meet_call(writing_call call, bool has_old, long nth) {
    fst_error error = {0};
    fault_plan plan = {.kind = FAULT_ACTION, .nth = nth, .with_reads = true, .action = save_there};
    unlink(target);
    if (has_old && call != save_with_manifest) put_old_text();
    if (has_old && call == save_with_manifest && call(NULL) != FST_OK) abort();
    fault_calls_begin(&plan);
    fst_status status = call(&error);
    fault_report report = fault_calls_end();
    if (report.failed == NULL) return false;
    bool is_kept = model_at(target) == NEW_MODEL;
    bool is_told = status == FST_OK || status == FST_E_FILE_CHANGED || status == FST_E_ARGUMENT;
    if (!is_kept || !is_told)
        check_fail(__FILE__, __LINE__, "model saved before call %ld (%s): %s, status %d %s", nth,
                   report.failed, is_kept ? "kept" : "lost", (int)status, error.message);
    return true;
}

TEST(model_saved_meanwhile_is_never_replaced)
{
    static const writing_call calls[] = {save_with_manifest, write_manifest, write_sums,
                                         write_signature};
    if (!make_folder()) SKIP("no openssl command that makes keys");
    for (size_t c = 0; c < sizeof calls / sizeof *calls; c++)
        for (int has_old = 0; has_old < 2; has_old++)
            for (long nth = 1; !check_failed && meet_call(calls[c], has_old != 0, nth); nth++) {
            }
}

// ---- a model and its own manifest ----

static uint32_t file_count; ///< of the model that is saved, perhaps with MANIFEST

static void save_again(void) {
    if (save_model(model, file_count, NEW_MODEL, FST_SAVE_QUICK, NULL) != FST_OK) abort();
}

static void describe(void) {
    fst_status status = fst_manifest_write(model, NULL, NULL, NULL, NULL);
    if (status != FST_OK && status != FST_E_FILE_CHANGED && status != FST_E_NOT_FOUND) abort();
}

/// Whether the manifest describes this model. Only a save without one may leave none.
static bool is_described_right(void) {
    fst_error error = {0};
    if (access(target, F_OK) != 0) return (file_count & MANIFEST) == 0;
    fst_status status = fst_manifest_check(model, NULL, NULL, &error);
    if (status != FST_OK) printf("# %s: %s\n", fst_status_name(status), error.message);
    return status == FST_OK;
}

/// `action` runs before the n-th call of `call`. False if there are fewer calls.
static bool meet_own(void (*call)(void), void (*action)(void), long nth) {
    fault_plan plan = {.kind = FAULT_ACTION, .nth = nth, .with_reads = true, .action = action};
    unlink(target);
    if (save_model(model, FILE_COUNT(file_count), OLD_MODEL, FST_SAVE_QUICK, NULL) != FST_OK)
        abort();
    fault_calls_begin(&plan);
    call();
    fault_report report = fault_calls_end();
    if (report.failed == NULL) return false;
    if (!is_described_right())
        check_fail(__FILE__, __LINE__, "%x files, before call %ld (%s): another model's manifest",
                   file_count, nth, report.failed);
    return true;
}

static void meet_each(void) {
    for (long nth = 1; !check_failed && meet_own(describe, save_again, nth); nth++) {
    }
    for (long nth = 1; !check_failed && meet_own(save_again, describe, nth); nth++) {
    }
}

TEST(no_manifest_of_another_model_stays)
{
    snprintf(folder, sizeof folder, "%s", fixture_path("own"));
    mkdir(folder, 0700);
    snprintf(model, sizeof model, "%s/model.safetensors", folder);
    snprintf(target, sizeof target, "%s.manifest", model);
    file_count = 0;
    meet_each();
    file_count = MANIFEST;
    meet_each();
    snprintf(model, sizeof model, "%s", fixture_path("set"));
    snprintf(target, sizeof target, "%s/model.manifest", model);
    file_count = 2;
    meet_each();
    file_count = 2 | MANIFEST;
    meet_each();
}
