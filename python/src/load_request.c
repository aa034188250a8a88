// SPDX-License-Identifier: Apache-2.0
/// Load requests: from Python arguments to options of the C library.
#include <errno.h>

#include "load_request.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/// Reads slice bounds into `target`. False with an exception.
static int read_numbers(PyObject *sequence, uint64_t *target, uint32_t rank) {
    if (PySequence_Size(sequence) != (Py_ssize_t)rank) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "a slice needs one number per dimension");
        return 0;
    }
    for (uint32_t i = 0; i < rank; i++) {
        PyObject *number = PySequence_GetItem(sequence, (Py_ssize_t)i);
        target[i] = number == NULL ? 0 : PyLong_AsUnsignedLongLong(number);
        Py_XDECREF(number);
        if (PyErr_Occurred()) return 0;
    }
    return 1;
}

/// Finds an item by name. *rank: of the tensor.
static int find_item(module_state *state, const fst_model *model, PyObject *name, fst_part *item,
                     uint32_t *rank) {
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(name, &size);
    if (text == NULL) return 0;
    fst_error error;
    fst_tensor_info info = FST_STRUCT_INIT(fst_tensor_info);
    if (fst_model_find(model, text, (size_t)size, &item->tensor_index, &error) != FST_OK ||
        fst_model_tensor_info(model, item->tensor_index, &info, &error) != FST_OK) {
        fstpy_raise(state, &error);
        return 0;
    }
    *rank = info.rank;
    return 1;
}

static int reserve_numbers(load_request *request, size_t count) {
    if (request->number_count + count <= request->number_capacity) return 1;
    size_t capacity = 2 * (request->number_capacity + count);
    uint64_t *grown = realloc(request->numbers, capacity * sizeof *grown);
    if (grown == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    request->numbers = grown;
    request->number_capacity = capacity;
    return 1;
}

/// Reads (name, address, bytes): caller memory for a whole tensor.
static int read_destination(module_state *state, const fst_model *model, PyObject *object,
                            fst_part *item) {
    PyObject *name;
    unsigned long long address;
    Py_ssize_t size;
    uint32_t rank;
    if (!PyArg_ParseTuple(object, "UKn", &name, &address, &size)) return 0;
    if (address == 0 || size < 0) {
        PyErr_SetString(PyExc_ValueError, "a destination must be (address, size)");
        return 0;
    }
    item->destination = (void *)(uintptr_t)address;
    item->destination_bytes = (size_t)size;
    return find_item(state, model, name, item, &rank);
}

static int is_destination(PyObject *object) {
    PyObject *second =
        PyTuple_Check(object) && PyTuple_Size(object) == 3 ? PyTuple_GetItem(object, 1) : NULL;
    return second != NULL && PyLong_Check(second);
}

/// Reads an item: a name, (name, begin, end) or (name, address, bytes). Slices are stored as
/// offsets into `numbers`, which may still move; link_slices() turns them into pointers.
static int read_item(module_state *state, const fst_model *model, PyObject *object,
                     load_request *request, fst_part *item) {
    uint32_t rank;
    if (PyUnicode_Check(object)) return find_item(state, model, object, item, &rank);
    PyObject *name, *begin, *end;
    if (is_destination(object)) return read_destination(state, model, object, item);
    if (!PyArg_ParseTuple(object, "UOO", &name, &begin, &end) ||
        !find_item(state, model, name, item, &rank) ||
        !reserve_numbers(request, 2 * (size_t)rank + 1))
        return 0;
    uint64_t *numbers = request->numbers + request->number_count;
    if (!read_numbers(begin, numbers, rank) || !read_numbers(end, numbers + rank, rank)) return 0;
    item->begin = (const uint64_t *)(uintptr_t)(request->number_count + 1);
    item->end = (const uint64_t *)(uintptr_t)(request->number_count + 1 + rank);
    request->number_count += 2 * (size_t)rank + 1;
    return 1;
}

static void link_slices(load_request *request, size_t item_count) {
    for (size_t i = 0; i < item_count; i++) {
        fst_part *item = &request->items[i];
        if (item->begin == NULL) continue;
        item->begin = request->numbers + (uintptr_t)item->begin - 1;
        item->end = request->numbers + (uintptr_t)item->end - 1;
    }
}

static int read_items(module_state *state, const fst_model *model, PyObject *sequence,
                      load_request *request, fst_load_options *options) {
    if (sequence == Py_None) return 1;
    Py_ssize_t count = PySequence_Size(sequence);
    if (count < 0) return 0;
    request->items = calloc((size_t)count + 1, sizeof *request->items);
    if (request->items == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *object = PySequence_GetItem(sequence, i);
        request->items[i].struct_size = sizeof request->items[i];
        int good = object != NULL && read_item(state, model, object, request, &request->items[i]);
        Py_XDECREF(object);
        if (!good) return 0;
    }
    link_slices(request, (size_t)count);
    options->parts = request->items;
    options->part_count = (size_t)count;
    return 1;
}

/// String options of a request, as passed from Python.
typedef struct request_words {
    const char *mode, *engine, *order, *ring, *numa, *dtype, *device, *gds, *unified, *cache,
        *share;
} request_words;

/// The allowed values of one option.
typedef struct word_list {
    const char *what;
    const char *const *words;
    int count;
} word_list;

static int read_words(const request_words *words, fst_load_options *options,
                      fst_load_tuning *tuning) {
    static const char *const modes[] = {"auto", "load", "map"};
    static const char *const engines[] = {"auto", "pread", "direct", "uring", "mmap"};
    static const char *const orders[] = {"file", "request"};
    static const char *const rings[] = {"auto", "place", "slots"};
    static const char *const numas[] = {"default", "local", "interleave"};
    static const char *const gds_ways[] = {"auto", "off", "strict"};
    static const char *const unified[] = {"auto", "on", "off"};
    static const char *const caches[] = {"auto", "keep", "bypass"};
    static const char *const shares[] = {"off", "node"};
    static const word_list lists[] = {
        {"mode", modes, FST_MODE_COUNT},         {"engine", engines, FST_ENGINE_COUNT},
        {"order", orders, FST_ORDER_COUNT},      {"ring", rings, FST_RING_COUNT},
        {"numa policy", numas, FST_NUMA_COUNT},  {"gds", gds_ways, FST_GDS_COUNT},
        {"unified", unified, FST_UNIFIED_COUNT}, {"cache", caches, FST_CACHE_COUNT},
        {"share", shares, FST_SHARE_COUNT}};
    const char *given[] = {words->mode, words->engine,  words->order, words->ring, words->numa,
                           words->gds,  words->unified, words->cache, words->share};
    int numbers[9];
    for (int i = 0; i < 9; i++) {
        numbers[i] = fstpy_find_word(given[i], lists[i].words, lists[i].count, lists[i].what);
        if (numbers[i] < 0) return 0;
    }
    options->mode = (fst_load_mode)numbers[0];
    tuning->engine = (fst_engine)numbers[1];
    options->order = (fst_order)numbers[2];
    tuning->ring = (fst_ring)numbers[3];
    tuning->numa = (fst_numa)numbers[4];
    tuning->gds = (fst_gds)numbers[5];
    tuning->unified = (fst_unified)numbers[6];
    options->cache = (fst_cache)numbers[7];
    options->share = (fst_share)numbers[8];
    return 1;
}

static int read_dtype(const char *name, fst_load_options *options) {
    if (name == NULL) return 1;
    options->convert = 1;
    for (int i = 0; i < FST_DTYPE_COUNT; i++) {
        options->dtype = (fst_dtype)i;
        if (strcmp(name, fst_dtype_name(options->dtype)) == 0) return 1;
    }
    PyErr_Format(PyExc_ValueError, "unknown dtype '%s'", name);
    return 0;
}

// ---- caller memory ----

/// An object from allocate(), kept alive until the load and its tensors are freed. Shared by the
/// buffers of a load, each with a reference.
typedef struct caller_buffer {
    load_scope scope; ///< of the callback that makes or releases it
    PyObject *owner;
    void *address;
    struct caller_buffer *next;
} caller_buffer;

struct caller_memory {
    PyObject *allocate; ///< callable(size in bytes) -> object with data_ptr()
    caller_buffer *buffers;
    size_t count; ///< buffers, plus 1 for the request or its load, and for a thread that closes it
    /// The exception of the last call of `allocate`, if it raised one: its type, value, traceback.
    PyObject *raised[3];
};

static void forget_exception(caller_memory *memory) {
    for (size_t i = 0; i < 3; i++) Py_CLEAR(memory->raised[i]);
}

/// Returns the errno for the library: ECANCELED unless memory may become free.
static int keep_exception(caller_memory *memory) {
    // A StopIteration would look like the end of an iteration.
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_StopIteration))
        PyErr_SetString(PyExc_RuntimeError, "the allocator raised StopIteration");
    int is_short = !PyErr_Occurred() || PyErr_ExceptionMatches(PyExc_MemoryError);
    forget_exception(memory);
    PyErr_Fetch(&memory->raised[0], &memory->raised[1], &memory->raised[2]);
    return is_short ? ENOMEM : ECANCELED;
}

PyObject *fstpy_load_raise(module_state *state, caller_memory *memory, const fst_error *error) {
    int is_of_memory = error->status == FST_E_NO_MEMORY || error->status == FST_E_CANCELLED;
    if (memory == NULL || memory->raised[0] == NULL || !is_of_memory)
        return fstpy_raise(state, error);
    PyErr_Restore(memory->raised[0], memory->raised[1], memory->raised[2]);
    memset(memory->raised, 0, sizeof memory->raised); // given away
    return NULL;
}

void fstpy_memory_ref(caller_memory *memory) {
    if (memory != NULL) memory->count++;
}

void fstpy_memory_unref(caller_memory *memory) {
    if (memory == NULL || --memory->count > 0) return;
    Py_XDECREF(memory->allocate);
    forget_exception(memory);
    free(memory);
}

void fstpy_memory_finish(caller_memory *memory) {
    if (memory == NULL) return;
    Py_CLEAR(memory->allocate);
    forget_exception(memory);
}

/// The call may drop the last reference to the callable.
static PyObject *call_allocator(const caller_memory *memory, size_t size_bytes) {
    if (memory->allocate == NULL) return NULL;
    PyObject *callable = Py_NewRef(memory->allocate);
    PyObject *owner = PyObject_CallFunction(callable, "n", (Py_ssize_t)size_bytes);
    Py_DECREF(callable);
    return owner;
}

static void *find_address(PyObject *owner) {
    PyObject *number = PyObject_CallMethod(owner, "data_ptr", NULL);
    void *address = number == NULL ? NULL : PyLong_AsVoidPtr(number);
    Py_XDECREF(number);
    return address;
}

static void *allocate_memory(void *context, size_t size_bytes, size_t alignment) {
    (void)alignment; // checked by the library
    caller_memory *memory = context;
    caller_buffer *buffer = calloc(1, sizeof *buffer);
    if (buffer == NULL) return NULL;
    PyGILState_STATE gil = PyGILState_Ensure();
    fstpy_scope_enter(&buffer->scope, memory);
    void *address = NULL;
    int code = 0;
    buffer->owner = call_allocator(memory, size_bytes);
    if (buffer->owner != NULL && buffer->owner != Py_None) address = find_address(buffer->owner);
    if (address != NULL) {
        forget_exception(memory);
        buffer->address = address;
        buffer->next = memory->buffers;
        memory->buffers = buffer;
        memory->count++;
    } else {
        code = keep_exception(memory);
        Py_CLEAR(buffer->owner);
    }
    fstpy_scope_leave(&buffer->scope);
    if (address == NULL) free(buffer);
    PyGILState_Release(gil);
    errno = code;
    return address;
}

static void release_memory(void *context, void *pointer, size_t size_bytes) {
    (void)size_bytes;
    caller_memory *memory = context;
    if (!Py_IsInitialized()) return; // the process is ending
    PyGILState_STATE gil = PyGILState_Ensure();
    for (caller_buffer **place = &memory->buffers; *place != NULL; place = &(*place)->next) {
        caller_buffer *buffer = *place;
        if (buffer->address != pointer) continue;
        *place = buffer->next;
        fstpy_scope_enter(&buffer->scope, memory);
        Py_DECREF(buffer->owner);
        fstpy_memory_unref(memory);
        fstpy_scope_leave(&buffer->scope);
        free(buffer);
        break;
    }
    PyGILState_Release(gil);
}

static int take_allocator(PyObject *callable, load_request *request) {
    if (callable == Py_None) return 1;
    if (!fstpy_is_main_interpreter()) return 0;
    if (!PyCallable_Check(callable)) {
        PyErr_SetString(PyExc_TypeError, "allocator must be callable");
        return 0;
    }
    caller_memory *memory = calloc(1, sizeof *memory);
    if (memory == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    memory->allocate = Py_NewRef(callable);
    memory->count = 1;
    request->memory = memory;
    request->allocator =
        (fst_allocator){sizeof request->allocator, memory, allocate_memory, release_memory};
    request->options.allocator = &request->allocator;
    return 1;
}

static int read_device(const char *name, fst_load_options *options) {
    fst_error error;
    if (fst_device_parse(name, &options->device, &error) == FST_OK) return 1;
    PyErr_SetString(PyExc_ValueError, error.message);
    return 0;
}

int fstpy_request_read(module_state *state, const fst_model *model, PyObject *args,
                       PyObject *kwargs, load_request *request) {
    static char *names[] = {"items",  "mode",      "engine",      "threads", "order",
                            "budget", "read_only", "dtype",       "ring",    "numa",
                            "device", "gds",       "unified",     "stream",  "allocator",
                            "cache",  "share",     "share_grace", NULL};
    PyObject *items = Py_None, *allocator = Py_None;
    request_words words = {.mode = "auto",
                           .engine = "auto",
                           .order = "file",
                           .ring = "auto",
                           .numa = "default",
                           .device = "cpu",
                           .gds = "auto",
                           .unified = "auto",
                           .cache = "auto",
                           .share = "off"};
    long long budget = 0;
    unsigned long long stream = 0;
    int threads = 0, share_grace = 0;
    *request = (load_request){.options = FST_STRUCT_INIT(fst_load_options),
                              .tuning = FST_STRUCT_INIT(fst_load_tuning)};
    request->options.tuning = &request->tuning;
    fst_load_options *options = &request->options;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O$ssisLpzsssssKOssi:load", names, &items,
                                     &words.mode, &words.engine, &threads, &words.order, &budget,
                                     &options->map_read_only, &words.dtype, &words.ring,
                                     &words.numa, &words.device, &words.gds, &words.unified,
                                     &stream, &allocator, &words.cache, &words.share, &share_grace))
        return 0;
    // Unsigned format codes would turn -1 into the largest number.
    if (threads < 0 || budget < 0 || share_grace < 0) {
        PyErr_SetString(PyExc_ValueError, "threads, budget and share_grace must not be negative");
        return 0;
    }
    options->thread_count = (uint32_t)threads;
    options->budget_bytes = (uint64_t)budget;
    options->share_grace_s = (uint32_t)share_grace;
    options->stream = (uintptr_t)stream;
    return read_words(&words, options, &request->tuning) && read_dtype(words.dtype, options) &&
           read_device(words.device, options) && take_allocator(allocator, request) &&
           read_items(state, model, items, request, options);
}

void fstpy_request_clear(load_request *request) {
    free(request->items);
    free(request->numbers);
    fstpy_memory_unref(request->memory);
}
