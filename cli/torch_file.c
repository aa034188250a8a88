// SPDX-License-Identifier: Apache-2.0
/// Passes torch.save files to Python, without running code from their folder.
#include "torch_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "standard_input.h"

/// With -c and -m Python imports modules from the working folder first, and a downloaded model may
/// come with a torch.py. The program therefore removes that entry before its imports. The user's
/// PYTHONPATH is kept, except for entries that mean the working folder.
static const char program[] =
    "import sys\n"
    "sys.path[:] = [path for path in sys.path if path[:1] == '/']\n"
    "try:\n"
    "    from fastsafetensors._torch.torch_file import main\n"
    "except ImportError:\n"
    "    sys.stderr.write('fastsafetensors: torch files need Python with this package and torch, "
    "but ' + sys.executable"
    " + ' does not have this package. Install this project there '"
    "'(pip install . in its folder) with torch, or put a Python that has both first in PATH\\n')\n"
    "    sys.exit(4)\n"
    "sys.exit(main(sys.argv[1:]))\n";

bool cli_is_torch_file(const char *path) {
    unsigned char start[9] = {0};
    // Opening a pipe would wait for a writer.
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return false;
    ssize_t got = pread(fd, start, sizeof start, 0);
    close(fd);
    // A header of 896 bytes begins with 80 03, as a pickle does. The brace distinguishes it.
    bool is_header = memcmp(start + 4, "\0\0\0", 4) == 0 && start[8] == '{';
    return got == (ssize_t)sizeof start && !is_header &&
           (memcmp(start, "PK\x03\x04", 4) == 0 ||
            (start[0] == 0x80 && start[1] >= 2 && start[1] <= 5));
}

/// The file `name` in a folder, if it can be run; the path goes to `out` (PATH_MAX bytes).
static bool find_program(const char *folder, size_t folder_size, const char *name, char *out) {
    // Ignore relative entries of PATH, which depend on the working folder.
    if (folder_size == 0 || folder[0] != '/') return false;
    int size = snprintf(out, PATH_MAX, "%.*s/%s", (int)folder_size, folder, name);
    return size > 0 && size < PATH_MAX && access(out, X_OK) == 0;
}

/// Finds the Python next to this program (same environment), or else the first in PATH.
static bool find_python(char *out) {
    char own[PATH_MAX];
    ssize_t size = readlink("/proc/self/exe", own, sizeof own);
    const char *slash = size <= 0 ? NULL : memrchr(own, '/', (size_t)size);
    if (slash != NULL && find_program(own, (size_t)(slash - own), "python3", out)) return true;
    const char *path = getenv("PATH");
    while (path != NULL) {
        const char *end = strchrnul(path, ':');
        if (find_program(path, (size_t)(end - path), "python3", out)) return true;
        path = *end == ':' ? end + 1 : NULL;
    }
    return false;
}

/// Relative entries of PYTHONPATH depend on the working folder, and Python imports sitecustomize
/// from there before our program starts. Removes them.
static void clean_python_path(void) {
    const char *path = getenv("PYTHONPATH");
    char *clean = path == NULL ? NULL : calloc(strlen(path) + 1, 1);
    size_t used = 0;
    for (const char *at = path; clean != NULL && at != NULL;) {
        const char *end = strchrnul(at, ':');
        if (*at == '/') {
            // Not longer than `path`, of which it contains parts.
            // NOLINTNEXTLINE(clang-analyzer-security.ArrayBound)
            if (used > 0) clean[used++] = ':';
            memcpy(clean + used, at, (size_t)(end - at));
            used += (size_t)(end - at);
        }
        at = *end == ':' ? end + 1 : NULL;
    }
    if (used > 0)
        setenv("PYTHONPATH", clean, 1);
    else
        unsetenv("PYTHONPATH");
    free(clean);
}

/// In the order of the library's enumeration.
static const char *const compress_words[] = {"none", "float", "all"};

/// The plan as JSON for Python. The caller frees it; NULL without memory.
static char *describe_plan(const rewrite_plan *plan) {
    char *text = NULL;
    size_t size;
    FILE *out = open_memstream(&text, &size);
    if (out == NULL) return NULL;
    fputc('{', out);
    if (plan->convert) fprintf(out, "\"dtype\": \"%s\", ", fst_dtype_name(plan->dtype));
    if (plan->save.manifest != NULL)
        fprintf(out, "\"manifest\": \"%s\", ", fst_digest_name(plan->save.digest));
    fprintf(out, "\"compress\": \"%s\", ", compress_words[plan->save.compress]);
    fprintf(out,
            "\"alignment\": %" PRIu64 ", \"order\": \"%s\", \"engine\": \"%s\", "
            "\"promise\": \"%s\", \"dry_run\": %s, \"to_pipe\": %s, \"as_json\": %s}",
            plan->save.alignment_bytes, cli_order_words[plan->save.order],
            cli_engine_words[plan->save.engine],
            plan->save.promise == FST_SAVE_QUICK ? "quick" : "durable",
            plan->dry_run ? "true" : "false", cli_is_output(plan->target) ? "true" : "false",
            cli_wants_json() ? "true" : "false");
    if (fclose(out) == 0) return text;
    free(text);
    return NULL;
}

static int run_python(char *python, const char *source, const rewrite_plan *plan, char *options) {
    static char flag[] = "-c";
    const char *first[] = {python, flag, program, source, plan->target, options};
    size_t count = sizeof first / sizeof *first;
    const char **words = calloc(count + plan->glob_count + 1, sizeof *words);
    if (words == NULL) return cli_no_memory();
    memcpy(words, first, sizeof first);
    if (plan->glob_count > 0) memcpy(words + count, plan->globs, plan->glob_count * sizeof *words);
    clean_python_path();
    execv(python, (char **)(uintptr_t)words);
    cli_print_note("running %s failed: %s", python, strerror(errno));
    free(words);
    return EXIT_MISSING;
}

int cli_convert_torch_file(const char *source, const rewrite_plan *plan) {
    char python[PATH_MAX];
    if (cli_is_output(plan->target) && (cli_wants_json() || cli_stdout_is_terminal()))
        return cli_refuse_stream();
    if (!find_python(python))
        return cli_refuse(EXIT_MISSING, "Missing",
                          "torch files need Python, but no python3 was found in PATH");
    char *options = describe_plan(plan);
    if (options == NULL) return cli_no_memory();
    int code = run_python(python, source, plan, options);
    free(options);
    return code;
}
