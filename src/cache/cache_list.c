// SPDX-License-Identifier: Apache-2.0
/// Lists the objects of a cache, and evicts objects when it is too large.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "cache_private.h"

#define ITEM_COUNT_MAX ((size_t)1 << 20)
/// A temporary file is renamed at once. After this time its process is considered dead.
#define UNFINISHED_S 600

/// One version of an object.
typedef struct cache_item {
    char name[CACHE_NAME_BYTES];
    bool is_whole;
    uint64_t size_bytes, disk_bytes;
    struct timespec used;
} cache_item;

typedef struct item_list {
    cache_item *items;
    size_t count, capacity;
} item_list;

/// Whether a file name is NAME plus that ending.
static bool is_file_of(const char *file, const char *ending) {
    size_t size = CACHE_NAME_BYTES - 1;
    return strspn(file, "0123456789abcdef") == size && strcmp(file + size, ending) == 0;
}

static uint64_t disk_bytes_of(const struct stat *info) { return (uint64_t)info->st_blocks * 512; }

static bool examine_file(const cache_folder *folder, const char *name, const char *ending,
                         struct stat *info) {
    char file[CACHE_FILE_NAME_BYTES];
    fsti_cache_file_name(file, name, ending);
    return fstatat(folder->fd, file, info, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(info->st_mode);
}

/// Whether a file begins with these bytes. The user may have named a folder with other files, whose
/// names may look the same; they are neither listed nor deleted.
static bool begins_with(const cache_folder *folder, const char *file, const char *magic) {
    char bytes[CACHE_MAGIC_BYTES];
    int fd = fsti_cache_file_open(folder, file, O_RDONLY);
    if (fd < 0) return false;
    bool is_own =
        fsti_read_at(fd, bytes, sizeof bytes, 0) == 0 && memcmp(bytes, magic, sizeof bytes) == 0;
    close(fd);
    return is_own;
}

/// Adds a version to the list if its map says that it is one. False without memory.
static bool add_item(const cache_folder *folder, const char *file, item_list *list) {
    cache_item item = {.is_whole = is_file_of(file, ".data")};
    char map_file[CACHE_FILE_NAME_BYTES];
    struct stat data, map;
    memcpy(item.name, file, CACHE_NAME_BYTES - 1);
    fsti_cache_file_name(map_file, item.name, ".map");
    if (!examine_file(folder, item.name, item.is_whole ? ".data" : ".part", &data) ||
        !examine_file(folder, item.name, ".map", &map) ||
        !begins_with(folder, map_file, CACHE_MAP_MAGIC))
        return true;
    item.size_bytes = (uint64_t)data.st_size;
    item.disk_bytes = disk_bytes_of(&data) + disk_bytes_of(&map);
    item.used = map.st_mtim;
    if (!fsti_array_reserve((void **)&list->items, &list->capacity, list->count,
                            sizeof *list->items, ITEM_COUNT_MAX))
        return false;
    list->items[list->count++] = item;
    return true;
}

/// Removes leftovers of a killed process: a temporary file, or a map without its data file.
static void remove_remains(const cache_folder *folder, const char *file) {
    char name[CACHE_NAME_BYTES] = "";
    struct stat info;
    size_t size = strlen(file);
    bool is_unfinished = strspn(file, "0123456789abcdef") == CACHE_NAME_BYTES - 1 &&
                         size > CACHE_NAME_BYTES && fsti_ends_with(file, ".tmp");
    if (fstatat(folder->fd, file, &info, AT_SYMLINK_NOFOLLOW) != 0) return;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (is_unfinished && now.tv_sec - info.st_mtim.tv_sec > UNFINISHED_S &&
        begins_with(folder, file, CACHE_REF_MAGIC))
        unlinkat(folder->fd, file, 0);
    if (!is_file_of(file, ".map") || !begins_with(folder, file, CACHE_MAP_MAGIC)) return;
    memcpy(name, file, CACHE_NAME_BYTES - 1);
    if (!examine_file(folder, name, ".data", &info) && !examine_file(folder, name, ".part", &info))
        unlinkat(folder->fd, file, 0);
}

static int compare_items(const void *a_pointer, const void *b_pointer) {
    const cache_item *a = a_pointer, *b = b_pointer;
    if (a->used.tv_sec != b->used.tv_sec) return a->used.tv_sec < b->used.tv_sec ? -1 : 1;
    if (a->used.tv_nsec != b->used.tv_nsec) return a->used.tv_nsec < b->used.tv_nsec ? -1 : 1;
    return strcmp(a->name, b->name);
}

/// All versions, least recently used first. 0 or an errno. `cleans`: the folder is locked, so
/// leftovers are deleted.
static int list_items(const cache_folder *folder, bool cleans, item_list *list) {
    int fd = openat(folder->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC), failed = 0;
    DIR *stream = fd < 0 ? NULL : fdopendir(fd);
    *list = (item_list){0};
    if (stream == NULL) {
        failed = errno;
        if (fd >= 0) close(fd);
        return failed;
    }
    const struct dirent *entry;
    while (failed == 0 && (errno = 0, entry = readdir(stream)) != NULL) {
        if (cleans) remove_remains(folder, entry->d_name);
        if ((is_file_of(entry->d_name, ".data") || is_file_of(entry->d_name, ".part")) &&
            !add_item(folder, entry->d_name, list))
            failed = ENOMEM;
    }
    if (failed == 0) failed = errno;
    closedir(stream);
    if (failed != 0) {
        fsti_free(list->items);
        *list = (item_list){0};
    } else if (list->count > 1) {
        qsort(list->items, list->count, sizeof *list->items, compare_items);
    }
    return failed;
}

/// Takes an exclusive lock on a version's data file; -1: the file is in use, or deleted.
static int lock_exclusive(const cache_folder *folder, const cache_item *item) {
    char file[CACHE_FILE_NAME_BYTES];
    fsti_cache_file_name(file, item->name, item->is_whole ? ".data" : ".part");
    int fd = fsti_cache_file_open(folder, file, O_RDWR);
    if (fd < 0 || flock(fd, LOCK_EX | LOCK_NB) == 0) return fd;
    close(fd);
    return -1;
}

/// Deletes an unused version. The folder is locked, so no process opens it for the first time
/// meanwhile, and one that has just opened it sees that its link count is 0.
static bool remove_item(const cache_folder *folder, const cache_item *item) {
    char file[CACHE_FILE_NAME_BYTES];
    int fd = lock_exclusive(folder, item);
    if (fd < 0) return false;
    fsti_cache_file_name(file, item->name, item->is_whole ? ".data" : ".part");
    bool is_removed = unlinkat(folder->fd, file, 0) == 0;
    fsti_cache_file_name(file, item->name, ".map");
    if (is_removed) unlinkat(folder->fd, file, 0);
    close(fd);
    return is_removed;
}

/// The size of a version; a partial one counts as complete, because it will grow.
static uint64_t claim_of(const cache_folder *folder, const cache_item *item) {
    if (item->is_whole) return item->disk_bytes;
    int fd = lock_exclusive(folder, item);
    if (fd < 0) return fsti_max(item->disk_bytes, item->size_bytes);
    close(fd);
    return item->disk_bytes;
}

/// Deletes from the start of the list until *bytes is at most `bytes_max`.
static void prune_items(const cache_folder *folder, const item_list *list, uint64_t bytes_max,
                        uint64_t *bytes, fst_cache_pruned *out) {
    for (size_t i = 0; i < list->count && *bytes > bytes_max; i++) {
        if (!remove_item(folder, &list->items[i])) continue;
        *bytes -= fsti_min(*bytes, list->items[i].disk_bytes);
        out->removed_bytes += list->items[i].disk_bytes;
        out->removed_count++;
    }
}

bool fsti_cache_evict(const cache_folder *folder, uint64_t bytes, uint64_t bytes_max) {
    item_list list;
    struct statvfs disk;
    fst_cache_pruned pruned = {0};
    uint64_t used = 0, own = 0;
    if (fstatvfs(folder->fd, &disk) != 0 || list_items(folder, true, &list) != 0) return false;
    for (size_t i = 0; i < list.count; i++) {
        own += list.items[i].disk_bytes;
        used += claim_of(folder, &list.items[i]);
    }
    uint64_t room = own + (uint64_t)disk.f_bavail * disk.f_frsize;
    uint64_t limit = bytes_max != 0 ? fsti_min(bytes_max, room) : room / 5 * 4;
    if (bytes <= limit) prune_items(folder, &list, limit - bytes, &used, &pruned);
    fsti_free(list.items);
    return bytes <= limit && used <= limit - bytes;
}

// ---- listing and pruning, for users ----

static fst_status open_named(const char *path, cache_folder *out, fst_error *error) {
    cache_settings *settings = fsti_alloc(sizeof *settings);
    if (settings == NULL) return fsti_error_memory(error, sizeof *settings);
    fst_status status = fsti_cache_settings(path, settings, error);
    if (status == FST_OK && settings->folder[0] == '\0')
        status = fsti_error_set(error, FST_E_ARGUMENT, FSTI_NO_LOCATION,
                                "no cache is configured. Give a folder, or auto");
    if (status == FST_OK) status = fsti_cache_folder_open(settings->folder, false, out, error);
    fsti_free(settings);
    return status;
}

/// Cached bytes of a partial version.
static uint64_t count_kept(int map_fd, uint64_t size_bytes) {
    uint64_t digests[512], kept = 0, count = fsti_cache_block_count(size_bytes);
    for (uint64_t at = 0; at < count; at += sizeof digests / sizeof *digests) {
        uint64_t some = fsti_min(count - at, sizeof digests / sizeof *digests);
        if (fsti_cache_map_read(map_fd, at, some, digests) != 0) return kept;
        for (uint64_t i = 0; i < some; i++)
            if (digests[i] != 0)
                kept += fsti_min(CACHE_BLOCK_BYTES, size_bytes - (at + i) * CACHE_BLOCK_BYTES);
    }
    return kept;
}

static void report_item(const cache_folder *folder, const cache_item *item, fst_cache_visitor visit,
                        void *context) {
    char file[CACHE_FILE_NAME_BYTES];
    cache_map_header head = {.address = ""};
    fst_cache_object object = {.struct_size = sizeof object,
                               .size_bytes = item->size_bytes,
                               .kept_bytes = item->is_whole ? item->size_bytes : 0,
                               .disk_bytes = item->disk_bytes,
                               .used_s = item->used.tv_sec,
                               .is_whole = item->is_whole};
    fsti_cache_file_name(file, item->name, ".map");
    int map_fd = fsti_cache_file_open(folder, file, O_RDONLY);
    if (map_fd >= 0) {
        if (fsti_cache_map_read_header(map_fd, &head) != 0) head.address[0] = '\0';
        if (!item->is_whole) object.kept_bytes = count_kept(map_fd, item->size_bytes);
        close(map_fd);
    }
    int fd = lock_exclusive(folder, item);
    object.in_use = fd < 0;
    if (fd >= 0) close(fd);
    head.address[sizeof head.address - 1] = '\0';
    object.address = head.address;
    visit(context, &object);
}

fst_status fsti_cache_visit(const char *path, fst_cache_visitor visit, void *context,
                            fst_error *error) {
    cache_folder folder;
    item_list list;
    FST_TRY(open_named(path, &folder, error));
    int failed = list_items(&folder, false, &list);
    fst_status status = FST_OK;
    if (failed != 0) status = fsti_error_errno(error, failed, folder.path, "listing the cache");
    for (size_t i = 0; i < list.count; i++) report_item(&folder, &list.items[i], visit, context);
    fsti_free(list.items);
    fsti_cache_folder_close(&folder);
    return status;
}

/// Deletes references of URLs whose objects have all been deleted.
static void remove_refs(const cache_folder *folder) {
    int fd = openat(folder->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *stream = fd < 0 ? NULL : fdopendir(fd);
    const struct dirent *entry;
    if (stream == NULL && fd >= 0) close(fd);
    if (stream == NULL) return;
    while ((entry = readdir(stream)) != NULL)
        if (is_file_of(entry->d_name, ".ref") &&
            begins_with(folder, entry->d_name, CACHE_REF_MAGIC))
            unlinkat(folder->fd, entry->d_name, 0);
    closedir(stream);
}

static fst_status prune_folder(cache_folder *folder, uint64_t bytes_max, fst_cache_pruned *out,
                               fst_error *error) {
    item_list list;
    uint64_t bytes = 0;
    int failed = fsti_cache_folder_lock(folder);
    if (failed != 0) return fsti_error_errno(error, failed, folder->path, "locking the cache");
    failed = list_items(folder, true, &list);
    if (failed != 0) return fsti_error_errno(error, failed, folder->path, "listing the cache");
    for (size_t i = 0; i < list.count; i++) bytes += list.items[i].disk_bytes;
    // An empty object takes no space, but pruning to 0 must delete it as well.
    if (bytes_max == 0 && list.count > 0) bytes = UINT64_MAX;
    prune_items(folder, &list, bytes_max, &bytes, out);
    out->left_count = list.count - out->removed_count;
    if (out->left_count == 0) remove_refs(folder);
    fsti_free(list.items);
    return FST_OK;
}

fst_status fsti_cache_prune(const char *path, uint64_t bytes_max, fst_cache_pruned *out,
                            fst_error *error) {
    cache_folder folder;
    item_list list;
    FST_TRY(open_named(path, &folder, error));
    fst_status status = prune_folder(&folder, bytes_max, out, error);
    if (status == FST_OK && list_items(&folder, false, &list) == 0) {
        for (size_t i = 0; i < list.count; i++) out->left_bytes += list.items[i].disk_bytes;
        fsti_free(list.items);
    }
    fsti_cache_folder_close(&folder);
    return status;
}
