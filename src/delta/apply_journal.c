// SPDX-License-Identifier: Apache-2.0
/// Creates, opens and checks the journal of an update of files.
#include "apply_journal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "output/output.h"

#define MAGIC "fst-delta-jrn-5"
#define PAGE_BYTES ((uint64_t)4096)
#define TEXT_BYTES_MAX ((uint64_t)1 << 28)
#define BLOCKS_MAX ((uint64_t)1 << 31) // see journal_word()

/// Where the parts of the file begin.
typedef struct journal_layout {
    uint64_t text, files, records, hashes, old_hashes, words, blocks, end;
} journal_layout;

/// The counts and sizes of the head have limits, so that the sums do not overflow.
static journal_layout lay_out(const journal_head *head) {
    uint64_t slots = head->slot_count;
    journal_layout layout = {.text = fsti_align_up(sizeof(journal_head), PAGE_BYTES)};
    layout.files = layout.text + fsti_align_up(head->text_bytes, PAGE_BYTES);
    layout.records =
        layout.files + fsti_align_up(head->file_count * sizeof(journal_file), PAGE_BYTES);
    layout.hashes =
        layout.records + fsti_align_up(head->tensor_count * sizeof(journal_record), PAGE_BYTES);
    uint64_t hash_bytes = fsti_align_up(head->block_count * sizeof(uint64_t), PAGE_BYTES);
    layout.old_hashes = layout.hashes + hash_bytes;
    layout.words = layout.old_hashes + hash_bytes;
    layout.blocks =
        layout.words + fsti_align_up(slots * JOURNAL_WORD_STRIDE * sizeof(uint64_t), PAGE_BYTES);
    layout.end = layout.blocks + slots * JOURNAL_SLOT_BYTES;
    return layout;
}

static void read_boot_id(char out[40]) {
    memset(out, 0, 40);
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    if (read(fd, out, 36) < 0) out[0] = '\0';
    close(fd);
}

static void point_into(apply_journal *journal, char *map, const journal_layout *layout) {
    journal->map = map;
    journal->head = (journal_head *)(void *)map;
    journal->text = map + layout->text;
    journal->files = (journal_file *)(void *)(map + layout->files);
    journal->records = (journal_record *)(void *)(map + layout->records);
    journal->hashes = (uint64_t *)(void *)(map + layout->hashes);
    journal->old_hashes = (uint64_t *)(void *)(map + layout->old_hashes);
    journal->words = (atomic_uint_least64_t *)(void *)(map + layout->words);
    journal->blocks = (unsigned char *)map + layout->blocks;
}

/// Makes text number `index` of the journal: base version, new version, folders, names of files.
static fst_status make_text(const sync_folder *sync, const journal_plan *plan, size_t index,
                            char **out, fst_error *error) {
    const fst_delta *delta = plan->delta;
    size_t versions = plan->span.end - plan->span.first;
    if (index >= 2 && index < 2 + versions)
        return fsti_path_absolute(delta->versions[plan->span.first + index - 2].folder, out, error);
    const char *text =
        index == 0 ? delta->versions[plan->span.first].text.base
        : index == 1
            ? delta->versions[plan->span.end - 1].text.version
            : fsti_sync_name(sync, fsti_file_path(plan->base->files[index - 2 - versions].file));
    *out = fsti_string_copy(text, strlen(text));
    return *out == NULL ? fsti_error_memory(error, strlen(text)) : FST_OK;
}

/// Concatenates the texts of the journal, each ended by NUL. *out is from fsti_alloc.
static fst_status collect_texts(const sync_folder *sync, const journal_plan *plan, fsti_octets *out,
                                fst_error *error) {
    size_t count = 2 + plan->span.end - plan->span.first + plan->base->file_count;
    size_t capacity = 0, used = 0;
    unsigned char *all = NULL;
    fst_status status = FST_OK;
    for (size_t i = 0; i < count && status == FST_OK; i++) {
        char *text = NULL;
        status = make_text(sync, plan, i, &text, error);
        size_t size = status == FST_OK ? strlen(text) + 1 : 0;
        for (size_t k = 0; k < size && status == FST_OK; k++) {
            if (!fsti_array_reserve((void **)&all, &capacity, used, 1, TEXT_BYTES_MAX))
                status = fsti_error_memory(error, size);
            else
                all[used++] = (unsigned char)text[k];
        }
        fsti_free(text);
    }
    if (status != FST_OK) fsti_free(all);
    *out = (fsti_octets){status == FST_OK ? all : NULL, used};
    return status;
}

/// Creates and maps a file with all its blocks allocated. A full disk is an error here, because a
/// later store to the mapping would end the process (SIGBUS).
static fst_status map_new(const char *path, uint64_t size, char **map, fst_error *error) {
    (void)unlink(path);
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (fd < 0) return fsti_error_errno(error, errno, path, "creating the journal");
    int failure = posix_fallocate(fd, 0, (off_t)size);
    fst_status status =
        failure == 0 ? FST_OK : fsti_error_errno(error, failure, path, "reserving the journal");
    *map = MAP_FAILED;
    if (status == FST_OK) {
        *map = mmap(NULL, (size_t)size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (*map == MAP_FAILED)
            status = fsti_error_errno(error, errno, path, "mapping the journal");
    }
    close(fd);
    if (status != FST_OK) (void)unlink(path);
    return status;
}

static fst_status open_undo(const sync_folder *sync, int flags, apply_journal *journal,
                            fst_error *error) {
    journal->undo_path = sync->undo_path;
    journal->undo_fd =
        open(sync->undo_path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | flags, 0666);
    if (journal->undo_fd >= 0) return FST_OK;
    return fsti_error_errno(error, errno, sync->undo_path, "opening the undo file");
}

static void fill_head(journal_head *head, const journal_plan *plan) {
    memcpy(head->magic, MAGIC, sizeof head->magic);
    head->order_hash = plan->order_hash;
    head->had_state = plan->had_state;
    head->version_count = (uint32_t)(plan->span.end - plan->span.first);
    read_boot_id(head->boot_id);
    for (size_t i = 0; i < head->version_count; i++)
        memcpy(head->index_digests[i], plan->delta->versions[plan->span.first + i].index_digest,
               16);
}

/// Records which files the update is about.
static fst_status fill_files(journal_file *files, const journal_plan *plan, fst_error *error) {
    for (size_t i = 0; i < plan->base->file_count; i++) {
        const fsti_file *file = plan->base->files[i].file;
        struct stat info;
        int fd = plan->descriptors[i] >= 0 ? plan->descriptors[i] : fsti_file_identity(file);
        if (fstat(fd, &info) != 0)
            return fsti_error_errno(error, errno, fsti_file_path(file), "examining the file");
        files[i] = (journal_file){.device = info.st_dev,
                                  .inode = info.st_ino,
                                  .size_bytes = (uint64_t)info.st_size,
                                  .modified_ns = fsti_sync_modified_ns(&info)};
    }
    return FST_OK;
}

/// Fills the mapped journal before it gets its name.
static fst_status fill(apply_journal *journal, const sync_folder *sync, const journal_head *sizes,
                       const journal_plan *plan, fst_error *error) {
    journal->head->map_bytes = lay_out(sizes).end;
    journal->head->text_bytes = sizes->text_bytes;
    journal->head->file_count = sizes->file_count;
    journal->head->tensor_count = sizes->tensor_count;
    journal->head->block_count = sizes->block_count;
    journal->head->slot_count = sizes->slot_count;
    fill_head(journal->head, plan);
    FST_TRY(fill_files(journal->files, plan, error));
    return open_undo(sync, O_TRUNC, journal, error);
}

fst_status fsti_journal_create(const sync_folder *sync, const journal_plan *plan,
                               apply_journal *out, fst_error *error) {
    fsti_octets text;
    char *map = NULL;
    *out = (apply_journal){.undo_fd = -1};
    FST_TRY(collect_texts(sync, plan, &text, error));
    journal_head sizes = {.text_bytes = text.size,
                          .file_count = plan->base->file_count,
                          .tensor_count = plan->tensor_count,
                          .block_count = plan->block_count,
                          .slot_count = plan->slot_count};
    journal_layout layout = lay_out(&sizes);
    char *temporary = fsti_location_join(sync->journal_path, ".tmp");
    fst_status status = temporary == NULL ? fsti_error_memory(error, 64) : FST_OK;
    if (status == FST_OK) status = map_new(temporary, layout.end, &map, error);
    if (status == FST_OK && map != NULL) {
        point_into(out, map, &layout);
        if (text.bytes != NULL) memcpy(map + layout.text, text.bytes, text.size);
        status = fill(out, sync, &sizes, plan, error);
        if (status == FST_OK && rename(temporary, sync->journal_path) != 0)
            status = fsti_error_errno(error, errno, sync->journal_path, "renaming the journal");
        if (status != FST_OK && temporary != NULL) (void)unlink(temporary);
    }
    fsti_free(temporary);
    fsti_free(text.bytes);
    if (status != FST_OK) fsti_journal_close(out);
    return status;
}

static fst_status refuse_journal(const sync_folder *sync, fst_status status, const char *what,
                                 fst_error *error) {
    fsti_error_location location = {.file = sync->journal_path, .byte_offset = FST_NO_OFFSET};
    return fsti_error_set(error, status, location, "%s", what);
}

/// Whether the sizes in the head add up to the file's size, so that no access lies outside of the
/// mapping.
static bool head_fits(const journal_head *head, uint64_t file_bytes) {
    if (memcmp(head->magic, MAGIC, sizeof head->magic) != 0 || head->map_bytes != file_bytes)
        return false;
    if (head->text_bytes > TEXT_BYTES_MAX || head->tensor_count > UINT32_MAX ||
        head->file_count > UINT32_MAX || head->block_count > BLOCKS_MAX || head->slot_count == 0 ||
        head->slot_count > DELTA_THREADS_MAX || head->version_count == 0 ||
        head->version_count > DELTA_FOLD_MAX)
        return false;
    return lay_out(head).end == file_bytes;
}

static bool texts_fit(const apply_journal *journal) {
    size_t count = 0;
    for (uint64_t i = 0; i < journal->head->text_bytes; i++) count += journal->text[i] == '\0';
    return count == 2 + journal->head->version_count + journal->head->file_count;
}

static fst_status check_open(const sync_folder *sync, apply_journal *out, uint64_t file_bytes,
                             fst_error *error) {
    char boot_id[40];
    journal_head *head = out->head;
    if (!head_fits(head, file_bytes))
        return refuse_journal(sync, FST_E_CORRUPT,
                              "this is not a journal of this version of fastsafetensors; copy the "
                              "checkpoint again and delete .weight_sync",
                              error);
    journal_layout layout = lay_out(head);
    point_into(out, out->map, &layout);
    if (!texts_fit(out))
        return refuse_journal(sync, FST_E_CORRUPT, "the journal is damaged", error);
    read_boot_id(boot_id);
    if (memcmp(boot_id, head->boot_id, sizeof boot_id) != 0)
        return refuse_journal(sync, FST_E_VERSION,
                              "the machine was restarted while a delta was being applied, so the "
                              "files are of no known version; copy the checkpoint again and delete "
                              ".weight_sync",
                              error);
    return open_undo(sync, 0, out, error);
}

fst_status fsti_journal_open(const sync_folder *sync, apply_journal *out, fst_error *error) {
    struct stat info;
    *out = (apply_journal){.undo_fd = -1};
    int fd = open(sync->journal_path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0 && errno == ENOENT) return FST_OK;
    if (fd < 0) return fsti_error_errno(error, errno, sync->journal_path, "opening the journal");
    fst_status status = FST_OK;
    char *map = MAP_FAILED;
    if (fstat(fd, &info) != 0)
        status = fsti_error_errno(error, errno, sync->journal_path, "examining the journal");
    else if ((uint64_t)info.st_size < sizeof(journal_head))
        status = refuse_journal(sync, FST_E_CORRUPT, "the journal is cut off", error);
    else
        map = mmap(NULL, (size_t)info.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (status == FST_OK && map == MAP_FAILED)
        status = fsti_error_errno(error, errno, sync->journal_path, "mapping the journal");
    close(fd);
    FST_TRY(status);
    out->map = map;
    out->head = (journal_head *)(void *)map;
    status = check_open(sync, out, (uint64_t)info.st_size, error);
    if (status != FST_OK) {
        munmap(map, (size_t)info.st_size);
        *out = (apply_journal){.undo_fd = -1};
    }
    return status;
}

void fsti_journal_close(apply_journal *journal) {
    if (journal->undo_fd >= 0) close(journal->undo_fd);
    if (journal->map != NULL) munmap(journal->map, (size_t)journal->head->map_bytes);
    *journal = (apply_journal){.undo_fd = -1};
}

const char *fsti_journal_text(const apply_journal *journal, size_t index) {
    const char *at = journal->text;
    for (; index > 0; index--) at += strlen(at) + 1;
    return at;
}

fst_status fsti_journal_refuse_file(const apply_journal *journal, const char *path,
                                    fst_error *error) {
    fsti_error_location location = {.file = path, .byte_offset = FST_NO_OFFSET};
    return fsti_error_set(error, FST_E_FILE_CHANGED, location,
                          "the file was replaced or changed after the update to version %s "
                          "had been interrupted, so that can be neither finished nor undone. No "
                          "file was changed now. Copy the checkpoint again unless its files are "
                          "complete, and delete .weight_sync",
                          fsti_journal_text(journal, 1));
}

static fst_status check_file(const sync_folder *sync, const apply_journal *journal, size_t index,
                             const char *name, fst_error *error) {
    journal_file *file = &journal->files[index];
    struct stat info;
    // The name is from a file, so it must not lead out of the folder.
    if (!fsti_path_stays_inside(name, strlen(name)))
        return refuse_journal(sync, FST_E_CORRUPT, "the journal is damaged", error);
    char *start = fsti_location_join(sync->checkpoint, "/");
    char *path = start == NULL ? NULL : fsti_location_join(start, name);
    fsti_free(start);
    if (path == NULL) return fsti_error_memory(error, strlen(name));
    bool is_same = stat(path, &info) == 0 && info.st_dev == file->device &&
                   info.st_ino == file->inode && (uint64_t)info.st_size == file->size_bytes;
    if (is_same && atomic_load(&file->is_written_to) == 0)
        is_same = fsti_sync_modified_ns(&info) == file->modified_ns;
    fst_status status = is_same ? FST_OK : fsti_journal_refuse_file(journal, path, error);
    fsti_free(path);
    return status;
}

fst_status fsti_journal_check_files(const sync_folder *sync, const apply_journal *journal,
                                    fst_error *error) {
    const char *name = fsti_journal_text(journal, 2 + (size_t)journal->head->version_count);
    for (size_t i = 0; i < journal->head->file_count; i++) {
        FST_TRY(check_file(sync, journal, i, name, error));
        name += strlen(name) + 1;
    }
    return FST_OK;
}

uint64_t fsti_journal_hash(const void *bytes, size_t size) {
    uint64_t words[2];
    fsti_digest_xxh3.hash(bytes, size, (unsigned char *)words);
    return words[0];
}
