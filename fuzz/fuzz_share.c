// SPDX-License-Identifier: Apache-2.0
/// Fuzzes the files of shared segments. A load makes a segment; the input damages it, and may give
/// it a valid header again. Then it is listed, used by another load, pinned and dropped.
#include "fuzz_files.h"
#include "fuzz_target.h"
#include "share/share_private.h"

#define TENSOR_BYTES ((size_t)1100000)
#define PATCH_COUNT_MAX 64

static const char header[] = "{\"w\":{\"dtype\":\"U8\",\"shape\":[1100000],\"data_offsets\":"
                             "[0,1100000]}}     ";

enum { FLAG_SEAL = 1, FLAG_CUT = 2, FLAG_PIN = 4, FLAG_DROP = 8, FLAG_RENAME = 16 };

static void load(void) {
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    fst_model *model;
    fst_loader *loader;
    fst_error error;
    options.thread_count = 1;
    options.mode = FST_MODE_LOAD;
    options.share = FST_SHARE_NODE;
    options.share_grace_s = 100;
    require(fst_model_open("model.safetensors", NULL, &model, &error) == FST_OK);
    require(fst_loader_open(model, &options, &loader, &error) == FST_OK);
    require(fst_loader_wait(loader, -1, &error) == FST_OK);
    fst_loader_close(loader);
    fst_model_close(model);
}

/// The name of the only segment.
static void copy_name(void *context, const fst_segment *segment) {
    require(segment->name != NULL && segment->label != NULL);
    snprintf(context, SHARE_NAME_BYTES, "%s", segment->name);
}

static void look(void *context, const fst_segment *segment) {
    (void)context;
    require(strlen(segment->name) == SHARE_NAME_BYTES - 1 && segment->label != NULL);
}

static void damage(const char *path, fuzz_input *input, uint8_t flags) {
    share_header head;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    for (int i = 0; i < PATCH_COUNT_MAX && input->size >= 3; i++) {
        off_t at = fuzz_byte(input);
        at = (at | (off_t)fuzz_byte(input) << 8) % (off_t)(3 * SHARE_HEADER_BYTES);
        uint8_t value = fuzz_byte(input);
        require(pwrite(fd, &value, 1, at) == 1);
    }
    if ((flags & FLAG_SEAL) != 0 && pread(fd, &head, sizeof head, 0) == (ssize_t)sizeof head) {
        fsti_share_header_make(&head);
        require(pwrite(fd, &head, sizeof head, 0) == (ssize_t)sizeof head);
    }
    if ((flags & FLAG_CUT) != 0) (void)!ftruncate(fd, (off_t)fuzz_byte(input) << 13);
    close(fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static unsigned char model[8 + sizeof header - 1 + TENSOR_BYTES];
    fuzz_input input = {data, size};
    char path[128], name[SHARE_NAME_BYTES] = "";
    if (fuzz_enter("share")) {
        uint64_t length = sizeof header - 1;
        memcpy(model, &length, 8);
        memcpy(model + 8, header, length);
        snprintf(path, sizeof path, "%s/segments", fuzz_folder);
        setenv("FASTSAFETENSORS_SHARE_DIR", path, 1);
    }
    fuzz_clear();
    fuzz_put("model.safetensors", model, sizeof model);
    load();
    uint8_t flags = fuzz_byte(&input);
    (void)!fst_segment_visit(NULL, copy_name, name, NULL);
    snprintf(path, sizeof path, "segments/%s", name);
    if (name[0] != '\0') damage(path, &input, flags);
    if ((flags & FLAG_RENAME) != 0)
        (void)!rename(path, "segments/0123456789abcdef0123456789abcdef");
    (void)!fst_segment_visit(NULL, look, NULL, NULL);
    if ((flags & FLAG_PIN) != 0) (void)!fst_segment_pin(NULL, "", 1, NULL);
    load();
    if ((flags & FLAG_DROP) != 0) (void)!fst_segment_drop(NULL, NULL, NULL, NULL);
    load();
    return 0;
}
