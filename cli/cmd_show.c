// SPDX-License-Identifier: Apache-2.0
/// show: prints minimum, maximum and mean of tensors, the number of NaNs, and the first values.
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "close_names.h"
#include "commands.h"
#include "rewrite.h"

#define PIECE_BYTES ((uint64_t)4 << 20)
#define BUDGET_BYTES ((uint64_t)48 << 20)
#define FIRST_MAX 1000

typedef struct show_request {
    uint64_t first; ///< how many values are printed
    const char *const *names;
    size_t name_count;
} show_request;

typedef struct value_statistics {
    uint64_t count, nan_count, infinite_count, zero_count;
    double least, greatest, sum, square_sum;
    double first[FIRST_MAX];
    uint64_t first_count, first_matching;
    fst_dtype dtype; ///< the dtype of the values
    /// For integers, also as exact keys: see cli_integer_key().
    uint64_t least_key, greatest_key, first_keys[FIRST_MAX];
} value_statistics;

static void add_value(value_statistics *statistics, double value) {
    if (statistics->first_count < statistics->first_matching)
        statistics->first[statistics->first_count++] = value;
    statistics->count++;
    if (isnan(value)) {
        statistics->nan_count++;
        return;
    }
    if (isinf(value)) statistics->infinite_count++;
    if (value == 0) statistics->zero_count++;
    if (value < statistics->least) statistics->least = value;
    if (value > statistics->greatest) statistics->greatest = value;
    if (!isinf(value)) {
        statistics->sum += value;
        statistics->square_sum += value * value;
    }
}

/// Call it before add_value() for the same value.
static void add_key(value_statistics *statistics, uint64_t key) {
    bool is_first = statistics->count == 0;
    if (statistics->first_count < statistics->first_matching)
        statistics->first_keys[statistics->first_count] = key;
    if (is_first || key < statistics->least_key) statistics->least_key = key;
    if (is_first || key > statistics->greatest_key) statistics->greatest_key = key;
}

static bool add_values(value_statistics *statistics, const fst_tensor_view *view) {
    uint64_t count = view->size_bytes * 8 / fst_dtype_bits(view->dtype);
    double number;
    bool is_whole = cli_is_integer(view->dtype);
    for (uint64_t i = 0; i < count; i++) {
        if (!cli_value_at(view, i, &number)) return false;
        if (is_whole) add_key(statistics, cli_integer_key(view, i));
        add_value(statistics, number);
    }
    return true;
}

/// A value as text; integers with all digits.
static const char *value_text(const value_statistics *statistics, double value, uint64_t key,
                              char *text) {
    if (cli_is_integer(statistics->dtype)) return cli_integer_text(statistics->dtype, key, text);
    snprintf(text, 32, "%.6g", value);
    return text;
}

static void print_value(const value_statistics *statistics, double value, uint64_t key) {
    char text[32];
    if (!cli_is_integer(statistics->dtype))
        cli_print_number(value);
    else
        printf("%s", cli_integer_text(statistics->dtype, key, text));
}

/// Loads the tensor piece by piece, as F64 or 64-bit integers. *known: its dtype has numbers.
static fst_status gather(fst_model *model, const piece_list *pieces, value_statistics *statistics,
                         bool *known, fst_error *error) {
    fst_load_options options = {.struct_size = sizeof options,
                                .mode = FST_MODE_LOAD,
                                .order = FST_ORDER_REQUEST,
                                .parts = pieces->items,
                                .part_count = pieces->count,
                                .budget_bytes = pieces->count > 1 ? BUDGET_BYTES : 0,
                                .tuning = &cli_unmapped_reads,
                                .convert = 1,
                                .dtype = statistics->dtype};
    fst_loader *loader;
    fst_status status = fst_loader_open(model, &options, &loader, error);
    if (status != FST_OK) return status;
    for (size_t i = 0; i < pieces->count && status == FST_OK && *known; i++) {
        fst_tensor *tensor;
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        status = fst_loader_next(loader, -1, &tensor, error);
        if (status != FST_OK) break;
        status = fst_tensor_view_get(tensor, &view, error);
        if (status == FST_OK) *known = add_values(statistics, &view);
        fst_tensor_unref(tensor);
    }
    fst_loader_close(loader);
    return status;
}

/// Standard deviation of the finite values, as numpy's std. NaN without finite values.
static double standard_deviation(const value_statistics *s) {
    double finite = (double)(s->count - s->nan_count - s->infinite_count), mean = s->sum / finite;
    double square = s->square_sum / finite - mean * mean;
    return square < 0 ? 0 : sqrt(square);
}

static void print_json(const fst_tensor_info *info, const value_statistics *s, bool known) {
    uint64_t finite = s->count - s->nan_count - s->infinite_count;
    printf("{\"name\": ");
    cli_print_json(info->name, info->name_size);
    printf(", \"dtype\": \"%s\", \"shape\": [", fst_dtype_name(info->dtype));
    for (uint32_t i = 0; i < info->rank; i++)
        printf("%s%" PRIu64, i > 0 ? ", " : "", info->shape[i]);
    printf("], \"bytes\": %" PRIu64, info->size_bytes);
    if (known && s->count > 0) {
        printf(", \"min\": ");
        print_value(s, s->least, s->least_key);
        printf(", \"max\": ");
        print_value(s, s->greatest, s->greatest_key);
        printf(", \"mean\": ");
        cli_print_number(s->sum / (double)finite);
        printf(", \"std\": ");
        cli_print_number(standard_deviation(s));
        printf(", \"nans\": %" PRIu64 ", \"infinities\": %" PRIu64 ", \"zeros\": %" PRIu64
               ", \"first\": [",
               s->nan_count, s->infinite_count, s->zero_count);
        for (uint64_t i = 0; i < s->first_count; i++) {
            printf("%s", i > 0 ? ", " : "");
            print_value(s, s->first[i], s->first_keys[i]);
        }
        printf("]");
    }
    printf("}\n");
}

static void print_text(const fst_tensor_info *info, const value_statistics *s, bool known) {
    char shape[256], size[16], texts[2][32];
    uint64_t finite = s->count - s->nan_count - s->infinite_count;
    printf("%s", cli_bold());
    cli_print_name(info->name, info->name_size);
    printf("%s  %s %s, %s\n", cli_plain(), fst_dtype_name(info->dtype),
           cli_shape_text(info->shape, info->rank, shape, sizeof shape),
           cli_size_text(info->size_bytes, size));
    if (!known) printf("  %s has no values to show\n", fst_dtype_name(info->dtype));
    if (!known || s->count == 0) return;
    if (s->nan_count < s->count)
        printf("  min %s  max %s", value_text(s, s->least, s->least_key, texts[0]),
               value_text(s, s->greatest, s->greatest_key, texts[1]));
    if (finite > 0)
        printf("  mean %.6g  standard deviation %.6g", s->sum / (double)finite,
               standard_deviation(s));
    if (s->nan_count < s->count) printf("\n");
    printf("  NaN %" PRIu64 "  infinite %" PRIu64 "  zero %" PRIu64 " of %" PRIu64 "\n",
           s->nan_count, s->infinite_count, s->zero_count, s->count);
    if (s->first_count > 0) printf("  first");
    for (uint64_t i = 0; i < s->first_count; i++)
        printf(" %s", value_text(s, s->first[i], s->first_keys[i], texts[0]));
    if (s->first_count > 0) printf("%s\n", s->first_count < s->count ? " .." : "");
}

static int show_tensor(fst_model *model, const fst_tensor_info *info, size_t index,
                       uint64_t first) {
    static value_statistics statistics; // static, because it is large for a stack
    statistics = (value_statistics){.least = INFINITY,
                                    .greatest = -INFINITY,
                                    .first_matching = first,
                                    .dtype = cli_value_dtype(info->dtype)};
    piece_list pieces = {0};
    fst_error error;
    fst_status status = FST_OK;
    bool known = info->dtype == FST_DTYPE_BOOL || cli_value_dtype(info->dtype) != info->dtype ||
                 info->dtype == FST_DTYPE_F64 || info->dtype == FST_DTYPE_I64 ||
                 info->dtype == FST_DTYPE_U64;
    bool cut = !known || cli_pieces_cut(&pieces, info, fst_dtype_bits(info->dtype), PIECE_BYTES);
    cli_pieces_of(&pieces, index);
    if (cut && pieces.count > 0) status = gather(model, &pieces, &statistics, &known, &error);
    cli_pieces_clear(&pieces);
    if (!cut) return cli_no_memory();
    if (status != FST_OK) return cli_fail(&error);
    (cli_wants_json() ? print_json : print_text)(info, &statistics, known);
    return EXIT_OK;
}

static int take(void *context, int key, cli_value value) {
    show_request *request = context;
    (void)key;
    if (cli_parse_count(value.text, FIRST_MAX, &request->first)) return EXIT_OK;
    return cli_usage("show", "--first must be a number up to %d, not '%s'", FIRST_MAX, value.text);
}

/// Shows the tensors that match the names or patterns, in file order. Sets `found` for each name
/// that matched.
static int show_matches(fst_model *model, const show_request *request, bool *found) {
    int code = EXIT_OK;
    for (size_t i = 0; i < fst_model_tensor_count(model) && code == EXIT_OK; i++) {
        fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
        bool is_named = false;
        if (fst_model_tensor_info(model, i, &info, NULL) != FST_OK) continue;
        for (size_t n = 0; n < request->name_count; n++)
            if (strcmp(request->names[n], info.name) == 0 ||
                cli_name_matches(&info, &request->names[n], 1))
                is_named = found[n] = true;
        if (is_named) code = show_tensor(model, &info, i, request->first);
    }
    return code;
}

/// A name without a tensor: a padding tensor, or a mistake.
static int show_other(fst_model *model, const show_request *request, const char *name) {
    char names[CLOSE_NAMES_TEXT_MAX];
    fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
    size_t index;
    if (fst_model_find(model, name, SIZE_MAX, &index, NULL) == FST_OK &&
        fst_model_tensor_info(model, index, &info, NULL) == FST_OK)
        return show_tensor(model, &info, index, request->first);
    cli_close_names(model, name, names);
    return cli_refuse(EXIT_INVALID, "NoMatch", "no tensor name matches '%s'%s%s", name,
                      names[0] == '\0' ? "" : ". Close: ", names);
}

static int run(const cli_command *command, char **argv) {
    show_request request = {.first = 8};
    cli_operands operands;
    int code = cli_parse(command, argv, &request, &operands);
    if (code != EXIT_OK || operands.is_answered) return code;
    fst_model *model;
    fst_error error;
    if (fst_model_open(operands.words[0], NULL, &model, &error) != FST_OK) return cli_fail(&error);
    request.names = (const char *const *)operands.words + 1;
    request.name_count = (size_t)operands.count - 1;
    bool *found = calloc(request.name_count, sizeof *found);
    code = found == NULL ? cli_no_memory() : show_matches(model, &request, found);
    for (size_t n = 0; found != NULL && n < request.name_count && code == EXIT_OK; n++)
        if (!found[n]) code = show_other(model, &request, request.names[n]);
    free(found);
    fst_model_close(model);
    return code;
}

static const cli_option options[] = {
    {'f', "first", "N", NULL, "print the first N values (default: 8)", 0},
    {0},
};

const cli_command show_command = {
    .name = "show",
    .operands = "PATH NAME...",
    .summary = "print values of tensors: min, max, mean, NaNs, first values",
    .about =
        "Read the named tensors and print their minimum, maximum and mean, the number of NaN,\n"
        "infinite and zero elements, and the first values. NAME may be a pattern. With\n"
        "--json, print one object per tensor, with null for values that JSON cannot express.",
    .examples = "  fastsafetensors show model.safetensors embeddings.LayerNorm.bias\n"
                "  fastsafetensors show --json --first 0 model.safetensors '*.weight'\n",
    .options = options,
    .operand_min = 2,
    .operand_max = 1000,
    .inputs = INPUTS_FIRST,
    .has_json = true,
    .has_cache = true,
    .take = take,
    .run = run,
};
