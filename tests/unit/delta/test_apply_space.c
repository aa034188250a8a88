// SPDX-License-Identifier: Apache-2.0
/// Applying a delta in place to a sparse checkpoint when system calls fail, as they do on a full
/// disk: its space is reserved before anything is changed, and errors say what the files hold.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "delta_fixture.h"
#include "fastsafetensors.h"
#include "fastsafetensors/experimental.h"
#include "fault_calls.h"
#include "fixture.h"

#define SIZE ((size_t)3 << 20)

static char old[600], made[600], delta_folder[600];

/// A checkpoint of two tensors of zeros, which take no blocks, or of other bytes.
static void write_checkpoint(const char *folder, bool is_new) {
    static const char text[] = "{\"a\":{\"dtype\":\"U8\",\"shape\":[3145728],\"data_offsets\":"
                               "[0,3145728]},\"b\":{\"dtype\":\"U8\",\"shape\":[3145728],"
                               "\"data_offsets\":[3145728,6291456]}}";
    char path[700];
    uint64_t length = sizeof text - 1;
    delta_remove(folder);
    mkdir(folder, 0700);
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    FILE *file = fopen(path, "wbe");
    if (file == NULL) abort();
    fwrite(&length, sizeof length, 1, file);
    fwrite(text, 1, length, file);
    for (size_t i = 0; is_new && i < 2 * SIZE; i++) fputc(fixture_byte(i), file);
    fclose(file);
    if (truncate(path, (off_t)(8 + length + 2 * SIZE)) != 0) abort();
}

static bool is_old(void) {
    static unsigned char bytes[2 * SIZE];
    char path[700];
    snprintf(path, sizeof path, "%s/model.safetensors", old);
    FILE *file = fopen(path, "rbe");
    if (file == NULL || fseek(file, -(long)(2 * SIZE), SEEK_END) != 0) abort();
    bool is_read = fread(bytes, 1, sizeof bytes, file) == sizeof bytes;
    fclose(file);
    return is_read && bytes[0] == 0 && memcmp(bytes, bytes + 1, sizeof bytes - 1) == 0;
}

static void make_delta(fst_delta_encoding encoding, fst_delta **out) {
    const char *folders[] = {delta_folder};
    fst_delta_make_options options = FST_STRUCT_INIT(fst_delta_make_options);
    snprintf(old, sizeof old, "%s", fixture_path("space-old"));
    snprintf(made, sizeof made, "%s", fixture_path("space-new"));
    snprintf(delta_folder, sizeof delta_folder, "%s", fixture_path("space-delta"));
    write_checkpoint(old, false);
    write_checkpoint(made, true);
    delta_remove(delta_folder);
    options.checkpoint = made;
    options.base_version = "0";
    options.version = "1";
    options.encoding = encoding;
    if (fst_delta_make(old, delta_folder, &options, NULL, NULL) != FST_OK ||
        fst_delta_open(folders, 1, out, NULL) != FST_OK)
        abort();
}

static fst_status apply(const fst_delta *delta, const fault_plan *plan, fault_report *report,
                        fst_error *error) {
    fst_delta_options options = FST_STRUCT_INIT(fst_delta_options);
    options.thread_count = 1;
    write_checkpoint(old, false);
    fault_calls_begin(plan);
    fst_status status = fst_delta_apply(delta, old, &options, NULL, error);
    *report = fault_calls_end();
    return status;
}

static bool has_journal(void) {
    char path[700];
    snprintf(path, sizeof path, "%s/.weight_sync/journal", old);
    return access(path, F_OK) == 0;
}

/// The n-th call fails; the checkpoint is the old one, with or without its note.
static void fail_once(const fst_delta *delta, long nth, long *reserved, bool *is_last) {
    fst_error error = {0};
    fault_report report;
    fault_plan plan = {.kind = FAULT_ONCE, .nth = nth};
    fst_status status = apply(delta, &plan, &report, &error);
    *is_last = report.failed == NULL;
    if (*is_last || status == FST_OK) return;
    bool is_reserve = strstr(error.message, "reserving the space of changed tensors") != NULL;
    *reserved += is_reserve;
    if (is_reserve) {
        CHECK_INT(status, FST_E_NO_SPACE);
        CHECK_CONTAINS(error.message, "model.safetensors");
    }
    if (!is_old() || has_journal() || error.file[0] == '\0')
        check_fail(__FILE__, __LINE__, "call %ld (%s): %s", nth, report.failed, error.message);
}

TEST(a_sparse_checkpoint_is_unchanged_after_a_failure)
{
    for (int encoding = FST_DELTA_XOR; encoding <= FST_DELTA_OVERWRITE; encoding++) {
        fst_delta *delta;
        long reserved = 0;
        bool is_last = false;
        make_delta((fst_delta_encoding)encoding, &delta);
        for (long nth = 1; !is_last && !check_failed; nth++)
            fail_once(delta, nth, &reserved, &is_last);
        CHECK_INT(reserved, 2);
        fst_delta_close(delta);
    }
}

TEST(errors_say_what_the_files_hold)
{
    for (int encoding = FST_DELTA_XOR; encoding <= FST_DELTA_OVERWRITE; encoding++) {
        fst_delta *delta;
        fault_report report = {.failed = ""};
        make_delta((fst_delta_encoding)encoding, &delta);
        for (long nth = 1; report.failed != NULL && !check_failed; nth += CHECK_SANITIZED ? 3 : 1) {
            fst_error error = {0};
            fault_plan plan = {.kind = FAULT_FOREVER, .nth = nth};
            fst_status status = apply(delta, &plan, &report, &error);
            if (status == FST_OK) continue;
            bool says_mixed = strstr(error.message, "two versions") != NULL;
            if (says_mixed == is_old() || error.file[0] == '\0')
                check_fail(__FILE__, __LINE__, "call %ld (%s): %s", nth, report.failed,
                           error.message);
        }
        fst_delta_close(delta);
    }
}
