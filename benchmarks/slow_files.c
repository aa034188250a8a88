// SPDX-License-Identifier: Apache-2.0
/// A file system that simulates a distant one: it shows the files of a folder, read-only, and lets
/// a time pass before it answers a read. Many reads are answered at once, as by a server. For
/// node_loads.py; needs root and /dev/fuse:
///
///     slow_files FOLDER MOUNT_POINT DELAY_MS
///
/// It prints "ready", and runs until it is unmounted. The number of used blocks that statfs()
/// reports is that of all blocks of 4096 bytes that were read. The messages are those of
/// linux/fuse.h.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define FILES_MAX 64
#define THREADS 64
#define READ_BYTES ((size_t)1 << 20)
#define ROOT_NODE 1u
#define VALID_S 3600

/// The file with the node number i + 2.
typedef struct shown_file {
    char name[256];
    int fd;
    struct stat info;
} shown_file;

static shown_file files[FILES_MAX];
static size_t file_count;
static int device;
static struct timespec delay;
static atomic_uint_fast64_t bytes_read;

static void must(int good, const char *what) {
    if (good) return;
    perror(what);
    exit(1);
}

static void list_files(const char *folder) {
    DIR *dir = opendir(folder);
    must(dir != NULL, folder);
    for (const struct dirent *entry; (entry = readdir(dir)) != NULL && file_count < FILES_MAX;) {
        shown_file *file = &files[file_count];
        if (strstr(entry->d_name, ".safetensors") == NULL) continue;
        snprintf(file->name, sizeof file->name, "%s", entry->d_name);
        file->fd = openat(dirfd(dir), entry->d_name, O_RDONLY | O_CLOEXEC);
        must(file->fd >= 0 && fstat(file->fd, &file->info) == 0, entry->d_name);
        file_count++;
    }
    closedir(dir);
}

static void answer(uint64_t unique, int os_errno, const void *data, size_t size) {
    struct fuse_out_header head = {.unique = unique, .error = -os_errno};
    if (os_errno != 0) size = 0;
    head.len = (uint32_t)(sizeof head + size);
    struct iovec parts[2] = {{&head, sizeof head}, {(void *)(uintptr_t)data, size}};
    (void)!writev(device, parts, size > 0 ? 2 : 1);
}

static shown_file *file_of(uint64_t node) {
    return node > ROOT_NODE && node - 2 < file_count ? &files[node - 2] : NULL;
}

static void fill_attributes(uint64_t node, struct fuse_attr *out) {
    const shown_file *file = file_of(node);
    *out = (struct fuse_attr){.ino = node, .mode = S_IFDIR | 0755, .nlink = 2, .blksize = 4096};
    if (file == NULL) return;
    out->mode = S_IFREG | 0444;
    out->nlink = 1;
    out->size = (uint64_t)file->info.st_size;
    out->blocks = (uint64_t)file->info.st_blocks;
    out->mtime = (uint64_t)file->info.st_mtim.tv_sec;
    out->ctime = (uint64_t)file->info.st_ctim.tv_sec;
}

static void look_up(uint64_t unique, const char *name) {
    for (size_t i = 0; i < file_count; i++) {
        if (strcmp(files[i].name, name) != 0) continue;
        struct fuse_entry_out out = {
            .nodeid = i + 2, .entry_valid = VALID_S, .attr_valid = VALID_S};
        fill_attributes(i + 2, &out.attr);
        answer(unique, 0, &out, sizeof out);
        return;
    }
    answer(unique, ENOENT, NULL, 0);
}

static void start(uint64_t unique, const struct fuse_init_in *in) {
    struct fuse_init_out out = {.major = FUSE_KERNEL_VERSION,
                                .minor = 31,
                                .max_readahead = in->max_readahead,
                                .flags = FUSE_ASYNC_READ | FUSE_ASYNC_DIO | FUSE_MAX_PAGES |
                                         FUSE_PARALLEL_DIROPS,
                                .max_background = THREADS,
                                .congestion_threshold = THREADS,
                                .max_write = 4096,
                                .max_pages = (uint16_t)(READ_BYTES / 4096)};
    answer(unique, 0, &out, sizeof out);
}

static void read_file(uint64_t unique, uint64_t node, const struct fuse_read_in *in, char *buffer) {
    const shown_file *file = file_of(node);
    size_t size = in->size < READ_BYTES ? in->size : READ_BYTES;
    nanosleep(&delay, NULL);
    ssize_t got = file == NULL ? -1 : pread(file->fd, buffer, size, (off_t)in->offset);
    if (got > 0) atomic_fetch_add(&bytes_read, (uint64_t)got);
    answer(unique, got < 0 ? EIO : 0, buffer, got < 0 ? 0 : (size_t)got);
}

static void list_folder(uint64_t unique, const struct fuse_read_in *in, char *buffer) {
    size_t used = 0;
    for (size_t i = in->offset; i < file_count; i++) {
        struct fuse_dirent entry = {.ino = i + 2, .off = i + 1, .type = DT_REG};
        entry.namelen = (uint32_t)strlen(files[i].name);
        size_t size = FUSE_DIRENT_ALIGN(FUSE_NAME_OFFSET + entry.namelen);
        if (used + size > in->size || used + size > READ_BYTES) break;
        memset(buffer + used, 0, size);
        memcpy(buffer + used, &entry, FUSE_NAME_OFFSET);
        memcpy(buffer + used + FUSE_NAME_OFFSET, files[i].name, entry.namelen);
        used += size;
    }
    answer(unique, 0, buffer, used);
}

static void handle(const struct fuse_in_header *head, const void *body, char *buffer) {
    struct fuse_attr_out attributes = {.attr_valid = VALID_S};
    struct fuse_open_out opened = {.open_flags = FOPEN_KEEP_CACHE};
    struct fuse_statfs_out space = {.st = {.bsize = 4096, .frsize = 4096, .namelen = 255}};
    space.st.blocks = atomic_load(&bytes_read) / 4096;
    switch (head->opcode) {
    case FUSE_INIT: start(head->unique, body); break;
    case FUSE_LOOKUP: look_up(head->unique, body); break;
    case FUSE_GETATTR:
        fill_attributes(head->nodeid, &attributes.attr);
        answer(head->unique, 0, &attributes, sizeof attributes);
        break;
    case FUSE_OPEN:
    case FUSE_OPENDIR: answer(head->unique, 0, &opened, sizeof opened); break;
    case FUSE_READ: read_file(head->unique, head->nodeid, body, buffer); break;
    case FUSE_READDIR: list_folder(head->unique, body, buffer); break;
    case FUSE_STATFS: answer(head->unique, 0, &space, sizeof space); break;
    case FUSE_RELEASE:
    case FUSE_RELEASEDIR:
    case FUSE_FLUSH: answer(head->unique, 0, NULL, 0); break;
    case FUSE_FORGET:
    case FUSE_BATCH_FORGET:
    case FUSE_INTERRUPT: break; // have no answer
    default: answer(head->unique, ENOSYS, NULL, 0);
    }
}

static void *serve(void *context) {
    char *request = malloc(READ_BYTES + 4096), *buffer = malloc(READ_BYTES);
    must(request != NULL && buffer != NULL, "memory");
    for (;;) {
        ssize_t got = read(device, request, READ_BYTES + 4096);
        if (got >= (ssize_t)sizeof(struct fuse_in_header))
            handle((const struct fuse_in_header *)(const void *)request,
                   request + sizeof(struct fuse_in_header), buffer);
        else if (got < 0 && errno != EINTR && errno != ENOENT && errno != EAGAIN)
            exit(0); // unmounted
    }
    return context;
}

int main(int argc, char **argv) {
    char options[120];
    pthread_t thread;
    must(argc == 4, "slow_files FOLDER MOUNT_POINT DELAY_MS");
    long delay_ms = atol(argv[3]);
    delay = (struct timespec){delay_ms / 1000, delay_ms % 1000 * 1000000};
    list_files(argv[1]);
    device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    must(device >= 0, "/dev/fuse");
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other",
             device);
    must(mount("slow_files", argv[2], "fuse", MS_NOSUID | MS_NODEV | MS_RDONLY, options) == 0,
         "mounting");
    for (int i = 1; i < THREADS; i++)
        must(pthread_create(&thread, NULL, serve, NULL) == 0, "threads");
    puts("ready");
    fflush(stdout);
    serve(NULL);
    return 0;
}
