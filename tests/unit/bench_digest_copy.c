// SPDX-License-Identifier: Apache-2.0
/// bench_digest_copy FILE: the highest speed at which a file can be copied out of the page cache
/// and digested in the same pass, on all cores. It is an upper limit for verified loads of cached
/// files. Threads copy pieces to memory that is already mapped, and digest each while it is in the
/// CPU cache. Reads one word per line from standard input and prints its seconds: "none" only
/// copies, the name of a digest copies and digests; the prefix "only-" digests without copying,
/// "fresh-" copies to new memory, as the first load of a program does. benchmarks/verified_loads.py
/// runs it interleaved with loads.
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "digest/digest.h"

#define THREADS_MAX 64
#define CHUNK_BYTES ((uint64_t)1 << 20)

typedef struct digest_pass {
    int fd;
    uint64_t file_bytes;
    char *target;
    const fsti_digest_kind *kind; ///< NULL: only copied
    bool only_digests;            ///< what is in memory already is digested, and not copied
    atomic_uint_fast64_t next;
} digest_pass;

static void stop(const char *what) {
    perror(what);
    exit(1);
}

static void take_piece(digest_pass *pass, void *state, uint64_t at, uint64_t size) {
    char *target = pass->target + at;
    if (!pass->only_digests && pread(pass->fd, target, size, (off_t)at) != (ssize_t)size)
        stop("pread");
    if (pass->kind != NULL && !pass->kind->update(state, target, size)) exit(1);
}

static void *run_pass(void *context) {
    digest_pass *pass = context;
    unsigned char digest[FSTI_DIGEST_BYTES_MAX];
    for (;;) {
        uint64_t begin = atomic_fetch_add(&pass->next, CHUNK_BYTES);
        if (begin >= pass->file_bytes) return NULL;
        uint64_t end = fsti_min(begin + CHUNK_BYTES, pass->file_bytes);
        void *state = pass->kind == NULL ? NULL : pass->kind->begin();
        take_piece(pass, state, begin, end - begin);
        if (state != NULL && !pass->kind->end(state, digest)) exit(1);
    }
}

static void run_threads(digest_pass *pass) {
    pthread_t threads[THREADS_MAX];
    uint64_t count = fsti_min(fsti_cpu_count(), THREADS_MAX);
    atomic_store(&pass->next, 0);
    for (uint64_t i = 1; i < count; i++)
        if (pthread_create(&threads[i], NULL, run_pass, pass) != 0) stop("pthread_create");
    run_pass(pass);
    for (uint64_t i = 1; i < count; i++) pthread_join(threads[i], NULL);
}

static const fsti_digest_kind *kind_of(const char *name) {
    const fsti_digest_kind *kind = fsti_digest_find(name, strlen(name));
    return kind != NULL && kind->ready(NULL) == FST_OK ? kind : NULL;
}

static char *make_memory(uint64_t bytes) {
    char *memory = aligned_alloc((size_t)2 << 20, fsti_align_up(bytes, 2 << 20));
    if (memory == NULL) stop("memory");
    (void)madvise(memory, bytes, MADV_HUGEPAGE);
    return memory;
}

static bool drop_prefix(const char **word, const char *prefix) {
    bool has = strncmp(*word, prefix, strlen(prefix)) == 0;
    if (has) *word += strlen(prefix);
    return has;
}

/// Answers one word with one line.
static void answer(digest_pass *pass, const char *word) {
    char *kept = pass->target;
    bool is_fresh = drop_prefix(&word, "fresh-");
    pass->only_digests = drop_prefix(&word, "only-");
    pass->kind = kind_of(word);
    uint64_t start_ns = fsti_now_ns();
    if (is_fresh) pass->target = make_memory(pass->file_bytes);
    run_threads(pass);
    uint64_t spent_ns = fsti_now_ns() - start_ns;
    if (is_fresh) free(pass->target);
    pass->target = kept;
    bool is_known = pass->kind != NULL || strcmp(word, "none") == 0;
    printf(is_known ? "%.6f\n" : "nan\n", (double)spent_ns / 1e9);
    fflush(stdout);
}

int main(int argc, char **argv) {
    struct stat info;
    char word[32];
    if (argc != 2) {
        fprintf(stderr, "usage: bench_digest_copy FILE < WORDS\n");
        return 2;
    }
    digest_pass pass = {.fd = open(argv[1], O_RDONLY | O_CLOEXEC)};
    if (pass.fd < 0 || fstat(pass.fd, &info) != 0) stop(argv[1]);
    pass.file_bytes = (uint64_t)info.st_size;
    pass.target = make_memory(pass.file_bytes);
    memset(pass.target, 1, pass.file_bytes);
    while (scanf("%31s", word) == 1) answer(&pass, word);
    free(pass.target);
    close(pass.fd);
    return 0;
}
