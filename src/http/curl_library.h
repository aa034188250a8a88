// SPDX-License-Identifier: Apache-2.0
/// libcurl, loaded at run time. Private to the http module. Its numbers are its stable ABI
/// (curl/curl.h and curl/multi.h), so the build needs no headers.
#ifndef FSTI_CURL_LIBRARY_H
#define FSTI_CURL_LIBRARY_H

#include "base/primitives.h"

typedef void curl_easy;  ///< CURL
typedef void curl_multi; ///< CURLM
typedef void curl_list;  ///< struct curl_slist

/// Options by type: numbers from 0, pointers from 10000, functions from 20000, 64-bit numbers from
/// 30000.
enum {
    CURL_WRITE_CONTEXT = 10001,
    CURL_URL = 10002,
    CURL_POST_BODY = 10015,
    CURL_USER_AGENT = 10018,
    CURL_HEADERS = 10023,
    CURL_HEADER_CONTEXT = 10029,
    CURL_METHOD = 10036,
    CURL_NO_BODY = 44,
    CURL_FOLLOW = 52,
    CURL_POST_BYTES = 30120,
    CURL_VERIFY_PEER = 64,
    CURL_CA_FILE = 10065,
    CURL_FRESH_CONNECTION = 74,
    CURL_HEADER_CALL = 20079,
    CURL_VERIFY_HOST = 81,
    CURL_HTTP_VERSION = 84,
    CURL_BUFFER_BYTES = 98,
    CURL_NO_SIGNALS = 99,
    CURL_PROXY = 10004,
    CURL_PRIVATE = 10103,
    CURL_OPEN_SOCKET_CONTEXT = 10164,
    CURL_NO_DELAY = 121,
    CURL_CONNECT_MS = 156,
    CURL_DECODES_CONTENT = 158,
    CURL_PROXY_EXCEPTIONS = 10177, ///< CURLOPT_NOPROXY
    CURL_PROTOCOLS = 181,
    CURL_PATH_AS_IS = 234,
    CURL_HIDE_PROXY_HEAD = 265,
    CURL_BEFORE_CONTEXT = 10313,
    CURL_WRITE_CALL = 20011,
    CURL_OPEN_SOCKET_CALL = 20163,
    CURL_BEFORE_CALL =
        20312, ///< called before a request is sent, also on reused connections; since 7.80
};
enum { CURL_PROTOCOL_HTTP = 1, CURL_PROTOCOL_HTTPS = 2 };
enum { CURL_HTTP_1_1 = 2 };
/// Options of multi handles.
enum { CURL_MULTI_CONNECTIONS_KEPT = 6 };
/// Properties of a transfer.
enum {
    CURL_INFO_PRIVATE = 0x100015,
    CURL_INFO_CONNECTS = 0x20001a,
    CURL_INFO_REDIRECT = 0x10001f,
    CURL_INFO_PROXY_STATUS = 0x200016, ///< status of a proxy's response to CONNECT
    CURL_INFO_SENT = 0x600007,         ///< body bytes sent
};
/// Results of a transfer (CURLcode).
enum {
    CURL_OK = 0,
    CURL_BAD_URL = 3,
    CURL_PROXY_NOT_FOUND = 5,
    CURL_HOST_NOT_FOUND = 6,
    CURL_NO_CONNECTION = 7,
    CURL_PARTIAL = 18,
    CURL_TIMED_OUT = 28,
    CURL_TLS_FAILED = 35,
    CURL_CERTIFICATE = 60,
    CURL_CA_FILE_BAD = 77,
};

/// CURLMsg.
typedef struct curl_message {
    int kind; ///< 1: a transfer has ended
    curl_easy *easy;
    union {
        void *pointer;
        int result;
    } data;
} curl_message;

/// The fields of curl_version_info_data that are used.
typedef struct curl_version {
    int age;
    const char *text;
    unsigned number;
} curl_version;

/// Functions of the library: (result, name, parameters).
#define CURL_FUNCTIONS(X)                                                                          \
    X(int, curl_global_init, (long flags))                                                         \
    X(const curl_version *, curl_version_info, (int age))                                          \
    X(curl_easy *, curl_easy_init, (void))                                                         \
    X(int, curl_easy_setopt, (curl_easy * easy, int option, ...))                                  \
    X(int, curl_easy_getinfo, (curl_easy * easy, int info, ...))                                   \
    X(void, curl_easy_cleanup, (curl_easy * easy))                                                 \
    X(const char *, curl_easy_strerror, (int result))                                              \
    X(curl_list *, curl_slist_append, (curl_list * list, const char *line))                        \
    X(void, curl_slist_free_all, (curl_list * list))                                               \
    X(curl_multi *, curl_multi_init, (void))                                                       \
    X(int, curl_multi_setopt, (curl_multi * multi, int option, ...))                               \
    X(int, curl_multi_add_handle, (curl_multi * multi, curl_easy * easy))                          \
    X(int, curl_multi_remove_handle, (curl_multi * multi, curl_easy * easy))                       \
    X(int, curl_multi_perform, (curl_multi * multi, int *running))                                 \
    X(int, curl_multi_poll,                                                                        \
      (curl_multi * multi, void *more, unsigned more_count, int timeout_ms, int *count))           \
    X(int, curl_multi_wakeup, (curl_multi * multi))                                                \
    X(curl_message *, curl_multi_info_read, (curl_multi * multi, int *left))                       \
    X(int, curl_multi_cleanup, (curl_multi * multi))

typedef struct curl_library {
#define CURL_FIELD(result, name, parameters) result(*name) parameters;
    CURL_FUNCTIONS(CURL_FIELD)
#undef CURL_FIELD
} curl_library;

/// Opens the library, for ever. FST_E_UNSUPPORTED names it if it is missing or older than 7.68,
/// whose waits cannot be interrupted.
fst_status fsti_curl_open(const curl_library **out, fst_error *error);
/// The certificate file to use if the library's default does not exist; NULL: the default.
const char *fsti_curl_ca_file(void);

#endif
