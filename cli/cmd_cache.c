// SPDX-License-Identifier: Apache-2.0
/// cache: lists and cleans the disk cache of remote models.
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <fastsafetensors/remote.h>

#include "commands.h"

typedef struct cache_request {
    const char *folder;
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
    if (cli_wants_json()) {
        printf("], \"disk_bytes\": %" PRIu64, request->disk_bytes);
        if (status != FST_OK) {
            printf(", \"error\": ");
            cli_print_error_json(&error);
        }
        printf("}\n");
        return status == FST_OK ? EXIT_OK : cli_code_of(status);
    }
    if (status != FST_OK) return cli_fail(&error);
    printf("%zu object%s, %s on disk\n", request->display, cli_plural(request->display),
           cli_size_text(request->disk_bytes, size));
    return EXIT_OK;
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
    request->has_max = true;
    if (cli_parse_size(value.text, &request->bytes_max)) return EXIT_OK;
    return cli_usage("cache", "--max must be a size (20G, 500M), not '%s'", value.text);
}

static int run(const cli_command *command, char **argv) {
    static const char *const deeds[] = {"list", "prune", "clear", NULL};
    cache_request request = {.folder = NULL};
    cli_operands operands;
    int code = cli_parse(command, argv, &request, &operands);
    if (code != EXIT_OK || operands.is_answered) return code;
    const char *word = operands.count > 0 ? operands.words[0] : "list";
    int deed = cli_find_word(word, deeds);
    if (deed < 0)
        return cli_usage("cache", "unknown action '%s'; expected one of: list, prune, clear", word);
    if ((deed == 1) != request.has_max)
        return cli_usage("cache",
                         deed == 1 ? "prune needs --max SIZE" : "--max is only valid with prune");
    if (request.folder == NULL) request.folder = "auto";
    if (deed == 0) return list_cache(&request);
    return prune_cache(&request, deed == 2 ? 0 : request.bytes_max);
}

static const cli_option options[] = {
    {'d', "cache-dir", "FOLDER", NULL, "the cache folder (default: auto)", 0},
    {'m', "max", "SIZE", NULL, "with prune: keep at most SIZE, such as 200G", 0},
    {0},
};

const cli_command cache_command = {
    .name = "cache",
    .operands = "[list | prune | clear]",
    .operand_words = (const char *const[]){"list", "prune", "clear", NULL},
    .summary = "list and clean the disk cache of remote models",
    .about = "list: print the cached objects, least recently used first. prune: delete objects in\n"
             "this order until at most --max is left. clear: delete all objects. Objects that a\n"
             "process uses are kept. The default folder is FASTSAFETENSORS_CACHE_DIR, else\n"
             "fastsafetensors/objects in XDG_CACHE_HOME or ~/.cache.",
    .examples = "  fastsafetensors cache\n"
                "  fastsafetensors cache prune --max 200G\n",
    .options = options,
    .operand_min = 0,
    .operand_max = 1,
    .has_json = true,
    .take = take,
    .run = run,
};
