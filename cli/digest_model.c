// SPDX-License-Identifier: Apache-2.0
/// Digests a model's tensors and files while later pieces are read ahead. The bytes of a file are
/// its tensors in file order, and the bytes before, between and after them.
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "digest_model.h"
#include "rewrite.h"
#include "steady_model.h"

#define PIECE_BYTES ((uint64_t)16 << 20)
#define BUDGET_BYTES ((uint64_t)96 << 20)

typedef struct digest_job {
    fst_model *model;
    const char *path; ///< of the model
    fst_digest digest;
    fst_part *items;
    size_t item_count, item_capacity;
    uint64_t *numbers;
    size_t number_count, number_capacity;
    size_t tensor; ///< the tensor being split
    FILE *out;
    fst_digest_state *file_state;
    bool is_compressed; ///< stored and decoded bytes differ, so the file is read separately
} digest_job;

bool cli_digest_find(const char *name, fst_digest *out) {
    for (int digest = 0; digest <= (int)FST_DIGEST_XXH3_64; digest++)
        if (strcmp(name, fst_digest_name((fst_digest)digest)) == 0) {
            *out = (fst_digest)digest;
            return true;
        }
    return false;
}

static bool take_piece(void *context, const uint64_t *begin, const uint64_t *end,
                       uint64_t first_element) {
    digest_job *job = context;
    fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
    (void)first_element;
    if (fst_model_tensor_info(job->model, job->tensor, &info, NULL) != FST_OK) return false;
    uint32_t rank = begin == NULL ? 0 : info.rank;
    if (job->item_count == job->item_capacity) {
        job->item_capacity = 2 * job->item_capacity + 64;
        void *items = realloc(job->items, job->item_capacity * sizeof *job->items);
        if (items == NULL) return false;
        job->items = items;
    }
    if (job->number_count + 2 * rank > job->number_capacity) {
        job->number_capacity = 2 * job->number_capacity + 2 * rank + 256;
        void *numbers = realloc(job->numbers, job->number_capacity * sizeof *job->numbers);
        if (numbers == NULL) return false;
        job->numbers = numbers;
    }
    fst_part *item = &job->items[job->item_count++];
    *item = (fst_part){.struct_size = sizeof(fst_part), .tensor_index = job->tensor};
    if (rank == 0) return true;
    item->begin = (void *)(uintptr_t)(job->number_count + 1);
    item->end = (void *)(uintptr_t)(job->number_count + 1 + rank);
    memcpy(job->numbers + job->number_count, begin, rank * sizeof *begin);
    memcpy(job->numbers + job->number_count + rank, end, rank * sizeof *end);
    job->number_count += 2 * rank;
    return true;
}

static bool cut_tensors(digest_job *job) {
    for (job->tensor = 0; job->tensor < fst_model_tensor_count(job->model); job->tensor++) {
        fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
        if (fst_model_tensor_info(job->model, job->tensor, &info, NULL) != FST_OK) return false;
        if (info.size_bytes > 0 &&
            !cli_cut_tensor(&info, fst_dtype_bits(info.dtype), PIECE_BYTES, take_piece, job))
            return false;
    }
    for (size_t i = 0; i < job->item_count; i++) {
        fst_part *item = &job->items[i];
        if (item->begin == NULL) continue;
        item->begin = job->numbers + (uintptr_t)item->begin - 1;
        item->end = job->numbers + (uintptr_t)item->end - 1;
    }
    return true;
}

/// Adds bytes that belong to no tensor of the model: the header, padding, and tensors that an index
/// omits.
static int add_gap(digest_job *job, const fst_file_info *info, uint64_t begin, uint64_t end) {
    static char bytes[1 << 16];
    FILE *file = begin < end ? fopen(info->path, "rb") : NULL;
    bool good = begin >= end || (file != NULL && fseeko(file, (off_t)begin, SEEK_SET) == 0);
    while (good && begin < end) {
        size_t wanted = end - begin < sizeof bytes ? (size_t)(end - begin) : sizeof bytes;
        good = fread(bytes, 1, wanted, file) == wanted;
        if (good && fst_digest_update(job->file_state, bytes, wanted, NULL) != FST_OK) good = false;
        begin += wanted;
    }
    bool is_broken = file == NULL ? errno != ENOENT : ferror(file) != 0;
    if (file != NULL) fclose(file);
    if (good) return EXIT_OK;
    return is_broken ? cli_fail_errno("reading", info->path) : steady_refuse(info->path);
}

/// Finishes a digest and writes its line.
static fst_status put_line(digest_job *job, const char *kind, fst_digest_state *state,
                           fst_error *error) {
    unsigned char digest[FST_DIGEST_BYTES_MAX];
    size_t size = 0;
    fst_status status = fst_digest_end(state, digest, &size, error);
    if (status != FST_OK) return status;
    fprintf(job->out, "%s ", kind);
    for (size_t i = 0; i < size; i++) fprintf(job->out, "%02x", digest[i]);
    fputc(' ', job->out);
    return FST_OK;
}

/// Adds the next piece of a tensor to the tensor's and the file's digest.
static fst_status add_piece(digest_job *job, fst_loader *loader, fst_digest_state *state,
                            uint64_t *left, fst_error *error) {
    fst_tensor *tensor;
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
    fst_status status = fst_loader_next(loader, -1, &tensor, error);
    if (status != FST_OK) return status;
    status = fst_tensor_view_get(tensor, &view, error);
    if (status == FST_OK) status = fst_digest_update(state, view.data, view.size_bytes, error);
    if (status == FST_OK && !job->is_compressed)
        status = fst_digest_update(job->file_state, view.data, view.size_bytes, error);
    if (status == FST_OK) *left -= view.size_bytes;
    fst_tensor_unref(tensor);
    return status;
}

/// Digests one tensor, whose pieces come next in the stream.
static fst_status add_tensor(digest_job *job, fst_loader *loader, const fst_tensor_info *info,
                             fst_error *error) {
    fst_digest_state *state;
    fst_status status = fst_digest_begin(job->digest, &state, error);
    if (status != FST_OK) return status;
    for (uint64_t left = info->size_bytes; left > 0 && status == FST_OK;)
        status = add_piece(job, loader, state, &left, error);
    if (status != FST_OK) {
        fst_digest_drop(state);
        return status;
    }
    status = put_line(job, "tensor", state, error);
    if (status != FST_OK) return status;
    cli_put_json(job->out, info->name, info->name_size);
    fputc('\n', job->out);
    return FST_OK;
}

/// Digests the file's bytes in order: its tensors, from *tensor on, and the bytes around them. For
/// a compressed file: the decoded tensors first, then all stored bytes.
static int add_bytes(digest_job *job, fst_loader *loader, size_t file, size_t *tensor) {
    fst_file_info info = FST_STRUCT_INIT(fst_file_info);
    fst_tensor_info next = FST_STRUCT_INIT(fst_tensor_info);
    fst_error error;
    uint64_t at = 0;
    int code = EXIT_OK;
    if (fst_model_file_info(job->model, file, &info, &error) != FST_OK) return cli_fail(&error);
    while (code == EXIT_OK && *tensor < fst_model_tensor_count(job->model) &&
           fst_model_tensor_info(job->model, *tensor, &next, &error) == FST_OK &&
           next.file_index == file) {
        if (!job->is_compressed) code = add_gap(job, &info, at, next.file_offset);
        if (code == EXIT_OK && add_tensor(job, loader, &next, &error) != FST_OK)
            code = cli_fail(&error);
        at = next.file_offset + next.size_bytes;
        ++*tensor;
    }
    if (code != EXIT_OK) return code;
    return job->is_compressed ? add_gap(job, &info, 0, info.stored_bytes)
                              : add_gap(job, &info, at, info.size_bytes);
}

/// The path of a file below the model's folder, or the file's name if it is not there.
static const char *name_below(const char *model, const char *path) {
    struct stat info;
    bool is_folder = stat(model, &info) == 0 && S_ISDIR(info.st_mode);
    const char *end = strrchr(model, '/'), *slash = strrchr(path, '/');
    size_t size = is_folder ? strlen(model) : end == NULL ? 0 : (size_t)(end - model);
    while (size > 0 && model[size - 1] == '/') size--;
    bool is_here = size == 0 && !is_folder && end == NULL && path[0] != '/';
    if (is_here) return path;
    bool is_below = strncmp(path, model, size) == 0 && path[size] == '/';
    if (!is_below) return slash == NULL ? path : slash + 1;
    path += size;
    return path + strspn(path, "/");
}

static bool is_utf8(const char *name) {
    uint32_t code = 0;
    int columns;
    for (size_t at = 0, size = strlen(name); at < size && code != FST_TEXT_INVALID;)
        at += fst_text_step(name + at, size - at, &code, &columns);
    return code != FST_TEXT_INVALID;
}

int cli_digest_check_names(const fst_model *model, const char *path) {
    fst_file_info info = FST_STRUCT_INIT(fst_file_info);
    for (size_t f = 0; f < fst_model_file_count(model); f++) {
        if (fst_model_file_info(model, f, &info, NULL) != FST_OK) continue;
        if (!is_utf8(name_below(path, info.path)))
            return cli_fail_file(FST_E_ARGUMENT, info.path,
                                 "a .digest file cannot have this name, which is not UTF-8. Use "
                                 "hash --sums");
    }
    return EXIT_OK;
}

static int digest_file(digest_job *job, fst_loader *loader, size_t file, size_t *tensor) {
    fst_file_info info = FST_STRUCT_INIT(fst_file_info);
    fst_error error;
    if (fst_model_file_info(job->model, file, &info, &error) != FST_OK ||
        fst_digest_begin(job->digest, &job->file_state, &error) != FST_OK)
        return cli_fail(&error);
    job->is_compressed = info.compressed_count > 0 || info.stored_bytes != info.size_bytes;
    int code = add_bytes(job, loader, file, tensor);
    if (code != EXIT_OK) {
        fst_digest_drop(job->file_state);
        return code;
    }
    if (put_line(job, "file", job->file_state, &error) != FST_OK) return cli_fail(&error);
    const char *name = name_below(job->path, info.path);
    cli_put_json(job->out, name, strlen(name));
    fputc('\n', job->out);
    return EXIT_OK;
}

static int digest_all(digest_job *job) {
    fst_error error;
    fst_loader *loader = NULL;
    fst_load_options options = {.struct_size = sizeof options,
                                .mode = FST_MODE_LOAD,
                                .order = FST_ORDER_REQUEST,
                                .parts = job->items,
                                .part_count = job->item_count,
                                .budget_bytes = BUDGET_BYTES,
                                .tuning = &cli_unmapped_reads,
                                .progress = cli_progress_begin()};
    if (job->item_count > 0 && fst_loader_open(job->model, &options, &loader, &error) != FST_OK)
        return cli_fail(&error);
    int code = EXIT_OK;
    size_t tensor = 0;
    fprintf(job->out, "fastsafetensors-digest 1 %s\n", fst_digest_name(job->digest));
    for (size_t f = 0; f < fst_model_file_count(job->model) && code == EXIT_OK; f++)
        code = digest_file(job, loader, f, &tensor);
    fst_loader_close(loader);
    cli_progress_end(code == EXIT_OK);
    return code;
}

/// Whether the digest is available. Returns an exit code after printing what is missing.
static int check_digest(fst_digest digest) {
    fst_digest_state *state;
    fst_error error;
    if (fst_digest_begin(digest, &state, &error) != FST_OK) return cli_fail(&error);
    fst_digest_drop(state);
    return EXIT_OK;
}

int cli_digest_model(fst_model *model, const char *path, fst_digest digest, char **text) {
    size_t size;
    digest_job job = {.model = model, .path = path, .digest = digest};
    *text = NULL;
    int code = check_digest(digest);
    if (code != EXIT_OK) return code;
    job.out = open_memstream(text, &size);
    if (job.out == NULL || !cut_tensors(&job))
        code = cli_no_memory();
    else
        code = digest_all(&job);
    if (job.out != NULL && fclose(job.out) != 0) code = EXIT_UNREADABLE;
    free(job.items);
    free(job.numbers);
    return code;
}
