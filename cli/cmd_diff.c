// SPDX-License-Identifier: Apache-2.0
/// diff: what differs between two models.
#include <getopt.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rewrite.h"

#define PIECE_BYTES ((uint64_t)8 << 20)
#define BUDGET_BYTES ((uint64_t)48 << 20)

static void print_help(void) {
    printf("usage: fastsafetensors diff [OPTIONS] A B\n\n"
           "Compares names, shapes, dtypes and bytes of two models, and their metadata.\n"
           "Exit code: 0 the same, 1 different, 2 one could not be read.\n\n"
           "  --values        of tensors whose bytes differ: how many elements, by how much at\n"
           "                  most and on average (floats and integers of any dtype)\n"
           "  --no-metadata   metadata may differ\n"
           "  --quiet         exit code only\n"
           "  --no-progress   no progress bar, also on a terminal\n");
}

/// What to compare, and what was found.
typedef struct model_comparison {
    fst_model *models[2];
    bool values, metadata, quiet, progress;
    size_t difference_count, same_count;
} model_comparison;

/// What the differing elements of a tensor come to.
typedef struct value_summary {
    uint64_t element_count, differing;
    double max, sum;
    bool known; ///< the dtype has numbers
} value_summary;

/// One tensor as two streams of the same pieces.
typedef struct tensor_pair {
    fst_model *models[2];
    fst_tensor_info infos[2];
    size_t indexes[2];
    fst_request_item *items;
    uint64_t *numbers;
    size_t count, capacity;
} tensor_pair;

static void say(model_comparison *comparison, const char *what, const fst_tensor_info *info) {
    comparison->difference_count++;
    if (comparison->quiet) return;
    printf("%s ", what);
    cli_print_name(info->name, info->name_size);
}

static bool take_piece(void *context, const uint64_t *begin, const uint64_t *end,
                       uint64_t first_element) {
    tensor_pair *pair = context;
    uint32_t rank = begin == NULL ? 0 : pair->infos[0].rank;
    (void)first_element;
    if (pair->count == pair->capacity) {
        pair->capacity = 2 * pair->capacity + 16;
        void *items = realloc(pair->items, pair->capacity * sizeof *pair->items);
        if (items != NULL) pair->items = items;
        void *numbers = realloc(pair->numbers, (pair->capacity * 2 * rank + 1) * sizeof(uint64_t));
        if (numbers != NULL) pair->numbers = numbers;
        if (items == NULL || numbers == NULL) return false;
    }
    if (rank > 0) {
        memcpy(pair->numbers + pair->count * 2 * rank, begin, rank * sizeof *begin);
        memcpy(pair->numbers + (pair->count * 2 + 1) * rank, end, rank * sizeof *end);
    }
    pair->items[pair->count++] = (fst_request_item){0};
    return true;
}

static void fill_items(tensor_pair *pair, int side) {
    uint32_t rank = pair->infos[0].rank;
    for (size_t i = 0; i < pair->count; i++) {
        pair->items[i].tensor_index = pair->indexes[side];
        if (pair->count == 1) continue; // whole
        pair->items[i].slice_begin = pair->numbers + i * 2 * rank;
        pair->items[i].slice_end = pair->numbers + (i * 2 + 1) * rank;
    }
}

static fst_status open_side(tensor_pair *pair, int side, const fst_dtype *dtype, fst_loader **out,
                            fst_error *error) {
    fill_items(pair, side);
    fst_load_options options = {.struct_size = sizeof options,
                                .mode = FST_MODE_LOAD,
                                .order = FST_ORDER_REQUEST,
                                .items = pair->items,
                                .item_count = pair->count,
                                .budget_bytes = BUDGET_BYTES,
                                // Cached chunks by pread: mapped pages would count as our memory.
                                .no_sigbus_guard = 1};
    if (dtype != NULL) {
        options.convert = 1;
        options.dtype = *dtype;
    }
    // A tensor that can't be cut (below a byte) may be larger than the budget.
    if (pair->count == 1) options.budget_bytes = 0;
    return fst_loader_open(pair->models[side], &options, out, error);
}

typedef void (*piece_visitor)(void *context, const fst_tensor_view *a, const fst_tensor_view *b);

/// Visits the pieces of both sides together; both converted to `dtype` where it is not NULL.
static fst_status visit_pieces(tensor_pair *pair, const fst_dtype *dtype, piece_visitor visit,
                               void *context, fst_error *error) {
    fst_loader *loaders[2] = {NULL, NULL};
    fst_status status = FST_OK;
    for (int side = 0; side < 2 && status == FST_OK; side++)
        status = open_side(pair, side, dtype, &loaders[side], error);
    for (size_t i = 0; i < pair->count && status == FST_OK; i++) {
        fst_tensor *tensors[2] = {NULL, NULL};
        fst_tensor_view views[2];
        for (int side = 0; side < 2 && status == FST_OK; side++) {
            status = fst_loader_next(loaders[side], -1, &tensors[side], error);
            if (status == FST_OK) status = fst_tensor_view_get(tensors[side], &views[side], error);
        }
        if (status == FST_OK) visit(context, &views[0], &views[1]);
        fst_tensor_unref(tensors[0]);
        fst_tensor_unref(tensors[1]);
    }
    fst_loader_close(loaders[0]);
    fst_loader_close(loaders[1]);
    return status;
}

static void visit_bytes(void *context, const fst_tensor_view *a, const fst_tensor_view *b) {
    bool *same = context;
    if (*same && memcmp(a->data, b->data, a->size_bytes) != 0) *same = false;
}

/// Element `i` of a converted piece: F64, or an integer.
static double value_of(const fst_tensor_view *view, uint64_t i) {
    double number;
    int64_t integer;
    uint64_t natural;
    const char *at = (const char *)view->data + 8 * i;
    switch (view->dtype) {
    case FST_DTYPE_F64: memcpy(&number, at, 8); return number;
    case FST_DTYPE_I64: memcpy(&integer, at, 8); return (double)integer;
    default: memcpy(&natural, at, 8); return (double)natural;
    }
}

static void visit_values(void *context, const fst_tensor_view *a, const fst_tensor_view *b) {
    value_summary *summary = context;
    if (a->dtype != FST_DTYPE_F64 && a->dtype != FST_DTYPE_I64 && a->dtype != FST_DTYPE_U64) return;
    summary->known = true;
    for (uint64_t i = 0; i < a->size_bytes / 8; i++) {
        summary->element_count++;
        if (memcmp((const char *)a->data + 8 * i, (const char *)b->data + 8 * i, 8) == 0) continue;
        double difference = fabs(value_of(a, i) - value_of(b, i));
        summary->differing++;
        if (!(difference <= summary->max)) summary->max = difference; // NaN shows
        summary->sum += difference;
    }
}

static bool is_float(fst_dtype dtype) {
    const char *name = fst_dtype_name(dtype);
    return name[0] == 'F' || strcmp(name, "BF16") == 0;
}

static fst_status summarise(model_comparison *comparison, tensor_pair *pair, fst_error *error) {
    value_summary summary = {0};
    fst_dtype wide = is_float(pair->infos[0].dtype) ? FST_DTYPE_F64 : FST_DTYPE_I64;
    fst_status status = visit_pieces(pair, &wide, visit_values, &summary, error);
    if (status != FST_OK || comparison->quiet) return status;
    if (!summary.known)
        printf(": %s has no values to compare", fst_dtype_name(pair->infos[0].dtype));
    else
        printf(": %" PRIu64 " of %" PRIu64 " elements, by at most %.6g, on average %.6g",
               summary.differing, summary.element_count, summary.max,
               summary.element_count == 0 ? 0 : summary.sum / (double)summary.element_count);
    return status;
}

static void say_shapes(const model_comparison *comparison, const fst_tensor_info *infos) {
    char texts[2][128];
    for (int side = 0; side < 2 && !comparison->quiet; side++)
        cli_shape_text(infos[side].shape, infos[side].rank, texts[side], sizeof texts[side]);
    if (!comparison->quiet)
        printf(": %s %s, %s %s\n", fst_dtype_name(infos[0].dtype), texts[0],
               fst_dtype_name(infos[1].dtype), texts[1]);
}

static int compare_bytes(model_comparison *comparison, tensor_pair *pair) {
    bool same = true;
    fst_error error;
    fst_status status = FST_OK;
    // Pieces are cut by what they take as 64-bit numbers, so that the budget holds for values too.
    if (pair->infos[0].size_bytes > 0 &&
        !cli_cut_tensor(&pair->infos[0], fst_dtype_bits(pair->infos[0].dtype),
                        PIECE_BYTES * fst_dtype_bits(pair->infos[0].dtype) / 64, take_piece, pair))
        return EXIT_UNREADABLE;
    if (pair->count > 0) status = visit_pieces(pair, NULL, visit_bytes, &same, &error);
    if (status != FST_OK) return cli_fail(&error);
    if (same) {
        comparison->same_count++;
        return EXIT_GOOD;
    }
    say(comparison, "bytes differ:", &pair->infos[0]);
    if (comparison->values) status = summarise(comparison, pair, &error);
    if (!comparison->quiet) printf("\n");
    return status == FST_OK ? EXIT_GOOD : cli_fail(&error);
}

static int compare_tensor(model_comparison *comparison, size_t index) {
    tensor_pair pair = {.models = {comparison->models[0], comparison->models[1]},
                        .indexes = {index, 0}};
    fst_tensor_info *infos = pair.infos;
    if (fst_model_tensor_info(pair.models[0], index, &infos[0], NULL) != FST_OK)
        return EXIT_UNREADABLE;
    if (fst_model_find(pair.models[1], infos[0].name, infos[0].name_size, &pair.indexes[1], NULL) !=
            FST_OK ||
        fst_model_tensor_info(pair.models[1], pair.indexes[1], &infos[1], NULL) != FST_OK) {
        say(comparison, "only in A:", &infos[0]);
        if (!comparison->quiet) printf("\n");
        return EXIT_GOOD;
    }
    if (infos[0].dtype != infos[1].dtype || infos[0].rank != infos[1].rank ||
        memcmp(infos[0].shape, infos[1].shape, infos[0].rank * sizeof(uint64_t)) != 0) {
        say(comparison, "shape or dtype differs:", &infos[0]);
        say_shapes(comparison, infos);
        return EXIT_GOOD;
    }
    int code = compare_bytes(comparison, &pair);
    free(pair.items);
    free(pair.numbers);
    return code;
}

static void find_added(model_comparison *comparison) {
    for (size_t i = 0; i < fst_model_tensor_count(comparison->models[1]); i++) {
        fst_tensor_info info;
        size_t index;
        if (fst_model_tensor_info(comparison->models[1], i, &info, NULL) != FST_OK ||
            fst_model_find(comparison->models[0], info.name, info.name_size, &index, NULL) ==
                FST_OK)
            continue;
        say(comparison, "only in B:", &info);
        if (!comparison->quiet) printf("\n");
    }
}

static const fst_metadata_entry *find_entry(const fst_metadata_entry *entries, size_t count,
                                            const fst_metadata_entry *wanted) {
    for (size_t i = 0; i < count; i++)
        if (entries[i].key_size == wanted->key_size &&
            memcmp(entries[i].key, wanted->key, wanted->key_size) == 0)
            return &entries[i];
    return NULL;
}

static void say_metadata(model_comparison *comparison, const char *what,
                         const fst_metadata_entry *entry) {
    comparison->difference_count++;
    if (comparison->quiet) return;
    printf("%s ", what);
    cli_print_name(entry->key, entry->key_size);
    printf("\n");
}

static void compare_metadata(model_comparison *comparison) {
    size_t counts[2];
    fst_metadata_entry *entries[2];
    for (int side = 0; side < 2; side++)
        entries[side] = cli_model_metadata(comparison->models[side], &counts[side]);
    for (size_t i = 0; entries[0] != NULL && entries[1] != NULL && i < counts[0]; i++) {
        const fst_metadata_entry *own = &entries[0][i];
        const fst_metadata_entry *other = find_entry(entries[1], counts[1], own);
        if (other == NULL)
            say_metadata(comparison, "metadata only in A:", own);
        else if (own->value_size != other->value_size ||
                 memcmp(own->value, other->value, own->value_size) != 0)
            say_metadata(comparison, "metadata differs:", own);
    }
    for (size_t i = 0; entries[0] != NULL && entries[1] != NULL && i < counts[1]; i++)
        if (find_entry(entries[0], counts[0], &entries[1][i]) == NULL)
            say_metadata(comparison, "metadata only in B:", &entries[1][i]);
    free(entries[0]);
    free(entries[1]);
}

static int compare_models(model_comparison *comparison) {
    int code = EXIT_GOOD;
    size_t count = fst_model_tensor_count(comparison->models[0]);
    uint64_t done = 0, total = 0;
    fst_tensor_info info;
    if (comparison->metadata) compare_metadata(comparison);
    for (size_t i = 0; i < count; i++)
        if (fst_model_tensor_info(comparison->models[0], i, &info, NULL) == FST_OK)
            total += info.size_bytes;
    for (size_t i = 0; i < count && code == EXIT_GOOD; i++) {
        code = compare_tensor(comparison, i);
        if (fst_model_tensor_info(comparison->models[0], i, &info, NULL) == FST_OK)
            done += info.size_bytes;
        if (comparison->progress) cli_show_progress(NULL, done, total, i + 1, count);
    }
    if (comparison->progress && count > 0) fprintf(stderr, "\n");
    if (code != EXIT_GOOD) return EXIT_UNREADABLE;
    find_added(comparison);
    if (!comparison->quiet)
        printf("%zu tensors are the same, %zu difference%s\n", comparison->same_count,
               comparison->difference_count, comparison->difference_count == 1 ? "" : "s");
    return comparison->difference_count > 0 ? EXIT_INVALID : EXIT_GOOD;
}

int cmd_diff(int argc, char **argv) {
    static const struct option options[] = {
        {"values", no_argument, NULL, 'v'}, {"no-metadata", no_argument, NULL, 'm'},
        {"quiet", no_argument, NULL, 'q'},  {"no-progress", no_argument, NULL, 'p'},
        {"help", no_argument, NULL, 'h'},   {NULL, 0, NULL, 0},
    };
    model_comparison comparison = {.metadata = true, .progress = cli_stderr_is_terminal()};
    for (int option; (option = getopt_long(argc, argv, "hq", options, NULL)) != -1;) {
        switch (option) {
        case 'v': comparison.values = true; break;
        case 'm': comparison.metadata = false; break;
        case 'q': comparison.quiet = true; break;
        case 'p': comparison.progress = false; break;
        case 'h': print_help(); return EXIT_GOOD;
        default: return cli_usage("diff", "wrong option");
        }
    }
    if (optind + 2 != argc) return cli_usage("diff", "expected A and B");
    int code = EXIT_GOOD;
    fst_error error;
    for (int side = 0; side < 2 && code == EXIT_GOOD; side++)
        if (fst_model_open(argv[optind + side], NULL, &comparison.models[side], &error) != FST_OK) {
            cli_fail(&error);
            code = EXIT_UNREADABLE;
        }
    if (code == EXIT_GOOD) code = compare_models(&comparison);
    fst_model_close(comparison.models[0]);
    fst_model_close(comparison.models[1]);
    return code;
}
