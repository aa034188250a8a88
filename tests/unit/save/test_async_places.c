// SPDX-License-Identifier: Apache-2.0
/// Saves and edits that may touch the same files by different names: links, sets, manifests; and
/// the callbacks of a save that save themselves.
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "async_fixture.h"
#include "check.h"
#include "fixture.h"

static char root[2048];

/// A path in the folder of this test, in one of four buffers that are used in turn.
static const char *in_root(const char *name) {
    static char paths[4][4096];
    static unsigned next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", root, name);
    return path;
}

/// Makes the folder of a test: `x`, and a model at `blobs/T`. Models are of '0' then.
static bool make_root(const char *name) {
    snprintf(root, sizeof root, "%s", fixture_path(name));
    async_fill('0');
    return mkdir(root, 0777) == 0 && mkdir(in_root("x"), 0777) == 0 &&
           mkdir(in_root("blobs"), 0777) == 0 && async_save_sync(in_root("blobs/T")) == FST_OK;
}

/// Starts a save of '1' that is not written before `async_may_write`.
static fst_async_save *start_held(const char *path, fst_save_options *save) {
    fst_async_save *handle = NULL;
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    save->progress = async_hold;
    options.save = save;
    atomic_store(&async_may_write, false);
    async_fill('1');
    return async_start(path, &options, &handle) == FST_OK ? handle : NULL;
}

static fst_status save_with(const char *path, const fst_save_options *options) {
    fst_save_tensor tensors[TENSOR_COUNT];
    async_make_tensors(tensors);
    return fst_save(path, tensors, TENSOR_COUNT, options, NULL, NULL);
}

static fst_status replace_link(void) {
    fst_save_options options = async_save_options();
    options.replace_link = 1;
    return save_with(in_root("x/model.safetensors"), &options);
}

static fst_status save_set_of_one_shard(void) {
    fst_save_options options = async_save_options();
    options.file_count = 1;
    options.stem = "model-00001-of-00002";
    return save_with(in_root("x"), &options);
}

static fst_status save_folder(void) {
    fst_save_options options = async_save_options();
    options.file_count = 1;
    return save_with(in_root("x"), &options);
}

static fst_status save_file(void) { return async_save_sync(in_root("x/model.safetensors")); }
static fst_status save_shard(void) {
    return async_save_sync(in_root("x/model-00001-of-00002.safetensors"));
}

static fst_status edit(const char *path) {
    fst_metadata_entry entry = {.key = "edited", .key_size = SIZE_MAX};
    entry.value = "yes", entry.value_size = SIZE_MAX;
    fst_edit_options options = FST_STRUCT_INIT(fst_edit_options);
    options.metadata = &entry;
    options.metadata_count = 1;
    return fst_header_edit(path, NULL, &options, NULL, NULL);
}

static fst_status edit_file(void) { return edit(in_root("x/model.safetensors")); }
static fst_status edit_folder(void) { return edit(in_root("x")); }

static fst_status write_manifest(void) {
    fst_save_options options = async_save_options();
    static char path[4096];
    snprintf(path, sizeof path, "%s", in_root("manifest"));
    options.manifest = path;
    return save_with(in_root("other.safetensors"), &options);
}

/// An asynchronous save, a later call, and the path that must then have the later state.
typedef struct place_case {
    const char *name, *earlier;
    uint32_t file_count; ///< of the earlier save
    bool has_link;       ///< x/model.safetensors is a link to blobs/T
    bool has_shards;     ///< x has a set of two files
    bool is_apart;       ///< the earlier save follows the link, so nothing is to wait for
    const char *manifest;
    fst_status (*later)(void);
    const char *checked;
    char value;
} place_case;

static const place_case cases[] = {
    {"a", "x/model.safetensors", 0, .has_link = true, .is_apart = true, .later = replace_link,
     .checked = "x/model.safetensors", .value = '2'},
    {"b", "x/model.safetensors", 0, .has_link = true, .is_apart = true, .later = save_folder,
     .checked = "x/model.safetensors", .value = '2'},
    {"c", "x", 1, .has_link = true, .later = save_file, .checked = "x/model.safetensors",
     .value = '2'},
    {"d", "x", 1, .has_link = true, .later = edit_file, .checked = "x/model.safetensors",
     .value = '1'},
    {"e", "x", 1, .has_shards = true, .later = save_shard,
     .checked = "x/model-00001-of-00002.safetensors", .value = '2'},
    {"f", "x", 1, .later = edit_folder, .checked = "x", .value = '1'},
    {"g", "x/model.safetensors", 0, .later = edit_folder, .checked = "x", .value = '1'},
    {"i", "x", 1, .has_shards = true, .later = save_set_of_one_shard,
     .checked = "x/model-00001-of-00002.safetensors", .value = '2'},
    {"h", "some.safetensors", 0, .manifest = "manifest", .later = write_manifest,
     .checked = "other.safetensors", .value = '2'},
};

TEST(a_later_call_waits_for_saves_that_may_replace_its_files)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const place_case *one = &cases[i];
        fst_save_options options = async_save_options(), two_files = async_save_options();
        pthread_t thread;
        CHECK(make_root(one->name));
        two_files.file_count = 2;
        if (one->has_shards) CHECK_INT(save_with(in_root("x"), &two_files), FST_OK);
        if (one->has_link) CHECK(symlink("../blobs/T", in_root("x/model.safetensors")) == 0);
        options.file_count = one->file_count;
        if (one->manifest != NULL) options.manifest = in_root(one->manifest);
        fst_async_save *save = start_held(in_root(one->earlier), &options);
        CHECK(save != NULL);
        async_fill('2');
        CHECK(pthread_create(&thread, NULL, async_release_soon, NULL) == 0);
        CHECK_INT(one->later(), FST_OK);
        CHECK_INT(fst_async_save_wait(save, one->is_apart ? -1 : 0, NULL), FST_OK);
        CHECK_INT(async_value_at(in_root(one->checked)), one->value);
        pthread_join(thread, NULL);
        fst_async_save_close(save);
    }
}

/// The link is followed at the call.
/// A set owns the names of its files only.
TEST(a_set_is_not_in_the_way_of_other_files_in_its_folder)
{
    fst_async_save *other;
    fst_save_options files = async_save_options();
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    CHECK(make_root("apart"));
    files.file_count = 2;
    fst_async_save *set = start_held(in_root("x"), &files);
    CHECK(set != NULL);
    CHECK_INT(async_save_sync(in_root("x/ema.safetensors")), FST_OK);
    files.stem = "ema-sharded";
    options.save = &files;
    files.progress = NULL;
    options.overlap = FST_OVERLAP_SUPERSEDE;
    CHECK_INT(async_start(in_root("x"), &options, &other), FST_OK);
    CHECK_INT(fst_async_save_wait(other, -1, NULL), FST_OK);
    CHECK_INT(fst_async_save_wait(set, 0, NULL), FST_E_TIMEOUT);
    atomic_store(&async_may_write, true);
    CHECK_INT(fst_async_save_wait(set, -1, NULL), FST_OK);
    fst_async_save_close(other);
    fst_async_save_close(set);
}

/// The first set deletes an old manifest of the folder.
TEST(sets_of_a_folder_have_its_manifest_in_common)
{
    fst_async_save *later;
    fst_save_options first = async_save_options(), second = async_save_options();
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    pthread_t thread;
    CHECK(make_root("manifest"));
    first.file_count = second.file_count = 1;
    fst_async_save *earlier = start_held(in_root("x"), &first);
    CHECK(earlier != NULL && pthread_create(&thread, NULL, async_release_soon, NULL) == 0);
    second.stem = "optimizer";
    second.manifest = "";
    options.save = &second;
    options.overlap = FST_OVERLAP_SUPERSEDE; // of another model
    CHECK_INT(async_start(in_root("x"), &options, &later), FST_OK);
    CHECK_INT(fst_async_save_wait(later, 20000, NULL), FST_OK);
    CHECK_INT(fst_async_save_wait(earlier, 0, NULL), FST_OK); // it has ended
    CHECK_INT(access(in_root("x/model.manifest"), F_OK), 0);
    pthread_join(thread, NULL);
    fst_async_save_close(earlier);
    fst_async_save_close(later);
}

TEST(a_link_that_changes_during_a_save_keeps_its_new_file)
{
    fst_save_options options = async_save_options();
    CHECK(make_root("repointed"));
    CHECK_INT(async_save_sync(in_root("blobs/U")), FST_OK);
    CHECK(symlink("../blobs/T", in_root("x/model.safetensors")) == 0);
    // Another save of the pool or path before it, so that it has no files yet.
    fst_async_save *first = start_held(in_root("x/model.safetensors"), &options);
    fst_async_save *second = start_held(in_root("x/model.safetensors"), &options);
    CHECK(first != NULL && second != NULL);
    CHECK(unlink(in_root("x/model.safetensors")) == 0);
    CHECK(symlink("../blobs/U", in_root("x/model.safetensors")) == 0);
    atomic_store(&async_may_write, true);
    CHECK_INT(fst_async_save_wait(first, -1, NULL), FST_OK);
    CHECK_INT(fst_async_save_wait(second, -1, NULL), FST_OK);
    CHECK_INT(async_value_at(in_root("blobs/U")), '0');
    CHECK_INT(async_value_at(in_root("blobs/T")), '1');
    fst_async_save_close(first);
    fst_async_save_close(second);
}

// ---- callbacks that save ----

static fst_status published_status;
static const char *const *published_paths;
static size_t published_count;

static void *publish_paths(void *unused) {
    published_status =
        fst_set_publish(in_root("x"), published_paths, published_count, NULL, NULL, NULL);
    return unused;
}

static fst_status publish_in_thread(void *context, fst_status status, const char *const *paths,
                                    size_t count, fst_error *error) {
    (void)context, (void)error;
    pthread_t thread;
    if (status != FST_OK) return status;
    published_paths = paths, published_count = count;
    if (pthread_create(&thread, NULL, publish_paths, NULL) != 0) return FST_E_IO;
    pthread_join(thread, NULL);
    return published_status;
}

TEST(another_thread_may_publish_the_files_of_a_save)
{
    fst_async_save *save;
    fst_save_options files = async_save_options();
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    CHECK(make_root("published"));
    files.file_count = 1;
    options.save = &files;
    options.publish = publish_in_thread;
    async_fill('1');
    CHECK_INT(async_start(in_root("x"), &options, &save), FST_OK);
    CHECK_INT(fst_async_save_wait(save, 20000, NULL), FST_OK);
    CHECK_INT(async_value_at(in_root("x")), '1');
    fst_async_save_close(save);
}

static fst_status status_in_callback;

/// Saves where a later save of the same pool is going to.
static int save_elsewhere(void *context) {
    (void)context;
    while (!atomic_load(&async_may_write)) usleep(1000); // until the later save has begun
    status_in_callback = async_save_sync(in_root("later"));
    return 1;
}

TEST(a_callback_does_not_wait_for_saves_that_wait_for_it)
{
    fst_staging_pool *pool;
    fst_async_save *first, *later;
    CHECK(make_root("callback"));
    CHECK_INT(fst_staging_open(0, 128 * MIB, &pool, NULL), FST_OK);
    fst_async_options options = async_options_of(FST_STAGE_LAZY);
    options.pool = pool;
    options.is_unchanged = save_elsewhere;
    atomic_store(&async_may_write, false);
    async_fill('1');
    CHECK_INT(async_start(in_root("first"), &options, &first), FST_OK);
    options.is_unchanged = NULL;
    CHECK_INT(async_start(in_root("later"), &options, &later), FST_OK);
    atomic_store(&async_may_write, true);
    CHECK_INT(fst_async_save_wait(later, 20000, NULL), FST_OK);
    CHECK_INT(fst_async_save_wait(first, 20000, NULL), FST_OK);
    CHECK_INT(status_in_callback, FST_OK);
    fst_async_save_close(first);
    fst_async_save_close(later);
    fst_staging_close(pool);
}

static atomic_int progress_count;

/// Saves into the folder of the set whose progress it is.
static int save_status(void *context, uint64_t done, uint64_t total, size_t tensors_done,
                       size_t tensors_total) {
    (void)done, (void)total, (void)tensors_done, (void)tensors_total;
    if (atomic_fetch_add(&progress_count, 1) < 10) (void)!async_save_sync(context);
    return 0;
}

/// Several threads write the files.
TEST(the_progress_of_a_set_may_save_one_of_its_files)
{
    fst_async_save *save;
    static char path[4096];
    fst_save_options files = async_save_options();
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    CHECK(make_root("progress"));
    snprintf(path, sizeof path, "%s", in_root("x/model-00001-of-00003.safetensors"));
    files.file_count = 3;
    files.thread_count = 3;
    files.progress = save_status;
    files.progress_context = path;
    options.save = &files;
    CHECK_INT(async_start(in_root("x"), &options, &save), FST_OK);
    CHECK_INT(fst_async_save_wait(save, 20000, NULL), FST_OK);
    fst_async_save_close(save);
}

static fst_staging_pool *shared_pool;
static fst_async_save *inner;

static int start_inner(void *context) {
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    options.pool = shared_pool;
    status_in_callback = async_start(context, &options, &inner);
    return 1;
}

TEST(a_callback_may_start_a_save_of_the_same_pool_and_path)
{
    fst_async_save *save;
    static char path[4096];
    CHECK(make_root("nested"));
    snprintf(path, sizeof path, "%s", in_root("nested"));
    CHECK_INT(fst_staging_open(0, 0, &shared_pool, NULL), FST_OK);
    fst_async_options options = async_options_of(FST_STAGE_LAZY);
    options.pool = shared_pool;
    options.is_unchanged = start_inner;
    options.context = path;
    async_fill('1');
    CHECK_INT(async_start(path, &options, &save), FST_OK);
    CHECK_INT(fst_async_save_wait(save, 20000, NULL), FST_OK);
    CHECK_INT(status_in_callback, FST_OK);
    CHECK_INT(fst_async_save_wait(inner, 20000, NULL), FST_OK);
    fst_async_save_close(inner);
    fst_async_save_close(save);
    fst_staging_close(shared_pool);
}

static fst_async_save *held;
static char held_path[4096];

/// Saves where an earlier save is going to, and then publishes its own files.
static fst_status publish_after_saving(void *context, fst_status status, const char *const *paths,
                                       size_t count, fst_error *error) {
    pthread_t thread;
    (void)context;
    if (status != FST_OK || pthread_create(&thread, NULL, async_release_soon, NULL) != 0)
        return FST_E_IO;
    status_in_callback = async_save_sync(held_path);
    if (status_in_callback == FST_OK)
        status_in_callback = fst_async_save_wait(held, 0, NULL); // it has ended
    pthread_join(thread, NULL);
    return fst_set_publish(in_root("x"), paths, count, NULL, NULL, error);
}

TEST(a_callback_waits_for_saves_before_its_own)
{
    fst_async_save *save;
    fst_save_options waits = async_save_options(), files = async_save_options();
    fst_async_options options = async_options_of(FST_STAGE_COPY);
    CHECK(make_root("before"));
    snprintf(held_path, sizeof held_path, "%s", in_root("held"));
    held = start_held(held_path, &waits);
    CHECK(held != NULL);
    files.file_count = 1;
    options.save = &files;
    options.publish = publish_after_saving;
    async_fill('2');
    CHECK_INT(async_start(in_root("x"), &options, &save), FST_OK);
    CHECK_INT(fst_async_save_wait(save, 20000, NULL), FST_OK);
    CHECK_INT(status_in_callback, FST_OK);
    CHECK_INT(async_value_at(held_path), '2');
    fst_async_save_close(save);
    fst_async_save_close(held);
}
