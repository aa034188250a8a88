// SPDX-License-Identifier: Apache-2.0
/// verify_model MODEL: makes the manifest if it is missing, and loads the model verified.
#include <fastsafetensors.h>
#include <inttypes.h>
#include <stdio.h>

int main(int argc, char **argv) {
    fst_error error;
    fst_model *model;
    fst_loader *loader = NULL;
    fst_load_stats stats = FST_STRUCT_INIT(fst_load_stats);
    fst_open_options options = FST_STRUCT_INIT(fst_open_options);
    options.flags = FST_OPEN_VERIFY;
    if (argc != 2) return fprintf(stderr, "usage: verify_model MODEL\n"), 2;
    fst_status status = fst_model_open(argv[1], &options, &model, &error);
    if (status == FST_E_NOT_FOUND) {
        status = fst_manifest_write(argv[1], NULL, NULL, NULL, &error);
        if (status == FST_OK) status = fst_model_open(argv[1], &options, &model, &error);
    }
    if (status != FST_OK) return fprintf(stderr, "%s\n", error.message), 1;
    status = fst_loader_open(model, NULL, &loader, &error);
    if (status == FST_OK) status = fst_loader_wait(loader, -1, &error);
    if (status == FST_OK) status = fst_loader_stats_get(loader, &stats, &error);
    fst_loader_close(loader);
    fst_model_close(model);
    if (status != FST_OK) return fprintf(stderr, "%s\n", error.message), 1;
    printf("%zu tensors, %" PRIu64 " bytes verified\n", stats.tensor_count, stats.verified_bytes);
    return 0;
}
