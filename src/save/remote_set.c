// SPDX-License-Identifier: Apache-2.0
/// Saves to addresses. A store has no hidden names and no renaming: files are sent as they come,
/// seen when each is whole, and an index is sent when all of them are.
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "net/net.h"
#include "writer.h"

fst_status fsti_writer_check_remote(const fst_writer *writer, const fst_save_options *options,
                                    fst_error *error) {
    const char *path = writer->folder != NULL ? writer->folder : writer->published[0];
    const char *why = NULL;
    if (writer->origin != NULL) why = "edits and rewritten files are saved to files only";
    if (options->compress != FST_COMPRESS_NONE)
        why = "compressed files are made as files: save one, and copy it there";
    if (options->others_write != 0) why = "several processes can't write one object";
    if (options->engine != FST_SAVE_ENGINE_AUTO)
        why = "an engine writes to disks, and this is an address";
    return why == NULL ? FST_OK : fsti_address_refuse(path, why, error);
}

// ---- what is there ----

/// Files of a set of the same stem, its index left out.
static bool is_member(const fst_writer *writer, const char *name) {
    size_t size = strlen(name);
    return fsti_save_is_shard(name, size, writer->stem) ||
           fsti_save_is_single(name, size, writer->stem);
}

static fst_status refuse_key(const fst_writer *writer, fst_error *error) {
    fsti_error_place place = FSTI_NOWHERE;
    place.file = writer->folder;
    (void)!fsti_error_set(error, FST_E_IO, place, "there is a model already (no_overwrite)");
    if (error != NULL) error->os_errno = EEXIST;
    return FST_E_IO;
}

#define STALE_COUNT_MAX ((size_t)1 << 20)
#define LISTED_NAME_BYTES 1100u

static fst_status note_path(const fst_writer *writer, const char *name, char ***paths,
                            size_t *count, size_t *capacity, fst_error *error) {
    char *path = fsti_url_beside(writer->published[0], name);
    if (path == NULL ||
        !fsti_array_reserve((void **)paths, capacity, *count, sizeof **paths, STALE_COUNT_MAX)) {
        fsti_free(path);
        return fsti_error_memory(error, strlen(name));
    }
    (*paths)[(*count)++] = path;
    return FST_OK;
}

/// Of one file of such a set, or of its index.
static bool is_manifest(const fst_writer *writer, const char *name) {
    char of[LISTED_NAME_BYTES];
    if (!fsti_ends_with(name, ".manifest") || strlen(name) >= sizeof of) return false;
    snprintf(of, sizeof of, "%.*s", (int)(strlen(name) - strlen(".manifest")), name);
    return is_member(writer, of) || fsti_save_is_index(of, strlen(of), writer->stem);
}

static fst_status note_key(void *context, const char *name, fst_error *error) {
    fst_writer *writer = context;
    remote_scene *scene = &writer->scene;
    bool is_index = fsti_save_is_index(name, strlen(name), writer->stem);
    if (is_manifest(writer, name))
        return note_path(writer, name, &scene->manifests, &scene->manifest_count,
                         &scene->manifest_capacity, error);
    if (!is_index && !is_member(writer, name)) return FST_OK;
    if (fsti_net_must_be_new()) return refuse_key(writer, error);
    if (is_index) {
        scene->has_index = true;
        return FST_OK;
    }
    return note_path(writer, name, &scene->members, &scene->count, &scene->capacity, error);
}

void fsti_writer_clear_scene(fst_writer *writer) {
    for (size_t i = 0; i < writer->scene.count; i++) fsti_free(writer->scene.members[i]);
    for (size_t i = 0; i < writer->scene.manifest_count; i++) fsti_free(writer->scene.manifests[i]);
    fsti_free(writer->scene.members);
    fsti_free(writer->scene.manifests);
    writer->scene = (remote_scene){0};
}

/// Who may write and not list saves as well: then nothing of an earlier set is removed.
static fst_status look_at_keys(fst_writer *writer, fst_error *error) {
    fst_error cause = {0};
    char *folder = fsti_url_beside(writer->published[0], "");
    if (folder == NULL) return fsti_error_memory(error, strlen(writer->published[0]));
    fst_status status = fsti_net_list(folder, &writer->watch, note_key, writer, &cause);
    fsti_free(folder);
    if (status == FST_E_PERMISSION) {
        fsti_log(FST_LOG_WARNING, "what lies there is not known: %s", cause.message);
        fsti_writer_clear_scene(writer);
        writer->scene.has_index = writer->scene.is_unknown = true;
        return FST_OK;
    }
    if (status != FST_OK && error != NULL) *error = cause;
    return status;
}

static bool is_single(const fst_writer *writer, const char *member) {
    const char *name = fsti_path_name(member);
    return fsti_save_is_single(name, strlen(name), writer->stem);
}

/// Whether what is there is what this save makes, too: one file of a name.
static bool is_own(const fst_writer *writer, const char *member) {
    return writer->file_count == 1 && strcmp(member, writer->published[0]) == 0;
}

/// Files of a set come beside those of another, never in their place: until the index leads to the
/// new ones it leads to the old ones, whole, and a reader has the one set or the other.
static fst_status choose_names(fst_writer *writer, fst_error *error) {
    const remote_scene *scene = &writer->scene;
    bool is_free = !scene->has_index && scene->count == 0;
    if (writer->file_count == 1 || is_free || fsti_net_must_be_new()) return FST_OK;
    snprintf(writer->tag, sizeof writer->tag, "-%016" PRIx64, fsti_net_random());
    return fsti_writer_name_files(writer, writer->folder, error);
}

/// What is replaced later has to be what is there now: another save may end meanwhile.
static fst_status look_closer(fst_writer *writer, fst_error *error) {
    remote_scene *scene = &writer->scene;
    const char *index = writer->published[writer->file_count];
    scene->index = (fsti_seen){.kind = FSTI_SEEN_NOTHING};
    if (scene->has_index) FST_TRY(fsti_net_look(index, &writer->watch, &scene->index, error));
    // Of all files that may be removed another save may put its own at this one's address alone.
    for (size_t i = 0; i < scene->count; i++)
        if (is_single(writer, scene->members[i]))
            FST_TRY(fsti_net_look(scene->members[i], &writer->watch, &scene->single, error));
    return FST_OK;
}

static void demand_what_was_seen(fst_writer *writer, uint32_t file) {
    static const fsti_seen nothing = {.kind = FSTI_SEEN_NOTHING};
    bool is_index = file == writer->file_count;
    if (is_index) writer->index_target.seen = &writer->scene.index;
    // Another set's first files would get the same names.
    bool has_usual_name = writer->file_count > 1 && writer->tag[0] == '\0';
    if (!is_index && has_usual_name) writer->files[file].target.seen = &nothing;
    if (!is_index) writer->files[file].target.is_unique = writer->tag[0] != '\0';
    writer->index_target.leads = true;
}

/// Who has said once that the save is to end is not asked again: what is taken back then asks, too.
static fst_status ask_caller(void *context, uint64_t zero, fst_error *error) {
    fst_writer *writer = context;
    if (atomic_load(&writer->is_ended))
        return fsti_error_set(error, FST_E_CANCELLED, FSTI_NOWHERE, "cancelled");
    return fsti_writer_report(writer, zero, error);
}

fst_status fsti_writer_find_objects(fst_writer *writer, fst_error *error) {
    bool is_set = writer->folder != NULL;
    writer->watch = (fsti_net_watch){.ask = ask_caller, .context = writer};
    if (is_set) FST_TRY(look_at_keys(writer, error));
    if (is_set) FST_TRY(look_closer(writer, error));
    if (is_set) FST_TRY(choose_names(writer, error));
    for (uint32_t f = 0; f < writer->file_count + (is_set ? 1 : 0); f++) {
        bool is_index = f == writer->file_count;
        fsti_target *target = is_index ? &writer->index_target : &writer->files[f].target;
        FST_TRY(fsti_target_object(writer->published[f], target, error));
        target->watch = &writer->watch;
        if (is_set) demand_what_was_seen(writer, f);
        // Of a single object nobody looks whether there is one.
        target->had_object = is_index ? writer->scene.has_index : !is_set;
    }
    for (size_t i = 0; i < writer->scene.count; i++)
        if (is_own(writer, writer->scene.members[i])) writer->files[0].target.had_object = true;
    return FST_OK;
}

// ---- the journal ----

static bool has_stale(const fst_writer *writer) {
    for (size_t i = 0; i < writer->scene.count; i++)
        if (!is_own(writer, writer->scene.members[i])) return true;
    return false;
}

bool fsti_writer_wants_index(const fst_writer *writer) {
    if (writer->file_count > 1) return true;
    // From a set to one file an index leads, until the files of the set are gone. Who may not list
    // them may have seen the index by itself.
    const remote_scene *scene = &writer->scene;
    bool has_index = scene->is_unknown ? scene->index.kind == FSTI_SEEN_THIS : scene->has_index;
    return writer->folder != NULL && (has_index || has_stale(writer));
}

static fst_status add_files(fst_writer *writer, fst_error *error) {
    for (uint32_t f = 0; f < writer->file_count; f++)
        FST_TRY(fsti_journal_add(&writer->journal, STEP_PLACE, writer->files[f].output, error));
    return FST_OK;
}

static fst_status tell_another(const fst_writer *writer, const char *what, fst_error *error) {
    fsti_error_place place = FSTI_NOWHERE;
    place.file = writer->folder != NULL ? writer->folder : writer->published[0];
    return fsti_error_set(error, FST_E_FILE_CHANGED, place, "another save %s", what);
}

/// Files of this save that a listing names.
typedef struct own_files {
    const fst_writer *writer;
    uint32_t count;
} own_files;

static fst_status count_own(void *context, const char *name, fst_error *error) {
    own_files *own = context;
    const fst_writer *writer = own->writer;
    char *url = fsti_url_beside(writer->published[0], name);
    if (url == NULL) return fsti_error_memory(error, strlen(name));
    for (uint32_t f = 0; f < writer->file_count; f++)
        own->count += strcmp(url, writer->published[f]) == 0;
    fsti_free(url);
    return FST_OK;
}

/// Before the index leads to them: a save that has ended meanwhile may have taken this one's files
/// for left over. (Where the store keeps to its conditions the index would be refused as well.)
static fst_status check_own(void *context, fst_error *error) {
    fst_writer *writer = context;
    own_files own = {writer, 0};
    char *folder = fsti_url_beside(writer->published[0], "");
    if (folder == NULL) return fsti_error_memory(error, strlen(writer->published[0]));
    fst_status status = fsti_net_list(folder, &writer->watch, count_own, &own, error);
    fsti_free(folder);
    if (status == FST_E_PERMISSION) return FST_OK;
    FST_TRY(status);
    return own.count == writer->file_count ? FST_OK
                                           : tell_another(writer,
                                                          "has removed files of this one, which it "
                                                          "took for left over",
                                                          error);
}

/// Before a file comes into place that no index leads to: one would hide it.
static fst_status check_no_index(void *context, fst_error *error) {
    fst_writer *writer = context;
    fsti_seen now;
    FST_TRY(fsti_net_look(writer->index_target.path, &writer->watch, &now, error));
    bool is_new = now.kind == FSTI_SEEN_THIS && !fsti_seen_is_same(&now, &writer->scene.index);
    return is_new ? tell_another(writer, "has put an index there since this one began", error)
                  : FST_OK;
}

/// Files of an earlier save may be removed by who sees that no other save's index leads to them
/// now.
static bool may_not_look(const fst_writer *writer) {
    return writer->scene.index.is_hidden || writer->scene.single.is_hidden;
}

static fst_status tell_hidden(void *context, fst_error *error) {
    const fst_writer *writer = context;
    fsti_error_place place = FSTI_NOWHERE;
    place.file = writer->folder;
    return fsti_error_set(error, FST_E_PERMISSION, place,
                          "files of an earlier save stay: whether they are another's by now can't "
                          "be told without the right to look at objects");
}

/// Before old files go: another save's index may lead to some by now, and that one removes the
/// others.
static fst_status check_index(void *context, fst_error *error) {
    fst_writer *writer = context;
    const fsti_seen *own = fsti_output_mark(writer->final_index);
    fsti_seen now;
    FST_TRY(fsti_net_look(writer->index_target.path, &writer->watch, &now, error));
    bool is_own =
        own->kind == FSTI_SEEN_ANY || now.kind == FSTI_SEEN_ANY || fsti_seen_is_same(own, &now);
    return is_own ? FST_OK : tell_another(writer, "has replaced this one already", error);
}

/// Before a file's manifest comes into place: of two saves of the file the other may be there now.
static fst_status check_file(void *context, fst_error *error) {
    fst_writer *writer = context;
    const fsti_seen *own = fsti_output_mark(writer->files[0].output);
    fsti_seen now;
    FST_TRY(fsti_net_look(writer->published[0], &writer->watch, &now, error));
    bool is_own =
        own->kind == FSTI_SEEN_ANY || now.kind == FSTI_SEEN_ANY || fsti_seen_is_same(own, &now);
    return is_own ? FST_OK : tell_another(writer, "has replaced this one already", error);
}

/// Only what was there when this save began: what has come since is another save's.
static fst_status add_removals(fst_writer *writer, fst_error *error) {
    const remote_scene *scene = &writer->scene;
    save_journal *journal = &writer->journal;
    bool has_index = writer->final_index != NULL;
    if (has_index && (has_stale(writer) || writer->manifest.kind != NULL))
        FST_TRY(fsti_journal_add_check(journal, check_index, writer, error));
    for (size_t i = 0; i < scene->count && !may_not_look(writer); i++) {
        const char *member = scene->members[i];
        const fsti_seen *seen = is_single(writer, member) ? &scene->single : NULL;
        if (!is_own(writer, member))
            FST_TRY(fsti_journal_add_removal(journal, member, seen, &writer->watch, error));
    }
    return FST_OK;
}

/// The index comes last: what leads to the files. But where none leads to old files that stay until
/// one file has come, it comes first: who opens the folder meanwhile is told what is missing. An
/// old manifest goes right before the model changes.
static fst_status plan_to_turn(fst_writer *writer, fst_error *error) {
    save_journal *journal = &writer->journal;
    fsti_output *index = writer->final_index;
    bool is_first = index != NULL && writer->file_count == 1 && !writer->scene.has_index;
    bool is_last = index != NULL && !is_first;
    if (!is_last) FST_TRY(fsti_save_manifest_aside_objects(writer, error));
    if (is_first) FST_TRY(fsti_journal_add(journal, STEP_PLACE, index, error));
    if (writer->folder != NULL && index == NULL)
        FST_TRY(fsti_journal_add_check(journal, check_no_index, writer, error));
    FST_TRY(add_files(writer, error));
    if (!is_last) return FST_OK;
    FST_TRY(fsti_journal_add_check(journal, check_own, writer, error));
    FST_TRY(fsti_save_manifest_aside_objects(writer, error));
    return fsti_journal_add(journal, STEP_PLACE, index, error);
}

fst_status fsti_writer_plan_objects(fst_writer *writer, fst_error *error) {
    save_journal *journal = &writer->journal;
    fsti_output *index = writer->final_index;
    FST_TRY(plan_to_turn(writer, error));
    fsti_journal_turn(journal);
    FST_TRY(add_removals(writer, error));
    // Files that stay are hidden by an index that leads to the new one.
    bool leaves_some = writer->scene.is_unknown || (may_not_look(writer) && has_stale(writer));
    if (writer->file_count == 1 && index != NULL && !leaves_some)
        FST_TRY(fsti_journal_add(journal, STEP_REMOVE_LAST, index, error));
    if (writer->manifest.kind != NULL && index == NULL)
        FST_TRY(fsti_journal_add_check(journal, check_file, writer, error));
    FST_TRY(fsti_save_manifest_place(writer, error));
    return may_not_look(writer) && has_stale(writer)
               ? fsti_journal_add_check(journal, tell_hidden, writer, error)
               : FST_OK;
}
