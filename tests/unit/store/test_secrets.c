// SPDX-License-Identifier: Apache-2.0
/// The secret key during saves and loads: it is only in pages that core dumps exclude.
#include <fastsafetensors.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "base/primitives.h"
#include "check.h"
#include "store/store.h"
#include "store/object_store.h"
#include "small_store.h"

#define KEY_BYTES ((size_t)40)
#define PIECE_BYTES ((size_t)1 << 20)
#define AREA_BYTES_MAX ((uint64_t)1 << 28) ///< larger areas are not searched

/// A byte of the key, which the program does not contain as plain text.
static volatile size_t step = 7;

static char key_byte(size_t i) { return (char)('A' + (i * step + 3) % 26); }

static bool is_key(const char *at) {
    for (size_t i = 0; i < KEY_BYTES; i++)
        if (at[i] != key_byte(i)) return false;
    return true;
}

typedef struct copies {
    size_t in_dumps, elsewhere;
} copies;

/// Without the copy in `piece` itself, which the kernel may have placed next to the searched
/// memory.
static size_t count_in(int memory, uint64_t begin, uint64_t end, char *piece) {
    size_t found = 0;
    for (uint64_t at = begin; at < end; at += PIECE_BYTES) {
        size_t size = (size_t)fsti_min(PIECE_BYTES + KEY_BYTES, end - at);
        ssize_t got = pread(memory, piece, size, (off_t)at);
        for (ssize_t i = 0; i + (ssize_t)KEY_BYTES <= got && i < (ssize_t)PIECE_BYTES; i++) {
            uint64_t place = at + (uint64_t)i - (uintptr_t)piece;
            if (place >= PIECE_BYTES + KEY_BYTES) found += is_key(piece + i);
        }
    }
    return found;
}

/// Looks through all memory that can be read (proc(5), smaps: VmFlags "dd" is left out of dumps).
static copies find_copies(void) {
    copies found = {0, 0};
    unsigned long long begin = 0, end = 0;
    char line[4096], rights[8];
    char *piece = fsti_secret_alloc(PIECE_BYTES + KEY_BYTES);
    FILE *list = fopen("/proc/self/smaps", "re");
    int memory = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
    bool can_read = false;
    while (list != NULL && memory >= 0 && piece != NULL && fgets(line, sizeof line, list) != NULL) {
        unsigned long long first = 0, last = 0;
        if (sscanf(line, "%llx-%llx %7s", &first, &last, rights) == 3) {
            begin = first;
            end = last;
            can_read = rights[0] == 'r';
        }
        if (strncmp(line, "VmFlags:", 8) != 0 || !can_read || end - begin > AREA_BYTES_MAX)
            continue;
        size_t *count = strstr(line, " dd") != NULL ? &found.elsewhere : &found.in_dumps;
        *count += count_in(memory, begin, end, piece);
    }
    if (list != NULL) fclose(list);
    if (memory >= 0) close(memory);
    fsti_secret_free(piece, PIECE_BYTES + KEY_BYTES);
    return found;
}

static fst_status configure(void) {
    char *key = fsti_secret_alloc(KEY_BYTES + 1);
    for (size_t i = 0; key != NULL && i < KEY_BYTES; i++) key[i] = key_byte(i);
    fst_remote_options options = FST_STRUCT_INIT(fst_remote_options);
    options.endpoint = small_store_begin();
    options.access_key = "AKIAFSTTESTS";
    options.secret_key = key;
    fst_status status = fst_remote_configure(&options, NULL);
    fsti_secret_free(key, KEY_BYTES + 1);
    return status;
}

static fst_status save(const char *address) {
    uint64_t shape[] = {1000};
    char data[1000] = {1};
    fst_save_tensor tensor = {.struct_size = sizeof tensor,
                              .name = "a",
                              .name_size = 1,
                              .dtype = FST_DTYPE_U8,
                              .shape = shape,
                              .rank = 1,
                              .data = data};
    fst_writer *writer = NULL;
    fst_status status = fst_writer_open(address, &tensor, 1, NULL, &writer, NULL);
    if (status == FST_OK) status = fst_writer_commit(writer, NULL);
    fst_writer_close(writer);
    return status;
}

TEST(secret_memory_is_excluded_from_dumps)
{
    if (CHECK_SANITIZED_THREADS) SKIP("most of the memory to search is the thread sanitizer's");
    long live = fsti_alloc_live();
    char *block = fsti_secret_alloc(KEY_BYTES);
    CHECK(block != NULL && block[0] == 0);
    CHECK_INT(fsti_alloc_live(), live + 1);
    for (size_t i = 0; i < KEY_BYTES; i++) block[i] = key_byte(i);
    copies found = find_copies();
    CHECK_INT(found.in_dumps, 0);
    CHECK(found.elsewhere >= 1);
    fsti_secret_free(block, KEY_BYTES);
    CHECK_INT(find_copies().elsewhere, 0);
    CHECK_INT(fsti_alloc_live(), live);
    fsti_alloc_fail_after(0);
    CHECK(fsti_secret_alloc(KEY_BYTES) == NULL);
    fsti_alloc_fail_after(-1);
}

TEST(secret_key_in_use_is_in_no_dump)
{
    char reason[160];
    if (CHECK_SANITIZED) SKIP("a sanitizer keeps what was freed, and much of its own");
    if (!fsti_http_usable(reason, sizeof reason)) SKIP("no libcurl");
    CHECK_INT(configure(), FST_OK);
    CHECK_INT(save("s3://bucket/m.safetensors"), FST_OK);
    CHECK_INT(find_copies().in_dumps, 0);
    CHECK(find_copies().elsewhere >= 1); // what was configured is kept
    fst_model *model = NULL;
    CHECK_INT(fst_model_open("s3://bucket/m.safetensors", NULL, &model, NULL), FST_OK);
    fst_loader *loader = NULL;
    CHECK_INT(fst_loader_open(model, NULL, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
    CHECK_INT(find_copies().in_dumps, 0);
    CHECK(find_copies().elsewhere >= 2); // and of the model's store
    fst_loader_close(loader);
    fst_model_close(model);
    fst_remote_options nothing = FST_STRUCT_INIT(fst_remote_options);
    CHECK_INT(fst_remote_configure(&nothing, NULL), FST_OK);
    // The module's threads free the memory of a request some moments after its end.
    for (int i = 0; i < 1000 && find_copies().elsewhere != 0; i++) usleep(20000);
    copies left = find_copies();
    CHECK_INT(left.in_dumps + left.elsewhere, 0);
}
