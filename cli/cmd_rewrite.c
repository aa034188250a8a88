// SPDX-License-Identifier: Apache-2.0
/// convert, extract, merge, split, rescue: one model written as another.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "commands.h"
#include "rewrite.h"
#include "standard_input.h"
#include "torch_file.h"

#define GLOB_COUNT_MAX 256

static const char *const compressions[] = {"float", "all", NULL};

typedef struct rewrite_request {
    const cli_command *command;
    rewrite_plan plan;
    const char *globs[GLOB_COUNT_MAX];
    char **sources;
    size_t source_count;
    uint32_t open_flags;
    bool decompress;
    fst_error loss; ///< of rescue: its message says what is missing
} rewrite_request;

const char *const cli_manifest_words[] = {"xxh3-128", "blake3", "sha256", NULL};
const char *const cli_order_words[] = {"reference", "name", "given", NULL};
const char *const cli_engine_words[] = {"auto", "buffered", "direct", "uring", NULL};

void cli_plan_manifest(rewrite_plan *plan, int digest) {
    plan->save.manifest = "";
    plan->save.digest = (fst_digest)digest;
}

static int take_number(rewrite_request *request, int key, const char *text) {
    rewrite_plan *plan = &request->plan;
    const char *name = request->command->name;
    uint64_t number = 0;
    switch (key) {
    case 'a':
        if (!fst_size_parse(text, &number) || number > 1 << 20 || (number & (number - 1)) != 0)
            return cli_usage(name, "--alignment must be a power of two up to 1048576, not '%s'",
                             text);
        plan->save.alignment_bytes = number;
        return EXIT_OK;
    case 'z':
        if (!fst_size_parse(text, &plan->file_bytes_max) || plan->file_bytes_max == 0)
            return cli_usage(name, "--size must be a size (5G, 500MB), not '%s'", text);
        return EXIT_OK;
    default:
        if (!cli_parse_count(text, 99999, &number) || number == 0)
            return cli_usage(name, "--count must be from 1 to 99999, not '%s'", text);
        plan->wanted_files = (uint32_t)number;
        return EXIT_OK;
    }
}

static int take(void *context, int key, cli_value value) {
    rewrite_request *request = context;
    rewrite_plan *plan = &request->plan;
    switch (key) {
    case 'D':
        plan->convert = 1;
        plan->dtype = (fst_dtype)value.word;
        return EXIT_OK;
    case 'o': plan->save.order = (fst_save_order)value.word; return EXIT_OK;
    case 'e': plan->save.engine = (fst_save_engine)value.word; return EXIT_OK;
    case 's':
        if (plan->glob_count == GLOB_COUNT_MAX)
            return cli_usage(request->command->name, "too many --select");
        request->globs[plan->glob_count++] = value.text;
        return EXIT_OK;
    case 'y': plan->by_layer = true; return EXIT_OK;
    case 'k': plan->save.compress = (fst_compress)(value.word + 1); return EXIT_OK;
    case 'm': cli_plan_manifest(plan, value.word); return EXIT_OK;
    case 'u': request->decompress = true; return EXIT_OK;
    case 'q': plan->save.promise = FST_SAVE_QUICK; return EXIT_OK;
    case 'd': plan->dry_run = true; return EXIT_OK;
    case 'l': request->open_flags |= FST_OPEN_LENIENT; return EXIT_OK;
    case 'n': plan->save.stem = value.text; return EXIT_OK;
    default: return take_number(request, key, value.text);
    }
}

static int check_request(const rewrite_request *request) {
    const rewrite_plan *plan = &request->plan;
    int methods = (plan->file_bytes_max > 0) + (plan->wanted_files > 0) + (plan->by_layer ? 1 : 0);
    const char *first = plan->file_bytes_max > 0 ? "size" : "count";
    const char *second = plan->by_layer ? "by-layer" : "count";
    if (request->command == &split_command && methods > 1)
        return cli_usage("split", "--%s and --%s cannot be combined", first, second);
    if (request->command == &split_command && methods == 0)
        return cli_usage("split", "expected --size, --count or --by-layer");
    const char *stem = plan->save.stem;
    if (stem != NULL && (stem[0] == '\0' || stem[0] == '.' || strchr(stem, '/') != NULL))
        return cli_usage("split",
                         "--stem must be the beginning of a file name, without slashes and "
                         "not hidden, not '%s'",
                         stem);
    if (request->command == &extract_command && plan->glob_count == 0)
        return cli_usage("extract", "expected --select GLOB");
    return EXIT_OK;
}

/// Checks compression against the target and the other options.
static int check_packing(const rewrite_request *request, bool is_torch_file) {
    const rewrite_plan *plan = &request->plan;
    bool compress = plan->save.compress != FST_COMPRESS_NONE;
    const char *name = request->command->name;
    if (!compress && !request->decompress) return EXIT_OK;
    if (compress && request->decompress)
        return cli_usage(name, "--compress and --decompress cannot be combined");
    if (cli_is_output(plan->target) || plan->dry_run || (request->decompress && is_torch_file))
        return cli_usage(name, "--%s cannot be combined with standard output%s or --dry-run",
                         compress ? "compress" : "decompress", compress ? "" : ", torch file");
    bool has_more = plan->convert || plan->glob_count > 0 || plan->save.alignment_bytes > 0 ||
                    plan->save.order != FST_SAVE_ORDER_REFERENCE || request->open_flags != 0;
    if (request->decompress && has_more)
        return cli_usage(name, "--decompress restores the original file and accepts only --quick "
                               "and --manifest");
    return EXIT_OK;
}

/// The save that writes the file also writes its manifest, next to it.
static int check_manifest(const rewrite_request *request) {
    const rewrite_plan *plan = &request->plan;
    if (plan->save.manifest == NULL) return EXIT_OK;
    if (cli_is_output(plan->target) || plan->dry_run)
        return cli_usage(request->command->name,
                         "--manifest cannot be combined with standard output or --dry-run");
    return EXIT_OK;
}

static bool ends_with(const char *text, const char *ending) {
    size_t size = strlen(text), ending_size = strlen(ending);
    return size >= ending_size && strcmp(text + size - ending_size, ending) == 0;
}

/// A model in one file that has the name of an index could not be opened.
static int check_target(const rewrite_request *request) {
    const rewrite_plan *plan = &request->plan;
    if (*plan->target == '\0') return cli_usage(request->command->name, "TARGET is empty");
    if (request->command == &split_command) return cli_check_folder_target(plan);
    if (ends_with(plan->target, ".index.json"))
        return cli_usage(request->command->name,
                         "TARGET '%s' has the name of an index, and %s writes one file",
                         plan->target, request->command->name);
    return plan->dry_run ? cli_check_file_target(plan->target, false) : EXIT_OK;
}

/// Whether two paths lead to the same file.
static bool is_same_file(const char *a, const char *b) {
    struct stat infos[2];
    return stat(a, &infos[0]) == 0 && stat(b, &infos[1]) == 0 &&
           infos[0].st_dev == infos[1].st_dev && infos[0].st_ino == infos[1].st_ino;
}

/// Finds how much of a truncated file is lost, which the error of a strict open says; "" if nothing
/// is.
static void find_loss(const char *path, fst_error *error) {
    fst_model *model = NULL;
    if (fst_model_open(path, NULL, &model, error) == FST_OK) error->message[0] = '\0';
    fst_model_close(model);
}

static int check_rescue(rewrite_request *request, const fst_model *model) {
    const char *source = request->sources[0];
    // The rest of a truncated tensor may still be useful, or completed by the download.
    if (is_same_file(source, request->plan.target))
        return cli_usage("rescue",
                         "TARGET '%s' is SOURCE, whose incomplete tensors would be lost. Give "
                         "another name",
                         source);
    find_loss(source, &request->loss);
    if (!cli_wants_json())
        cli_print_note("%s", request->loss.message[0] == '\0' ? "the file is complete"
                                                              : request->loss.message);
    // If no tensor is complete, do not replace an existing target.
    if (fst_model_tensor_count(model) > 0) return EXIT_OK;
    return cli_refuse(EXIT_INVALID, "NoTensors", "no tensor is complete. Nothing is written");
}

static int rewrite_sources(rewrite_request *request) {
    fst_open_options options = {.struct_size = sizeof options, .flags = request->open_flags};
    fst_model *model;
    int code = cli_open_sources((const char *const *)request->sources, request->source_count,
                                &options, &model);
    if (code != EXIT_OK) return code;
    if (request->command == &rescue_command) {
        code = check_rescue(request, model);
        request->plan.loss = request->loss.message;
    }
    if (request->command == &split_command) code = cli_check_selection(model, &request->plan);
    if (code == EXIT_OK) code = cli_rewrite(model, &request->plan);
    fst_model_close(model);
    return code;
}

static int run(const cli_command *command, char **argv) {
    rewrite_request request = {
        .command = command,
        .plan.save = {.struct_size = sizeof request.plan.save, .promise = FST_SAVE_DURABLE},
        .open_flags = command == &rescue_command ? FST_OPEN_CUT : 0};
    cli_operands operands;
    int code = cli_parse(command, argv, &request, &operands);
    if (code != EXIT_OK || operands.is_answered) return code;
    if ((code = check_request(&request)) != EXIT_OK) return code;
    request.sources = operands.words;
    request.source_count = (size_t)operands.count - 1;
    request.plan.target = operands.words[operands.count - 1];
    request.plan.globs = request.globs;
    bool is_torch_file = command == &convert_command && cli_is_torch_file(request.sources[0]);
    if ((code = check_packing(&request, is_torch_file)) != EXIT_OK) return code;
    if ((code = check_manifest(&request)) != EXIT_OK) return code;
    if ((code = check_target(&request)) != EXIT_OK) return code;
    if (is_torch_file && request.open_flags != 0)
        return cli_usage("convert", "--lenient applies to safetensors files only");
    if (is_torch_file) return cli_convert_torch_file(request.sources[0], &request.plan);
    bool packs = command == &convert_command && request.open_flags == 0 &&
                 cli_is_compress_only(&request.plan, request.sources[0]);
    if (request.decompress || packs)
        return cli_pack(request.sources[0], &request.plan, request.decompress);
    return rewrite_sources(&request);
}

/// The commands of this file, for the table of their options.
enum { CONVERT = 1, EXTRACT = 2, SPLIT = 4, MERGE = 8, RESCUE = 16 };

static const cli_option options[] = {
    {'z', "size", "SIZE", NULL, "write files of at most SIZE (5G, 500MB)", SPLIT},
    {'c', "count", "N", NULL, "write N files of about the same size", SPLIT},
    {'y', "by-layer", NULL, NULL, "write one file per layer, by the first number in the names",
     SPLIT},
    {'n', "stem", "NAME", NULL, "begin file names with NAME (default: model)", SPLIT},
    CLI_SELECT_OPTION,
    {'D', "dtype", "DTYPE", cli_dtype_words, "convert floats, and integers to wider ones, to DTYPE",
     ~(unsigned)RESCUE},
    {'a', "alignment", "SIZE", NULL,
     "begin each tensor at a multiple of SIZE (64, 4K); adds padding tensors where needed",
     ~(unsigned)RESCUE},
    {'k', "compress", "[=WHICH]", compressions,
     "compress float tensors, or all, without loss (needs libzstd)", ~(unsigned)RESCUE},
    CLI_MANIFEST_OPTION,
    {'u', "decompress", NULL, NULL, "restore the original of a compressed file", CONVERT},
    CLI_LENIENT_OPTION(~(unsigned)RESCUE),
    {'o', "order", "ORDER", cli_order_words,
     "order tensors by dtype and name (reference, default), by name, or as in SOURCE (given)", 0},
    CLI_QUICK_OPTION,
    {'e', "engine", "ENGINE", cli_engine_words,
     "write through the page cache (buffered) or with direct I/O; default: auto, direct I/O from "
     "64 MiB on, unless --quick",
     0},
    CLI_DRY_RUN_OPTION,
    {0},
};

#define OF_THIS_FILE(option_bit, most_operands)                                                    \
    .options = options, .bit = option_bit, .operand_min = 2, .operand_max = most_operands,         \
    .inputs = INPUTS_ALL_BUT_LAST, .has_json = true, .has_progress = true, .has_cache = true,      \
    .take = take, .run = run

#define IN_ONE_STEP                                                                                \
    "The target is replaced atomically when the new file is complete, and its old manifest\n"      \
    "and .digest file are deleted. After an error or a crash the old file is unchanged.\n"         \
    "TARGET may be SOURCE itself. Use - for standard input or output."

const cli_command convert_command = {
    .name = "convert",
    .operands = "SOURCE TARGET",
    .summary = "rewrite a model: dtype, alignment, order, compression; torch files too",
    .about =
        "Write a model as one file, converted, aligned, compressed or in another order. It\n"
        "needs at most 256 MiB of memory. SOURCE may also be a torch.save file; torch's\n"
        "restricted unpickler (weights_only) reads it, in the Python next to this command or\n"
        "the first python3 of PATH. Tied tensors are saved once, as by save_model().\n"
        "\n"
        "--alignment puts tensors whose size is a multiple of SIZE first and a padding tensor of\n"
        "zeros behind each of the others except the last, because the format allows no gaps.\n"
        "This project ignores padding tensors unless you ask for one by its full name. Other\n"
        "readers see U8 tensors __padding__.0, __padding__.1 and so on: safetensors'\n"
        "load_file returns them, and load_state_dict(strict=True) refuses them as "
        "unexpected.\n\n" IN_ONE_STEP,
    .examples = "  fastsafetensors convert --dtype BF16 model.safetensors small.safetensors\n"
                "  fastsafetensors convert pytorch_model.bin model.safetensors\n"
                "  fastsafetensors convert --compress model.safetensors packed.safetensors\n",
    OF_THIS_FILE(CONVERT, 2),
};

const cli_command extract_command = {
    .name = "extract",
    .operands = "--select GLOB SOURCE TARGET",
    .summary = "write some tensors of a model to a new file",
    .about = "Write the tensors whose names match to a new file.\n\n" IN_ONE_STEP,
    .examples =
        "  fastsafetensors extract --select 'embeddings.*' model.safetensors emb.safetensors\n",
    OF_THIS_FILE(EXTRACT, 2),
};

const cli_command split_command = {
    .name = "split",
    .operands = "(--size SIZE | --count N | --by-layer) SOURCE FOLDER",
    .summary = "write a sharded model: by size, number of files or layer",
    .about =
        "Write a model in several files with an index, named as Hugging Face's libraries name\n"
        "them. The index is published last: until then the folder keeps its old model. Its files\n"
        "with the same --stem are replaced or deleted, SOURCE too if it is one of them. --dry-run\n"
        "lists these files. With --select, SOURCE must not be one of them: its other tensors\n"
        "would be lost.",
    .examples = "  fastsafetensors split --size 5G model.safetensors folder\n",
    OF_THIS_FILE(SPLIT, 2),
};

const cli_command merge_command = {
    .name = "merge",
    .operands = "SOURCE... TARGET",
    .summary = "write a sharded model, or several models, as one file",
    .about = "Write a sharded model, or several files, indexes or folders, as one file. The same\n"
             "name in two of them is an error.\n\n" IN_ONE_STEP,
    .examples = "  fastsafetensors merge folder model.safetensors\n"
                "  fastsafetensors merge base.safetensors adapter.safetensors both.safetensors\n",
    OF_THIS_FILE(MERGE, 100000),
};

const cli_command rescue_command = {
    .name = "rescue",
    .operands = "SOURCE TARGET",
    .summary = "save the complete tensors of a truncated file",
    .about = "Write the complete tensors of a truncated file (an interrupted download or copy) to\n"
             "a new file, and print how much is lost.",
    .examples = "  fastsafetensors rescue half.safetensors whole.safetensors\n",
    OF_THIS_FILE(RESCUE, 2),
};
