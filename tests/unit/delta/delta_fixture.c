// SPDX-License-Identifier: Apache-2.0
/// See delta_fixture.h.
#include "delta_fixture.h"

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fixture.h"

const char *const delta_names[DELTA_TENSORS] = {"big", "middle", "small", "same"};
const size_t delta_sizes[DELTA_TENSORS] = {30 * 262144 + 1000, 20 * 262144, 6, 300000};
unsigned char *delta_states[DELTA_STATES][DELTA_TENSORS];

/// What both files hold: the first two tensors, and the others.
static const int first_of_file[] = {0, 2, 4};

void delta_fill_states(void) {
    uint64_t seed = 7;
    if (delta_states[0][0] != NULL) return;
    for (int state = 0; state < DELTA_STATES; state++)
        for (int i = 0; i < DELTA_TENSORS; i++) {
            unsigned char *bytes = malloc(delta_sizes[i]);
            delta_states[state][i] = bytes;
            if (state > 0) memcpy(bytes, delta_states[state - 1][i], delta_sizes[i]);
            for (size_t at = 0; at < delta_sizes[i] && state == 0; at++)
                bytes[at] = (unsigned char)fixture_random(&seed);
            for (size_t at = 0; at < delta_sizes[i] && state > 0 && i < 3; at++)
                if (fixture_random(&seed) % 25 == 0 || at == 0)
                    bytes[at] ^= (unsigned char)(4 + state);
        }
}

static int remove_one(const char *path, const struct stat *info, int type, struct FTW *place) {
    (void)info, (void)type, (void)place;
    return remove(path);
}

void delta_remove(const char *folder) { nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS); }

static void write_file(const char *path, int state, int first, int end) {
    char json[1024] = "{";
    size_t at = 0;
    for (int i = first; i < end; i++) {
        snprintf(json + strlen(json), sizeof json - strlen(json),
                 "%s\"%s\":{\"dtype\":\"U8\",\"shape\":[%zu],\"data_offsets\":[%zu,%zu]}",
                 i > first ? "," : "", delta_names[i], delta_sizes[i], at, at + delta_sizes[i]);
        at += delta_sizes[i];
    }
    strcat(json, "}");
    uint64_t length = strlen(json);
    FILE *file = fopen(path, "wb");
    fwrite(&length, 8, 1, file);
    fwrite(json, 1, length, file);
    for (int i = first; i < end; i++) fwrite(delta_states[state][i], 1, delta_sizes[i], file);
    fclose(file);
}

void delta_write_checkpoint(const char *folder, int state) {
    char path[1024];
    delta_fill_states();
    delta_remove(folder);
    mkdir(folder, 0777);
    for (int file = 0; file < 2; file++) {
        snprintf(path, sizeof path, "%s/part%d.safetensors", folder, file);
        write_file(path, state, first_of_file[file], first_of_file[file + 1]);
    }
}

const char *delta_make_version(int version, fst_delta_encoding encoding, fst_digest digest) {
    static char paths[16][600];
    static int count;
    char name[64], text[16], base[16], old[600];
    fst_error error;
    snprintf(name, sizeof name, "v%d-%d-%d", version, (int)encoding, (int)digest);
    char *path = paths[count++ % 16];
    snprintf(path, sizeof paths[0], "%s", fixture_path(name));
    if (access(path, F_OK) == 0) return path;
    snprintf(old, sizeof old, "%s", fixture_path("old"));
    delta_write_checkpoint(old, version - 1);
    snprintf(text, sizeof text, "%06d", version);
    snprintf(base, sizeof base, "%06d", version - 1);
    fst_delta_memory memory[DELTA_TENSORS] = {{0}};
    for (int i = 0; i < DELTA_TENSORS; i++)
        memory[i] = (fst_delta_memory){
            .name = delta_names[i], .data = delta_states[version][i], .size_bytes = delta_sizes[i]};
    fst_delta_make_options options = FST_STRUCT_INIT(fst_delta_make_options);
    options.version = text;
    options.base_version = base;
    options.encoding = encoding;
    options.digest = digest;
    options.tensors = memory;
    options.tensor_count = DELTA_TENSORS;
    if (fst_delta_make(old, path, &options, NULL, &error) != FST_OK) {
        fprintf(stderr, "%s\n", error.message);
        abort();
    }
    return path;
}

static bool has_state(const char *folder, int file, int state) {
    char path[1024];
    snprintf(path, sizeof path, "%s/part%d.safetensors", folder, file);
    FILE *stream = fopen(path, "rb");
    uint64_t length;
    bool same = stream != NULL && fread(&length, 8, 1, stream) == 1 &&
                fseek(stream, (long)length, SEEK_CUR) == 0;
    for (int i = first_of_file[file]; i < first_of_file[file + 1] && same; i++) {
        unsigned char *bytes = malloc(delta_sizes[i]);
        same = fread(bytes, 1, delta_sizes[i], stream) == delta_sizes[i] &&
               memcmp(bytes, delta_states[state][i], delta_sizes[i]) == 0;
        free(bytes);
    }
    same = same && fgetc(stream) == EOF;
    if (stream != NULL) fclose(stream);
    return same;
}

int delta_find_state(const char *folder) {
    for (int state = 0; state < DELTA_STATES; state++)
        if (has_state(folder, 0, state) && has_state(folder, 1, state)) return state;
    return -1;
}

fst_delta *delta_open_chain(fst_delta_encoding encoding, fst_digest digest) {
    const char *folders[] = {delta_make_version(1, encoding, digest),
                             delta_make_version(2, encoding, digest)};
    fst_delta *delta;
    fst_error error;
    if (fst_delta_open(folders, 2, &delta, &error) == FST_OK) return delta;
    fprintf(stderr, "%s\n", error.message);
    abort();
}
