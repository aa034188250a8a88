// SPDX-License-Identifier: Apache-2.0
/// Implements cache_segments.h.
#include "cache_segments.h"

#include <inttypes.h>
#include <string.h>
#include <time.h>

typedef struct segment_sum {
    size_t count;
    uint64_t memory_bytes;
} segment_sum;

static void print_segment_json(const fst_segment *segment, bool is_first) {
    printf("%s\n  {\"name\": \"%s\", \"label\": ", is_first ? "" : ",", segment->name);
    cli_print_json(segment->label, strlen(segment->label));
    printf(", \"size_bytes\": %" PRIu64 ", \"memory_bytes\": %" PRIu64 ", \"grace_s\": %" PRIu64
           ", \"used_s\": %" PRId64 ", \"complete\": %s, \"pinned\": %s, \"in_use\": %s}",
           segment->size_bytes, segment->memory_bytes, segment->grace_s, segment->used_s,
           segment->is_complete ? "true" : "false", segment->is_pinned ? "true" : "false",
           segment->in_use ? "true" : "false");
}

static void print_segment(void *context, const fst_segment *segment) {
    segment_sum *sum = context;
    char size[16], used[32];
    time_t when = (time_t)segment->used_s;
    struct tm local;
    sum->memory_bytes += segment->memory_bytes;
    sum->count++;
    if (cli_wants_json()) {
        print_segment_json(segment, sum->count == 1);
        return;
    }
    if (localtime_r(&when, &local) == NULL ||
        strftime(used, sizeof used, "%Y-%m-%d %H:%M", &local) == 0)
        snprintf(used, sizeof used, "?");
    printf("%.12s  ", segment->name);
    cli_print_path(segment->label);
    printf("  %s of memory%s, used %s%s%s\n", cli_size_text(segment->memory_bytes, size),
           segment->is_complete ? "" : ", incomplete", used, segment->is_pinned ? ", pinned" : "",
           segment->in_use ? ", in use" : "");
}

fst_status cli_list_segments(const char *folder, fst_error *error) {
    segment_sum sum = {0};
    char size[16];
    if (cli_wants_json()) printf(", \"segments\": [");
    fst_status status = fst_segment_visit(folder, print_segment, &sum, error);
    if (cli_wants_json())
        printf("], \"memory_bytes\": %" PRIu64, sum.memory_bytes);
    else if (sum.count > 0)
        printf("%zu shared segment%s, %s of memory\n", sum.count, cli_plural(sum.count),
               cli_size_text(sum.memory_bytes, size));
    return status;
}

int cli_pin_segment(const char *folder, const char *name, bool is_pinned) {
    fst_error error;
    if (fst_segment_pin(folder, name, is_pinned, &error) != FST_OK) return cli_fail(&error);
    if (cli_wants_json())
        printf("{\"pinned\": %s}\n", is_pinned ? "true" : "false");
    else
        printf("%s\n", is_pinned ? "pinned" : "unpinned");
    return EXIT_OK;
}

int cli_drop_segments(const char *folder, const char *name) {
    fst_segments_dropped dropped = {.struct_size = sizeof dropped};
    fst_error error;
    char size[16];
    const char *which = strcmp(name, "all") == 0 ? NULL : name;
    if (fst_segment_drop(folder, which, &dropped, &error) != FST_OK) return cli_fail(&error);
    if (cli_wants_json())
        printf("{\"dropped\": %zu, \"memory_bytes\": %" PRIu64 "}\n", dropped.count,
               dropped.memory_bytes);
    else
        printf("%zu shared segment%s dropped, %s of memory\n", dropped.count,
               cli_plural(dropped.count), cli_size_text(dropped.memory_bytes, size));
    return EXIT_OK;
}
