// SPDX-License-Identifier: Apache-2.0
/// Drivers and compilers that lack something: a function, a text for an error, a library in the
/// usual place. Each case runs in a separate process, because drivers are loaded once. The linker's
/// functions are replaced, so that names can be hidden:
///   HIDE_SYMBOL: dlsym() does not find it; HIDE_LIBRARY: dlopen() does not find that name
///   (any library whose name begins like it); HIP_INSIDE: the driver has the compiler's functions;
///   HIP_TOOLKIT: the toolkit's folder has the compiler; SLOW_OPEN: dlopen() of a driver takes
///   half a second.
#include <dlfcn.h>
#include <fastsafetensors.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"
#include "gpu/gpu_private.h"
#include "gpu_fixture.h"

void *__real_dlsym(void *handle, const char *name);
void *__wrap_dlsym(void *handle, const char *name);
void *__real_dlopen(const char *name, int flags);
void *__wrap_dlopen(const char *name, int flags);

static atomic_bool has_begun; ///< CUDA's driver is starting or has started
static int (*real_init)(unsigned flags);

static int begin(unsigned flags) {
    atomic_store(&has_begun, true);
    return real_init(flags);
}

void *__wrap_dlsym(void *handle, const char *name) {
    const char *hidden = getenv("HIDE_SYMBOL");
    if (hidden != NULL && strcmp(name, hidden) == 0) return NULL;
    bool is_driver = __real_dlsym(handle, "hipInit") != NULL;
    if (is_driver && strncmp(name, "hiprtc", 6) == 0)
        return getenv("HIP_INSIDE") == NULL
                   ? NULL
                   : __real_dlsym(__real_dlopen("libhiprtc.so", RTLD_NOW), name);
    void *found = __real_dlsym(handle, name);
    if (found == NULL || strcmp(name, "cuInit") != 0) return found;
    real_init = (int (*)(unsigned))found;
    return (void *)begin;
}

void *__wrap_dlopen(const char *name, int flags) {
    const char *hidden = getenv("HIDE_LIBRARY");
    if (getenv("HIP_TOOLKIT") != NULL && strcmp(name, "/opt/rocm/lib/libhiprtc.so.6") == 0)
        return __real_dlopen("libhiprtc.so", flags);
    if (hidden != NULL && strncmp(name, hidden, strlen(hidden)) == 0) return NULL;
    if (getenv("SLOW_OPEN") != NULL && strcmp(name, "libcuda.so.1") == 0) usleep(500000);
    return __real_dlopen(name, flags);
}

// ---- what a new process finds ----

static char said[8192]; ///< all log lines

static void add_line(void *context, fst_log_level level, const char *text) {
    (void)context, (void)level;
    size_t used = strlen(said);
    snprintf(said + used, sizeof said - used, "%s\n", text);
}

/// Whether the driver's error, its reason not to convert, or a log line has `expected` in it.
static int meet(const char *expected) {
    fst_device_info info = {.struct_size = sizeof info};
    fst_error error = {0};
    fst_device_kind kind = getenv("MEET_CUDA") != NULL ? FST_DEVICE_CUDA : FST_DEVICE_HIP;
    if (getenv("LOADED_BEFORE") != NULL && dlopen(getenv("LOADED_BEFORE"), RTLD_NOW) == NULL)
        return 1;
    fst_log_set(add_line, NULL, FST_LOG_DEBUG);
    fst_status status = fst_device_info_get((fst_device){kind, 0}, &info, &error);
    char all[sizeof said + 1024];
    snprintf(all, sizeof all, "%s%s\n%s\n%s", said, error.message, info.converts_reason,
             status != FST_OK ? "unusable"
             : info.converts  ? "converts"
                              : "usable");
    if (strstr(all, expected) != NULL) return 0;
    fprintf(stderr, "%s\n(expected: %s)\n", all, expected);
    return 1;
}

/// A driver that does not return in time: the first request waits 200 ms, later ones do not, and a
/// load says so. Once it has started it can be used.
static int meet_slow_start(fst_device_kind kind) {
    fst_device_info info = {.struct_size = sizeof info};
    fst_error error;
    fsti_gpu_limit_start(200);
    if (fst_device_info_get((fst_device){kind, 0}, &info, &error) != FST_E_UNSUPPORTED ||
        strstr(error.message, "has not returned in time") == NULL)
        return 1;
    for (int i = 0; i < 100; i++)
        if (fst_device_count(kind) != 0) return 2;
    pid_t child = fork();
    if (child == 0) _exit(fst_device_count(kind) == 0 ? 0 : 1);
    int status = 1;
    waitpid(child, &status, 0);
    if (status != 0) return 3;
    if (strlen(getenv("FAKE_GPU_INIT_US")) > 8) return 0; // it does not return
    for (int i = 0; i < 3000 && fst_device_count(kind) == 0; i++) usleep(10000);
    return fst_device_info_get((fst_device){kind, 0}, &info, &error) == FST_OK ? 0 : 4;
}

static atomic_bool has_forked;

static void *ask_driver(void *context) {
    (void)context;
    (void)fst_device_count(FST_DEVICE_CUDA);
    return NULL;
}

static void *fork_once(void *context) {
    (void)context;
    pid_t child = fork();
    if (child == 0) {
        alarm(30); // it would wait for a driver that starts in its parent
        // If fork() was first, the driver may start here.
        _exit(atomic_load(&has_begun) ? (int)fst_device_count(FST_DEVICE_CUDA) : 0);
    }
    int status = 1;
    atomic_store(&has_forked, true);
    waitpid(child, &status, 0);
    return status == 0 ? NULL : context;
}

/// While a driver starts, fork() waits for it; models are opened meanwhile.
static int meet_fork(const char *path) {
    pthread_t threads[2];
    fst_model *model;
    fst_error error;
    if (pthread_create(&threads[0], NULL, ask_driver, NULL) != 0) return 1;
    bool opens_slowly = getenv("SLOW_OPEN") != NULL;
    usleep(100000);
    while (!opens_slowly && !atomic_load(&has_begun)) usleep(1000);
    if (pthread_create(&threads[1], NULL, fork_once, threads) != 0) return 1;
    usleep(100000);
    fst_load_options options = FST_STRUCT_INIT(fst_load_options);
    fst_loader *loader;
    if (fst_model_open(path, NULL, &model, &error) != FST_OK ||
        fst_loader_open(model, &options, &loader, &error) != FST_OK ||
        fst_loader_wait(loader, -1, &error) != FST_OK)
        return 2;
    fst_loader_close(loader);
    fst_model_close(model);
    bool was_earlier = !atomic_load(&has_forked);
    void *failed[2] = {NULL};
    for (int i = 0; i < 2; i++) pthread_join(threads[i], &failed[i]);
    if (failed[1] != NULL) return 4;
    // While a library is being loaded, a model may wait with the fork.
    return was_earlier || opens_slowly ? 0 : 3;
}

/// fork() does not wait for a driver that is late, although another has a later limit.
static int meet_late_start(void) {
    fsti_gpu_limit_start(200);
    if (fst_device_count(FST_DEVICE_CUDA) != 0) return 1;
    setenv("FAKE_GPU_INIT_US", "0", 1);
    fsti_gpu_limit_start(0); // the usual one
    if (fst_device_count(FST_DEVICE_HIP) == 0) return 2;
    alarm(30);
    pid_t child = fork();
    if (child == 0) _exit(0);
    return child > 0 && waitpid(child, NULL, 0) == child ? 0 : 3;
}

__attribute__((constructor)) static void meet_if_asked(void) {
    if (getenv("MEET_LATE") != NULL) exit(meet_late_start());
    if (getenv("MEET_FORK") != NULL) exit(meet_fork(getenv("MEET_FORK")));
    if (getenv("MEET_SLOW") != NULL)
        exit(meet_slow_start(getenv("MEET_CUDA") != NULL ? FST_DEVICE_CUDA : FST_DEVICE_HIP));
    const char *expected = getenv("MEET");
    if (expected != NULL) exit(meet(expected));
}

/// Settings of a case: pairs of name and value, ended by NULL.
typedef struct settings {
    const char *pairs[8];
} settings;

static bool meets(settings given, const char *expected) {
    for (size_t i = 0; given.pairs[i] != NULL; i += 2)
        setenv(given.pairs[i], given.pairs[i + 1], 1);
    bool met = gpu_restart_with("MEET", expected);
    for (size_t i = 0; given.pairs[i] != NULL; i += 2) unsetenv(given.pairs[i]);
    return met;
}
#define CASE(...) ((settings){{__VA_ARGS__, NULL}})

TEST(errors_have_the_text_of_either_function)
{
    CHECK(meets(CASE("FAKE_GPU_INIT_CODE", "999"), "hipInit failed: a fake error (error 999)"));
    CHECK(meets(CASE("FAKE_GPU_INIT_CODE", "999", "HIDE_SYMBOL", "hipDrvGetErrorString"),
                "hipInit failed: a fake error (error 999)"));
    CHECK(meets(CASE("FAKE_GPU_COUNT_CODE", "3"),
                "hipGetDeviceCount failed: a fake error (error 3)"));
    CHECK(meets(
        CASE("MEET_CUDA", "1", "FAKE_GPU_INIT_CODE", "999", "HIDE_SYMBOL", "cuGetErrorString"),
        "cuInit failed: the driver has no text for this error (error 999)"));
    CHECK(meets(CASE("MEET_CUDA", "1", "FAKE_GPU_INIT_CODE", "12345"),
                "cuInit failed: the driver has no text for this error (error 12345)"));
    CHECK(meets(CASE("FAKE_GPU_INIT_CODE", "12345"),
                "hipInit failed: the driver has no text for this error (error 12345)"));
}

TEST(hip_without_a_device_says_so)
{
    // HIP 5.2 without a device: hipInit answers 101, hipGetDeviceCount 100.
    CHECK(meets(CASE("FAKE_GPU_INIT_CODE", "101", "FAKE_GPU_COUNT_CODE", "100"),
                access("/dev/kfd", F_OK) == 0
                    ? "the driver sees no device ("
                    : "the driver sees no device (/dev/kfd does not exist here)"));
    CHECK(meets(CASE("MEET_CUDA", "1", "FAKE_GPU_DEVICES", "0"),
                "sees no device (CUDA_VISIBLE_DEVICES may hide them, if nvidia-smi lists any)"));
    CHECK(meets(CASE("FAKE_GPU_INIT_CODE", "101"), "hipInit failed: a fake error (error 101)"));
    CHECK(meets(CASE("FAKE_GPU_DEVICES", "-3"), "the driver reports -3 devices"));
    CHECK(meets(CASE("FAKE_GPU_DEVICES", "2000000000"), "the driver reports 2000000000 devices"));
    CHECK(meets(CASE("FAKE_GPU_DEVICES", "-2"), "the driver reports -1 devices")); // not stored
}

TEST(drivers_that_do_not_start_are_refused)
{
    static const char *const times[] = {"70000000000", "800000"}; // for ever, and late
    for (size_t i = 0; i < 4; i++) {
        setenv("FAKE_GPU_INIT_US", times[i % 2], 1);
        if (i >= 2) setenv("MEET_CUDA", "1", 1);
        bool met = gpu_restart_with("MEET_SLOW", "1");
        unsetenv("FAKE_GPU_INIT_US");
        unsetenv("MEET_CUDA");
        CHECK(met);
    }
}

TEST(loads_to_the_cpu_do_not_wait_for_a_fork_that_waits_for_a_driver)
{
    const char *path = gpu_all_patterns(0);
    setenv("FAKE_GPU_INIT_US", "8000000", 1); // longer than the load on a busy machine
    CHECK(gpu_restart_with("MEET_FORK", path));
    setenv("FAKE_GPU_INIT_US", "1000000", 1);
    setenv("SLOW_OPEN", "1", 1); // then the driver begins to start while fork() waits
    CHECK(gpu_restart_with("MEET_FORK", path));
    unsetenv("SLOW_OPEN");
    unsetenv("FAKE_GPU_INIT_US");
}

TEST(a_fork_does_not_wait_for_a_late_driver)
{
    setenv("FAKE_GPU_INIT_US", "70000000000", 1);
    bool met = gpu_restart_with("MEET_LATE", "1");
    unsetenv("FAKE_GPU_INIT_US");
    CHECK(met);
}

TEST(each_function_may_be_missing)
{
    static const char *const optional[] = {"cuGetErrorString",
                                           "hipDrvGetErrorString",
                                           "cuCtxGetId",
                                           "cuDeviceGetPCIBusId",
                                           "hipDeviceGetPCIBusId",
                                           "cuThreadExchangeStreamCaptureMode",
                                           "hipThreadExchangeStreamCaptureMode"};
    static const char *const names[][2] = {
#define ROW(field, parameters, cuda, hip) {cuda, hip},
        FSTI_GPU_FUNCTIONS(ROW)
#undef ROW
    };
    for (size_t i = 0; i < 2 * sizeof names / sizeof *names; i++) {
        const char *name = names[i / 2][i % 2];
        if (name == NULL) continue;
        char expected[128];
        snprintf(expected, sizeof expected, "lacks %s: the driver is too old", name);
        bool is_optional = false;
        for (size_t k = 0; k < sizeof optional / sizeof *optional; k++)
            is_optional |= strcmp(name, optional[k]) == 0;
        settings hidden = CASE("HIDE_SYMBOL", name);
        if (i % 2 == 0) hidden = CASE("HIDE_SYMBOL", name, "MEET_CUDA", "1");
        CHECK(meets(hidden, is_optional ? "\nconverts" : expected));
    }
}

TEST(the_compiler_is_found_in_five_places)
{
    CHECK(meets(CASE("LOADED_BEFORE", "libhiprtc.so"), "(loaded by the program)"));
    CHECK(meets(CASE("HIP_INSIDE", "1"), "libamdhip64.so (part of the driver)"));
    CHECK(meets(CASE("HIDE_LIBRARY", "nothing"), "libhiprtc.so (found by the linker)"));
    CHECK(meets(CASE("HIDE_LIBRARY", "libhiprtc.so", "HIP_TOOLKIT", "1"),
                "libhiprtc.so (of the ROCm toolkit)"));
    CHECK(meets(CASE("HIDE_LIBRARY", "libhiprtc.so"), "libhiprtc.so (next to the driver)"));
    // In this order.
    CHECK(
        meets(CASE("LOADED_BEFORE", "libhiprtc.so", "HIP_INSIDE", "1"), "(loaded by the program)"));
    CHECK(meets(CASE("HIP_INSIDE", "1", "HIP_TOOLKIT", "1"), "(part of the driver)"));
    CHECK(meets(CASE("HIP_TOOLKIT", "1"), "(found by the linker)"));
}

TEST(missing_compilers_are_reported)
{
    // No name at all: the folder of the driver is reached by its path.
    CHECK(meets(CASE("HIDE_SYMBOL", "hiprtcCreateProgram"),
                "libhiprtc.so lacks hiprtcCreateProgram"));
    CHECK(meets(CASE("HIDE_SYMBOL", "hiprtcGetCode"), "libhiprtc.so lacks hiprtcGetCode"));
    CHECK(meets(CASE("HIDE_SYMBOL", "hiprtcGetCode"), "the CPU converts"));
    CHECK(meets(CASE("HIDE_SYMBOL", "hiprtcGetProgramLog"), "\nconverts"));
}

TEST(the_log_of_a_rejected_kernel_is_shown)
{
    CHECK(meets(CASE("FAKE_HIPRTC_REFUSE", "1"),
                "the runtime compiler rejected the kernel: error: no such type\n"));
    CHECK(meets(CASE("FAKE_HIPRTC_REFUSE", "1"), "runtime compiler: In file included from here:"));
    CHECK(
        meets(CASE("FAKE_HIPRTC_REFUSE", "1"), "runtime compiler: scatter.cu:7:1: error: no such"));
    CHECK(meets(CASE("FAKE_HIPRTC_REFUSE", "1", "HIDE_SYMBOL", "hiprtcGetProgramLogSize"),
                "the runtime compiler rejected the kernel\n"));
}

TEST(denormals_are_kept_or_the_cpu_converts)
{
    CHECK(meets(CASE("FAKE_HIPRTC_OPTION", "-fno-gpu-flush-denormals-to-zero"), "\nconverts"));
    CHECK(meets(CASE("FAKE_HIPRTC_OPTION", "-fno-cuda-flush-denormals-to-zero"), "\nconverts"));
    CHECK(meets(CASE("FAKE_HIPRTC_OPTION", "-fother"),
                "rejected the kernel: error: unknown argument: '-fno-cuda-flush-denormals-t"));
}

TEST(ptx_is_tried_if_a_binary_has_no_kernel)
{
    static const char *const codes[] = {"209", "218", "500"};
    for (size_t i = 0; i < 3; i++) {
        char expected[128];
        snprintf(expected, sizeof expected,
                 "PTX that the driver compiles, because it rejects the binary (error %s)",
                 codes[i]);
        CHECK(meets(CASE("MEET_CUDA", "1", "FAKE_GPU_NO_FUNCTION", codes[i]), expected));
        CHECK(meets(CASE("MEET_CUDA", "1", "FAKE_GPU_NO_FUNCTION", codes[i]), "\nconverts"));
    }
    CHECK(meets(CASE("MEET_CUDA", "1", "FAKE_GPU_CAPABILITY", "70"), "no binary for the device"));
    CHECK(meets(CASE("MEET_CUDA", "1"), "a binary of the library"));
}

// ---- compiled kernels on disk ----

static long compilations(const char *path) {
    struct stat info;
    return stat(path, &info) == 0 ? (long)info.st_size : 0;
}

/// The file of the only kernel in the folder.
static const char *kernel_file(const char *folder) {
    static char path[600];
    char command[1300];
    snprintf(command, sizeof command, "ls %s/hip-*", folder);
    FILE *list = popen(command, "r");
    if (list == NULL) abort();
    size_t size = fread(path, 1, sizeof path - 1, list);
    pclose(list);
    path[size > 0 ? size - 1 : 0] = '\0';
    return path;
}

/// Overwrites a byte, or cuts the file (offset -1).
static void damage(const char *path, long offset) {
    if (offset < 0) {
        if (truncate(path, 50) != 0) abort();
        return;
    }
    FILE *file = fopen(path, "r+b");
    if (file == NULL || fseek(file, offset, SEEK_SET) != 0) abort();
    int byte = fgetc(file);
    if (fseek(file, offset, SEEK_SET) != 0 || fputc(byte ^ 1, file) == EOF || fclose(file) != 0)
        abort();
}

TEST(compiled_kernels_are_used_by_later_processes)
{
    char folder[500], count[500];
    snprintf(folder, sizeof folder, "%s/made/kernels", fixture_path("cache"));
    snprintf(count, sizeof count, "%s", fixture_path("compilations"));
    snprintf(said, sizeof said, "mkdir -p %s", fixture_path("cache"));
    if (system(said) != 0) abort();
    settings given = CASE("FASTSAFETENSORS_KERNEL_CACHE_DIR", folder, "FAKE_HIPRTC_COUNT", count);
    CHECK(meets(given, "disk cache: kept for later processes"));
    CHECK_INT(compilations(count), 1);
    struct stat info;
    CHECK(stat(folder, &info) == 0 && (info.st_mode & 0777) == 0700);
    CHECK(stat(kernel_file(folder), &info) == 0 && (info.st_mode & 0777) == 0600);
    long size = (long)info.st_size;
    CHECK(meets(given, "compiled before, from hip-"));
    CHECK(meets(given, "\nconverts"));
    CHECK_INT(compilations(count), 1);
    // A damaged file is compiled again and replaced: its mark, its sizes, its key, its code, a cut.
    const long places[] = {0, 8, 16, 24, 40, size - 1, -1};
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        damage(kernel_file(folder), places[i]);
        CHECK(meets(given, "kept for later processes"));
        CHECK_INT(compilations(count), 2 + (long)i);
        CHECK(meets(given, "compiled before, from hip-"));
    }
    // Another driver has another file.
    long before = compilations(count);
    setenv("FAKE_GPU_VERSION", "60200", 1);
    CHECK(meets(given, "kept for later processes"));
    CHECK(meets(given, "compiled before"));
    unsetenv("FAKE_GPU_VERSION");
    CHECK(meets(given, "compiled before"));
    CHECK_INT(compilations(count), before + 1);
}

TEST(unsafe_kernel_folders_are_not_used)
{
    char folder[500], count[500], text[4000];
    snprintf(folder, sizeof folder, "%s", fixture_path("open"));
    snprintf(count, sizeof count, "%s", fixture_path("unsafe"));
    settings given = CASE("FASTSAFETENSORS_KERNEL_CACHE_DIR", folder, "FAKE_HIPRTC_COUNT", count);
    CHECK(meets(given, "kept for later processes"));
    snprintf(text, sizeof text, "chmod g+w %s", folder);
    CHECK_INT(system(text), 0);
    CHECK(meets(given, "other users can write to the folder. It is not used"));
    CHECK_INT(compilations(count), 2);
    snprintf(text, sizeof text, "chmod g-w %s && chmod o+w %s", folder, kernel_file(folder));
    CHECK_INT(system(text), 0);
    CHECK(meets(given, "kept for later processes")); // that file is replaced
    CHECK(meets(given, "compiled before"));
    // A second name, a link, a pipe.
    snprintf(text, sizeof text, "ln %s %s/other", kernel_file(folder), folder);
    CHECK_INT(system(text), 0);
    CHECK(meets(given, "kept for later processes"));
    snprintf(text, sizeof text, "rm %s/other; mv %s %s/other; ln -s other %s", folder,
             kernel_file(folder), folder, kernel_file(folder));
    CHECK_INT(system(text), 0);
    CHECK(meets(given, "kept for later processes"));
    snprintf(text, sizeof text, "rm -f %s; mkfifo %s", kernel_file(folder), kernel_file(folder));
    CHECK_INT(system(text), 0);
    CHECK(meets(given, "kept for later processes"));
    CHECK(meets(given, "compiled before"));
    // A folder that is a link.
    snprintf(text, sizeof text, "ln -s open %s-link", folder);
    CHECK_INT(system(text), 0);
    snprintf(text, sizeof text, "%s-link", folder);
    given.pairs[1] = text;
    CHECK(meets(given, "disk cache: "));
    CHECK(meets(given, "Not a directory"));
    given.pairs[1] = "off";
    CHECK(meets(given, "disk cache: switched off"));
    given.pairs[1] = "/proc/nothing";
    CHECK(meets(given, "/proc/nothing: No such file or directory"));
    CHECK(meets(given, "\nconverts"));
}

TEST(kernels_are_kept_in_the_cache_folder_of_the_user)
{
    char home[500], cache[500], text[1200];
    struct stat info;
    snprintf(home, sizeof home, "%s", fixture_path("home"));
    snprintf(cache, sizeof cache, "%s", fixture_path("xdg"));
    settings given =
        CASE("FASTSAFETENSORS_KERNEL_CACHE_DIR", "", "XDG_CACHE_HOME", "", "HOME", home);
    CHECK(meets(given, "home/.cache/fastsafetensors/kernels: No such file or directory"));
    CHECK(stat(home, &info) != 0); // a home is not created
    CHECK_INT(mkdir(home, 0755), 0);
    CHECK(meets(given, "kept for later processes"));
    CHECK(meets(given, "compiled before, from hip-"));
    snprintf(text, sizeof text, "%s/.cache/fastsafetensors/kernels", home);
    CHECK(strncmp(kernel_file(text), text, strlen(text)) == 0);
    given.pairs[3] = cache;
    CHECK(meets(given, "kept for later processes"));
    snprintf(text, sizeof text, "%s/fastsafetensors/kernels", cache);
    CHECK(strncmp(kernel_file(text), text, strlen(text)) == 0);
    given.pairs[3] = "relative";
    CHECK(meets(given, "compiled before, from hip-")); // as if it were not set
    given.pairs[5] = "relative";
    CHECK(meets(given, "switched off, or neither XDG_CACHE_HOME nor HOME is set"));
}

TEST(the_kernel_folder_is_bounded)
{
    char folder[500];
    snprintf(folder, sizeof folder, "%s", fixture_path("full"));
    setenv("FASTSAFETENSORS_KERNEL_CACHE_DIR", folder, 1);
    char bytes[8] = "kernel!", note[256], key[32];
    fsti_kernel_code code = {.bytes = bytes, .size = sizeof bytes}, got;
    for (int i = 0; i < 40; i++) {
        snprintf(key, sizeof key, "key %d", i);
        fsti_kernel_cache_write(key, &code, note, sizeof note);
        CHECK_CONTAINS(note, "kept");
    }
    snprintf(said, sizeof said, "test $(ls %s | wc -l) = 32", folder);
    CHECK_INT(system(said), 0);
    CHECK(fsti_kernel_cache_read("key 39", &got, note, sizeof note)); // the latest is there
    CHECK(got.size == sizeof bytes && memcmp(got.bytes, bytes, sizeof bytes) == 0);
    fsti_free(got.bytes);
    CHECK(!fsti_kernel_cache_read("key 0", &got, note, sizeof note) && got.bytes == NULL);
    // What a killed process left is deleted an hour later, and not before.
    // Files that only have such names stay.
    snprintf(said, sizeof said,
             "cd %s && for i in a b; do printf fstkern1 > new-1-00000000000000a$i; done &&"
             " printf x > new-1-00000000000000cc && touch hip-00000000000000dd &&"
             " touch -d '2 hours ago' new-1-00000000000000ab new-1-00000000000000cc"
             " hip-00000000000000dd new-1-00000000000000ee",
             folder);
    CHECK_INT(system(said), 0);
    fsti_kernel_cache_write("key 41", &code, note, sizeof note);
    snprintf(said, sizeof said,
             "cd %s && test -e new-1-00000000000000aa && ! test -e new-1-00000000000000ab &&"
             " test -e new-1-00000000000000cc && test -e hip-00000000000000dd &&"
             " ! test -e new-1-00000000000000ee",
             folder);
    CHECK_INT(system(said), 0);
    // A limit of file sizes, beyond which the kernel would end this process.
    struct rlimit before, none = {0};
    getrlimit(RLIMIT_FSIZE, &before);
    none.rlim_max = before.rlim_max;
    setrlimit(RLIMIT_FSIZE, &none);
    fsti_kernel_cache_write("key 42", &code, note, sizeof note);
    setrlimit(RLIMIT_FSIZE, &before);
    CHECK_CONTAINS(note, "can't be written: File too large");
    unsetenv("FASTSAFETENSORS_KERNEL_CACHE_DIR");
}
