// SPDX-License-Identifier: Apache-2.0
/// Lists the files of a folder level by level, and digests them, one thread per file.
#include "file_tree.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "file_stamp.h"
#include "io/io.h"
#include "work_progress.h"

#define FILE_COUNT_MAX ((size_t)1 << 20)
#define DEPTH_MAX ((size_t)64)
/// Limit for trees that links to folders make very large.
#define FOLDER_COUNT_MAX ((size_t)1 << 16)
#define PIECE_BYTES ((size_t)1 << 20)
#define THREADS_MAX 16u

void fsti_file_tree_clear(file_tree *tree) {
    for (size_t i = 0; i < tree->count; i++) fsti_free(tree->files[i].name);
    fsti_free(tree->files);
    fsti_free(tree->folder);
    *tree = (file_tree){0};
}

/// first + second + third, from fsti_alloc.
static char *join(const char *first, const char *second, const char *third) {
    size_t sizes[] = {strlen(first), strlen(second), strlen(third)};
    char *text = fsti_alloc(sizes[0] + sizes[1] + sizes[2] + 1);
    if (text == NULL) return NULL;
    memcpy(text, first, sizes[0]);
    memcpy(text + sizes[0], second, sizes[1]);
    memcpy(text + sizes[0] + sizes[1], third, sizes[2] + 1);
    return text;
}

/// Refuses a tree that exceeds `limit` of `what`.
static fst_status refuse_tree(const file_tree *tree, size_t limit, const char *what,
                              fst_error *error) {
    fsti_error_location location = {.file = tree->folder, .byte_offset = FST_NO_OFFSET};
    return fsti_error_set(error, FST_E_ARGUMENT, location, "more than %zu %s", limit, what);
}

static fst_status push_file(file_tree *tree, char *name, fst_error *error) {
    if (tree->count == FILE_COUNT_MAX) {
        fsti_free(name);
        return refuse_tree(tree, FILE_COUNT_MAX, "files", error);
    }
    if (!fsti_array_reserve((void **)&tree->files, &tree->capacity, tree->count,
                            sizeof *tree->files, FILE_COUNT_MAX)) {
        fsti_free(name);
        return fsti_error_memory(error, tree->count * sizeof *tree->files);
    }
    tree->files[tree->count++] = (tree_file){.name = name};
    return FST_OK;
}

/// The identity of a folder, independent of its path.
typedef struct folder_identity {
    dev_t device;
    ino_t inode;
} folder_identity;

typedef struct tree_walk {
    file_tree *tree;
    tree_ignores ignores;
    const void *context;
    const char *prefix; ///< of the current folder: relative, with a final slash
    unsigned depth, folder_count;
    folder_identity above[DEPTH_MAX]; ///< the current folder and its parents
} tree_walk;

static fst_status walk_folder(tree_walk *walk, const char *prefix, fst_error *error);

/// The kind of an entry that is neither a file nor a folder.
static const char *name_kind(mode_t mode) {
    return S_ISFIFO(mode)   ? "a FIFO"
           : S_ISSOCK(mode) ? "a socket"
           : S_ISCHR(mode)  ? "a character device"
           : S_ISBLK(mode)  ? "a block device"
                            : "neither a file nor a folder";
}

/// Lists an entry without bytes, with its kind as an error: a signature cannot cover it, so its
/// presence is a difference. Takes over `name`.
static fst_status push_undigestible(file_tree *tree, char *name, fst_status status,
                                    const char *what, fst_error *error) {
    FST_TRY(push_file(tree, name, error));
    (void)fsti_error_set(&tree->files[tree->count - 1].error, status, FSTI_NO_LOCATION, "%s", what);
    return FST_OK;
}

/// Whether a folder is the current one or one of its parents, so that a link forms a cycle.
static bool is_above(const tree_walk *walk, const struct stat *info) {
    for (unsigned i = 0; i < walk->depth; i++)
        if (walk->above[i].device == info->st_dev && walk->above[i].inode == info->st_ino)
            return true;
    return false;
}

/// Walks the folder `name` with identity `info`. Takes over `name`.
static fst_status walk_below(tree_walk *walk, char *name, const struct stat *info,
                             fst_error *error) {
    if (is_above(walk, info))
        return push_undigestible(walk->tree, name, FST_E_NOT_REGULAR,
                                 "a symbolic link to a folder that contains it", error);
    char *below = join(name, "/", "");
    fst_status status =
        below == NULL ? fsti_error_memory(error, strlen(name)) : walk_folder(walk, below, error);
    fsti_free(below);
    fsti_free(name);
    return status;
}

/// Lists an entry, and takes over its name. `failed`: the errno of stat(), or 0.
static fst_status list_entry(tree_walk *walk, char *name, const struct stat *info, int failed,
                             fst_error *error) {
    if (failed == ENOENT || failed == ELOOP)
        return push_undigestible(
            walk->tree, name, FST_E_NOT_FOUND,
            failed == ELOOP ? "a symbolic link in a loop" : "a broken symbolic link", error);
    if (S_ISREG(info->st_mode)) return push_file(walk->tree, name, error);
    if (S_ISDIR(info->st_mode)) return walk_below(walk, name, info, error);
    return push_undigestible(walk->tree, name, FST_E_NOT_REGULAR, name_kind(info->st_mode), error);
}

/// Handles an entry of the folder `prefix` (relative, with a final slash).
static fst_status walk_entry(tree_walk *walk, const char *prefix, const char *entry,
                             fst_error *error) {
    struct stat info = {0};
    char *name = join(prefix, entry, "");
    char *path = name == NULL ? NULL : join(walk->tree->folder, name, "");
    bool is_link = false;
    if (path == NULL) {
        fsti_free(name);
        return fsti_error_memory(error, strlen(entry));
    }
    int failed = lstat(path, &info) == 0 ? 0 : errno;
    if (failed == 0 && S_ISLNK(info.st_mode)) {
        is_link = walk->tree->has_links = true;
        failed = stat(path, &info) == 0 ? 0 : errno;
    }
    fst_status status = FST_OK;
    if (failed != 0 && !(is_link && (failed == ENOENT || failed == ELOOP)))
        status = fsti_error_errno(error, failed, path, "examining the file");
    fsti_free(path);
    if (status == FST_OK) return list_entry(walk, name, &info, failed, error);
    fsti_free(name);
    return status;
}

static fst_status visit_entry(void *context, const fsti_folder_entry *entry, fst_error *error) {
    tree_walk *walk = context;
    bool is_top = walk->prefix[0] == '\0';
    if (is_top && walk->ignores(walk->context, entry->name)) return FST_OK;
    return walk_entry(walk, walk->prefix, entry->name, error);
}

static fst_status walk_folder(tree_walk *walk, const char *prefix, fst_error *error) {
    if (++walk->folder_count > FOLDER_COUNT_MAX)
        return refuse_tree(walk->tree, FOLDER_COUNT_MAX, "folders", error);
    if (walk->depth >= DEPTH_MAX)
        return refuse_tree(walk->tree, DEPTH_MAX, "nested folders", error);
    char *path = join(walk->tree->folder, prefix, ".");
    if (path == NULL) return fsti_error_memory(error, strlen(prefix));
    const char *above = walk->prefix;
    struct stat info = {0};
    (void)!stat(path, &info); // an entry that cannot be examined cannot be listed either
    walk->above[walk->depth] = (folder_identity){info.st_dev, info.st_ino};
    walk->prefix = prefix;
    walk->depth++;
    fst_status status = fsti_folder_visit(path, visit_entry, walk, error);
    walk->depth--;
    walk->prefix = above;
    fsti_free(path);
    return status;
}

static int compare_files(const void *a, const void *b) {
    return strcmp(((const tree_file *)a)->name, ((const tree_file *)b)->name);
}

fst_status fsti_file_tree_list(const char *folder, tree_ignores ignores, const void *context,
                               file_tree *out, fst_error *error) {
    FST_TRY(fsti_file_tree_begin(folder, out, error));
    tree_walk walk = {.tree = out, .ignores = ignores, .context = context};
    FST_TRY(walk_folder(&walk, "", error));
    fsti_file_tree_sort(out);
    return FST_OK;
}

void fsti_file_tree_sort(file_tree *tree) {
    if (tree->count > 1) qsort(tree->files, tree->count, sizeof *tree->files, compare_files);
}

fst_status fsti_file_tree_push(file_tree *tree, const char *name, fst_error *error) {
    char *copy = fsti_string_copy(name, strlen(name));
    return copy == NULL ? fsti_error_memory(error, strlen(name)) : push_file(tree, copy, error);
}

fst_status fsti_file_tree_begin(const char *folder, file_tree *out, fst_error *error) {
    size_t size = strlen(folder);
    *out = (file_tree){.folder = join(folder, size > 0 && folder[size - 1] != '/' ? "/" : "", "")};
    if (out->folder == NULL) {
        (void)fsti_error_memory(error, size);
        return FST_E_NO_MEMORY; // explicit for static analyzers
    }
    clock_gettime(CLOCK_REALTIME, &out->begun);
    return FST_OK;
}

tree_file *fsti_file_tree_find(const file_tree *tree, const fsti_signed_file *listed) {
    size_t low = 0, high = tree->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2, size = strlen(tree->files[middle].name);
        size_t shorter = size < listed->name_size ? size : listed->name_size;
        int order = memcmp(tree->files[middle].name, listed->name, shorter);
        if (order == 0) order = size < listed->name_size ? -1 : size > listed->name_size;
        if (order == 0) return &tree->files[middle];
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

const char *fsti_file_tree_name_inside(const char *folder, const char *path) {
    char real_folder[PATH_MAX], real_parent[PATH_MAX], parent[PATH_MAX];
    const char *slash = strrchr(path, '/');
    size_t size = slash == NULL ? 1 : slash == path ? 1 : (size_t)(slash - path);
    if (size >= sizeof parent) return NULL;
    memcpy(parent, slash == NULL ? "." : path, size);
    parent[size] = '\0';
    if (realpath(folder, real_folder) == NULL || realpath(parent, real_parent) == NULL ||
        strcmp(real_folder, real_parent) != 0)
        return NULL;
    return slash == NULL ? path : slash + 1;
}

// ---- digesting ----

bool fsti_verify_is_shortage(const fst_error *error) {
    return error->status == FST_E_NO_MEMORY || error->os_errno == EMFILE ||
           error->os_errno == ENFILE || error->os_errno == ENOMEM;
}

typedef struct tree_hash {
    file_tree *tree;
    work_progress progress;
    atomic_size_t next;
    atomic_uint_fast64_t bytes_read;
    atomic_bool out_of_memory;
} tree_hash;

static fst_status hash_bytes(tree_hash *hash, fsti_file *file, void *state, char *buffer,
                             fst_error *error) {
    for (uint64_t at = 0;;) {
        size_t got;
        FST_TRY(fsti_file_read(file, buffer, PIECE_BYTES, at, &got, error));
        if (got > 0 && !fsti_digest_sha256.update(state, buffer, got))
            return fsti_error_memory(error, got);
        at += got;
        atomic_fetch_add(&hash->bytes_read, got);
        FST_TRY(fsti_work_add(&hash->progress, got, error));
        if (got < PIECE_BYTES) return fsti_file_check(file, error);
    }
}

/// Whether an earlier signed digest is still valid: same size, times and inode.
static bool reuse_digest(tree_file *target, const char *path) {
    struct stat info;
    const fsti_signed_file *known = target->known;
    if (known == NULL || known->is_listed_otherwise || known->stamp.inode == 0) return false;
    if (stat(path, &info) != 0 || !S_ISREG(info.st_mode)) return false;
    fsti_file_stamp now = fsti_file_stamp_of(&info);
    if (known->size_bytes != (uint64_t)info.st_size || !fsti_file_stamp_equals(&known->stamp, &now))
        return false;
    memcpy(target->digest, known->digest, sizeof target->digest);
    target->size_bytes = known->size_bytes;
    target->stamp = now;
    return target->is_kept = true;
}

/// Takes the stamp of the open file before reading it, so that changes from here on change the
/// stamp. A file that changed just before the run began gets no stamp: within the resolution of the
/// file system's clock it could change again and keep its times.
static void record_stamp(const tree_hash *hash, tree_file *target, const fsti_file *file) {
    struct stat info;
    int fd = fsti_file_descriptor(file);
    if (fd < 0 || fstat(fd, &info) != 0) return;
    if ((uint64_t)info.st_size != fsti_file_size(file)) return;
    if (!fsti_file_stamp_is_settled(&info, &hash->tree->begun)) return;
    target->size_bytes = (uint64_t)info.st_size;
    target->stamp = fsti_file_stamp_of(&info);
}

/// Opens a file to digest. *out is NULL if its old digest is reused.
static fst_status open_file(const tree_hash *hash, tree_file *target, fsti_file **out,
                            fst_error *error) {
    *out = NULL;
    char *path = join(hash->tree->folder, target->name, "");
    if (path == NULL) return fsti_error_memory(error, strlen(target->name));
    fst_status status = reuse_digest(target, path) ? FST_OK : fsti_file_open(path, out, error);
    fsti_free(path);
    return status;
}

static fst_status hash_file(tree_hash *hash, tree_file *target, char *buffer, fst_error *error) {
    fsti_file *file;
    FST_TRY(open_file(hash, target, &file, error));
    if (file == NULL) return fsti_work_add(&hash->progress, target->size_bytes, error);
    record_stamp(hash, target, file);
    void *state = fsti_digest_sha256.begin();
    fst_status status =
        state == NULL ? fsti_error_memory(error, 64) : hash_bytes(hash, file, state, buffer, error);
    if (state != NULL && !fsti_digest_sha256.end(state, target->digest) && status == FST_OK)
        status = fsti_error_memory(error, 64);
    fsti_file_unref(file);
    return status;
}

/// Threads take files by a shared counter. Each file's row is written by the thread that took it.
static void *run_hash(void *context) {
    tree_hash *hash = context;
    char *buffer = fsti_alloc(PIECE_BYTES);
    if (buffer == NULL) atomic_store(&hash->out_of_memory, true);
    while (buffer != NULL) {
        size_t index = atomic_fetch_add(&hash->next, 1);
        if (index >= hash->tree->count) break;
        tree_file *file = &hash->tree->files[index];
        fst_error error;
        if (file->error.status != FST_OK) continue; // not digestible
        if (hash_file(hash, file, buffer, &error) != FST_OK) file->error = error;
    }
    fsti_free(buffer);
    return NULL;
}

/// The number of bytes to digest, as far as known before opening the files.
static uint64_t total_bytes(const file_tree *tree) {
    uint64_t total = 0;
    for (size_t i = 0; i < tree->count; i++) {
        struct stat info;
        char *path = join(tree->folder, tree->files[i].name, "");
        if (path != NULL && stat(path, &info) == 0 && S_ISREG(info.st_mode))
            total += (uint64_t)info.st_size;
        fsti_free(path);
    }
    return total;
}

/// Whether a failure affects the whole run, not only its file: a lack of resources, or
/// cancellation.
static bool ends_all(const fst_error *error) {
    return error->status == FST_E_CANCELLED || fsti_verify_is_shortage(error);
}

static void hash_by_threads(tree_hash *hash) {
    pthread_t threads[THREADS_MAX];
    uint32_t wanted = (uint32_t)fsti_min(fsti_cpu_count(), THREADS_MAX), started = 0;
    while (started + 1 < wanted && started + 1 < hash->tree->count &&
           fsti_thread_start(&threads[started], run_hash, hash) == 0)
        started++;
    run_hash(hash);
    for (uint32_t i = 0; i < started; i++) pthread_join(threads[i], NULL);
}

fst_status fsti_file_tree_hash(file_tree *tree, const fsti_check_progress *listener,
                               fst_error *error) {
    tree_hash hash = {.tree = tree};
    FST_TRY(fsti_digest_sha256.ready(error));
    fsti_work_begin(&hash.progress, listener, listener->callback == NULL ? 0 : total_bytes(tree));
    hash_by_threads(&hash);
    fsti_work_end(&hash.progress);
    tree->bytes_read = atomic_load(&hash.bytes_read);
    // A thread without a buffer leaves its files to others. If no thread has one, that is the
    // error.
    if (atomic_load(&hash.out_of_memory) && atomic_load(&hash.next) < tree->count)
        return fsti_error_memory(error, PIECE_BYTES);
    for (size_t i = 0; i < tree->count; i++) {
        const fst_error *failed = &tree->files[i].error;
        if (failed->status == FST_OK || !ends_all(failed)) continue;
        if (error != NULL) *error = *failed;
        return failed->status;
    }
    return FST_OK;
}

/// The error of a file without digest, with its name.
static fst_status report_file_error(const tree_file *file, fst_error *error) {
    fsti_error_location location = {.file = file->name, .byte_offset = FST_NO_OFFSET};
    if (error == NULL || file->error.file[0] != '\0') {
        if (error != NULL) *error = file->error;
        return file->error.status;
    }
    return fsti_error_set(error, file->error.status, location, "cannot be signed: %s",
                          file->error.message);
}

fst_status fsti_file_tree_rows(const file_tree *tree, fsti_signed_file **out, fst_error *error) {
    fsti_signed_file *files = fsti_alloc_zeroed(tree->count + 1, sizeof *files);
    if (files == NULL) return fsti_error_memory(error, tree->count * sizeof *files);
    for (size_t i = 0; i < tree->count; i++) {
        if (tree->files[i].error.status != FST_OK) {
            fsti_free(files);
            return report_file_error(&tree->files[i], error);
        }
        files[i].name = tree->files[i].name;
        files[i].name_size = strlen(files[i].name);
        memcpy(files[i].digest, tree->files[i].digest, sizeof files[i].digest);
        files[i].size_bytes = tree->files[i].size_bytes;
        files[i].stamp = tree->files[i].stamp;
    }
    *out = files;
    return FST_OK;
}
