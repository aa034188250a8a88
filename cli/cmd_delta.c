// SPDX-License-Identifier: Apache-2.0
/// delta: what changed between two versions of a checkpoint: made, shown, verified, applied.
#include <fastsafetensors/experimental.h>
#include <inttypes.h>
#include <string.h>

#include "commands.h"

typedef struct delta_request {
    fst_delta_make_options make;
    fst_delta_options options;
    char keys[16]; ///< of the options that were given
} delta_request;

/// The options that an action has, by their keys.
static const struct {
    const char *action, *keys;
} action_keys[] = {{"make", "vbecdltq"}, {"convert", "vbecdltq"}, {"apply", "vtqCN"},
                   {"verify", "vt"},     {"recover", "tRq"},      {"show", ""}};

static const char *const action_words[] = {"make",    "apply", "verify", "convert",
                                           "recover", "show",  NULL};
static const char *const encoding_words[] = {"xor", "overwrite", NULL};
static const char *const checksum_words[] = {"adler32", "xxh3-128", "blake3", NULL};
static const fst_digest checksums[] = {FST_DIGEST_ADLER32, FST_DIGEST_XXH3_128, FST_DIGEST_BLAKE3};
static const char *const dialect_words[] = {"sglang", "modelexpress", NULL};

static int take(void *context, int key, cli_value value) {
    delta_request *request = context;
    uint64_t number;
    size_t used = strlen(request->keys);
    if (used + 1 < sizeof request->keys) request->keys[used] = (char)key;
    switch (key) {
    case 'v': request->make.version = request->options.version = value.text; break;
    case 'b': request->make.base_version = value.text; break;
    case 'e': request->make.encoding = (fst_delta_encoding)value.word; break;
    case 'c': request->make.digest = checksums[value.word]; break;
    case 'd': request->make.dialect = (fst_delta_dialect)value.word; break;
    case 'l':
        if (!cli_parse_count(value.text, 19, &number) || number == 0)
            return cli_usage("delta", "--level must be 1 to 19, not '%s'", value.text);
        request->make.level = (int)number;
        break;
    case 't':
        if (!cli_parse_count(value.text, 1024, &number))
            return cli_usage("delta", "--threads must be a number up to 1024, not '%s'",
                             value.text);
        request->make.thread_count = request->options.thread_count = (uint32_t)number;
        break;
    case 'q':
        request->make.flags &= ~(uint32_t)FST_DELTA_DURABLE;
        request->options.flags &= ~(uint32_t)FST_DELTA_DURABLE;
        break;
    case 'C': request->options.flags |= FST_DELTA_CHECK_FIRST; break;
    case 'N': request->options.flags |= FST_DELTA_NEW_FILES; break;
    default: request->options.flags |= FST_DELTA_ROLL_BACK; break;
    }
    return EXIT_OK;
}

static int report(fst_status status, const fst_delta_stats *stats, const char *what,
                  const fst_error *error) {
    char size[16], written[16];
    if (status != FST_OK) return cli_fail(error);
    if (cli_wants_json())
        printf("{\"tensors\": %zu, \"tensor_bytes\": %" PRIu64 ", \"bytes_read\": %" PRIu64
               ", \"bytes_written\": %" PRIu64 ", \"recovered\": %d, \"seconds\": %.6f}\n",
               stats->tensor_count, stats->tensor_bytes, stats->bytes_read, stats->bytes_written,
               stats->recovered, (double)stats->total_ns / 1e9);
    else
        printf("%s: %zu tensor%s, %s; %s written in %.2f s\n", what, stats->tensor_count,
               cli_plural(stats->tensor_count), cli_size_text(stats->tensor_bytes, size),
               cli_size_text(stats->bytes_written, written), (double)stats->total_ns / 1e9);
    return EXIT_OK;
}

/// Prints one changed tensor, or all of them as JSON.
static int show_tensors(const fst_delta *delta, const fst_delta_info *info, fst_error *error) {
    char size[16];
    for (size_t i = 0; i < info->tensor_count; i++) {
        fst_delta_tensor tensor = FST_STRUCT_INIT(fst_delta_tensor);
        if (fst_delta_tensor_get(delta, i, &tensor, error) != FST_OK) return cli_fail(error);
        if (cli_wants_json()) {
            printf("%s\n  {\"name\": ", i > 0 ? "," : "");
            cli_print_json(tensor.name, tensor.name_size);
            printf(", \"versions\": %zu, \"stored_bytes\": %" PRIu64 "}", tensor.version_count,
                   tensor.stored_bytes);
        } else {
            printf("  ");
            cli_print_name(tensor.name, tensor.name_size);
            printf("  %s\n", cli_size_text(tensor.stored_bytes, size));
        }
    }
    return EXIT_OK;
}

static int show_delta(const fst_delta *delta, fst_error *error) {
    char size[16];
    fst_delta_info info = FST_STRUCT_INIT(fst_delta_info);
    if (fst_delta_info_get(delta, &info, error) != FST_OK) return cli_fail(error);
    const char *encoding = encoding_words[info.encoding], *digest = fst_digest_name(info.digest);
    if (cli_wants_json()) {
        printf("{\"base_version\": ");
        cli_print_json(info.base_version, strlen(info.base_version));
        printf(", \"version\": ");
        cli_print_json(info.version, strlen(info.version));
        printf(", \"versions\": %zu, \"encoding\": \"%s\", \"checksum\": \"%s\", \"stored_bytes\": "
               "%" PRIu64 ", \"tensors\": [",
               info.version_count, encoding, digest, info.stored_bytes);
    } else {
        printf("version ");
        cli_print_name(info.version, strlen(info.version));
        printf(" based on ");
        cli_print_name(info.base_version, strlen(info.base_version));
        printf(": %s, %s, %zu tensor%s, %s\n", encoding, digest, info.tensor_count,
               cli_plural(info.tensor_count), cli_size_text(info.stored_bytes, size));
    }
    int code = show_tensors(delta, &info, error);
    if (code == EXIT_OK && cli_wants_json()) printf("]}\n");
    return code;
}

/// The version note of a checkpoint folder. False where there is no note, unless `may_lack`.
/// *code: the exit code.
static bool show_note(const char *path, bool may_lack, int *code) {
    char version[FST_DELTA_VERSION_BYTES];
    int is_interrupted;
    fst_error error;
    fst_status status = fst_delta_version(path, version, &is_interrupted, &error);
    // FST_E_ARGUMENT: a file, which can be neither a delta nor the folder of a checkpoint.
    bool is_final = status == FST_E_FILE_CHANGED || status == FST_E_ARGUMENT;
    *code = is_final ? cli_fail(&error) : EXIT_OK;
    if (*code != EXIT_OK) return true;
    if (status != FST_OK || (version[0] == '\0' && !is_interrupted && !may_lack)) return false;
    if (cli_wants_json()) {
        printf("{\"version\": ");
        cli_print_json(version, strlen(version));
        printf(", \"interrupted\": %s}\n", is_interrupted ? "true" : "false");
    } else if (is_interrupted) {
        printf("an update was interrupted: run 'fastsafetensors delta recover'\n");
    } else if (version[0] == '\0') {
        printf("no version note: no delta was applied to this checkpoint\n");
    } else {
        printf("version ");
        cli_print_name(version, strlen(version));
        printf("\n");
    }
    return true;
}

/// Whether a folder that could not be opened as a delta is a checkpoint: a full version, to which
/// no delta was applied yet, or one without an index.
static bool is_checkpoint(const char *path, fst_status status) {
    fst_model *model;
    if (status == FST_E_ARGUMENT) return true;
    if (status != FST_E_NOT_FOUND || fst_model_open(path, NULL, &model, NULL) != FST_OK)
        return false;
    fst_model_close(model);
    return true;
}

static int make(delta_request *request, char **words) {
    fst_delta_stats stats = FST_STRUCT_INIT(fst_delta_stats);
    fst_error error = {0};
    if (request->make.version == NULL || request->make.base_version == NULL)
        return cli_usage("delta", "make needs --version and --base-version");
    request->make.checkpoint = words[1];
    fst_status status = fst_delta_make(words[0], words[2], &request->make, &stats, &error);
    return report(status, &stats, "made", &error);
}

static int convert(delta_request *request, const fst_delta *delta, const char *base,
                   const char *folder) {
    fst_delta_stats stats = FST_STRUCT_INIT(fst_delta_stats);
    fst_delta_info info = FST_STRUCT_INIT(fst_delta_info);
    fst_error error = {0};
    if (fst_delta_info_get(delta, &info, &error) != FST_OK) return cli_fail(&error);
    if (request->make.version == NULL) request->make.version = info.version;
    if (request->make.base_version == NULL) request->make.base_version = info.base_version;
    request->make.delta = delta;
    fst_status status = fst_delta_make(base, folder, &request->make, &stats, &error);
    return report(status, &stats, "converted", &error);
}

static int apply(const delta_request *request, const fst_delta *delta, const char *checkpoint) {
    fst_delta_stats stats = FST_STRUCT_INIT(fst_delta_stats);
    fst_error error = {0};
    bool is_check = (request->options.flags & FST_DELTA_CHECK_ONLY) != 0;
    fst_status status = fst_delta_apply(delta, checkpoint, &request->options, &stats, &error);
    return report(status, &stats, is_check ? "verified" : "applied", &error);
}

static int recover(const delta_request *request, const char *checkpoint) {
    fst_delta_stats stats = FST_STRUCT_INIT(fst_delta_stats);
    fst_error error = {0};
    fst_status status = fst_delta_recover(checkpoint, &request->options, &stats, &error);
    const char *what = stats.recovered == 2   ? "rolled back"
                       : stats.recovered == 1 ? "finished"
                                              : "nothing to recover";
    return report(status, &stats, what, &error);
}

/// What needs opened deltas.
static int run_opened(delta_request *request, const char *action, char **words, int count) {
    bool is_show = strcmp(action, "show") == 0, is_convert = strcmp(action, "convert") == 0;
    int first = is_show ? 0 : 1, end = is_convert ? count - 1 : count;
    fst_delta *delta;
    fst_error error = {0};
    if (end <= first)
        return cli_usage("delta", "%s needs %s", action,
                         is_convert ? "CHECKPOINT DELTA... FOLDER"
                         : is_show  ? "a folder"
                                    : "CHECKPOINT DELTA...");
    int code;
    if (is_show && count == 1 && show_note(words[0], false, &code)) return code;
    fst_status status =
        fst_delta_open((const char *const *)words + first, (size_t)(end - first), &delta, &error);
    if (status != FST_OK && is_show && count == 1 && is_checkpoint(words[0], status) &&
        show_note(words[0], true, &code))
        return code;
    if (status != FST_OK) return cli_fail(&error);
    if (is_show) {
        code = show_delta(delta, &error);
    } else if (is_convert) {
        code = convert(request, delta, words[0], words[count - 1]);
    } else {
        if (strcmp(action, "verify") == 0) request->options.flags |= FST_DELTA_CHECK_ONLY;
        code = apply(request, delta, words[0]);
    }
    fst_delta_close(delta);
    return code;
}

static const cli_option options[] = {
    {'v', "version", "NAME", NULL,
     "make, convert: the name of the new version; apply, verify: the version of a "
     "checkpoint that has no note of it",
     0},
    {'b', "base-version", "NAME", NULL, "make, convert: the version that the delta is based on", 0},
    {'e', "encoding", "WORD", encoding_words,
     "make, convert: how tensors are stored (default: xor)", 0},
    {'c', "checksum", "WORD", checksum_words,
     "make, convert: the checksum of each new tensor (default: adler32)", 0},
    {'d', "dialect", "WORD", dialect_words,
     "make, convert: the programs that will read it (default: sglang)", 0},
    {'l', "level", "N", NULL, "make, convert: level of the compression, 1 to 19 (default: 1)", 0},
    {'C', "check-first", NULL, NULL, "apply: decode and verify everything before any change", 0},
    {'N', "new-files", NULL, NULL,
     "apply: write new files that replace the old ones, for readers that have these open", 0},
    {'R', "roll-back", NULL, NULL, "recover: restore the old version", 0},
    CLI_QUICK_OPTION,
    {'t', "threads", "N", NULL, "use N threads", 0},
    {0},
};

/// An option that the action does not have is a mistake.
static int check_keys(const delta_request *request, const char *action) {
    const char *allowed = "";
    for (size_t i = 0; i < sizeof action_keys / sizeof *action_keys; i++)
        if (strcmp(action_keys[i].action, action) == 0) allowed = action_keys[i].keys;
    const char *wrong = request->keys + strspn(request->keys, allowed);
    for (const cli_option *option = options; *wrong != '\0' && option->name != NULL; option++)
        if (option->key == *wrong)
            return cli_usage("delta", "%s has no option --%s", action, option->name);
    return EXIT_OK;
}

static int run(const cli_command *command, char **argv) {
    delta_request request = {FST_STRUCT_INIT(fst_delta_make_options),
                             FST_STRUCT_INIT(fst_delta_options), ""};
    cli_operands operands;
    request.make.digest = FST_DIGEST_ADLER32;
    request.make.flags = request.options.flags = FST_DELTA_DURABLE;
    int code = cli_parse(command, argv, &request, &operands);
    if (code != EXIT_OK || operands.is_answered) return code;
    const char *action = operands.words[0];
    char **words = operands.words + 1;
    int count = operands.count - 1;
    if (cli_find_word(action, action_words) < 0)
        return cli_usage(
            "delta", "expected make, apply, verify, convert, recover or show, not '%s'", action);
    if ((code = check_keys(&request, action)) != EXIT_OK) return code;
    if (strcmp(action, "make") == 0)
        return count == 3 ? make(&request, words) : cli_usage("delta", "make needs OLD NEW FOLDER");
    if (strcmp(action, "recover") == 0)
        return count == 1 ? recover(&request, words[0])
                          : cli_usage("delta", "recover needs CHECKPOINT");
    return run_opened(&request, action, words, count);
}

const cli_command delta_command = {
    .name = "delta",
    .operands = "ACTION PATH...",
    .summary = "make and apply weight deltas between versions of a checkpoint",
    .about =
        "Weight deltas hold what changed between two versions of a checkpoint, in the format of\n"
        "SGLang, slime, miles and ModelExpress. Actions:\n\n"
        "  make OLD NEW FOLDER                  write the delta between two checkpoints\n"
        "  apply CHECKPOINT DELTA...            change the files of a checkpoint folder in place\n"
        "  verify CHECKPOINT DELTA...           do the same checks, change nothing\n"
        "  convert CHECKPOINT DELTA... FOLDER   write a chain as one delta of another kind\n"
        "  recover CHECKPOINT                   finish an update that was killed\n"
        "  show DELTA... | CHECKPOINT           list changed tensors, or the folder's version\n\n"
        "Several deltas are a chain, oldest first. An error rolls back; after a kill, apply and\n"
        "recover finish the work. Engines must not load the folder while a delta is applied.",
    .examples =
        "  fastsafetensors delta make step6 step7 v7 --version 000007 --base-version 000006\n"
        "  fastsafetensors delta apply local/checkpoint v7 v8 v9\n"
        "  fastsafetensors delta show v7\n",
    .operand_words = action_words,
    .options = options,
    .operand_min = 1,
    .operand_max = 1 << 20,
    .inputs = INPUTS_NONE,
    .has_json = true,
    .take = take,
    .run = run,
};
