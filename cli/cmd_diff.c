// SPDX-License-Identifier: Apache-2.0
/// diff: compares two models.
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"
#include "diff_pair.h"
#include "metadata.h"

/// Number of the worst tensors listed at the end, and of metadata keys of one kind.
#define WORST_COUNT 5
#define KEY_COUNT_MAX 8

typedef struct worst_tensor {
    fst_tensor_info info;
    double max;
} worst_tensor;

/// The request of a comparison, and its findings.
typedef struct model_comparison {
    fst_model *models[2];
    bool values, metadata, quiet;
    size_t difference_count, same_count, valued_count;
    worst_tensor worst[WORST_COUNT];
    value_summary all;
} model_comparison;

/// Starts the line, or JSON object, of a difference: `what` for people, `kind` for programs.
static void print_line(model_comparison *comparison, const char *what, const char *kind,
                       const char *name, size_t size) {
    if (!comparison->quiet && cli_wants_json()) {
        printf("%s\n  {\"kind\": \"%s\", \"name\": ", comparison->difference_count > 0 ? "," : "",
               kind);
        cli_print_json(name, size);
    } else if (!comparison->quiet) {
        printf("%s ", what);
        cli_print_name(name, size);
    }
    comparison->difference_count++;
}

static void print_end(const model_comparison *comparison) {
    if (!comparison->quiet) printf(cli_wants_json() ? "}" : "\n");
}

static void print_tensor_difference(model_comparison *comparison, const char *what,
                                    const char *kind, const fst_tensor_info *info) {
    print_line(comparison, what, kind, info->name, info->name_size);
}

/// Keeps the tensors with the greatest differences, the greatest first.
static void update_worst(model_comparison *comparison, const fst_tensor_info *info,
                         const value_summary *summary) {
    size_t at = WORST_COUNT;
    comparison->valued_count++;
    comparison->all.element_count += summary->element_count;
    comparison->all.differing += summary->differing;
    comparison->all.sum += summary->sum;
    while (at > 0 && diff_exceeds(summary->max, comparison->worst[at - 1].max)) at--;
    if (at == WORST_COUNT || summary->differing == 0) return;
    memmove(&comparison->worst[at + 1], &comparison->worst[at],
            (WORST_COUNT - at - 1) * sizeof *comparison->worst);
    comparison->worst[at] = (worst_tensor){*info, summary->max};
}

static void print_values(const value_summary *summary) {
    double mean = summary->element_count == 0 ? 0 : summary->sum / (double)summary->element_count;
    if (cli_wants_json()) {
        printf(", \"elements\": %" PRIu64 ", \"differing\": %" PRIu64 ", \"max_error\": ",
               summary->element_count, summary->differing);
        cli_print_number(summary->max);
        printf(", \"mean_error\": ");
        cli_print_number(mean);
    } else if (summary->element_count == 0) {
        printf(": there are no elements");
    } else {
        printf(": %" PRIu64 " of %" PRIu64 " elements, by at most %.6g, on average %.6g",
               summary->differing, summary->element_count, summary->max, mean);
    }
}

/// Compares values and prints the differences. The dtypes may differ.
static fst_status summarise(model_comparison *comparison, tensor_pair *pair, fst_error *error) {
    value_summary summary;
    fst_status status = diff_pair_values(pair, &summary, error);
    if (status != FST_OK) return status;
    if (summary.known) update_worst(comparison, &pair->infos[0], &summary);
    if (comparison->quiet) return status;
    if (summary.known)
        print_values(&summary);
    else if (!cli_wants_json())
        printf(": %s has no values to compare", fst_dtype_name(pair->infos[0].dtype));
    return status;
}

static void print_shapes(const model_comparison *comparison, const fst_tensor_info *infos) {
    char texts[2][128];
    if (comparison->quiet) return;
    for (int side = 0; side < 2; side++)
        cli_shape_text(infos[side].shape, infos[side].rank, texts[side], sizeof texts[side]);
    printf(cli_wants_json() ? ", \"a\": \"%s %s\", \"b\": \"%s %s\"" : ": %s %s, %s %s",
           fst_dtype_name(infos[0].dtype), texts[0], fst_dtype_name(infos[1].dtype), texts[1]);
}

static fst_status compare_bytes(model_comparison *comparison, tensor_pair *pair, fst_error *error) {
    bool same = true;
    fst_status status = diff_pair_bytes(pair, &same, error);
    if (status != FST_OK) return status;
    if (same) {
        comparison->same_count++;
        return FST_OK;
    }
    print_tensor_difference(comparison, "bytes differ:", "bytes", &pair->infos[0]);
    if (comparison->values) status = summarise(comparison, pair, error);
    print_end(comparison);
    return status;
}

static int compare_pair(model_comparison *comparison, tensor_pair *pair) {
    const fst_tensor_info *infos = pair->infos;
    bool same_shape = infos[0].rank == infos[1].rank &&
                      memcmp(infos[0].shape, infos[1].shape, infos[0].rank * sizeof(uint64_t)) == 0;
    fst_error error;
    fst_status status = FST_OK;
    if (same_shape && infos[0].dtype == infos[1].dtype) {
        if (!diff_pair_cut(pair)) return cli_no_memory();
        status = compare_bytes(comparison, pair, &error);
    } else {
        print_tensor_difference(comparison, same_shape ? "dtype differs:" : "shape differs:",
                                same_shape ? "dtype" : "shape", &infos[0]);
        print_shapes(comparison, infos);
        if (same_shape && comparison->values) {
            if (!diff_pair_cut(pair)) return cli_no_memory();
            status = summarise(comparison, pair, &error);
        }
        print_end(comparison);
    }
    return status == FST_OK ? EXIT_OK : cli_fail(&error);
}

static int compare_tensor(model_comparison *comparison, size_t index) {
    tensor_pair pair = {.models = {comparison->models[0], comparison->models[1]},
                        .indexes = {index, 0}};
    fst_tensor_info *infos = pair.infos;
    infos[0] = infos[1] = FST_STRUCT_INIT(fst_tensor_info);
    if (fst_model_tensor_info(pair.models[0], index, &infos[0], NULL) != FST_OK)
        return EXIT_UNREADABLE;
    if (fst_model_find(pair.models[1], infos[0].name, infos[0].name_size, &pair.indexes[1], NULL) !=
            FST_OK ||
        fst_model_tensor_info(pair.models[1], pair.indexes[1], &infos[1], NULL) != FST_OK) {
        print_tensor_difference(comparison, "only in A:", "only_a", &infos[0]);
        print_end(comparison);
        return EXIT_OK;
    }
    int code = compare_pair(comparison, &pair);
    diff_pair_clear(&pair);
    return code;
}

static void find_added(model_comparison *comparison) {
    for (size_t i = 0; i < fst_model_tensor_count(comparison->models[1]); i++) {
        fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
        size_t index;
        if (fst_model_tensor_info(comparison->models[1], i, &info, NULL) != FST_OK ||
            fst_model_find(comparison->models[0], info.name, info.name_size, &index, NULL) ==
                FST_OK)
            continue;
        print_tensor_difference(comparison, "only in B:", "only_b", &info);
        print_end(comparison);
    }
}

/// Kinds of metadata differences. Of each kind only a few keys are printed.
enum { ONLY_IN_A, ONLY_IN_B, DIFFERS, METADATA_KIND_COUNT };

static void print_metadata_difference(model_comparison *comparison, int kind,
                                      const fst_metadata_entry *entry, size_t *counts) {
    static const char *const words[] = {
        "metadata only in A:", "metadata only in B:", "metadata differs:"};
    static const char *const kinds[] = {"metadata_only_a", "metadata_only_b", "metadata"};
    if (counts[kind]++ >= KEY_COUNT_MAX && !cli_wants_json()) {
        comparison->difference_count++;
        return;
    }
    print_line(comparison, words[kind], kinds[kind], entry->key, entry->key_size);
    print_end(comparison);
}

static int compare_metadata(model_comparison *comparison) {
    size_t counts[2] = {0, 0}, display[METADATA_KIND_COUNT] = {0};
    fst_metadata_entry *entries[2];
    metadata_index found[2] = {{0}, {0}};
    bool is_complete = true;
    for (int side = 0; side < 2; side++) {
        entries[side] = cli_model_metadata(comparison->models[side], &counts[side]);
        is_complete = is_complete && entries[side] != NULL &&
                      cli_metadata_index(entries[side], counts[side], &found[side]);
    }
    for (size_t i = 0; is_complete && i < counts[0]; i++) {
        const fst_metadata_entry *own = &entries[0][i];
        const fst_metadata_entry *other = cli_metadata_find(&found[1], "", own->key, own->key_size);
        if (other == NULL)
            print_metadata_difference(comparison, ONLY_IN_A, own, display);
        else if (own->value_size != other->value_size ||
                 memcmp(own->value, other->value, own->value_size) != 0)
            print_metadata_difference(comparison, DIFFERS, own, display);
    }
    for (size_t i = 0; is_complete && i < counts[1]; i++)
        if (cli_metadata_find(&found[0], "", entries[1][i].key, entries[1][i].key_size) == NULL)
            print_metadata_difference(comparison, ONLY_IN_B, &entries[1][i], display);
    free(found[0].order);
    free(found[1].order);
    free(entries[0]);
    free(entries[1]);
    for (int kind = 0; kind < METADATA_KIND_COUNT; kind++)
        if (display[kind] > KEY_COUNT_MAX && !comparison->quiet && !cli_wants_json())
            printf("metadata: %zu more keys like these\n", display[kind] - KEY_COUNT_MAX);
    return is_complete ? EXIT_OK : cli_no_memory();
}

static void print_worst(const model_comparison *comparison) {
    if (comparison->valued_count < 2 || comparison->all.differing == 0) return;
    const value_summary *all = &comparison->all;
    printf("values: %" PRIu64 " of %" PRIu64 " elements differ, by at most %.6g, on average %.6g; "
           "most in\n",
           all->differing, all->element_count, comparison->worst[0].max,
           all->sum / (double)all->element_count);
    for (size_t i = 0; i < WORST_COUNT && comparison->worst[i].info.name != NULL; i++) {
        printf("  %.6g  ", comparison->worst[i].max);
        cli_print_name(comparison->worst[i].info.name, comparison->worst[i].info.name_size);
        printf("\n");
    }
}

static void print_result(const model_comparison *comparison) {
    if (cli_wants_json()) {
        printf("], \"same\": %zu, \"different\": %zu", comparison->same_count,
               comparison->difference_count);
        if (comparison->valued_count > 0) {
            value_summary all = comparison->all;
            all.max = comparison->worst[0].max;
            print_values(&all);
        }
        printf("}\n");
        return;
    }
    print_worst(comparison);
    printf("%zu tensor%s %s the same, %zu difference%s\n", comparison->same_count,
           cli_plural(comparison->same_count), comparison->same_count == 1 ? "is" : "are",
           comparison->difference_count, cli_plural(comparison->difference_count));
}

static int compare_models(model_comparison *comparison) {
    int code = EXIT_OK;
    size_t count = fst_model_tensor_count(comparison->models[0]);
    uint64_t done = 0, total = 0;
    fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
    if (cli_wants_json() && !comparison->quiet) printf("{\"differences\": [");
    if (comparison->metadata) code = compare_metadata(comparison);
    for (size_t i = 0; i < count; i++)
        if (fst_model_tensor_info(comparison->models[0], i, &info, NULL) == FST_OK)
            total += info.size_bytes;
    fst_progress_callback progress = cli_progress_begin();
    for (size_t i = 0; i < count && code == EXIT_OK; i++) {
        code = compare_tensor(comparison, i);
        if (fst_model_tensor_info(comparison->models[0], i, &info, NULL) == FST_OK)
            done += info.size_bytes;
        if (progress != NULL) progress(NULL, done, total, i + 1, count);
    }
    cli_progress_end(code == EXIT_OK);
    if (code != EXIT_OK) return EXIT_UNREADABLE;
    find_added(comparison);
    if (!comparison->quiet) print_result(comparison);
    return comparison->difference_count > 0 ? EXIT_INVALID : EXIT_OK;
}

static int take(void *context, int key, cli_value value) {
    model_comparison *comparison = context;
    (void)value;
    if (key == 'v') comparison->values = true;
    if (key == 'm') comparison->metadata = false;
    if (key == 'q') comparison->quiet = true;
    return EXIT_OK;
}

static int run(const cli_command *command, char **argv) {
    model_comparison comparison = {.metadata = true};
    cli_operands operands;
    int code = cli_parse(command, argv, &comparison, &operands);
    if (code != EXIT_OK || operands.is_answered) return code;
    fst_error error;
    for (int side = 0; side < 2 && code == EXIT_OK; side++)
        if (fst_model_open(operands.words[side], NULL, &comparison.models[side], &error) !=
            FST_OK) {
            cli_fail(&error);
            code = EXIT_UNREADABLE; // 1 would mean that they differ
        }
    if (code == EXIT_OK) code = compare_models(&comparison);
    fst_model_close(comparison.models[0]);
    fst_model_close(comparison.models[1]);
    return code;
}

static const cli_option options[] = {
    {'v', "values", NULL, NULL,
     "count differing elements, with the largest and the mean difference, also between dtypes", 0},
    {'m', "no-metadata", NULL, NULL, "ignore metadata", 0},
    {'q', "quiet", NULL, NULL, "print nothing; set the exit code", 0},
    {0},
};

const cli_command diff_command = {
    .name = "diff",
    .operands = "A B",
    .summary = "compare two models: names, shapes, dtypes, bytes, values",
    .about = "Compare names, shapes, dtypes, bytes and metadata of two models.",
    .examples = "  fastsafetensors diff --values model.safetensors converted.safetensors\n"
                "  fastsafetensors diff --json folder other.safetensors | jq .different\n",
    .options = options,
    .operand_min = 2,
    .operand_max = 2,
    .inputs = INPUTS_ALL,
    .has_json = true,
    .has_cache = true,
    .has_progress = true,
    .take = take,
    .run = run,
};
