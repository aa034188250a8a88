// SPDX-License-Identifier: Apache-2.0
/// Opens the cache entry of a URL.
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "cache_private.h"

/// A file that is deleted between lookup and lock is looked up again.
#define OPEN_TRIES_MAX 8
/// Processes wait at most this long for the one that resolves a URL, because the server may be
/// slow. Then they send their own requests.
#define RESOLVE_TIMEOUT_NS ((uint64_t)3000000000)
/// Pause between attempts to lock the URL.
#define RESOLVE_PAUSE_US 3000
#define ADDRESS_BYTES_MAX 16384u

/// The state of one open call.
typedef struct cache_opening {
    cache_folder folder;
    cache_settings settings;
    fsti_object *object;
    char address[CACHE_NAME_BYTES];      ///< name of the file with the URL's reference
    char known[FSTI_VERSION_TEXT_BYTES]; ///< the version stored there; "": unknown
    char version[FSTI_VERSION_TEXT_BYTES];
    char name[CACHE_NAME_BYTES];
    uint64_t size_bytes;
    const char *failed; ///< the operation that failed, with its errno
    int failure;
    bool is_full; ///< cached blocks are used, but there is no space for more
} cache_opening;

// ---- the version that a URL had last ----

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

/// Whether the lines of a stored version may stand in a request.
static bool is_version(const char *text) {
    for (; *text != '\0'; text++)
        if (iscntrl((unsigned char)*text) && *text != '\n') return false;
    return true;
}

/// Reads the stored version into opening->known; "" if unknown.
static void read_ref(cache_opening *opening) {
    char name[CACHE_FILE_NAME_BYTES], text[sizeof CACHE_REF_MAGIC + 8 + FSTI_VERSION_TEXT_BYTES];
    opening->known[0] = '\0';
    fsti_cache_file_name(name, opening->address, ".ref");
    int fd = fsti_cache_file_open(&opening->folder, name, O_RDONLY);
    if (fd < 0) return;
    ssize_t got = pread(fd, text, sizeof text - 1, 0);
    close(fd);
    const size_t begin = sizeof CACHE_REF_MAGIC - 1 + sizeof(uint64_t);
    if (got <= (ssize_t)begin || memcmp(text, CACHE_REF_MAGIC, sizeof CACHE_REF_MAGIC - 1) != 0)
        return;
    text[got] = '\0';
    uint64_t check;
    memcpy(&check, text + sizeof CACHE_REF_MAGIC - 1, sizeof check);
    size_t size = strlen(text + begin);
    bool is_valid = check == ref_check(text + begin) && is_version(text + begin);
    if (size < sizeof opening->known && is_valid) memcpy(opening->known, text + begin, size + 1);
}

/// Stores the URL's version. Without it, the next open sends one more request. Another thread of
/// this process may write the same temporary file at the same time; a mixture of both fails the
/// check of read_ref(). The check is in the CPU's byte order, so a machine with another order
/// ignores the file.
static void write_ref(const cache_opening *opening) {
    char name[CACHE_FILE_NAME_BYTES], temporary[CACHE_FILE_NAME_BYTES + 16];
    char text[sizeof CACHE_REF_MAGIC + 8 + FSTI_VERSION_TEXT_BYTES] = CACHE_REF_MAGIC;
    if (strcmp(opening->known, opening->version) == 0) return;
    uint64_t check = ref_check(opening->version);
    size_t size = sizeof CACHE_REF_MAGIC - 1, version_size = strlen(opening->version);
    memcpy(text + size, &check, sizeof check);
    memcpy(text + size + sizeof check, opening->version, version_size);
    size += sizeof check + version_size;
    fsti_cache_file_name(name, opening->address, ".ref");
    snprintf(temporary, sizeof temporary, "%s.%d.tmp", opening->address, (int)getpid());
    unlinkat(opening->folder.fd, temporary, 0);
    int fd = fsti_cache_file_open(&opening->folder, temporary, O_WRONLY | O_CREAT | O_EXCL);
    if (fd < 0) return;
    bool is_written = fsti_write_at(fd, text, size, 0) == 0;
    close(fd);
    if (!is_written || renameat(opening->folder.fd, temporary, opening->folder.fd, name) != 0)
        unlinkat(opening->folder.fd, temporary, 0);
}

// ---- files of a version ----

/// Records why the cache cannot be used for this object.
static bool fail(cache_opening *opening, const char *what, int failure) {
    opening->failed = what;
    opening->failure = failure;
    return false;
}

/// Takes a shared lock, which prevents eviction. False if the file was deleted meanwhile, or has
/// another size.
static bool lock_shared(int fd, uint64_t size_bytes) {
    struct stat info;
    while (flock(fd, LOCK_SH) != 0 && errno == EINTR) {
    }
    // Without lock support, eviction cannot lock it either. A deleted file stays readable while it
    // is open.
    return fstat(fd, &info) == 0 && info.st_nlink == 1 && (uint64_t)info.st_size == size_bytes;
}

/// Whether a complete file starts with the bytes that the server has just sent, if any. See
/// has_first_block().
static bool first_bytes_match(const cache_opening *opening, int fd) {
    size_t size;
    const char *bytes = fsti_object_first(opening->object, &size);
    char kept[4096];
    for (size_t at = 0, some; at < size; at += some) {
        some = fsti_min(size - at, sizeof kept);
        if (fsti_read_at(fd, kept, some, at) != 0) return true; // the load will report the error
        if (memcmp(kept, bytes + at, some) != 0) return false;
    }
    return true;
}

/// Opens and locks the file of a complete object; -1 and an errno if it is missing.
static int open_complete(const cache_opening *opening) {
    char name[CACHE_FILE_NAME_BYTES];
    fsti_cache_file_name(name, opening->name, ".data");
    for (int tries = 0; tries < OPEN_TRIES_MAX; tries++) {
        int fd = fsti_cache_file_open(&opening->folder, name, O_RDONLY);
        if (fd < 0) return -1;
        if (lock_shared(fd, opening->size_bytes) && first_bytes_match(opening, fd)) {
            fsti_cache_file_name(name, opening->name, ".map");
            utimensat(opening->folder.fd, name, NULL,
                      AT_SYMLINK_NOFOLLOW); // update the time of last use
            return fd;
        }
        close(fd);
    }
    errno = ESTALE;
    return -1;
}

/// Whether an error is about resources, not about the file, which is then kept.
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

/// Opens both files of a partial version. False if one is missing or they do not match.
static bool open_pair(const cache_opening *opening, int *data_fd, int *map_fd) {
    char name[CACHE_FILE_NAME_BYTES];
    fsti_cache_file_name(name, opening->name, ".part");
    *data_fd = fsti_cache_file_open(&opening->folder, name, O_RDWR);
    fsti_cache_file_name(name, opening->name, ".map");
    *map_fd = *data_fd < 0 ? -1 : fsti_cache_file_open(&opening->folder, name, O_RDWR);
    if (*map_fd >= 0) return true;
    int failed = errno;
    if (*data_fd >= 0) close(*data_fd);
    *data_fd = -1;
    errno = failed;
    return false;
}

static bool is_valid_pair(const cache_opening *opening, int data_fd, int map_fd) {
    cache_map_header head;
    struct stat data, map;
    uint64_t map_bytes =
        CACHE_MAP_HEADER_BYTES + sizeof(uint64_t) * fsti_cache_block_count(opening->size_bytes);
    return fstat(data_fd, &data) == 0 && (uint64_t)data.st_size == opening->size_bytes &&
           fstat(map_fd, &map) == 0 && (uint64_t)map.st_size == map_bytes &&
           fsti_cache_map_read_header(map_fd, &head) == 0 &&
           head.size_bytes == opening->size_bytes && strcmp(head.version, opening->version) == 0;
}

static int fill_map(const cache_opening *opening, int map_fd) {
    cache_map_header head = {.size_bytes = opening->size_bytes};
    uint64_t map_bytes =
        CACHE_MAP_HEADER_BYTES + sizeof(uint64_t) * fsti_cache_block_count(opening->size_bytes);
    snprintf(head.version, sizeof head.version, "%s", opening->version);
    snprintf(head.address, sizeof head.address, "%s", fsti_object_name(opening->object));
    if (ftruncate(map_fd, (off_t)map_bytes) != 0) return errno;
    return fsti_cache_map_write_header(map_fd, &head);
}

/// Creates both files: the map first, because it shows that the other one is the cache's. Returns 0
/// or an errno.
static int create_pair(const cache_opening *opening, int *data_fd, int *map_fd) {
    const int flags = O_RDWR | O_CREAT | O_EXCL;
    char name[CACHE_FILE_NAME_BYTES];
    fsti_cache_file_name(name, opening->name, ".map");
    *map_fd = fsti_cache_file_open(&opening->folder, name, flags);
    if (*map_fd < 0) return errno;
    int failed = fill_map(opening, *map_fd);
    fsti_cache_file_name(name, opening->name, ".part");
    *data_fd = failed != 0 ? -1 : fsti_cache_file_open(&opening->folder, name, flags);
    if (failed == 0 && (*data_fd < 0 || ftruncate(*data_fd, (off_t)opening->size_bytes) != 0))
        failed = errno;
    if (failed == 0) return 0;
    if (*data_fd >= 0) close(*data_fd);
    close(*map_fd);
    return failed;
}

/// Makes a new pair. The folder must be locked.
static bool make_pair(cache_opening *opening, int *data_fd, int *map_fd) {
    remove_files(opening); // incomplete, or of another version
    if (!fsti_cache_evict(&opening->folder, opening->size_bytes, opening->settings.bytes_max))
        return fail(opening, "it does not fit in the cache", ENOSPC);
    int failed = create_pair(opening, data_fd, map_fd);
    if (failed == 0) return true;
    remove_files(opening);
    return fail(opening, "the cache can't be written to", failed);
}

/// Whether the map's first block has the bytes that the server has just sent, if any. Two versions
/// may have the same date (one-second resolution) or a reused ETag, but not the same bytes.
static bool has_first_block(const cache_opening *opening, int map_fd) {
    size_t size;
    uint64_t digest = 0;
    const char *bytes = fsti_object_first(opening->object, &size);
    if (size != fsti_min(CACHE_BLOCK_BYTES, opening->size_bytes)) return true;
    if (fsti_cache_map_read(map_fd, 0, 1, &digest) != 0 || digest == 0) return true;
    return digest == fsti_cache_digest(bytes, size);
}

/// Reserves space for a partial object. It counts with its full size and is not evicted, because it
/// is locked. Without space, only its cached blocks are used.
static bool reserve_space(cache_opening *opening, int data_fd) {
    struct stat info;
    bool is_locked = lock_shared(data_fd, opening->size_bytes);
    bool grows = fstat(data_fd, &info) == 0 && (uint64_t)info.st_blocks * 512 < opening->size_bytes;
    if (!is_locked || !grows || fsti_http_is_offline()) return true;
    return fsti_cache_evict(&opening->folder, 0, opening->settings.bytes_max);
}

static bool find_pair(cache_opening *opening, int *data_fd, int *map_fd) {
    if (open_pair(opening, data_fd, map_fd)) {
        bool is_valid =
            is_valid_pair(opening, *data_fd, *map_fd) && has_first_block(opening, *map_fd);
        opening->is_full = is_valid && !reserve_space(opening, *data_fd);
        if (is_valid && (!opening->is_full || !opening->settings.is_required)) return true;
        close(*data_fd);
        close(*map_fd);
        if (is_valid) return fail(opening, "it does not fit in the cache", ENOSPC);
    } else if (is_shortage(errno)) {
        return fail(opening, "the cache can't be read", errno);
    }
    return make_pair(opening, data_fd, map_fd);
}

static fsti_cache_entry *make_entry(cache_opening *opening, int data_fd, int map_fd) {
    fsti_cache_entry *entry = fsti_alloc_zeroed(1, sizeof *entry);
    char *path = fsti_string_copy(opening->folder.path, strlen(opening->folder.path));
    bool has_memory = entry != NULL && path != NULL;
    if (!has_memory || !fsti_cache_pool_ready()) {
        fsti_free(entry);
        fsti_free(path);
        close(data_fd);
        close(map_fd);
        fail(opening,
             has_memory ? "a thread for the cache could not be started" : "no memory for the cache",
             has_memory ? EAGAIN : ENOMEM);
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
    futimens(map_fd, NULL); // update the time of last use
    return entry;
}

/// Stores the bytes that came with the first response.
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
        failed = fsti_write_at(entry->data_fd, bytes, size, 0);
        if (failed == 0) failed = fsti_cache_map_write(entry->map_fd, 0, 1, &digest);
        if (failed == 0) entry->counts.written_bytes += size;
    }
    if (failed != 0) fsti_cache_break(entry, failed);
    fsti_cache_unclaim(entry, &claim);
}

static bool open_entry(cache_opening *opening, fsti_cached *out) {
    int data_fd = -1, map_fd = -1, failed = fsti_cache_folder_lock(&opening->folder);
    if (failed != 0) return fail(opening, "the cache can't be locked", failed);
    out->complete_fd = open_complete(opening);
    bool is_short = out->complete_fd < 0 && is_shortage(errno);
    if (is_short) fail(opening, "the cache can't be read", errno);
    bool is_open = out->complete_fd >= 0 || (!is_short && find_pair(opening, &data_fd, &map_fd));
    // Lock before unlocking the folder, so that it cannot be evicted in between.
    if (is_open && out->complete_fd < 0) (void)lock_shared(data_fd, opening->size_bytes);
    fsti_cache_folder_unlock(&opening->folder);
    if (!is_open || out->complete_fd >= 0) return is_open;
    out->entry = make_entry(opening, data_fd, map_fd);
    if (out->entry == NULL) return false;
    write_ref(opening);
    keep_first(out->entry);
    fsti_cache_backfill(out->entry);
    if (fsti_cache_seal(out->entry, &opening->folder, opening->name))
        out->complete_fd = open_complete(opening);
    if (out->complete_fd >= 0) {
        fsti_cache_close(out->entry);
        out->entry = NULL;
    }
    return true;
}

/// Opens the cached files of the object's version.
static bool use_cache(cache_opening *opening, fsti_cached *out) {
    opening->size_bytes = fsti_object_size(opening->object);
    if (opening->size_bytes == 0) return fail(opening, "the object is empty", 0);
    char text[CACHE_NAME_BYTES + FSTI_VERSION_TEXT_BYTES];
    // A size alone does not identify a version.
    if (!fsti_object_has_version(opening->object))
        return fail(opening,
                    "the server sends neither a strong ETag nor a Last-Modified a minute old",
                    EOPNOTSUPP);
    if (!fsti_object_version_text(opening->object, opening->version, sizeof opening->version))
        return fail(opening, "its version identifier is too long", 0);
    int used = snprintf(text, sizeof text, "%s\n%s", opening->address, opening->version);
    fsti_cache_name_of(text, (size_t)used, opening->name);
    out->complete_fd = open_complete(opening);
    if (out->complete_fd >= 0) {
        write_ref(opening);
        return true;
    }
    return open_entry(opening, out);
}

/// Reports the result: an error if the cache is required, else a warning.
static fst_status report_outcome(const cache_opening *opening, bool is_used, fsti_cached *out,
                                 fst_error *error) {
    if (is_used) {
        snprintf(out->words, sizeof out->words, "%s",
                 out->complete_fd >= 0 ? "a remote object, completely in the disk cache"
                                       : "a remote object, cached on disk");
        return FST_OK;
    }
    snprintf(out->words, sizeof out->words, "a remote object, not cached: %s%s%s", opening->failed,
             opening->failure == 0 ? "" : ": ",
             opening->failure == 0 ? "" : strerror(opening->failure));
    if (opening->failure == 0) return FST_OK;
    // Missing versions and long URLs are not failures of the folder.
    bool is_folder_failure = opening->failure != EOPNOTSUPP && opening->failure != ENAMETOOLONG;
    if (!opening->settings.is_required && is_folder_failure)
        fsti_cache_warn(opening->folder.path, opening->failed, opening->failure);
    if (!opening->settings.is_required) return FST_OK;
    fsti_error_location location = {
        .file = opening->folder.path, .os_errno = opening->failure, .byte_offset = FST_NO_OFFSET};
    fst_status status = fsti_error_errno(error, opening->failure, location.file, opening->failed);
    return fsti_error_set(error, status, location, "%s", opening->failed);
}

// ---- one process resolves an unknown URL ----

/// Processes that start together would all request the first bytes. For an unknown URL one process
/// does, and the others wait until it has stored the result. Returns a locked descriptor, or -1 if
/// no wait is needed or locks do not work.
///
/// The lock is one byte of a file, at an offset derived from the URL's name. Two URLs with the same
/// offset only wait for each other. It belongs to the open file, so it also excludes other threads
/// of this process.
static int lock_url(cache_opening *opening) {
    uint64_t begun_ns = fsti_now_ns(), lock_offset = 0;
    int fd = opening->known[0] != '\0' || fsti_http_is_offline()
                 ? -1
                 : fsti_cache_file_open(&opening->folder, "turns", O_RDWR | O_CREAT);
    memcpy(&lock_offset, opening->address, sizeof lock_offset);
    while (fd >= 0 && opening->known[0] == '\0') {
        struct flock byte = {.l_type = F_WRLCK,
                             .l_whence = SEEK_SET,
                             .l_start = (off_t)(lock_offset & INT32_MAX),
                             .l_len = 1};
        if (fcntl(fd, F_OFD_SETLK, &byte) == 0) {
            read_ref(opening); // the previous process may have stored it
            return fd;
        }
        bool is_taken = errno == EAGAIN || errno == EACCES;
        if (!is_taken || fsti_now_ns() - begun_ns > RESOLVE_TIMEOUT_NS) break;
        usleep(RESOLVE_PAUSE_US);
        read_ref(opening);
    }
    if (fd >= 0) close(fd);
    return -1;
}

/// Unlock explicitly: after a fork, the child's copy of the descriptor would keep the lock.
static void unlock_url(int fd) {
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
    int lock_fd = has_name ? lock_url(opening) : -1;
    fst_status status =
        fsti_object_fetch_first(opening->object, has_name ? opening->known : NULL, error);
    if (!has_name) fail(opening, "its URL is too long", ENAMETOOLONG);
    bool is_used = status == FST_OK && has_name && use_cache(opening, out);
    unlock_url(lock_fd);
    return status == FST_OK ? report_outcome(opening, is_used, out, error) : status;
}

static fst_status open_without_cache(const char *url, const fst_error *cause, fsti_cached *out,
                                     fst_error *error) {
    if (cause != NULL)
        snprintf(out->words, sizeof out->words, "a remote object, not cached: %.110s",
                 cause->message);
    return fsti_object_open(url, &out->object, error);
}

fst_status fsti_cache_open(const char *url, fsti_cached *out, fst_error *error) {
    fst_error cause;
    *out = (fsti_cached){.complete_fd = -1};
    cache_opening *opening = fsti_alloc_zeroed(1, sizeof *opening);
    if (opening == NULL) return fsti_error_memory(error, sizeof *opening);
    fsti_http_read_environment();
    fst_status status = fsti_cache_settings(NULL, &opening->settings, &cause);
    bool is_on = status == FST_OK && opening->settings.folder[0] != '\0';
    opening->folder.fd = opening->folder.lock_fd = -1;
    if (is_on)
        status = fsti_cache_folder_open(opening->settings.folder, true, &opening->folder, &cause);
    if (status != FST_OK && opening->settings.is_required) {
        if (error != NULL) *error = cause;
    } else if (status != FST_OK || !is_on) {
        if (status != FST_OK) fsti_cache_warn(opening->settings.folder, cause.message, 0);
        status = open_without_cache(url, status == FST_OK ? NULL : &cause, out, error);
    } else {
        status = open_by_cache(opening, url, out, error);
    }
    if (status != FST_OK) {
        fsti_cache_close(out->entry);
        if (out->complete_fd >= 0) close(out->complete_fd);
        fsti_object_unref(out->object);
        *out = (fsti_cached){.complete_fd = -1};
    }
    fsti_cache_folder_close(&opening->folder);
    fsti_free(opening);
    return status;
}

void fsti_cache_invalidate(fsti_object *object) {
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
    fsti_cache_heartbeat_end(entry);
    fsti_object_unref(entry->object);
    close(entry->data_fd);
    close(entry->map_fd);
    fsti_free(entry->folder);
    fsti_free(entry);
}

int fsti_cache_failure(const fsti_cache_entry *entry) {
    return atomic_load(&entry->is_broken) ? atomic_load(&entry->failure) : 0;
}

void fsti_cache_counts(fsti_cache_entry *entry, fsti_http_counts *out) {
    fsti_cache_lock();
    *out = entry->counts;
    fsti_cache_unlock();
}

void fsti_cache_warn_failure(const fsti_cache_entry *entry) {
    int failure = fsti_cache_failure(entry);
    if (failure != 0) fsti_cache_warn(entry->folder, "a write failed", failure);
}
