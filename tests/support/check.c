// SPDX-License-Identifier: Apache-2.0
/// main() of every C test program.
#include "check.h"

#include <stdarg.h>

check_test *check_tests;
bool check_failed;
const char *check_skip_reason;

void check_register(check_test *test) {
    check_test **end = &check_tests;
    while (*end != NULL) end = &(*end)->next;
    *end = test;
}

unsigned check_share(void) {
    const char *wanted = getenv("FASTSAFETENSORS_TESTS");
    if (wanted != NULL && strcmp(wanted, "all") == 0) return 1;
    return CHECK_SANITIZED ? 20 : 5;
}

long check_next(long n) {
    if (check_share() == 1) return n + 1;
    return n + 1 + (CHECK_SANITIZED_THREADS ? n / 2 : CHECK_SANITIZED ? n / 8 : 0);
}

void check_fail(const char *file, int line, const char *format, ...) {
    va_list arguments;
    check_failed = true;
    printf("# %s:%d: ", file, line);
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("\n");
}

#if defined(__SANITIZE_THREAD__)
/// glibc frees a dead thread's storage of dynamically loaded libraries (the stand-in drivers' here)
/// when it gives the stack to the next thread: in order, by a lock that the sanitizer does not see.
const char *__tsan_default_suppressions(void);
const char *__tsan_default_suppressions(void) { return "race:_dl_deallocate_tls\n"; }
#endif

/// With an argument only tests whose names contain it are run.
int main(int argc, char **argv) {
    int number = 0, failures = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (check_test *test = check_tests; test != NULL; test = test->next) {
        if (argc > 1 && strstr(test->name, argv[1]) == NULL) continue;
        check_failed = false;
        check_skip_reason = NULL;
        test->run();
        failures += check_failed;
        printf("%sok %d - %s%s%s\n", check_failed ? "not " : "", ++number, test->name,
               check_skip_reason != NULL ? " # SKIP " : "",
               check_skip_reason != NULL ? check_skip_reason : "");
    }
    printf("1..%d\n", number);
    return failures > 0;
}
