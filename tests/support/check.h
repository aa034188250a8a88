// SPDX-License-Identifier: Apache-2.0
/// A test program: TEST(name) { CHECK(...); } registers itself; main() prints TAP, one line per
/// test.
#ifndef CHECK_H
#define CHECK_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct check_test {
    const char *name;
    void (*run)(void);
    struct check_test *next;
} check_test;

extern check_test *check_tests;
extern bool check_failed;
extern const char *check_skip_reason;

void check_register(check_test *test);
void check_fail(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define CHECK_SANITIZED true
#else
#define CHECK_SANITIZED false
#endif

#if defined(__SANITIZE_THREAD__)
#define CHECK_SANITIZED_THREADS true
#else
#define CHECK_SANITIZED_THREADS false
#endif

/// Tests with very many or random cases try only one in this number: all of them with
/// FASTSAFETENSORS_TESTS=all (`make test LONG=1`), else every fifth; every twentieth under a
/// sanitizer, which slows everything down.
unsigned check_share(void);
/// The case after `n` in a test that lets each call fail in turn: `n` + 1. A sanitizer finds the
/// same in most of these cases, so under it the distance grows with `n`, unless all are tried.
long check_next(long n);
/// How often to repeat such a case.
#define CHECK_ROUNDS(count) ((count) / check_share())

#define TEST(test_name)                                                                            \
    static void test_name(void);                                                                   \
    __attribute__((constructor)) static void register_##test_name(void) {                          \
        static check_test test = {#test_name, test_name, NULL};                                    \
        check_register(&test);                                                                     \
    }                                                                                              \
    static void test_name(void)

/// A failed check ends its test function.
#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            check_fail(__FILE__, __LINE__, "%s", #condition);                                      \
            return;                                                                                \
        }                                                                                          \
    } while (0)

#define CHECK_INT(actual, expected)                                                                \
    do {                                                                                           \
        long long check_actual = (long long)(actual), check_expected = (long long)(expected);      \
        if (check_actual != check_expected) {                                                      \
            check_fail(__FILE__, __LINE__, "%s is %lld, not %lld", #actual, check_actual,          \
                       check_expected);                                                            \
            return;                                                                                \
        }                                                                                          \
    } while (0)

#define CHECK_TEXT(actual, expected)                                                               \
    do {                                                                                           \
        const char *check_actual = (actual), *check_expected = (expected);                         \
        if (check_actual == NULL || strcmp(check_actual, check_expected) != 0) {                   \
            check_fail(__FILE__, __LINE__, "%s is \"%s\", not \"%s\"", #actual, check_actual,      \
                       check_expected);                                                            \
            return;                                                                                \
        }                                                                                          \
    } while (0)

/// `part` occurs in `actual`.
#define CHECK_CONTAINS(actual, part)                                                               \
    do {                                                                                           \
        const char *check_actual = (actual);                                                       \
        if (strstr(check_actual, (part)) == NULL) {                                                \
            check_fail(__FILE__, __LINE__, "\"%s\" does not contain \"%s\"", check_actual,         \
                       (part));                                                                    \
            return;                                                                                \
        }                                                                                          \
    } while (0)

/// Ends the test as skipped.
#define SKIP(reason)                                                                               \
    do {                                                                                           \
        check_skip_reason = (reason);                                                              \
        return;                                                                                    \
    } while (0)

#endif
