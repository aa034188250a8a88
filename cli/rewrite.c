// SPDX-License-Identifier: Apache-2.0
/// Rewrites models: pieces are loaded (and converted) ahead within a budget, and written in the
/// order of the new file.
#include "rewrite.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "kept_digests.h"
#include "metadata.h"
#include "standard_input.h"

/// Size of pieces, and how much to load ahead: with the loader's and the writer's buffers well
/// below 256 MiB.
#define PIECE_BYTES ((uint64_t)16 << 20)
#define BUDGET_BYTES ((uint64_t)96 << 20)

/// A tensor of the new model.
typedef struct rewrite_output {
    size_t source; ///< in the model
    fst_tensor_info info;
    fst_dtype dtype; ///< of the new one
    uint64_t offset, size_bytes;
} rewrite_output;

/// A piece to copy: an item of the load and its position in the new file.
typedef struct rewrite_piece {
    size_t output;
    uint64_t offset;
} rewrite_piece;

typedef struct rewrite_job {
    const rewrite_plan *plan;
    fst_model *model;
    rewrite_output *outputs;
    size_t count;
    fst_save_tensor *tensors;
    fst_save_options save;
    fst_metadata_entry *metadata;
    kept_digests digests;
    fst_part *items;
    rewrite_piece *pieces;
    uint64_t *bounds; ///< slice bounds of each piece
    size_t piece_count, piece_capacity, bound_count, bound_capacity;
    size_t current; ///< the output being split
} rewrite_job;

static void clear_job(rewrite_job *job) {
    free(job->outputs);
    free(job->tensors);
    free(job->metadata);
    cli_digests_clear(&job->digests);
    free(job->items);
    free(job->pieces);
    free(job->bounds);
}

// ---- tensors of the new model ----

/// The dtype after conversion.
static fst_dtype new_dtype(const rewrite_plan *plan, fst_dtype own) {
    return plan->convert && fst_dtype_convertible(own, plan->dtype) ? plan->dtype : own;
}

static int choose_outputs(rewrite_job *job) {
    fst_error error;
    size_t total = fst_model_tensor_count(job->model);
    job->outputs = calloc(total + 1, sizeof *job->outputs);
    if (job->outputs == NULL) return cli_no_memory();
    for (size_t i = 0; i < total; i++) {
        fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
        if (fst_model_tensor_info(job->model, i, &info, &error) != FST_OK) return cli_fail(&error);
        if (!cli_name_matches(&info, job->plan->globs, job->plan->glob_count)) continue;
        job->outputs[job->count++] =
            (rewrite_output){.source = i, .info = info, .dtype = new_dtype(job->plan, info.dtype)};
    }
    if (job->count > 0 || job->plan->glob_count == 0) return EXIT_OK;
    return cli_refuse(EXIT_INVALID, "NoMatch", "no tensor name matches");
}

static int describe_tensors(rewrite_job *job) {
    job->tensors = calloc(job->count + 1, sizeof *job->tensors);
    if (job->tensors == NULL) return cli_no_memory();
    for (size_t i = 0; i < job->count; i++) {
        const rewrite_output *output = &job->outputs[i];
        job->tensors[i] = (fst_save_tensor){.struct_size = sizeof(fst_save_tensor),
                                            .name = output->info.name,
                                            .name_size = output->info.name_size,
                                            .dtype = output->dtype,
                                            .rank = output->info.rank,
                                            .shape = output->info.shape};
        const fst_tensor_rename *rename =
            job->plan->renames == NULL ? NULL : &job->plan->renames[output->source];
        if (rename == NULL || rename->to == NULL) continue;
        job->tensors[i].name = rename->to;
        job->tensors[i].name_size = rename->to_size;
    }
    return EXIT_OK;
}

static int compare_sources(const void *key, const void *element) {
    size_t wanted = *(const size_t *)key, own = ((const rewrite_output *)element)->source;
    return wanted < own ? -1 : wanted > own;
}

/// The output for a tensor that is not converted.
static const fst_save_tensor *find_unchanged(const void *context, size_t source) {
    const rewrite_job *job = context;
    const rewrite_output *output =
        bsearch(&source, job->outputs, job->count, sizeof *job->outputs, compare_sources);
    bool same = output != NULL && output->dtype == output->info.dtype;
    return same ? &job->tensors[output - job->outputs] : NULL;
}

static int fill_metadata(rewrite_job *job) {
    const rewrite_plan *plan = job->plan;
    size_t *count = &job->save.metadata_count;
    job->metadata = plan->metadata == NULL
                        ? cli_model_metadata(job->model, count)
                        : calloc(plan->metadata_count + 1, sizeof *job->metadata);
    if (job->metadata == NULL) return cli_no_memory();
    if (plan->metadata != NULL) {
        *count = plan->metadata_count;
        memcpy(job->metadata, plan->metadata, *count * sizeof *job->metadata);
    }
    job->save.metadata = job->metadata;
    job->digests = (kept_digests){.model = job->model,
                                  .entries = job->metadata,
                                  .entry_count = *count,
                                  .tensor_count = job->count,
                                  .find = find_unchanged,
                                  .context = job};
    if (!cli_digests_select(&job->digests)) return cli_no_memory();
    *count = job->digests.entry_count;
    return EXIT_OK;
}

// ---- assigning tensors to files ----

static int assign_by_size(rewrite_job *job, uint64_t file_bytes_max, uint32_t *file_of) {
    fst_shard_item *items = calloc(job->count + 1, sizeof *items);
    if (items == NULL) return cli_no_memory();
    for (size_t i = 0; i < job->count; i++) items[i].size_bytes = job->outputs[i].size_bytes;
    fst_error error;
    fst_status status = fst_shards_assign(items, job->count, file_bytes_max, file_of,
                                          &job->save.file_count, &error);
    free(items);
    if (job->save.file_count == 0) job->save.file_count = 1;
    return status == FST_OK ? EXIT_OK : cli_fail(&error);
}

/// Splits into N files of similar size, in file order.
static void assign_evenly(rewrite_job *job, uint32_t file_count, uint32_t *file_of) {
    uint64_t total = 0, before = 0;
    for (size_t i = 0; i < job->count; i++) total += job->outputs[i].size_bytes;
    if (file_count > job->count && job->count > 0) file_count = (uint32_t)job->count;
    for (size_t i = 0; i < job->count; i++) {
        // Assign by the middle of each tensor. The next lines make sure that no file stays empty.
        double middle = (double)before + (double)job->outputs[i].size_bytes / 2;
        uint32_t file = total == 0 ? 0 : (uint32_t)(middle / (double)total * file_count);
        uint32_t previous = i == 0 ? 0 : file_of[i - 1];
        size_t left = job->count - i, files_left = file_count - previous - (i == 0 ? 0 : 1);
        if (i > 0 && left <= files_left) file = previous + 1;
        if (i > 0 && file > previous + 1) file = previous + 1;
        if (i == 0) file = 0;
        file_of[i] = file < file_count ? file : file_count - 1;
        before += job->outputs[i].size_bytes;
    }
    job->save.file_count = file_count > 0 ? file_count : 1;
}

/// Length of the name up to and including its first numeric component. 0: no such component.
static size_t layer_prefix(const fst_tensor_info *info) {
    for (size_t begin = 0; begin < info->name_size;) {
        size_t end = begin;
        while (end < info->name_size && info->name[end] != '.') end++;
        size_t digits = begin;
        while (digits < end && info->name[digits] >= '0' && info->name[digits] <= '9') digits++;
        if (digits == end && end > begin) return end;
        begin = end + 1;
    }
    return 0;
}

/// One file per layer in order of appearance. Tensors outside of layers share one more file.
static void assign_by_layer(rewrite_job *job, uint32_t *file_of) {
    uint32_t count = 0, rest = UINT32_MAX;
    for (size_t i = 0; i < job->count; i++) {
        const fst_tensor_info *info = &job->outputs[i].info;
        size_t size = layer_prefix(info), other = i;
        if (size == 0) {
            file_of[i] = rest == UINT32_MAX ? (rest = count++) : rest;
            continue;
        }
        // Tensors of a layer are usually adjacent, so search backwards.
        while (other-- > 0) {
            const fst_tensor_info *before = &job->outputs[other].info;
            if (layer_prefix(before) == size && memcmp(before->name, info->name, size) == 0) break;
        }
        file_of[i] = other == SIZE_MAX ? count++ : file_of[other];
    }
    job->save.file_count = count > 0 ? count : 1;
}

static int assign_files(rewrite_job *job) {
    const rewrite_plan *plan = job->plan;
    int code = EXIT_OK;
    if (!cli_is_split(plan)) return EXIT_OK;
    size_t count = job->count;
    uint32_t *file_of = calloc(count + 1, sizeof *file_of);
    if (file_of == NULL) return cli_no_memory();
    if (plan->by_layer)
        assign_by_layer(job, file_of);
    else if (plan->wanted_files > 0)
        assign_evenly(job, plan->wanted_files, file_of);
    else
        code = assign_by_size(job, plan->file_bytes_max, file_of);
    for (size_t i = 0; i < count; i++) job->tensors[i].file_index = file_of[i];
    free(file_of);
    if (code == EXIT_OK && job->save.file_count > 99999)
        return cli_refuse(EXIT_UNREADABLE, fst_status_name(FST_E_UNSUPPORTED),
                          "the result would have more than 99999 files");
    if (code == EXIT_OK && plan->wanted_files > job->save.file_count)
        cli_print_note("%" PRIu32 " file%s instead of %" PRIu32 ", because there are only %zu "
                       "tensor%s",
                       job->save.file_count, cli_plural(job->save.file_count), plan->wanted_files,
                       count, cli_plural(count));
    return code;
}

// ---- pieces, in the order of the new files ----

static bool add_piece(void *context, const uint64_t *begin, const uint64_t *end,
                      uint64_t first_element) {
    rewrite_job *job = context;
    const rewrite_output *output = &job->outputs[job->current];
    uint32_t rank = begin == NULL ? 0 : output->info.rank;
    if (job->piece_count == job->piece_capacity) {
        job->piece_capacity = 2 * job->piece_capacity + 64;
        void *items = realloc(job->items, job->piece_capacity * sizeof *job->items);
        if (items != NULL) job->items = items;
        void *pieces = realloc(job->pieces, job->piece_capacity * sizeof *job->pieces);
        if (pieces != NULL) job->pieces = pieces;
        if (items == NULL || pieces == NULL) return false;
    }
    if (job->bound_count + 2 * rank > job->bound_capacity) {
        job->bound_capacity = 2 * job->bound_capacity + 2 * rank + 256;
        void *bounds = realloc(job->bounds, job->bound_capacity * sizeof *job->bounds);
        if (bounds == NULL) return false;
        job->bounds = bounds;
    }
    // The array of bounds may move when it grows, so `begin` holds an index (plus 1, because NULL
    // means the whole tensor) until link_slices() replaces it by a pointer.
    job->items[job->piece_count] =
        (fst_part){.struct_size = sizeof(fst_part), .tensor_index = output->source};
    if (rank > 0) {
        job->items[job->piece_count].begin = (void *)(uintptr_t)(job->bound_count + 1);
        memcpy(job->bounds + job->bound_count, begin, rank * sizeof *begin);
        memcpy(job->bounds + job->bound_count + rank, end, rank * sizeof *end);
        job->bound_count += 2 * rank;
    }
    job->pieces[job->piece_count++] =
        (rewrite_piece){job->current, first_element * fst_dtype_bits(output->dtype) / 8};
    return true;
}

/// Replaces the indices in the items by pointers, when the array of bounds has its final address.
static void link_slices(rewrite_job *job) {
    for (size_t i = 0; i < job->piece_count; i++) {
        fst_part *item = &job->items[i];
        if (item->begin == NULL) continue;
        uint32_t rank = job->outputs[job->pieces[i].output].info.rank;
        item->begin = job->bounds + (uintptr_t)item->begin - 1;
        item->end = item->begin + rank;
    }
}

typedef struct tensor_place {
    uint32_t file;
    size_t output;
    uint64_t offset;
} tensor_place;

static int compare_places(const void *a_pointer, const void *b_pointer) {
    const tensor_place *a = a_pointer, *b = b_pointer;
    if (a->file != b->file) return a->file < b->file ? -1 : 1;
    if (a->offset != b->offset) return a->offset < b->offset ? -1 : 1;
    return a->output < b->output ? -1 : a->output > b->output;
}

/// The offset of each tensor in its file, from another layout call per file.
static int find_places(rewrite_job *job, tensor_place *places) {
    fst_save_tensor *own = calloc(job->count + 1, sizeof *own);
    size_t *index = calloc(job->count + 1, sizeof *index);
    uint32_t file_count = job->save.file_count > 0 ? job->save.file_count : 1;
    fst_error error;
    fst_status status = own == NULL || index == NULL ? FST_E_NO_MEMORY : FST_OK;
    snprintf(error.message, sizeof error.message, "out of memory");
    error.status = FST_E_NO_MEMORY;
    for (uint32_t f = 0; f < file_count && status == FST_OK; f++) {
        fst_layout *layout;
        size_t count = 0;
        for (size_t i = 0; i < job->count; i++)
            if (job->tensors[i].file_index == f) {
                own[count] = job->tensors[i];
                own[count].file_index = 0;
                index[count++] = i;
            }
        fst_save_options options = job->save;
        options.file_count = 0;
        if ((status = fst_layout_open(own, count, &options, &layout, &error)) != FST_OK) break;
        for (size_t i = 0; i < count && status == FST_OK; i++) {
            places[index[i]] = (tensor_place){.file = f, .output = index[i]};
            status = fst_layout_tensor(layout, i, &places[index[i]].offset,
                                       &job->outputs[index[i]].size_bytes, &error);
        }
        fst_layout_close(layout);
    }
    free(own);
    free(index);
    return status == FST_OK ? EXIT_OK : cli_fail(&error);
}

static size_t count_converted(const rewrite_job *job) {
    size_t converted = 0;
    for (size_t i = 0; i < job->count; i++)
        converted += job->outputs[i].dtype != job->outputs[i].info.dtype;
    return converted;
}

/// Splits the outputs into pieces, in the order of their positions in the new files.
static int split_outputs(rewrite_job *job) {
    size_t count = job->count;
    tensor_place *places = calloc(count + 1, sizeof *places);
    if (places == NULL) return cli_no_memory();
    int code = find_places(job, places);
    if (code == EXIT_OK) qsort(places, count, sizeof *places, compare_places);
    for (size_t i = 0; i < count && code == EXIT_OK; i++) {
        const rewrite_output *output = &job->outputs[places[i].output];
        job->current = places[i].output;
        if (output->size_bytes == 0) continue;
        uint64_t in_bits = fst_dtype_bits(output->info.dtype);
        uint64_t out_bits = fst_dtype_bits(output->dtype);
        // Whole bytes on both sides: a split valid for the smaller element is valid for both.
        uint64_t bits = in_bits % 8 != 0 || out_bits % 8 != 0
                            ? (in_bits < out_bits ? in_bits : out_bits)
                            : (in_bits > out_bits ? in_bits : out_bits);
        uint64_t limit = PIECE_BYTES * bits / (in_bits > out_bits ? in_bits : out_bits);
        if (!cli_cut_tensor(&output->info, bits, limit, add_piece, job)) code = cli_no_memory();
    }
    free(places);
    link_slices(job);
    return code;
}

// ---- the stream ----

static int write_pieces(rewrite_job *job, fst_loader *loader, fst_writer *writer) {
    fst_error error;
    fst_status status = FST_OK;
    for (size_t i = 0; i < job->piece_count && status == FST_OK; i++) {
        fst_tensor *tensor;
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        status = fst_loader_next(loader, -1, &tensor, &error);
        if (status != FST_OK) break;
        status = fst_tensor_view_get(tensor, &view, &error);
        if (status == FST_OK)
            status = fst_writer_write(writer, job->pieces[i].output, job->pieces[i].offset,
                                      view.data, view.size_bytes, &error);
        fst_tensor_unref(tensor);
    }
    if (status == FST_OK) status = fst_writer_commit(writer, &error);
    return status == FST_OK ? EXIT_OK : cli_fail(&error);
}

static void print_loss(const char *loss) {
    if (loss == NULL) return;
    printf(", \"loss\": ");
    if (*loss == '\0')
        printf("null");
    else
        cli_print_json(loss, strlen(loss));
}

static void print_done(const rewrite_job *job, const fst_writer *writer) {
    fst_save_stats stats = {.struct_size = sizeof stats};
    char size[16];
    if (fst_writer_stats_get(writer, &stats, NULL) != FST_OK) return;
    double seconds = (double)stats.total_ns / 1e9;
    const char *promise = job->save.promise == FST_SAVE_DURABLE ? "durable" : "quick";
    if (cli_wants_json()) {
        printf("{\"target\": ");
        cli_print_json(job->plan->target, strlen(job->plan->target));
        printf(", \"tensors\": %zu, \"bytes\": %" PRIu64 ", \"files\": %" PRIu32
               ", \"converted\": %zu, \"seconds\": %.6f, \"engine\": \"%s\", \"promise\": "
               "\"%s\"",
               stats.tensor_count, stats.bytes_total, stats.file_count, count_converted(job),
               seconds, stats.engine, promise);
        print_loss(job->plan->loss);
        printf("}\n");
        return;
    }
    cli_print_path(job->plan->target);
    printf(": %zu tensor%s, %s in %" PRIu32 " file%s, %.2f s, %.2f GB/s (%s, %s)\n",
           stats.tensor_count, cli_plural(stats.tensor_count),
           cli_size_text(stats.bytes_total, size), stats.file_count, cli_plural(stats.file_count),
           seconds, (double)stats.bytes_total / 1e9 / (seconds > 0 ? seconds : 1e-9), stats.engine,
           promise);
}

static fst_status open_pieces(rewrite_job *job, fst_loader **loader, fst_error *error) {
    fst_load_options options = {.struct_size = sizeof options,
                                .mode = FST_MODE_LOAD,
                                .order = FST_ORDER_REQUEST,
                                .parts = job->items,
                                .part_count = job->piece_count,
                                .budget_bytes = BUDGET_BYTES,
                                .tuning = &cli_unmapped_reads,
                                .convert = job->plan->convert,
                                .dtype = job->plan->dtype};
    // Without pieces there is nothing to load, and an empty request would mean everything.
    return job->piece_count > 0 ? fst_loader_open(job->model, &options, loader, error) : FST_OK;
}

static int run_job(rewrite_job *job) {
    fst_error error;
    fst_writer *writer;
    fst_loader *loader = NULL;
    job->save.progress = cli_save_begin();
    if (fst_writer_open(job->plan->target, job->tensors, job->count, &job->save, &writer, &error) !=
        FST_OK)
        return cli_fail(&error);
    int code = open_pieces(job, &loader, &error) == FST_OK ? write_pieces(job, loader, writer)
                                                           : cli_fail(&error);
    fst_loader_close(loader);
    cli_progress_end(code == EXIT_OK);
    if (code == EXIT_OK) print_done(job, writer);
    fst_writer_close(writer);
    return code;
}

// ---- to standard output ----

/// Writes zeros up to `offset` (padding tensors), then the bytes.
static bool print_at(uint64_t *at, uint64_t offset, const void *bytes, uint64_t size_bytes) {
    for (; *at < offset; ++*at)
        if (putchar(0) == EOF) return false;
    *at += size_bytes;
    return size_bytes == 0 || fwrite(bytes, 1, size_bytes, stdout) == size_bytes;
}

static fst_status print_pieces(rewrite_job *job, fst_loader *loader, const fst_layout *layout,
                               bool *written, fst_error *error) {
    size_t header_bytes;
    uint64_t at = 0, offset, size_bytes;
    const char *header = fst_layout_header(layout, &header_bytes);
    *written = print_at(&at, 0, header, header_bytes);
    for (size_t i = 0; i < job->piece_count && *written; i++) {
        fst_tensor *tensor;
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        const rewrite_piece *piece = &job->pieces[i];
        fst_status status = fst_layout_tensor(layout, piece->output, &offset, &size_bytes, error);
        if (status == FST_OK) status = fst_loader_next(loader, -1, &tensor, error);
        if (status != FST_OK) return status;
        status = fst_tensor_view_get(tensor, &view, error);
        if (status == FST_OK)
            *written = print_at(&at, offset + piece->offset, view.data, view.size_bytes);
        fst_tensor_unref(tensor);
        if (status != FST_OK) return status;
    }
    if (*written) *written = print_at(&at, fst_layout_file_bytes(layout), NULL, 0);
    return FST_OK;
}

int cli_refuse_stream(void) {
    return cli_usage(NULL,
                     "'-' (standard output) needs a single file, a pipe or file as output, and no "
                     "--json");
}

/// Writes the file to standard output sequentially.
static int stream_job(rewrite_job *job) {
    fst_error error;
    fst_layout *layout = NULL;
    fst_loader *loader = NULL;
    bool written = true;
    if (cli_is_split(job->plan) || cli_wants_json() || cli_stdout_is_terminal())
        return cli_refuse_stream();
    fst_status status = fst_layout_open(job->tensors, job->count, &job->save, &layout, &error);
    if (status == FST_OK) status = open_pieces(job, &loader, &error);
    if (status == FST_OK) status = print_pieces(job, loader, layout, &written, &error);
    fst_loader_close(loader);
    fst_layout_close(layout);
    if (status != FST_OK) return cli_fail(&error);
    return written ? EXIT_OK : EXIT_UNREADABLE; // main() reports the reason
}

static void print_planned_files(const rewrite_job *job, uint32_t file_count) {
    char size[16];
    for (uint32_t f = 0; f < file_count; f++) {
        uint64_t bytes = 0;
        size_t tensors = 0;
        for (size_t i = 0; i < job->count; i++)
            if (job->tensors[i].file_index == f) {
                bytes += job->outputs[i].size_bytes;
                tensors++;
            }
        if (cli_wants_json())
            printf("%s{\"tensors\": %zu, \"tensor_bytes\": %" PRIu64 "}", f > 0 ? ", " : "",
                   tensors, bytes);
        else if (file_count > 1)
            printf("  file %" PRIu32 ": %zu tensor%s, %s\n", f + 1, tensors, cli_plural(tensors),
                   cli_size_text(bytes, size));
    }
}

static void print_plan(const rewrite_job *job) {
    uint32_t file_count = job->save.file_count > 0 ? job->save.file_count : 1;
    uint64_t total = 0;
    size_t converted = count_converted(job);
    char size[16];
    for (size_t i = 0; i < job->count; i++) total += job->outputs[i].size_bytes;
    if (cli_wants_json()) {
        printf("{\"target\": ");
        cli_print_json(job->plan->target, strlen(job->plan->target));
        printf(", \"dry_run\": true, \"tensors\": %zu, \"tensor_bytes\": %" PRIu64
               ", \"converted\": %zu, \"files\": %" PRIu32 ", \"shards\": [",
               job->count, total, converted, file_count);
        print_planned_files(job, file_count);
        printf("]");
        if (cli_is_split(job->plan)) cli_print_old_files(job->plan, file_count);
        printf("}\n");
        return;
    }
    printf("would write ");
    cli_print_path(job->plan->target);
    printf(": %zu tensor%s, %s in %" PRIu32 " file%s", job->count, cli_plural(job->count),
           cli_size_text(total, size), file_count, cli_plural(file_count));
    if (converted > 0)
        printf(", %zu tensor%s converted to %s", converted, cli_plural(converted),
               fst_dtype_name(job->plan->dtype));
    printf("\n");
    print_planned_files(job, file_count);
    if (cli_is_split(job->plan)) cli_print_old_files(job->plan, file_count);
}

static int size_outputs(rewrite_job *job) {
    for (size_t i = 0; i < job->count; i++) {
        rewrite_output *output = &job->outputs[i];
        output->size_bytes = (output->info.element_count * fst_dtype_bits(output->dtype) + 7) / 8;
    }
    return EXIT_OK;
}

int cli_rewrite(fst_model *model, const rewrite_plan *plan) {
    rewrite_job job = {.plan = plan, .model = model, .save = plan->save};
    int code = choose_outputs(&job);
    if (code == EXIT_OK) code = size_outputs(&job);
    if (code == EXIT_OK) code = describe_tensors(&job);
    if (code == EXIT_OK) code = fill_metadata(&job);
    if (code == EXIT_OK) code = assign_files(&job);
    if (code == EXIT_OK && cli_is_split(plan)) code = cli_check_one_file(plan, job.save.file_count);
    if (code == EXIT_OK) code = split_outputs(&job);
    if (code == EXIT_OK && plan->convert && count_converted(&job) == 0)
        cli_say_unconverted(plan->dtype);
    if (code == EXIT_OK && plan->dry_run)
        print_plan(&job);
    else if (code == EXIT_OK)
        code = cli_is_output(plan->target) ? stream_job(&job) : run_job(&job);
    clear_job(&job);
    return code;
}
