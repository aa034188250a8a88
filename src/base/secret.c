// SPDX-License-Identifier: Apache-2.0
/// Memory for credentials: on separate pages that core dumps exclude (MADV_DONTDUMP), and wiped
/// before it is freed.
#include <string.h>
#include <sys/mman.h>

#include "primitives.h"

static size_t round_up(size_t size_bytes) {
    return (size_t)fsti_align_up(size_bytes, fsti_page_bytes());
}

void *fsti_secret_alloc(size_t size_bytes) {
    if (fsti_alloc_fails()) return NULL;
    void *pages = mmap(NULL, round_up(size_bytes), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) return NULL;
    (void)madvise(pages, round_up(size_bytes),
                  MADV_DONTDUMP); // without kernel support dumps include the pages
    fsti_alloc_count(1);
    return pages;
}

void fsti_secret_free(void *block, size_t size_bytes) {
    if (block == NULL) return;
    explicit_bzero(block, size_bytes);
    fsti_alloc_count(-1);
    munmap(block, round_up(size_bytes));
}

void fsti_secret_text_free(char *text) {
    if (text != NULL) explicit_bzero(text, strlen(text));
    fsti_free(text);
}
