// SPDX-License-Identifier: Apache-2.0
/// cache: lists and cleans the disk cache of remote models, and the shared memory of loads.
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <fastsafetensors/remote.h>

#include "cache_segments.h"
#include "commands.h"

typedef struct cache_request {
    const char *folder;
    const char *share_folder; ///< NULL: the default one
    uint64_t bytes_max;
    bool has_max;
    size_t display;
    uint64_t disk_bytes;
} cache_request;

static const char *describe_outcome(const fst_cache_object *object, char text[24]) {
    if (object->is_whole) return "whole";
    // If the writing process was killed early, an object has a name but no size.
    unsigned percent =
        object->size_bytes == 0 ? 0 : (unsigned)(object->kept_bytes * 100 / object->size_bytes);
    snprintf(text, 24, "%u %% of it", percent < 100 ? percent : 99);
    return text;
}

static void report(void *context, const fst_cache_object *object) {
    cache_request *request = context;
    request->disk_bytes += object->disk_bytes;
    if (cli_wants_json()) {
        printf("%s\n  {\"address\": ", request->display++ > 0 ? "," : "");
        cli_print_json(object->address, strlen(object->address));
        printf(", \"size_bytes\": %" PRIu64 ", \"kept_bytes\": %" PRIu64
               ", \"disk_bytes\": %" PRIu64 ", \"used_s\": %" PRId64
               ", \"whole\": %s, \"in_use\": %s}",
               object->size_bytes, object->kept_bytes, object->disk_bytes, object->used_s,
               object->is_whole ? "true" : "false", object->in_use ? "true" : "false");
        return;
    }
    char size[16], used[32], part[24];
    time_t when = (time_t)object->used_s;
    struct tm local;
    if (localtime_r(&when, &local) == NULL ||
        strftime(used, sizeof used, "%Y-%m-%d %H:%M", &local) == 0)
        snprintf(used, sizeof used, "?");
    const char *name = object->address[0] == '\0' ? "(unknown)" : object->address;
    cli_print_name(name, strlen(name));
    printf("  %s, %s, used %s%s\n", cli_size_text(object->size_bytes, size),
           describe_outcome(object, part), used, object->in_use ? ", in use" : "");
    request->display++;
}

static int list_cache(cache_request *request) {
    fst_error error;
    char size[16];
    if (cli_wants_json()) printf("{\"objects\": [");
    fst_status status = fst_cache_visit(request->folder, report, request, &error);
    if (status == FST_E_NOT_FOUND) status = FST_OK; // the cache is empty
    if (cli_wants_json())
        printf("], \"disk_bytes\": %" PRIu64, request->disk_bytes);
    else if (status == FST_OK)
        printf("%zu object%s, %s on disk\n", request->display, cli_plural(request->display),
               cli_size_text(request->disk_bytes, size));
    if (status == FST_OK) status = cli_list_segments(request->share_folder, &error);
    if (!cli_wants_json()) return status == FST_OK ? EXIT_OK : cli_fail(&error);
    if (status != FST_OK) {
        printf(", \"error\": ");
        cli_print_error_json(&error);
    }
    printf("}\n");
    return status == FST_OK ? EXIT_OK : cli_code_of(status);
}

static int prune_cache(const cache_request *request, uint64_t bytes_max) {
    fst_cache_pruned pruned = {.struct_size = sizeof pruned};
    fst_error error;
    char removed[16], left[16];
    fst_status status = fst_cache_prune(request->folder, bytes_max, &pruned, &error);
    if (status != FST_OK && status != FST_E_NOT_FOUND) return cli_fail(&error);
    if (cli_wants_json())
        printf("{\"removed\": %zu, \"removed_bytes\": %" PRIu64
               ", \"left\": %zu, \"left_bytes\": %" PRIu64 "}\n",
               pruned.removed_count, pruned.removed_bytes, pruned.left_count, pruned.left_bytes);
    else
        printf("%zu object%s removed, %s; %zu left, %s\n", pruned.removed_count,
               cli_plural(pruned.removed_count), cli_size_text(pruned.removed_bytes, removed),
               pruned.left_count, cli_size_text(pruned.left_bytes, left));
    return EXIT_OK;
}

static int take(void *context, int key, cli_value value) {
    cache_request *request = context;
    if (key == 'd') {
        request->folder = value.text;
        return EXIT_OK;
    }
    if (key == 's') {
        request->share_folder = value.text;
        return EXIT_OK;
    }
    request->has_max = true;
    if (fst_size_parse(value.text, &request->bytes_max)) return EXIT_OK;
    return cli_usage("cache", "--max must be a size (20G, 500M), not '%s'", value.text);
}

typedef enum cache_action { DO_LIST, DO_PRUNE, DO_CLEAR, DO_PIN, DO_UNPIN, DO_DROP } cache_action;
static const char *const actions[] = {"list", "prune", "clear", "pin", "unpin", "drop", NULL};

static int check_request(const cache_request *request, cache_action action,
                         const cli_operands *operands) {
    bool needs_name = action >= DO_PIN;
    if ((action == DO_PRUNE) != request->has_max)
        return cli_usage("cache", action == DO_PRUNE ? "prune needs --max SIZE"
                                                     : "--max is only valid with prune");
    if (needs_name && operands->count < 2)
        return cli_usage("cache", "%s needs the NAME of a shared segment%s", actions[action],
                         action == DO_DROP ? ", or all" : "");
    if (!needs_name && operands->count > 1)
        return cli_usage("cache", "%s takes no NAME", actions[action]);
    if (needs_name && request->folder != NULL)
        return cli_usage("cache", "--cache-dir has no effect with %s", actions[action]);
    if (!needs_name && action != DO_LIST && request->share_folder != NULL)
        return cli_usage("cache", "--share-dir has no effect with %s", actions[action]);
    return EXIT_OK;
}

static int run(const cli_command *command, char **argv) {
    cache_request request = {.folder = NULL};
    cli_operands operands;
    int code = cli_parse(command, argv, &request, &operands);
    if (code != EXIT_OK || operands.is_answered) return code;
    const char *word = operands.count > 0 ? operands.words[0] : "list";
    int found = cli_find_word(word, actions);
    if (found < 0)
        return cli_usage("cache",
                         "unknown action '%s'; expected one of: list, prune, clear, pin, unpin, "
                         "drop",
                         word);
    cache_action action = (cache_action)found;
    code = check_request(&request, action, &operands);
    if (code != EXIT_OK) return code;
    const char *name = operands.count > 1 ? operands.words[1] : NULL;
    if (action == DO_DROP) return cli_drop_segments(request.share_folder, name);
    if (action >= DO_PIN) return cli_pin_segment(request.share_folder, name, action == DO_PIN);
    if (request.folder == NULL) request.folder = "auto";
    if (action == DO_LIST) return list_cache(&request);
    return prune_cache(&request, action == DO_CLEAR ? 0 : request.bytes_max);
}

static const cli_option options[] = {
    {'d', "cache-dir", "FOLDER", NULL, "the cache folder (default: auto)", 0},
    {'m', "max", "SIZE", NULL, "with prune: keep at most SIZE, such as 200G", 0},
    {'s', "share-dir", "FOLDER", NULL,
     "the folder of shared segments (default: FASTSAFETENSORS_SHARE_DIR, else "
     "/dev/shm/fastsafetensors-UID)",
     0},
    {0},
};

const cli_command cache_command = {
    .name = "cache",
    .operands = "[list | prune | clear | pin NAME | unpin NAME | drop NAME]",
    .operand_words = actions,
    .summary = "list and clean the disk cache of remote models, and shared memory",
    .about =
        "list: print the cached objects, least recently used first. prune: delete objects in\n"
        "this order until at most --max is left. clear: delete all objects. Objects that a\n"
        "process uses are kept. The default folder is FASTSAFETENSORS_CACHE_DIR, else\n"
        "fastsafetensors/objects in XDG_CACHE_HOME or ~/.cache.\n"
        "list also prints the segments of shared memory, made by loads with --share node.\n"
        "pin: keep a segment without users until it is dropped. unpin: undo pin. drop: remove\n"
        "a segment, or all; processes that use it keep their tensors. NAME is the segment's\n"
        "name or the beginning of it.",
    .examples = "  fastsafetensors cache\n"
                "  fastsafetensors cache prune --max 200G\n"
                "  fastsafetensors cache drop all\n",
    .options = options,
    .operand_min = 0,
    .operand_max = 2,
    .has_json = true,
    .take = take,
    .run = run,
};
