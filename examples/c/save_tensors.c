// SPDX-License-Identifier: Apache-2.0
/// save_tensors PATH: saves two tensors and one metadata entry, and returns when the disk has them.
#include <fastsafetensors.h>
#include <inttypes.h>
#include <stdio.h>

int main(int argc, char **argv) {
    const float weight[2][3] = {{1, 2, 3}, {4, 5, 6}}, bias[3] = {0.5, 0.25, 0};
    const uint64_t weight_shape[] = {2, 3}, bias_shape[] = {3};
    const fst_save_tensor tensors[] = {{.struct_size = sizeof tensors[0],
                                        .name = "layer.weight",
                                        .dtype = FST_DTYPE_F32,
                                        .rank = 2,
                                        .shape = weight_shape,
                                        .data = weight},
                                       {.struct_size = sizeof tensors[0],
                                        .name = "layer.bias",
                                        .dtype = FST_DTYPE_F32,
                                        .rank = 1,
                                        .shape = bias_shape,
                                        .data = bias}};
    const fst_metadata_entry format = {.key = "format", .value = "pt"};
    fst_save_options options = FST_STRUCT_INIT(fst_save_options);
    options.promise = FST_SAVE_DURABLE;
    options.metadata = &format;
    options.metadata_count = 1;
    fst_save_stats stats = FST_STRUCT_INIT(fst_save_stats);
    fst_error error;
    if (argc != 2) return fprintf(stderr, "usage: save_tensors PATH\n"), 2;
    if (fst_save(argv[1], tensors, 2, &options, &stats, &error) != FST_OK)
        return fprintf(stderr, "%s\n", error.message), 1;
    printf("%s: %zu tensors, %" PRIu64 " bytes\n", argv[1], stats.tensor_count, stats.bytes_total);
    return 0;
}
