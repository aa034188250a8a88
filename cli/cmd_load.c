// SPDX-License-Identifier: Apache-2.0
/// load: loads a model with the given options and prints speed, engines and reasons.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "commands.h"

#define GLOB_COUNT_MAX 64

typedef struct load_request {
    fst_load_options options;
    fst_load_tuning tuning;
    const char *globs[GLOB_COUNT_MAX];
    uint64_t repeat;
    bool lenient, verify;
} load_request;

// In the order of the library's enumeration.
static const char *const modes[] = {"auto", "load", "map", NULL};
static const char *const numas[] = {"default", "local", "interleave", NULL};
static const char *const rings[] = {"auto", "place", "slots", NULL};
static const char *const gds_choices[] = {"auto", "off", "strict", NULL};
static const char *const cache_choices[] = {"auto", "keep", "bypass", NULL};
static const char *const share_choices[] = {"off", "node", NULL};
static const char *const engines[] = {"auto", "pread", "direct", "uring", "mmap", NULL};

static int take_number(load_request *request, int key, const char *text) {
    fst_load_options *options = &request->options;
    uint64_t number = 0;
    switch (key) {
    case 't':
        if (!cli_parse_count(text, 1024, &number))
            return cli_usage("load", "--threads must be a number up to 1024, not '%s'", text);
        options->thread_count = (uint32_t)number;
        return EXIT_OK;
    case 'b':
        if (!fst_size_parse(text, &options->budget_bytes) || options->budget_bytes == 0)
            return cli_usage("load", "--budget must be a size (64M, 2GiB), not '%s'", text);
        return EXIT_OK;
    case 'G':
        if (!cli_parse_count(text, UINT32_MAX, &number))
            return cli_usage("load", "--share-grace must be a number of seconds, not '%s'", text);
        options->share_grace_s = (uint32_t)number;
        return EXIT_OK;
    default:
        if (!cli_parse_count(text, 1000000, &request->repeat) || request->repeat == 0)
            return cli_usage("load", "--repeat must be from 1 to 1000000, not '%s'", text);
        return EXIT_OK;
    }
}

static int take(void *context, int key, cli_value value) {
    load_request *request = context;
    fst_load_options *options = &request->options;
    fst_error error;
    switch (key) {
    case 'd':
        if (fst_device_parse(value.text, &options->device, &error) == FST_OK) return EXIT_OK;
        return cli_usage("load", "%s", error.message);
    case 'c': options->cache = (fst_cache)value.word; return EXIT_OK;
    case 'g': request->tuning.gds = (fst_gds)value.word; return EXIT_OK;
    case 'm': options->mode = (fst_load_mode)value.word; return EXIT_OK;
    case 'e': request->tuning.engine = (fst_engine)value.word; return EXIT_OK;
    case 'N': request->tuning.numa = (fst_numa)value.word; return EXIT_OK;
    case 'R': request->tuning.ring = (fst_ring)value.word; return EXIT_OK;
    case 'S': options->share = (fst_share)value.word; return EXIT_OK;
    case 'l': request->lenient = true; return EXIT_OK;
    case 'v': request->verify = true; return EXIT_OK;
    case 'D':
        options->convert = 1;
        options->dtype = (fst_dtype)value.word;
        return EXIT_OK;
    case 's':
        if (options->glob_count == GLOB_COUNT_MAX) return cli_usage("load", "too many --select");
        request->globs[options->glob_count++] = value.text;
        return EXIT_OK;
    default: return take_number(request, key, value.text);
    }
}

static bool is_on_gpu(const load_request *request) {
    fst_device_kind kind = request->options.device.kind;
    return kind == FST_DEVICE_CUDA || kind == FST_DEVICE_HIP;
}

/// Refuses options that would have no effect.
static int check_request(const load_request *request) {
    const fst_load_options *options = &request->options;
    if (request->tuning.gds != FST_GDS_AUTO && !is_on_gpu(request))
        return cli_usage("load", "--gds needs --device cuda, hip or gpu");
    if (request->tuning.ring != FST_RING_AUTO && request->tuning.engine != FST_ENGINE_AUTO &&
        request->tuning.engine != FST_ENGINE_URING)
        return cli_usage("load", "--ring needs --engine uring");
    if (options->mode == FST_MODE_MAP &&
        (request->tuning.engine != FST_ENGINE_AUTO || request->tuning.ring != FST_RING_AUTO ||
         request->tuning.numa != FST_NUMA_DEFAULT || options->budget_bytes > 0))
        return cli_usage(
            "load",
            "--mode map cannot be combined with --engine, --ring, --numa or --budget: no engine "
            "is used");
    if (options->share == FST_SHARE_NODE &&
        (options->device.kind != FST_DEVICE_CPU || options->budget_bytes > 0))
        return cli_usage("load", "--share node cannot be combined with --device or --budget: "
                                 "shared memory is on the CPU, for all tensors");
    if (options->share_grace_s > 0 && options->share != FST_SHARE_NODE)
        return cli_usage("load", "--share-grace needs --share node");
    if (options->mode == FST_MODE_MAP && options->convert)
        return cli_usage(
            "load",
            "--mode map cannot be combined with --dtype: mapped tensors are the file's bytes");
    return EXIT_OK;
}

static uint64_t read_counter(const fst_load_stats *stats, const fst_load_counter *counter) {
    uint64_t value;
    memcpy(&value, (const char *)stats + counter->offset, sizeof value);
    return value;
}

/// The kinds of digest sources, in the order of the library's enumeration.
static const char *const sources[] = {"manifest", "bundle", "sums", "hub", "sidecar", "tensors"};

static void print_verification(const fst_model *model) {
    fst_verification found = FST_STRUCT_INIT(fst_verification);
    if (fst_model_verification(model, &found, NULL) != FST_OK || found.manifest == NULL) return;
    const char *source = sources[found.source], *digest = fst_digest_name(found.digest);
    if (cli_wants_json()) {
        printf(", \"verified_by\": \"%s\", \"digest\": \"%s\", \"verified_with\": ", source,
               digest);
        cli_print_json(found.manifest, strlen(found.manifest));
    } else {
        printf("  verified against ");
        cli_print_path(found.manifest);
        printf(" (%s, %s)\n", source, digest);
    }
}

static void print_json(const fst_model *model, const fst_load_stats *s, double seconds) {
    printf("{\"seconds\": %.6f, \"mode\": \"%s\", \"engine\": \"%s\", \"reason\": ", seconds,
           s->mode, s->engine);
    cli_print_json(s->reason, strlen(s->reason));
    printf(", \"threads\": %" PRIu32 ", \"tensors\": %zu", s->thread_count, s->tensor_count);
    size_t count;
    const fst_load_counter *counters = fst_load_counters(&count);
    for (size_t i = 0; i < count; i++)
        printf(", \"%s\": %" PRIu64, counters[i].name, read_counter(s, &counters[i]));
    print_verification(model);
    printf("}\n");
}

/// Prints how many chunks were cached, if that is known.
static void print_chunks(const load_request *request, const fst_load_stats *s) {
    bool is_same = strcmp(s->engine, "pread") == 0 && s->chunks_resident == 0;
    if (request->tuning.engine != FST_ENGINE_AUTO || is_same) return; // the default was used
    printf(", %" PRIu64 " of %" PRIu64 " chunks were cached", s->chunks_resident, s->chunk_count);
}

/// Prints the requests of a remote load and their waiting times.
static void print_requests(const fst_load_stats *s) {
    if (s->network_requests == 0) return;
    printf("  %" PRIu64 " requests (%" PRIu64 " of them retries), %.1f ms to the first byte on "
           "average, %.3f s waited before retries\n",
           s->network_requests, s->network_retries,
           (double)s->network_first_byte_ns / 1e6 / (double)s->network_requests,
           (double)s->network_retry_wait_ns / 1e9);
}

static void print_stats(const fst_model *model, const load_request *request,
                        const fst_load_stats *s, double seconds) {
    char requested[16], read[16], copied[16], buffers[16];
    // Cached views transfer no bytes, so they have no speed.
    bool is_view = strcmp(s->mode, "map") == 0;
    uint64_t moved = is_view ? s->bytes_read + s->bytes_copied : s->bytes_requested;
    printf("%s%.3f s", cli_bold(), seconds);
    if (moved > 0 || !is_view)
        printf(", %.2f GB/s", (double)moved / 1e9 / (seconds > 0 ? seconds : 1e-9));
    printf("%s  %zu tensor%s, %s%s\n", cli_plain(), s->tensor_count, cli_plural(s->tensor_count),
           cli_size_text(s->bytes_requested, requested),
           !is_view    ? ""
           : moved > 0 ? " as views of the file"
                       : " as views of the file: nothing was read or copied");
    printf("  mode %s, engine %s, %" PRIu32 " thread%s\n  ", s->mode, s->engine, s->thread_count,
           cli_plural(s->thread_count));
    cli_print_name(s->reason, strlen(s->reason));
    printf("\n");
    printf("  %s read in %" PRIu64 " reads, %s copied, buffers %s",
           cli_size_text(s->bytes_read, read), s->read_count,
           cli_size_text(s->bytes_copied, copied), cli_size_text(s->buffer_bytes_peak, buffers));
    print_chunks(request, s);
    if (s->shared_bytes > 0)
        printf(", %s read by other loads", cli_size_text(s->shared_bytes, requested));
    printf("\n");
    print_requests(s);
    if (s->device_bytes + s->gds_bytes > 0)
        printf("  %s sent to the device in %" PRIu64 " copies and %" PRIu64
               " launches, %s read there\n",
               cli_size_text(s->device_bytes, requested), s->device_copies, s->device_launches,
               cli_size_text(s->gds_bytes, read));
    print_verification(model);
}

/// Takes and frees each tensor as it arrives, so that a budget is honoured.
static fst_status consume(fst_loader *loader, fst_error *error) {
    fst_tensor *tensor;
    fst_status status;
    while ((status = fst_loader_next(loader, -1, &tensor, error)) == FST_OK)
        fst_tensor_unref(tensor);
    return status == FST_END ? FST_OK : status;
}

/// Adds advice to errors about memory. A load to a device cannot map the files.
static int fail_load(const load_request *request, const fst_error *error) {
    int code = cli_fail(error);
    bool is_budget = error->status == FST_E_BUDGET;
    bool has_budget = request->options.budget_bytes != 0;
    if ((error->status == FST_E_NO_MEMORY || is_budget) && !cli_wants_json())
        fprintf(stderr, "%s, --select GLOB (some tensors)%s\n",
                is_budget    ? "one tensor must fit in the budget. Use a larger --budget"
                : has_budget ? "to load less at a time, use a smaller --budget"
                             : "to load less at a time, use --budget SIZE (at most SIZE of tensors "
                               "in memory)",
                request->options.device.kind == FST_DEVICE_CPU ? ", --mode map (memory-mapped)"
                                                               : "");
    return code;
}

static int load_once(fst_model *model, load_request *request) {
    fst_error error;
    fst_loader *loader;
    request->options.progress = cli_progress_begin();
    double start = cli_seconds_now();
    if (fst_loader_open(model, &request->options, &loader, &error) != FST_OK)
        return fail_load(request, &error);
    fst_status status = FST_OK;
    if (request->options.budget_bytes == 0) status = fst_loader_wait(loader, -1, &error);
    if (status == FST_OK) status = consume(loader, &error);
    double seconds = cli_seconds_now() - start;
    fst_load_stats stats = {.struct_size = sizeof stats};
    if (status == FST_OK) status = fst_loader_stats_get(loader, &stats, &error);
    fst_loader_close(loader);
    cli_progress_end(status == FST_OK);
    if (status != FST_OK) return fail_load(request, &error);
    if (stats.tensor_count == 0 && request->options.glob_count > 0)
        return cli_refuse(EXIT_INVALID, "NoMatch", "no tensor name matches");
    // Bytes that another process shares may be converted, which the statistics do not count.
    if (request->options.convert && stats.bytes_converted + stats.shared_bytes == 0 &&
        stats.bytes_requested > 0)
        cli_say_unconverted(request->options.dtype);
    if (cli_wants_json())
        print_json(model, &stats, seconds);
    else
        print_stats(model, request, &stats, seconds);
    return EXIT_OK;
}

static int run(const cli_command *command, char **argv) {
    load_request request = {.options = FST_STRUCT_INIT(fst_load_options),
                            .tuning = {.struct_size = sizeof request.tuning, .map_populate = 1},
                            .repeat = 1};
    cli_operands operands;
    int code = cli_parse(command, argv, &request, &operands);
    if (code == EXIT_OK && !operands.is_answered) code = check_request(&request);
    if (code != EXIT_OK || operands.is_answered) return code;
    // Options of the reading engines require reads.
    bool tunes = request.tuning.ring != FST_RING_AUTO || request.tuning.numa != FST_NUMA_DEFAULT;
    if (tunes && request.options.mode == FST_MODE_AUTO) request.options.mode = FST_MODE_LOAD;
    request.options.tuning = &request.tuning;
    request.options.globs = request.globs;
    fst_open_options open_options = {.struct_size = sizeof open_options,
                                     .flags = (request.lenient ? FST_OPEN_LENIENT : 0) |
                                              (request.verify ? FST_OPEN_VERIFY : 0)};
    fst_model *model;
    fst_error error;
    if (fst_model_open(operands.words[0], &open_options, &model, &error) != FST_OK)
        return cli_fail(&error);
    for (uint64_t i = 0; i < request.repeat && code == EXIT_OK; i++)
        code = load_once(model, &request);
    fst_model_close(model);
    return code;
}

static const cli_option options[] = {
    {'d', "device", "DEVICE", NULL, "target: cpu (default), cuda, cuda:N, hip, hip:N, gpu, pinned",
     0},
    {'c', "cache", "POLICY", cache_choices,
     "keep read bytes in the page cache or bypass it (default: auto, keep if they fit)", 0},
    {'g', "gds", "POLICY", gds_choices, "use GPUDirect Storage for loads to a GPU (default: auto)",
     0},
    {'m', "mode", "MODE", modes,
     "copy into owned memory (load) or map the file (map); default: auto, map on the CPU", 0},
    {'e', "engine", "ENGINE", engines,
     "read with ENGINE (default: auto; 'fastsafetensors engines PATH' shows which work)", 0},
    {'R', "ring", "TARGET", rings,
     "let io_uring read into the tensors (place) or staging buffers (slots); default: auto, "
     "measured",
     0},
    {'N', "numa", "POLICY", numas, "NUMA policy of the memory", 0},
    {'D', "dtype", "DTYPE", cli_dtype_words, "convert floats, and integers to wider ones, to DTYPE",
     0},
    CLI_SELECT_OPTION,
    {'S', "share", "POLICY", share_choices,
     "share owned memory with other processes of the node that load the same (default: off)", 0},
    {'G', "share-grace", "SECONDS", NULL,
     "keep shared memory so long after its last process has ended (default: 0)", 0},
    {'t', "threads", "N", NULL, "use N threads (default: by the machine)", 0},
    {'b', "budget", "SIZE", NULL,
     "stream, with at most SIZE of tensors in memory (64M, 2GiB); I/O buffers are extra", 0},
    {'r', "repeat", "N", NULL, "load N times", 0},
    {'v', "verify", NULL, NULL,
     "verify all bytes while loading, against the manifest or checksums of the model", 0},
    CLI_LENIENT_OPTION(0),
    {0},
};

const cli_command load_command = {
    .name = "load",
    .operands = "PATH",
    .summary = "load a model; print time, throughput and I/O method",
    .about = "Load a model into memory. Print time, throughput, the I/O method and why it was\n"
             "chosen. With --json, print one object per load.",
    .examples = "  fastsafetensors load --mode load --repeat 3 model.safetensors\n"
                "  fastsafetensors load --dtype BF16 --budget 512M folder\n",
    .options = options,
    .operand_min = 1,
    .operand_max = 1,
    .inputs = INPUTS_FIRST,
    .has_json = true,
    .has_cache = true,
    .has_progress = true,
    .take = take,
    .run = run,
};
