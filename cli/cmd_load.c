// SPDX-License-Identifier: Apache-2.0
/// load: loads a model as asked and says how fast, by what and why.
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli.h"

#define GLOB_COUNT_MAX 64

typedef struct load_request {
    const char *path;
    fst_load_options options;
    fst_load_tuning tuning;
    const char *globs[GLOB_COUNT_MAX];
    unsigned long repeat;
    bool json, no_progress, lenient;
} load_request;

static void print_help(void) {
    printf(
        "usage: fastsafetensors load [OPTIONS] PATH\n\n"
        "Loads a model into memory and prints time, speed, engine and why it was chosen.\n\n"
        "  --device DEVICE   where to: cpu (default), cuda, cuda:N, hip, hip:N, gpu or pinned\n"
        "  --gds WAY         GPUDirect Storage: auto (default), off or strict\n"
        "  --mode MODE       auto (default), load (own memory) or map (views of the file)\n"
        "  --engine ENGINE   auto (default), pread, direct, uring or mmap\n"
        "  --ring WAY        where io_uring reads to: auto (measured), place or slots\n"
        "  --numa POLICY     memory of several nodes: default, local or interleave\n"
        "  --dtype DTYPE     convert floats (integers: only to wider ones) on the way, e.g. BF16\n"
        "  --select GLOB     only tensors whose names match; may come several times\n"
        "  --threads N       threads (default: by the machine)\n"
        "  --budget SIZE     stream within this much memory (64M, 2GiB)\n"
        "  --repeat N        load N times\n"
        "  --lenient         accept bytes after the last tensor\n"
        "  --no-progress     no progress bar, also on a terminal\n"
        "  --json            one JSON object a load\n");
}

static const char *const modes[] = {"auto", "load", "map"};
static const char *const numas[] = {"default", "local", "interleave"};
static const char *const rings[] = {"auto", "place", "slots"};
static const char *const gds_ways[] = {"auto", "off", "strict"};
static const char *const engines[] = {"auto", "pread", "direct", "uring", "mmap"};

static bool parse_count(const char *text, unsigned long max, unsigned long *out) {
    char *end;
    if (text[0] < '0' || text[0] > '9') return false;
    *out = strtoul(text, &end, 10);
    return *end == '\0' && *out <= max;
}

/// Takes one option; returns EXIT_GOOD, or the exit code after saying what is wrong.
static int take_option(load_request *request, int option, const char *value) {
    fst_load_options *options = &request->options;
    unsigned long number = 0;
    fst_error error;
    int word;
    switch (option) {
    case 'd':
        if (fst_device_parse(value, &options->device, &error) == FST_OK) return EXIT_GOOD;
        return cli_usage("load", "%s", error.message);
    case 'g':
        word = cli_find_word(value, gds_ways, FST_GDS_COUNT);
        options->gds = (fst_gds)(word < 0 ? 0 : word);
        return word < 0 ? cli_usage("load", "unknown way '%s'", value) : EXIT_GOOD;
    case 'm':
        word = cli_find_word(value, modes, FST_MODE_COUNT);
        options->mode = (fst_load_mode)(word < 0 ? 0 : word);
        return word < 0 ? cli_usage("load", "unknown mode '%s'", value) : EXIT_GOOD;
    case 'e':
        word = cli_find_word(value, engines, FST_ENGINE_GDS);
        options->engine = (fst_engine)(word < 0 ? 0 : word);
        return word < 0 ? cli_usage("load", "unknown engine '%s'", value) : EXIT_GOOD;
    case 'N':
        word = cli_find_word(value, numas, FST_NUMA_COUNT);
        request->tuning.numa = (fst_numa)(word < 0 ? 0 : word);
        return word < 0 ? cli_usage("load", "unknown policy '%s'", value) : EXIT_GOOD;
    case 'R':
        word = cli_find_word(value, rings, FST_RING_COUNT);
        request->tuning.ring = (fst_ring)(word < 0 ? 0 : word);
        return word < 0 ? cli_usage("load", "unknown ring '%s'", value) : EXIT_GOOD;
    case 'D':
        word = cli_find_dtype(value);
        options->convert = 1;
        options->dtype = (fst_dtype)(word < 0 ? 0 : word);
        return word < 0 ? cli_usage("load", "unknown dtype '%s'", value) : EXIT_GOOD;
    case 's':
        if (options->glob_count == GLOB_COUNT_MAX) return cli_usage("load", "too many --select");
        request->globs[options->glob_count++] = value;
        return EXIT_GOOD;
    case 't':
        if (!parse_count(value, 1024, &number)) return cli_usage("load", "bad number '%s'", value);
        options->thread_count = (uint32_t)number;
        return EXIT_GOOD;
    case 'b':
        return cli_parse_size(value, &options->budget_bytes) && options->budget_bytes > 0
                   ? EXIT_GOOD
                   : cli_usage("load", "bad size '%s'", value);
    default:
        return parse_count(value, 1000000, &request->repeat) && request->repeat > 0
                   ? EXIT_GOOD
                   : cli_usage("load", "bad number '%s'", value);
    }
}

/// What would be without effect is refused, not passed over.
static int check_request(const load_request *request) {
    const fst_load_options *options = &request->options;
    bool on_gpu = options->device.kind == FST_DEVICE_CUDA || options->device.kind == FST_DEVICE_HIP;
    if (options->gds != FST_GDS_AUTO && !on_gpu)
        return cli_usage("load", "--gds is for loads to a GPU: --device cuda or hip");
    if (request->tuning.ring != FST_RING_AUTO && options->engine != FST_ENGINE_AUTO &&
        options->engine != FST_ENGINE_URING)
        return cli_usage("load", "--ring is of --engine uring");
    if (options->mode == FST_MODE_MAP &&
        (options->engine != FST_ENGINE_AUTO || request->tuning.ring != FST_RING_AUTO ||
         request->tuning.numa != FST_NUMA_DEFAULT || options->budget_bytes > 0))
        return cli_usage("load", "--mode map reads nothing: no --engine, --ring, --numa, --budget");
    return EXIT_GOOD;
}

static int parse_arguments(int argc, char **argv, load_request *request, bool *done) {
    static const struct option options[] = {
        {"device", required_argument, NULL, 'd'},  {"gds", required_argument, NULL, 'g'},
        {"mode", required_argument, NULL, 'm'},    {"engine", required_argument, NULL, 'e'},
        {"dtype", required_argument, NULL, 'D'},   {"ring", required_argument, NULL, 'R'},
        {"numa", required_argument, NULL, 'N'},    {"select", required_argument, NULL, 's'},
        {"threads", required_argument, NULL, 't'}, {"budget", required_argument, NULL, 'b'},
        {"repeat", required_argument, NULL, 'r'},  {"lenient", no_argument, NULL, 'l'},
        {"no-progress", no_argument, NULL, 'n'},   {"json", no_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},          {NULL, 0, NULL, 0},
    };
    for (int option; (option = getopt_long(argc, argv, "h", options, NULL)) != -1;) {
        int code = EXIT_GOOD;
        switch (option) {
        case 'l': request->lenient = true; break;
        case 'n': request->no_progress = true; break;
        case 'j': request->json = true; break;
        case 'h':
            print_help();
            *done = true;
            return EXIT_GOOD;
        case '?': return cli_usage("load", "wrong option");
        default: code = take_option(request, option, optarg);
        }
        if (code != EXIT_GOOD) return code;
    }
    if (optind + 1 != argc) return cli_usage("load", "expected one PATH");
    request->path = argv[optind];
    return check_request(request);
}

static void print_json(const fst_load_stats *s, double seconds) {
    printf("{\"seconds\": %.6f, \"mode\": \"%s\", \"engine\": \"%s\", \"reason\": ", seconds,
           s->mode, s->engine);
    cli_print_json(s->reason, strlen(s->reason));
    printf(", \"threads\": %" PRIu32 ", \"tensors\": %zu, \"bytes_requested\": %" PRIu64
           ", \"bytes_read\": %" PRIu64 ", \"bytes_direct\": %" PRIu64
           ", \"bytes_mapped\": %" PRIu64 ", \"bytes_copied\": %" PRIu64
           ", \"bytes_converted\": %" PRIu64 ", \"reads\": %" PRIu64 ", \"chunks\": %" PRIu64
           ", \"chunks_resident\": %" PRIu64 ", \"buffer_bytes\": %" PRIu64
           ", \"buffer_bytes_peak\": %" PRIu64 ", \"read_ns\": %" PRIu64 ", \"copy_ns\": %" PRIu64
           ", \"populate_ns\": %" PRIu64 ", \"device_bytes\": %" PRIu64
           ", \"device_copies\": %" PRIu64 ", \"device_launches\": %" PRIu64
           ", \"device_wait_ns\": %" PRIu64 ", \"gds_bytes\": %" PRIu64 "}\n",
           s->thread_count, s->tensor_count, s->bytes_requested, s->bytes_read, s->bytes_direct,
           s->bytes_mapped, s->bytes_copied, s->bytes_converted, s->read_count, s->chunk_count,
           s->chunks_resident, s->buffer_bytes, s->buffer_bytes_peak, s->read_ns, s->copy_ns,
           s->populate_ns, s->device_bytes, s->device_copies, s->device_launches, s->device_wait_ns,
           s->gds_bytes);
}

static void print_stats(const fst_load_stats *s, double seconds) {
    char requested[16], read[16], copied[16], buffers[16];
    printf("%s%.3f s, %.2f GB/s%s  %zu tensors, %s\n", cli_bold(), seconds,
           (double)s->bytes_requested / 1e9 / (seconds > 0 ? seconds : 1e-9), cli_plain(),
           s->tensor_count, cli_size_text(s->bytes_requested, requested));
    printf("  mode %s, engine %s, %" PRIu32 " threads\n  %s\n", s->mode, s->engine, s->thread_count,
           s->reason);
    printf("  %s read in %" PRIu64 " reads, %s copied, buffers %s, %" PRIu64 " of %" PRIu64
           " chunks were cached\n",
           cli_size_text(s->bytes_read, read), s->read_count,
           cli_size_text(s->bytes_copied, copied), cli_size_text(s->buffer_bytes_peak, buffers),
           s->chunks_resident, s->chunk_count);
    if (s->device_bytes + s->gds_bytes > 0)
        printf("  %s sent to the device in %" PRIu64 " copies and %" PRIu64
               " launches, %s read there\n",
               cli_size_text(s->device_bytes, requested), s->device_copies, s->device_launches,
               cli_size_text(s->gds_bytes, read));
}

/// Takes every tensor as it arrives, so that a budget is honoured, and lets it go.
static fst_status consume(fst_loader *loader, fst_error *error) {
    fst_tensor *tensor;
    fst_status status;
    while ((status = fst_loader_next(loader, -1, &tensor, error)) == FST_OK)
        fst_tensor_unref(tensor);
    return status == FST_END ? FST_OK : status;
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static int load_once(fst_model *model, load_request *request) {
    fst_error error;
    fst_loader *loader;
    double start = seconds_now();
    if (fst_loader_open(model, &request->options, &loader, &error) != FST_OK)
        return cli_fail(&error);
    fst_status status = FST_OK;
    if (request->options.budget_bytes == 0) status = fst_loader_wait(loader, -1, &error);
    if (status == FST_OK) status = consume(loader, &error);
    double seconds = seconds_now() - start;
    if (request->options.progress != NULL) fprintf(stderr, "\n");
    fst_load_stats stats = {.struct_size = sizeof stats};
    if (status == FST_OK) status = fst_loader_stats_get(loader, &stats, &error);
    fst_loader_close(loader);
    if (status != FST_OK) return cli_fail(&error);
    if (stats.tensor_count == 0 && request->options.glob_count > 0) {
        fprintf(stderr, "fastsafetensors: no tensor's name matches\n");
        return EXIT_INVALID;
    }
    if (request->json)
        print_json(&stats, seconds);
    else
        print_stats(&stats, seconds);
    return EXIT_GOOD;
}

int cmd_load(int argc, char **argv) {
    load_request request = {.options = {.struct_size = sizeof request.options, .map_populate = 1},
                            .tuning = FST_STRUCT_INIT(fst_load_tuning),
                            .repeat = 1};
    request.options.tuning = &request.tuning;
    bool done = false;
    int code = parse_arguments(argc, argv, &request, &done);
    if (code != EXIT_GOOD || done) return code;
    request.options.globs = request.globs;
    if (cli_stderr_is_terminal() && !request.no_progress && !request.json)
        request.options.progress = cli_show_progress;
    fst_open_options open_options = {.struct_size = sizeof open_options,
                                     .flags = request.lenient ? FST_OPEN_LENIENT : 0};
    fst_model *model;
    fst_error error;
    if (fst_model_open(request.path, &open_options, &model, &error) != FST_OK)
        return cli_fail(&error);
    for (unsigned long i = 0; i < request.repeat && code == EXIT_GOOD; i++)
        code = load_once(model, &request);
    fst_model_close(model);
    return code;
}
