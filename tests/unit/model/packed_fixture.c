// SPDX-License-Identifier: Apache-2.0
/// Creates files and compares loads of them; see packed_fixture.h.
#include "packed_fixture.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

file_bytes read_bytes(const char *path) {
    struct stat info;
    FILE *file = fopen(path, "rb");
    if (file == NULL || fstat(fileno(file), &info) != 0) abort();
    file_bytes read = {malloc((size_t)info.st_size + 1), (size_t)info.st_size};
    if (fread(read.bytes, 1, read.size, file) != read.size) abort();
    fclose(file);
    return read;
}

/// Bytes that look like weights of the dtype.
static unsigned char *make_weights(fst_dtype dtype, size_t size) {
    uint64_t state = 7 + (uint64_t)dtype;
    uint32_t bytes = fst_dtype_bits(dtype) <= 8 ? 1 : fst_dtype_bits(dtype) / 8;
    unsigned char *made = malloc(size + 1);
    for (size_t i = 0; i < size; i++) {
        uint32_t some = (uint32_t)(fixture_random(&state) >> 16);
        uint32_t top = (some >> 20 & 0x80) | (0x3c + (uint32_t)__builtin_ctz(some | 64));
        made[i] = (unsigned char)(i % bytes == bytes - 1 ? top : some);
    }
    return made;
}

/// A tensor of each dtype, a matrix of BF16, and some that stay plain.
const char *make_plain(void) {
    static const uint64_t shape[2] = {ROWS, COLUMNS}, vector[] = {40000}, none[] = {0, 3};
    static char names[FST_DTYPE_COUNT][32];
    static const char *path;
    fst_save_tensor tensors[FST_DTYPE_COUNT + 3];
    unsigned char *data[FST_DTYPE_COUNT + 3];
    if (path != NULL) return path;
    for (int i = 0; i < FST_DTYPE_COUNT; i++) {
        fst_dtype dtype = (fst_dtype)i;
        size_t size = 40000u * fst_dtype_bits(dtype) / 8;
        snprintf(names[i], sizeof names[i], "of.%s", fst_dtype_name(dtype));
        data[i] = make_weights(dtype, size);
        tensors[i] = (fst_save_tensor){.struct_size = sizeof(fst_save_tensor),
                                       .name = names[i],
                                       .name_size = SIZE_MAX,
                                       .dtype = dtype,
                                       .rank = 1,
                                       .shape = vector,
                                       .data = data[i]};
    }
    data[FST_DTYPE_COUNT] = make_weights(FST_DTYPE_BF16, ROWS * COLUMNS * 2);
    data[FST_DTYPE_COUNT + 1] = make_weights(FST_DTYPE_F32, 4);
    data[FST_DTYPE_COUNT + 2] = make_weights(FST_DTYPE_F32, 4);
    tensors[FST_DTYPE_COUNT] = (fst_save_tensor){.struct_size = sizeof(fst_save_tensor),
                                                 .name = "matrix",
                                                 .name_size = SIZE_MAX,
                                                 .dtype = FST_DTYPE_BF16,
                                                 .rank = 2,
                                                 .shape = shape,
                                                 .data = data[FST_DTYPE_COUNT]};
    tensors[FST_DTYPE_COUNT + 1] = (fst_save_tensor){.struct_size = sizeof(fst_save_tensor),
                                                     .name = "scalar",
                                                     .name_size = SIZE_MAX,
                                                     .dtype = FST_DTYPE_F32,
                                                     .data = data[FST_DTYPE_COUNT + 1]};
    tensors[FST_DTYPE_COUNT + 2] = (fst_save_tensor){.struct_size = sizeof(fst_save_tensor),
                                                     .name = "empty",
                                                     .name_size = SIZE_MAX,
                                                     .dtype = FST_DTYPE_F32,
                                                     .rank = 2,
                                                     .shape = none,
                                                     .data = data[FST_DTYPE_COUNT + 2]};
    path = strdup(fixture_path("plain.safetensors"));
    if (fst_save(path, tensors, FST_DTYPE_COUNT + 3, NULL, NULL, NULL) != FST_OK) abort();
    for (int i = 0; i < FST_DTYPE_COUNT + 3; i++) free(data[i]);
    return path;
}

/// The same compressed; NULL without libzstd.
const char *make_packed(void) {
    static const char *path;
    fst_error error;
    if (path != NULL) return path;
    const char *made = strdup(fixture_path("packed.safetensors"));
    fst_pack_options options = FST_STRUCT_INIT(fst_pack_options);
    options.compress = FST_COMPRESS_ALL;
    fst_status status = fst_file_compress(make_plain(), made, &options, NULL, &error);
    if (status == FST_E_UNSUPPORTED) {
        check_skip_reason = "no libzstd";
        return NULL;
    }
    if (status != FST_OK) printf("# %s\n", error.message);
    if (status == FST_OK) path = made;
    return path;
}

fst_status open_bytes(const file_bytes *file, fst_model **model, fst_error *error) {
    fst_source source = FST_STRUCT_INIT(fst_source);
    source.data = file->bytes;
    source.size_bytes = file->size;
    return fst_model_open_source(&source, NULL, model, error);
}

/// Loads everything and compares it with the plain file. Returns FST_E_CANCELLED for wrong bytes.
fst_status load_and_compare(fst_model *model, const fst_load_options *options,
                            const file_bytes *plain, fst_error *error) {
    fst_loader *loader;
    fst_tensor *tensor;
    fst_status status = fst_loader_open(model, options, &loader, error);
    if (status != FST_OK) return status;
    while ((status = fst_loader_next(loader, -1, &tensor, error)) == FST_OK) {
        fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
        fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
        size_t index;
        bool good = fst_tensor_view_get(tensor, &view, NULL) == FST_OK &&
                    fst_model_find(model, view.name, view.name_size, &index, NULL) == FST_OK &&
                    fst_model_tensor_info(model, index, &info, NULL) == FST_OK &&
                    info.file_offset + info.size_bytes <= plain->size &&
                    view.size_bytes == info.size_bytes &&
                    (view.size_bytes == 0 ||
                     memcmp(view.data, plain->bytes + info.file_offset, info.size_bytes) == 0);
        fst_tensor_unref(tensor);
        if (!good) {
            status = FST_E_CANCELLED;
            break;
        }
    }
    fst_loader_close(loader);
    return status == FST_END ? FST_OK : status;
}
