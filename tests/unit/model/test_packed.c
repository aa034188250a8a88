// SPDX-License-Identifier: Apache-2.0
/// Compressed files: they report and load the original tensors, read only what is needed, and
/// modified files are rejected or cause no harm.
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "packed_fixture.h"

TEST(compressed_file_round_trips)
{
    const char *path = make_packed(), *back = fixture_path("back.safetensors");
    if (path == NULL) return;
    CHECK_INT(fst_file_decompress(path, back, NULL, NULL, NULL), FST_OK);
    file_bytes one = read_bytes(make_plain()), other = read_bytes(back), packed = read_bytes(path);
    bool same = one.size == other.size && memcmp(one.bytes, other.bytes, one.size) == 0;
    bool smaller = packed.size < one.size;
    free(one.bytes);
    free(other.bytes);
    free(packed.bytes);
    CHECK(same && smaller);
}

TEST(every_load_mode_gives_the_same_bytes)
{
    static const fst_engine engines[] = {FST_ENGINE_AUTO, FST_ENGINE_PREAD};
    static const uint64_t budgets[] = {0, (uint64_t)32 << 20};
    fst_error error;
    fst_model *model;
    if (make_packed() == NULL) return;
    file_bytes plain = read_bytes(make_plain());
    CHECK_INT(fst_model_open(make_packed(), NULL, &model, &error), FST_OK);
    for (size_t i = 0; i < 16; i++) {
        fst_load_options options = FST_STRUCT_INIT(fst_load_options);
        options.mode = i % 2 == 0 ? FST_MODE_AUTO : FST_MODE_LOAD;
        options.tuning = fixture_engine(engines[i / 2 % 2]);
        options.budget_bytes = budgets[i / 4 % 2];
        options.thread_count = i / 8 == 0 ? 0 : 1;
        options.cache = i == 13 ? FST_CACHE_BYPASS : FST_CACHE_AUTO;
        fst_status status = load_and_compare(model, &options, &plain, &error);
        if (status != FST_OK) printf("# %zu: %s\n", i, error.message);
        CHECK_INT(status, FST_OK);
    }
    fst_model_close(model);
    free(plain.bytes);
}

static atomic_int direct_reads, fault;

/// Counts direct reads, and lets them fail where `fault` is an errno.
static void watch_direct(fsti_io_op *op) {
    if (op->engine != FST_ENGINE_DIRECT) return;
    atomic_fetch_add(&direct_reads, 1);
    if (atomic_load(&fault) != 0) op->result = -atomic_load(&fault);
}

/// The direct reads of an uncached load; -1 if its bytes are wrong.
static int count_direct(fst_cache cache, fst_engine engine, const file_bytes *plain) {
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    fst_model *model;
    fst_error error;
    options.mode = FST_MODE_LOAD;
    options.cache = cache;
    options.tuning = fixture_engine(engine);
    if (fst_model_open(make_packed(), NULL, &model, &error) != FST_OK) return -1;
    fixture_evict(make_packed()); // pages read by opening, with the kernel's readahead
    atomic_store(&direct_reads, 0);
    fsti_io_fault_hook_set(watch_direct);
    fst_status status = load_and_compare(model, &options, plain, &error);
    fsti_io_fault_hook_set(NULL);
    fst_model_close(model);
    return status == FST_OK ? atomic_load(&direct_reads) : -1;
}

TEST(absent_chunks_are_read_directly)
{
    fsti_file *file;
    fsti_io_facts facts;
    uint64_t resident;
    if (make_packed() == NULL) return;
    file_bytes plain = read_bytes(make_plain());
    CHECK_INT(fsti_file_open(make_packed(), &file, NULL), FST_OK);
    fixture_evict(make_packed());
    fsti_io_probe(file, &(fsti_io_request){.no_mapping = NULL}, &facts);
    bool can = facts.has_direct && fsti_file_resident(file, 0, fsti_file_size(file), &resident) &&
               resident == 0;
    fsti_file_unref(file);
    int around = count_direct(FST_CACHE_BYPASS, FST_ENGINE_AUTO, &plain);
    CHECK(can ? around > 0 : around == 0);
    CHECK_INT(count_direct(FST_CACHE_KEEP, FST_ENGINE_AUTO, &plain), 0);
    CHECK_INT(count_direct(FST_CACHE_AUTO, FST_ENGINE_PREAD, &plain), 0); // as requested
    // Refused once, and not tried again; the bytes are still read.
    atomic_store(&fault, EINVAL);
    int refused = count_direct(FST_CACHE_BYPASS, FST_ENGINE_AUTO, &plain);
    CHECK(can ? refused > 0 && refused <= 64 : refused == 0);
    atomic_store(&fault, 0);
    free(plain.bytes);
}

TEST(engines_that_need_a_file_and_views_are_refused)
{
    fst_error error;
    fst_model *model;
    fst_loader *loader;
    if (make_packed() == NULL) return;
    CHECK_INT(fst_model_open(make_packed(), NULL, &model, &error), FST_OK);
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    options.mode = FST_MODE_MAP;
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_E_UNSUPPORTED);
    CHECK_CONTAINS(error.message, "compressed");
    options.mode = FST_MODE_LOAD;
    options.tuning = fixture_engine(FST_ENGINE_URING);
    CHECK_INT(fst_loader_open(model, &options, &loader, &error), FST_E_UNSUPPORTED);
    fst_model_close(model);
}

TEST(opening_a_compressed_file_takes_one_more_read)
{
    fst_file_info plain = FST_STRUCT_INIT(fst_file_info), packed = FST_STRUCT_INIT(fst_file_info);
    fst_model *model;
    if (make_packed() == NULL) return;
    CHECK_INT(fst_model_open(make_plain(), NULL, &model, NULL), FST_OK);
    CHECK_INT(fst_model_file_info(model, 0, &plain, NULL), FST_OK);
    CHECK_INT(plain.header_reads, 1);
    CHECK(plain.stored_bytes == plain.size_bytes && plain.compressed_count == 0);
    fst_model_close(model);
    CHECK_INT(fst_model_open(make_packed(), NULL, &model, NULL), FST_OK);
    CHECK_INT(fst_model_file_info(model, 0, &packed, NULL), FST_OK);
    CHECK_INT(packed.header_reads, 2);
    CHECK_INT(packed.size_bytes, plain.size_bytes);
    CHECK(packed.stored_bytes < plain.size_bytes && packed.compressed_count > 10);
    fst_model_close(model);
}

TEST(stored_entries_are_shown_on_request)
{
    fst_model *model;
    size_t index;
    if (make_packed() == NULL) return;
    fst_open_options options = FST_STRUCT_INIT(fst_open_options);
    options.flags = FST_OPEN_STORED;
    CHECK_INT(fst_model_open(make_packed(), &options, &model, NULL), FST_OK);
    CHECK_INT(fst_model_find(model, "__packed__.matrix", SIZE_MAX, &index, NULL), FST_OK);
    CHECK_INT(fst_model_find(model, "matrix", SIZE_MAX, &index, NULL), FST_E_TENSOR_NOT_FOUND);
    fst_model_close(model);
}

/// An outer slice reads the chunks that it touches, and no other.
TEST(slices_read_only_their_chunks)
{
    uint64_t begin[] = {ROWS / 8, 0}, end[] = {ROWS / 4, COLUMNS};
    fst_model *model;
    fst_loader *loader;
    fst_tensor *tensor;
    fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
    fst_tensor_view view = FST_STRUCT_INIT(fst_tensor_view);
    fst_part item = {.struct_size = sizeof item, .begin = begin, .end = end};
    fst_load_stats stats = FST_STRUCT_INIT(fst_load_stats);
    if (make_packed() == NULL) return;
    file_bytes plain = read_bytes(make_plain());
    CHECK_INT(fst_model_open(make_packed(), NULL, &model, NULL), FST_OK);
    CHECK_INT(fst_model_find(model, "matrix", SIZE_MAX, &item.tensor_index, NULL), FST_OK);
    CHECK_INT(fst_model_tensor_info(model, item.tensor_index, &info, NULL), FST_OK);
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    options.parts = &item;
    options.part_count = 1;
    CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
    CHECK_INT(fst_loader_next(loader, -1, &tensor, NULL), FST_OK);
    CHECK_INT(fst_tensor_view_get(tensor, &view, NULL), FST_OK);
    uint64_t row = COLUMNS * 2, first = begin[0] * row, size = (end[0] - begin[0]) * row;
    CHECK(view.size_bytes == size &&
          memcmp(view.data, plain.bytes + info.file_offset + first, size) == 0);
    CHECK_INT(fst_loader_stats_get(loader, &stats, NULL), FST_OK);
    uint64_t chunks = (first + size - 1) / CHUNK_BYTES - first / CHUNK_BYTES + 1;
    CHECK(stats.stored_bytes <= chunks * (CHUNK_BYTES * 7 / 10));
    CHECK(stats.stored_bytes >= chunks * (CHUNK_BYTES * 6 / 10));
    CHECK(stats.decoded_bytes == size && stats.decode_ns > 0);
    fst_tensor_unref(tensor);
    fst_loader_close(loader);
    fst_model_close(model);
    free(plain.bytes);
}

/// No chunk is read or decoded twice, with any number of threads.
TEST(a_load_reads_each_chunk_once)
{
    fst_model *model;
    fst_loader *loader;
    fst_file_info info = FST_STRUCT_INIT(fst_file_info);
    if (make_packed() == NULL) return;
    for (uint32_t threads = 1; threads <= 4; threads++) {
        CHECK_INT(fst_model_open(make_packed(), NULL, &model, NULL), FST_OK);
        CHECK_INT(fst_model_file_info(model, 0, &info, NULL), FST_OK);
        fst_load_options options = FST_STRUCT_INIT(fst_load_options);
        fst_load_stats stats = FST_STRUCT_INIT(fst_load_stats);
        options.thread_count = threads;
        CHECK_INT(fst_loader_open(model, &options, &loader, NULL), FST_OK);
        CHECK_INT(fst_loader_wait(loader, -1, NULL), FST_OK);
        CHECK_INT(fst_loader_stats_get(loader, &stats, NULL), FST_OK);
        CHECK(stats.stored_bytes > 0 && stats.stored_bytes <= info.stored_bytes);
        CHECK_INT(stats.decoded_bytes, stats.bytes_requested);
        fst_loader_close(loader);
        fst_model_close(model);
    }
}

// ---- damage ----

/// The positions of the parts of a compressed file.
typedef struct packed_places {
    size_t directory, records, marks, original, data_begin;
    uint64_t entry_bytes;
} packed_places;

static uint64_t number_at(const unsigned char *bytes, unsigned size) {
    uint64_t value = 0;
    for (unsigned i = 0; i < size; i++) value |= (uint64_t)bytes[i] << (8 * i);
    return value;
}

static packed_places find_places(const file_bytes *file) {
    packed_places places = {.data_begin = 8 + (size_t)number_at(file->bytes, 8)};
    const unsigned char *head = file->bytes + places.data_begin;
    places.directory = places.data_begin;
    places.records = places.directory + FSTI_PACKED_HEAD_BYTES;
    places.marks = places.records + number_at(head + 24, 4) * FSTI_PACKED_TENSOR_BYTES;
    places.original = places.marks + number_at(head + 32, 8) * FSTI_PACKED_CHUNK_BYTES;
    const char *entry = strstr((char *)file->bytes + 8, "\"__packed__\":");
    entry = strstr(entry, "\"shape\":[") + 9;
    places.entry_bytes = strtoull(entry, NULL, 10);
    return places;
}

/// Corrects the directory's CRC, so that the check of the changed field is reached.
static void seal(const file_bytes *file, const packed_places *places) {
    unsigned char *head = file->bytes + places->directory;
    memset(head + 56, 0, 4);
    uint32_t crc = fsti_crc32c(head, places->entry_bytes);
    for (int i = 0; i < 4; i++) head[56 + i] = (unsigned char)(crc >> 8 * i);
}

typedef struct lie {
    int part; ///< 0: the head, 1: the first record, 2: the first chunk, 3: the original header
    size_t at;
    unsigned char value;
    fst_status status;
    const char *words;
} lie;

TEST(inconsistent_directories_are_reported)
{
    static const lie lies[] = {
        {0, 0, 'X', FST_E_CORRUPT, "no valid magic number"},
        {0, 8, 2, FST_E_UNSUPPORTED, "version"},
        {0, 12, 1, FST_E_UNSUPPORTED, "version"},
        {0, 18, 0x7f, FST_E_CORRUPT, "wrong size"},
        {0, 16, 1, FST_E_CORRUPT, "inconsistent"},
        {0, 24, 200, FST_E_CORRUPT, "inconsistent"},
        {0, 28, 1, FST_E_UNSUPPORTED, "coder"},
        {0, 39, 0xff, FST_E_CORRUPT, "inconsistent"},
        {0, 47, 0x10, FST_E_CORRUPT, "64 times"},
        {0, 40, 1, FST_E_METADATA_INCOMPLETE_BUFFER, ""},
        {0, 60, 1, FST_E_CORRUPT, "reserved"},
        {1, 0, 0, FST_E_CORRUPT, "original header"},
        {1, 1, 9, FST_E_UNSUPPORTED, "layout"},
        {1, 2, 2, FST_E_UNSUPPORTED, "coder"},
        {1, 3, 15, FST_E_CORRUPT, "impossible"},
        {1, 3, 21, FST_E_CORRUPT, "impossible"},
        {1, 4, 1, FST_E_CORRUPT, "impossible"},
        {1, 15, 1, FST_E_CORRUPT, "original header"},
        {1, 16, 1, FST_E_CORRUPT, "number of chunks"},
        {1, 28, 1, FST_E_CORRUPT, "impossible"},
        {2, 3, 0x80, FST_E_CORRUPT, "impossible"},
        {2, 2, 0xff, FST_E_CORRUPT, "impossible"},
        {2, 0, 1, FST_E_CORRUPT, "impossible"},
        {2, 1, 1, FST_E_CORRUPT, ""},
        {3, 8, 'x', FST_E_INVALID_HEADER_JSON, ""},
        {3, 0, 3, FST_E_CORRUPT, "a different length"},
    };
    if (make_packed() == NULL) return;
    file_bytes file = read_bytes(make_packed());
    packed_places places = find_places(&file);
    const size_t parts[] = {places.directory, places.records, places.marks, places.original};
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        fst_error error = {.status = FST_OK};
        fst_model *model;
        unsigned char *byte = &file.bytes[parts[lies[i].part] + lies[i].at], before = *byte;
        *byte = lies[i].value == before ? (unsigned char)(before + 3) : lies[i].value;
        seal(&file, &places);
        fst_status status = open_bytes(&file, &model, &error);
        if (status == FST_OK) fst_model_close(model);
        *byte = before;
        if (status != lies[i].status) printf("# lie %zu: %s\n", i, error.message);
        CHECK_INT(status, lies[i].status);
        CHECK_CONTAINS(error.message, lies[i].words);
    }
    free(file.bytes);
}

/// Header entries that contradict the directory.
TEST(inconsistent_entries_are_reported)
{
    static const struct {
        const char *from, *to, *words;
    } lies[] = {{"__packed__.matrix", "__packed__.matri_", "an entry's name is not a tensor"},
                {"__packed__.matrix", "__pakced__.matrix", "no packed entry"},
                {"\"scalar\"", "\"sca_ar\"", "an entry's name is not a tensor"},
                {"__packed__.of.BF16", "__packed__.of.BF66", "an entry's name is not a tensor"},
                {"__packed__.of.U16", "__packed__.of.F16", "duplicate tensor"}};
    if (make_packed() == NULL) return;
    file_bytes file = read_bytes(make_packed());
    file.bytes[file.size] = '\0';
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        fst_error error = {.status = FST_OK};
        fst_model *model;
        char *at = strstr((char *)file.bytes + 8, lies[i].from);
        CHECK(at != NULL);
        memcpy(at, lies[i].to, strlen(lies[i].to));
        fst_status status = open_bytes(&file, &model, &error);
        if (status == FST_OK) fst_model_close(model);
        memcpy(at, lies[i].from, strlen(lies[i].from));
        if (status == FST_E_INVALID_HEADER_JSON) continue; // the name was there already
        CHECK_INT(status, FST_E_CORRUPT);
        CHECK_CONTAINS(error.message, lies[i].words);
    }
    free(file.bytes);
}

TEST(a_wrong_crc_names_tensor_file_and_byte)
{
    fst_error error;
    fst_model *model;
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    if (make_packed() == NULL) return;
    file_bytes plain = read_bytes(make_plain()), file = read_bytes(make_packed());
    packed_places places = find_places(&file);
    file.bytes[places.marks + 4] ^= 1;
    seal(&file, &places);
    CHECK_INT(open_bytes(&file, &model, &error), FST_OK);
    CHECK_INT(load_and_compare(model, &options, &plain, &error), FST_E_CORRUPT);
    CHECK_CONTAINS(error.message, "CRC32C");
    CHECK(error.tensor[0] != '\0' && error.file[0] != '\0');
    CHECK_INT(error.byte_offset, places.directory + places.entry_bytes);
    fst_model_close(model);
    free(plain.bytes);
    free(file.bytes);
}

/// One bit anywhere in the header, the directory or packed bytes: an error, or the right bytes.
TEST(flipped_bits_are_detected_or_harmless)
{
    uint64_t state = 3;
    unsigned errors = 0, rounds = CHECK_ROUNDS(CHECK_SANITIZED_THREADS ? 3000 : 10000);
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    options.thread_count = 1;
    if (make_packed() == NULL) return;
    file_bytes plain = read_bytes(make_plain()), file = read_bytes(make_packed());
    packed_places places = find_places(&file);
    for (unsigned i = 0; i < rounds; i++) {
        fst_error error = {.status = FST_OK};
        fst_model *model;
        // Uncompressed tensors have no checksum here. They are stored last and not changed.
        uint64_t span = i % 2 == 0 ? places.original - places.directory + 400
                                   : file.size - places.directory - 700000;
        size_t at = places.directory + fixture_random(&state) % span;
        unsigned char bit = (unsigned char)(1u << fixture_random(&state) % 8);
        file.bytes[at] ^= bit;
        fst_status status = open_bytes(&file, &model, &error);
        if (status == FST_OK) {
            status = load_and_compare(model, &options, &plain, &error);
            fst_model_close(model);
        }
        file.bytes[at] ^= bit;
        if (status == FST_E_CANCELLED) printf("# byte %zu, bit %u\n", at, bit);
        CHECK(status != FST_E_CANCELLED);
        if (status != FST_OK) errors++;
    }
    free(plain.bytes);
    free(file.bytes);
    CHECK(errors > rounds * 9 / 10);
}

TEST(failed_allocations_do_not_leak)
{
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    options.thread_count = 1;
    if (make_packed() == NULL) return;
    file_bytes plain = read_bytes(make_plain()), file = read_bytes(make_packed());
    long live = fsti_alloc_live(), n = 0;
    for (fst_status status = FST_E_NO_MEMORY; status != FST_OK; n = check_next(n)) {
        fst_error error = {.status = FST_OK};
        fst_model *model = NULL;
        fsti_alloc_fail_after(n);
        status = open_bytes(&file, &model, &error);
        if (status == FST_OK) {
            status = load_and_compare(model, &options, &plain, &error);
            fst_model_close(model);
        }
        fsti_alloc_fail_after(-1);
        if (status != FST_OK && status != FST_E_NO_MEMORY) printf("# %ld: %s\n", n, error.message);
        CHECK(status == FST_OK || status == FST_E_NO_MEMORY);
        CHECK_INT(fsti_alloc_live(), live);
    }
    CHECK(n > 20);
    free(plain.bytes);
    free(file.bytes);
}

/// Bytes between a tensor's last chunk and the next entry are zero, or the file is damaged.
TEST(nonzero_padding_is_reported)
{
    fst_error error = {.status = FST_OK};
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    fst_model *model;
    if (make_packed() == NULL) return;
    file_bytes plain = read_bytes(make_plain()), file = read_bytes(make_packed());
    file.bytes[file.size] = '\0';
    const packed_places places = find_places(&file);
    size_t filled = 0;
    // The end of each packed entry in the header: "data_offsets":[begin,end]
    for (char *at = (char *)file.bytes + 8; (at = strstr(at, "\"__packed__.")) != NULL; at++) {
        const char *comma = strchr(strstr(at, "\"data_offsets\":["), ',');
        unsigned char *last = file.bytes + places.data_begin + strtoull(comma + 1, NULL, 10) - 1;
        if (*last != 0) continue;
        *last = 1;
        fst_status status = open_bytes(&file, &model, &error);
        CHECK_INT(status, FST_OK);
        CHECK_INT(load_and_compare(model, &options, &plain, &error), FST_E_CORRUPT);
        CHECK_CONTAINS(error.message, "its padding is not zero");
        CHECK(error.tensor[0] != '\0');
        // Where the last chunk fills the entry, the zeros are its own.
        filled += error.byte_offset == (uint64_t)(last - file.bytes);
        fst_model_close(model);
        *last = 0;
    }
    CHECK(filled > 3);
    free(plain.bytes);
    free(file.bytes);
}

/// A truncated file can't be rescued: the message says so, and does not recommend it.
TEST(truncated_compressed_file_is_reported)
{
    fst_error error = {.status = FST_OK};
    fst_open_options options = FST_STRUCT_INIT(fst_open_options);
    fst_model *model;
    if (make_packed() == NULL) return;
    file_bytes file = read_bytes(make_packed());
    file.size -= 10;
    CHECK_INT(open_bytes(&file, &model, &error), FST_E_METADATA_INCOMPLETE_BUFFER);
    CHECK(strstr(error.message, "rescue") == NULL);
    options.flags = FST_OPEN_CUT;
    fst_source source = FST_STRUCT_INIT(fst_source);
    source.data = file.bytes;
    source.size_bytes = file.size;
    CHECK_INT(fst_model_open_source(&source, &options, &model, &error), FST_E_UNSUPPORTED);
    CHECK_CONTAINS(error.message, "truncated");
    // Without a complete directory nothing can be reported.
    source.size_bytes = find_places(&file).records;
    CHECK_INT(fst_model_open_source(&source, &options, &model, &error), FST_OK);
    CHECK_INT(fst_model_tensor_count(model), 0);
    fst_model_close(model);
    free(file.bytes);
}

/// Incompressible data stays unchanged: the target equals the source.
TEST(incompressible_tensors_are_copied)
{
    const char *source = fixture_tensors("noise", 3, 100000);
    char *target = strdup(fixture_path("noise.packed"));
    if (make_packed() == NULL) return;
    CHECK_INT(fst_file_compress(source, target, NULL, NULL, NULL), FST_OK);
    file_bytes one = read_bytes(source), other = read_bytes(target);
    CHECK(one.size == other.size && memcmp(one.bytes, other.bytes, one.size) == 0);
    free(one.bytes);
    free(other.bytes);
    free(target);
}
