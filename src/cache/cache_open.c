// SPDX-License-Identifier: Apache-2.0
/// From an address to what of it is on disk.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "cache_private.h"

#define REF_MAGIC "fst-cache-ref 1\n"
/// A file that is removed between being found and being held is looked for again.
#define OPEN_TRIES_MAX 8
/// Who has the turn asks a server, which takes as long as it takes.
#define TURN_PATIENCE_NS ((uint64_t)3000000000)
#define TURN_PAUSE_US 3000
#define ADDRESS_BYTES_MAX 16384u

/// What one opening is about.
typedef struct cache_opening {
    cache_folder folder;
    cache_settings settings;
    fsti_object *object;
    char address[CACHE_NAME_BYTES];      ///< the name of the address's file
    char known[FSTI_VERSION_TEXT_BYTES]; ///< what that says; "": nothing
    char version[FSTI_VERSION_TEXT_BYTES];
    char name[CACHE_NAME_BYTES];
    uint64_t size_bytes;
    const char *failed; ///< what can't be done, and its errno
    int failure;
    bool is_full; ///< what is there of it is read, but there is no room for more
} cache_opening;

// ---- which version an address had last ----

static bool name_address(cache_opening *opening) {
    char *text = fsti_alloc(ADDRESS_BYTES_MAX);
    bool fits = text != NULL && fsti_object_address(opening->object, text, ADDRESS_BYTES_MAX);
    if (fits) fsti_cache_name_of(text, strlen(text), opening->address);
    fsti_free(text);
    return fits;
}

static uint64_t ref_check(const char *version) {
    return fsti_cache_digest(version, strlen(version));
}

/// Fills opening->known; "" where nothing is known.
static void read_ref(cache_opening *opening) {
    char name[CACHE_FILE_NAME_BYTES], text[sizeof REF_MAGIC + 8 + FSTI_VERSION_TEXT_BYTES];
    opening->known[0] = '\0';
    fsti_cache_file_name(name, opening->address, ".ref");
    int fd = fsti_cache_file_open(&opening->folder, name, O_RDONLY);
    if (fd < 0) return;
    ssize_t got = pread(fd, text, sizeof text - 1, 0);
    close(fd);
    const size_t begin = sizeof REF_MAGIC - 1 + sizeof(uint64_t);
    if (got <= (ssize_t)begin || memcmp(text, REF_MAGIC, sizeof REF_MAGIC - 1) != 0) return;
    text[got] = '\0';
    uint64_t check;
    memcpy(&check, text + sizeof REF_MAGIC - 1, sizeof check);
    size_t size = strlen(text + begin);
    if (size < sizeof opening->known && check == ref_check(text + begin))
        memcpy(opening->known, text + begin, size + 1);
}

/// Says what version the address has; without it the next start asks for more than it needs.
static void write_ref(const cache_opening *opening) {
    char name[CACHE_FILE_NAME_BYTES], hidden[CACHE_FILE_NAME_BYTES + 16];
    char text[sizeof REF_MAGIC + 8 + FSTI_VERSION_TEXT_BYTES] = REF_MAGIC;
    if (strcmp(opening->known, opening->version) == 0) return;
    uint64_t check = ref_check(opening->version);
    size_t size = sizeof REF_MAGIC - 1, version_size = strlen(opening->version);
    memcpy(text + size, &check, sizeof check);
    memcpy(text + size + sizeof check, opening->version, version_size);
    size += sizeof check + version_size;
    fsti_cache_file_name(name, opening->address, ".ref");
    snprintf(hidden, sizeof hidden, "%s.%d.tmp", opening->address, (int)getpid());
    unlinkat(opening->folder.fd, hidden, 0);
    int fd = fsti_cache_file_open(&opening->folder, hidden, O_WRONLY | O_CREAT | O_EXCL);
    if (fd < 0) return;
    bool is_written = fsti_cache_pwrite(fd, text, size, 0) == 0;
    close(fd);
    if (!is_written || renameat(opening->folder.fd, hidden, opening->folder.fd, name) != 0)
        unlinkat(opening->folder.fd, hidden, 0);
}

// ---- the version's files ----

/// Notes why the cache can't be used for this object.
static bool fail(cache_opening *opening, const char *what, int failure) {
    opening->failed = what;
    opening->failure = failure;
    return false;
}

/// Holds a file that was opened, so that nobody removes it: false where somebody has.
static bool hold_file(int fd, uint64_t size_bytes) {
    struct stat info;
    while (flock(fd, LOCK_SH) != 0 && errno == EINTR) {
    }
    // Where there are no locks nobody can remove it under one, either: it may vanish, which does
    // no harm to who has it open.
    return fstat(fd, &info) == 0 && info.st_nlink == 1 && (uint64_t)info.st_size == size_bytes;
}

/// Whether a whole file begins with what the server has just sent, if it has; see holds_first().
static bool begins_right(const cache_opening *opening, int fd) {
    size_t size;
    const char *bytes = fsti_object_first(opening->object, &size);
    char kept[4096];
    for (size_t at = 0, some; at < size; at += some) {
        some = fsti_min(size - at, sizeof kept);
        if (fsti_cache_pread(fd, kept, some, at) != 0) return true; // the load will tell
        if (memcmp(kept, bytes + at, some) != 0) return false;
    }
    return true;
}

/// The whole object's file, held; -1 and an errno: there is none.
static int open_whole(const cache_opening *opening) {
    char name[CACHE_FILE_NAME_BYTES];
    fsti_cache_file_name(name, opening->name, ".data");
    for (int tries = 0; tries < OPEN_TRIES_MAX; tries++) {
        int fd = fsti_cache_file_open(&opening->folder, name, O_RDONLY);
        if (fd < 0) return -1;
        if (hold_file(fd, opening->size_bytes) && begins_right(opening, fd)) {
            fsti_cache_file_name(name, opening->name, ".map");
            utimensat(opening->folder.fd, name, NULL, AT_SYMLINK_NOFOLLOW); // the last use
            return fd;
        }
        close(fd);
    }
    errno = ESTALE;
    return -1;
}

/// Whether an error says nothing about the file: then it is left alone.
static bool is_shortage(int failed) {
    return failed == EMFILE || failed == ENFILE || failed == ENOMEM || failed == EIO;
}

static void remove_files(const cache_opening *opening) {
    static const char *const endings[] = {".part", ".data", ".map"};
    char name[CACHE_FILE_NAME_BYTES];
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++) {
        fsti_cache_file_name(name, opening->name, endings[i]);
        unlinkat(opening->folder.fd, name, 0);
    }
}

/// Both files of a version that is there in part; false where they are not, or no pair.
static bool open_pair(const cache_opening *opening, int flags, int *data_fd, int *map_fd) {
    char name[CACHE_FILE_NAME_BYTES];
    fsti_cache_file_name(name, opening->name, ".part");
    *data_fd = fsti_cache_file_open(&opening->folder, name, O_RDWR | flags);
    fsti_cache_file_name(name, opening->name, ".map");
    *map_fd = *data_fd < 0 ? -1 : fsti_cache_file_open(&opening->folder, name, O_RDWR | flags);
    if (*map_fd >= 0) return true;
    int failed = errno;
    if (*data_fd >= 0) close(*data_fd);
    *data_fd = -1;
    errno = failed;
    return false;
}

static bool is_pair(const cache_opening *opening, int data_fd, int map_fd) {
    cache_map_head head;
    struct stat data, map;
    uint64_t map_bytes =
        CACHE_MAP_HEAD_BYTES + sizeof(uint64_t) * fsti_cache_block_count(opening->size_bytes);
    return fstat(data_fd, &data) == 0 && (uint64_t)data.st_size == opening->size_bytes &&
           fstat(map_fd, &map) == 0 && (uint64_t)map.st_size == map_bytes &&
           fsti_cache_map_read_head(map_fd, &head) == 0 && head.size_bytes == opening->size_bytes &&
           strcmp(head.version, opening->version) == 0;
}

static int fill_pair(const cache_opening *opening, int data_fd, int map_fd) {
    cache_map_head head = {.size_bytes = opening->size_bytes};
    uint64_t map_bytes =
        CACHE_MAP_HEAD_BYTES + sizeof(uint64_t) * fsti_cache_block_count(opening->size_bytes);
    snprintf(head.version, sizeof head.version, "%s", opening->version);
    snprintf(head.address, sizeof head.address, "%s", fsti_object_name(opening->object));
    if (ftruncate(data_fd, (off_t)opening->size_bytes) != 0) return errno;
    if (ftruncate(map_fd, (off_t)map_bytes) != 0) return errno;
    return fsti_cache_map_write_head(map_fd, &head);
}

/// Makes both files anew. The folder is locked.
static bool make_pair(cache_opening *opening, int *data_fd, int *map_fd) {
    remove_files(opening); // half of them, or not of this version
    if (!fsti_cache_make_room(&opening->folder, opening->size_bytes, opening->settings.bytes_max))
        return fail(opening, "it does not fit in the cache", ENOSPC);
    if (!open_pair(opening, O_CREAT | O_EXCL, data_fd, map_fd)) {
        int failed = errno;
        remove_files(opening);
        return fail(opening, "the cache can't be written to", failed);
    }
    int failed = fill_pair(opening, *data_fd, *map_fd);
    if (failed == 0) return true;
    close(*data_fd);
    close(*map_fd);
    remove_files(opening);
    return fail(opening, "the cache can't be written to", failed);
}

/// Whether the map's first block is what the server has just sent, if it has: dates that are the
/// same for a second, or tags that are used again, do not tell two versions apart, but bytes do.
static bool holds_first(const cache_opening *opening, int map_fd) {
    size_t size;
    uint64_t digest = 0;
    const char *bytes = fsti_object_first(opening->object, &size);
    if (size != fsti_min(CACHE_BLOCK_BYTES, opening->size_bytes)) return true;
    if (fsti_cache_map_read(map_fd, 0, 1, &digest) != 0 || digest == 0) return true;
    return digest == fsti_cache_digest(bytes, size);
}

/// Room for what is still to come of an object that is there in part: it counts as all of it, and
/// never goes itself, since it is held. Without room, what is there is all that it gets.
static bool has_room(cache_opening *opening, int data_fd) {
    struct stat info;
    bool is_held = hold_file(data_fd, opening->size_bytes);
    bool grows = fstat(data_fd, &info) == 0 && (uint64_t)info.st_blocks * 512 < opening->size_bytes;
    if (!is_held || !grows || fsti_net_is_offline()) return true;
    return fsti_cache_make_room(&opening->folder, 0, opening->settings.bytes_max);
}

static bool find_pair(cache_opening *opening, int *data_fd, int *map_fd) {
    if (open_pair(opening, 0, data_fd, map_fd)) {
        bool is_good = is_pair(opening, *data_fd, *map_fd) && holds_first(opening, *map_fd);
        opening->is_full = is_good && !has_room(opening, *data_fd);
        if (is_good && (!opening->is_full || !opening->settings.is_required)) return true;
        close(*data_fd);
        close(*map_fd);
        if (is_good) return fail(opening, "it does not fit in the cache", ENOSPC);
    } else if (is_shortage(errno)) {
        return fail(opening, "the cache can't be read", errno);
    }
    return make_pair(opening, data_fd, map_fd);
}

static fsti_cache_entry *make_entry(cache_opening *opening, int data_fd, int map_fd) {
    fsti_cache_entry *entry = fsti_alloc_zeroed(1, sizeof *entry);
    char *path = fsti_string_copy(opening->folder.path, strlen(opening->folder.path));
    if (entry == NULL || path == NULL || !fsti_cache_pool_ready()) {
        fsti_free(entry);
        fsti_free(path);
        close(data_fd);
        close(map_fd);
        fail(opening, "there is no memory for the cache", ENOMEM);
        return NULL;
    }
    entry->object = fsti_object_ref(opening->object);
    entry->size_bytes = opening->size_bytes;
    entry->block_count = fsti_cache_block_count(opening->size_bytes);
    entry->data_fd = data_fd;
    entry->map_fd = map_fd;
    entry->owner = getpid();
    entry->folder = path;
    entry->is_required = opening->settings.is_required;
    if (opening->is_full) fsti_cache_break(entry, ENOSPC);
    futimens(map_fd, NULL); // the last use
    return entry;
}

/// Keeps what came with the first answer.
static void keep_first(fsti_cache_entry *entry) {
    size_t size;
    uint64_t digest = 0;
    cache_claim claim;
    const char *bytes = fsti_object_first(entry->object, &size);
    bool is_block = size == CACHE_BLOCK_BYTES || size == entry->size_bytes;
    if (!is_block || atomic_load(&entry->is_broken) || size == 0 ||
        !fsti_cache_claim(entry, 0, 1, &claim))
        return;
    int failed = fsti_cache_map_read(entry->map_fd, 0, 1, &digest);
    if (failed == 0 && digest == 0) {
        digest = fsti_cache_digest(bytes, size);
        failed = fsti_cache_pwrite(entry->data_fd, bytes, size, 0);
        if (failed == 0) failed = fsti_cache_map_write(entry->map_fd, 0, 1, &digest);
        if (failed == 0) entry->counts.written_bytes += size;
    }
    if (failed != 0) fsti_cache_break(entry, failed);
    fsti_cache_unclaim(entry, &claim);
}

static bool open_entry(cache_opening *opening, fsti_cached *out) {
    int data_fd = -1, map_fd = -1, failed = fsti_cache_folder_lock(&opening->folder);
    if (failed != 0) return fail(opening, "the cache can't be locked", failed);
    out->whole_fd = open_whole(opening);
    bool is_short = out->whole_fd < 0 && is_shortage(errno);
    if (is_short) fail(opening, "the cache can't be read", errno);
    bool is_open = out->whole_fd >= 0 || (!is_short && find_pair(opening, &data_fd, &map_fd));
    // Held before the folder is let go of, so that nobody can remove it in between.
    if (is_open && out->whole_fd < 0) (void)hold_file(data_fd, opening->size_bytes);
    fsti_cache_folder_unlock(&opening->folder);
    if (!is_open || out->whole_fd >= 0) return is_open;
    out->entry = make_entry(opening, data_fd, map_fd);
    if (out->entry == NULL) return false;
    write_ref(opening);
    keep_first(out->entry);
    fsti_cache_bring_rest(out->entry);
    if (fsti_cache_seal(out->entry, &opening->folder, opening->name))
        out->whole_fd = open_whole(opening);
    if (out->whole_fd >= 0) {
        fsti_cache_close(out->entry);
        out->entry = NULL;
    }
    return true;
}

/// From the version to what is there of it.
static bool use_cache(cache_opening *opening, fsti_cached *out) {
    opening->size_bytes = fsti_object_size(opening->object);
    if (opening->size_bytes == 0) return fail(opening, "it has no bytes", 0);
    char text[CACHE_NAME_BYTES + FSTI_VERSION_TEXT_BYTES];
    // By its size alone nobody can tell a replaced object.
    if (!fsti_object_has_version(opening->object))
        return fail(opening, "the server tells neither ETag nor date", EOPNOTSUPP);
    if (!fsti_object_version_text(opening->object, opening->version, sizeof opening->version))
        return fail(opening, "its version has no short name", 0);
    int used = snprintf(text, sizeof text, "%s\n%s", opening->address, opening->version);
    fsti_cache_name_of(text, (size_t)used, opening->name);
    out->whole_fd = open_whole(opening);
    if (out->whole_fd >= 0) {
        write_ref(opening);
        return true;
    }
    return open_entry(opening, out);
}

/// Says what came of it: an error where the cache is required.
static fst_status tell(const cache_opening *opening, bool is_used, fsti_cached *out,
                       fst_error *error) {
    if (is_used) {
        snprintf(out->words, sizeof out->words, "%s",
                 out->whole_fd >= 0 ? "an object that is whole in the cache on disk"
                                    : "an object of a server, kept in the cache on disk");
        return FST_OK;
    }
    snprintf(out->words, sizeof out->words, "an object of a server, not cached: %s%s%s",
             opening->failed, opening->failure == 0 ? "" : ": ",
             opening->failure == 0 ? "" : strerror(opening->failure));
    if (!opening->settings.is_required || opening->failure == 0) return FST_OK;
    fsti_error_place place = {
        .file = opening->folder.path, .os_errno = opening->failure, .byte_offset = FST_NO_OFFSET};
    fst_status status = fsti_error_errno(error, opening->failure, place.file, opening->failed);
    return fsti_error_set(error, status, place, "%s", opening->failed);
}

// ---- who asks first ----

/// Processes that begin at once would all ask for the first bytes: of an address of which nothing
/// is known one asks, and the others wait until it has said what there is. Returns a descriptor
/// that holds the turn, or -1: there is nothing to wait for, or no lock to be had.
static int take_turn(cache_opening *opening) {
    uint64_t begun_ns = fsti_now_ns(), place = 0;
    int fd = opening->known[0] != '\0' || fsti_net_is_offline()
                 ? -1
                 : fsti_cache_file_open(&opening->folder, "turns", O_RDWR | O_CREAT);
    memcpy(&place, opening->address, sizeof place);
    while (fd >= 0 && opening->known[0] == '\0') {
        struct flock turn = {.l_type = F_WRLCK,
                             .l_whence = SEEK_SET,
                             .l_start = (off_t)(place & INT32_MAX),
                             .l_len = 1};
        if (fcntl(fd, F_OFD_SETLK, &turn) == 0) {
            read_ref(opening); // who had the turn before may have left it
            return fd;
        }
        bool is_taken = errno == EAGAIN || errno == EACCES;
        if (!is_taken || fsti_now_ns() - begun_ns > TURN_PATIENCE_NS) break;
        usleep(TURN_PAUSE_US);
        read_ref(opening);
    }
    if (fd >= 0) close(fd);
    return -1;
}

/// Said, as by closing alone a child that was forked meanwhile would keep it.
static void give_turn(int fd) {
    if (fd < 0) return;
    struct flock all = {.l_type = F_UNLCK, .l_whence = SEEK_SET};
    (void)fcntl(fd, F_OFD_SETLK, &all);
    close(fd);
}

static fst_status open_by_cache(cache_opening *opening, const char *url, fsti_cached *out,
                                fst_error *error) {
    FST_TRY(fsti_object_make(url, &opening->object, error));
    out->object = opening->object;
    bool has_name = name_address(opening);
    if (has_name) read_ref(opening);
    int turn = has_name ? take_turn(opening) : -1;
    fst_status status = fsti_object_ask(opening->object, has_name ? opening->known : NULL, error);
    if (!has_name) fail(opening, "its address is too long", ENAMETOOLONG);
    bool is_used = status == FST_OK && has_name && use_cache(opening, out);
    give_turn(turn);
    return status == FST_OK ? tell(opening, is_used, out, error) : status;
}

static fst_status open_past_cache(const char *url, const fst_error *cause, fsti_cached *out,
                                  fst_error *error) {
    if (cause != NULL)
        snprintf(out->words, sizeof out->words, "an object of a server, not cached: %.110s",
                 cause->message);
    return fsti_object_open(url, &out->object, error);
}

fst_status fsti_cache_open(const char *url, fsti_cached *out, fst_error *error) {
    fst_error cause;
    *out = (fsti_cached){.whole_fd = -1};
    cache_opening *opening = fsti_alloc_zeroed(1, sizeof *opening);
    if (opening == NULL) return fsti_error_memory(error, sizeof *opening);
    fst_status status = fsti_cache_settings(NULL, &opening->settings, &cause);
    bool is_on = status == FST_OK && opening->settings.folder[0] != '\0';
    opening->folder.fd = opening->folder.lock_fd = -1;
    if (is_on)
        status = fsti_cache_folder_open(opening->settings.folder, true, &opening->folder, &cause);
    if (status != FST_OK && opening->settings.is_required) {
        if (error != NULL) *error = cause;
    } else if (status != FST_OK || !is_on) {
        status = open_past_cache(url, status == FST_OK ? NULL : &cause, out, error);
    } else {
        status = open_by_cache(opening, url, out, error);
    }
    if (status != FST_OK) {
        fsti_cache_close(out->entry);
        if (out->whole_fd >= 0) close(out->whole_fd);
        fsti_object_unref(out->object);
        *out = (fsti_cached){.whole_fd = -1};
    }
    fsti_cache_folder_close(&opening->folder);
    fsti_free(opening);
    return status;
}

void fsti_cache_forget(fsti_object *object) {
    char name[CACHE_FILE_NAME_BYTES];
    cache_opening *opening = fsti_alloc_zeroed(1, sizeof *opening);
    if (opening == NULL) return;
    opening->object = object;
    opening->folder.fd = opening->folder.lock_fd = -1;
    if (fsti_cache_settings(NULL, &opening->settings, NULL) == FST_OK &&
        opening->settings.folder[0] != '\0' && name_address(opening) &&
        fsti_cache_folder_open(opening->settings.folder, false, &opening->folder, NULL) == FST_OK) {
        fsti_cache_file_name(name, opening->address, ".ref");
        unlinkat(opening->folder.fd, name, 0);
    }
    fsti_cache_folder_close(&opening->folder);
    fsti_free(opening);
}

void fsti_cache_close(fsti_cache_entry *entry) {
    if (entry == NULL) return;
    fsti_cache_beat_end(entry);
    fsti_object_unref(entry->object);
    close(entry->data_fd);
    close(entry->map_fd);
    fsti_free(entry->folder);
    fsti_free(entry);
}

int fsti_cache_failure(const fsti_cache_entry *entry) {
    return atomic_load(&entry->is_broken) ? atomic_load(&entry->failure) : 0;
}

void fsti_cache_counts(fsti_cache_entry *entry, fsti_net_counts *out) {
    fsti_cache_hold();
    *out = entry->counts;
    fsti_cache_release();
}
