// SPDX-License-Identifier: Apache-2.0
/// The pure parts of the http module: responses, delays, windows, private addresses.
#include "check.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "http/answered_hosts.h"
#include "http/http.h"
#include "http/http_settings.h"
#include "http/private_address.h"

static bool is_private(const char *host) { return fsti_host_is_private(host, strlen(host)); }

static const char *const private_hosts[] = {"0.0.0.0",
                                            "10.0.0.1",
                                            "10.255.255.255",
                                            "100.64.0.1",
                                            "100.100.100.200",
                                            "127.0.0.1",
                                            "127.255.0.9",
                                            "168.63.129.16",
                                            "169.254.0.1",
                                            "169.254.169.254",
                                            "172.16.0.1",
                                            "172.31.255.255",
                                            "192.0.0.192",
                                            "192.168.0.1",
                                            "198.18.0.1",
                                            "198.19.255.255",
                                            "224.0.0.1",
                                            "240.0.0.1",
                                            "255.255.255.255",
                                            "::",
                                            "::1",
                                            "::7f00:1",
                                            "::ffff:10.0.0.1",
                                            "::ffff:127.0.0.1",
                                            "::ffff:a9fe:a9fe",
                                            "::ffff:0:10.0.0.1",
                                            "64:ff9b::10.0.0.1",
                                            "64:ff9b:1::8.8.8.8",
                                            "2002:a00:1::",
                                            "2002:7f00:1::5",
                                            "fc00::1",
                                            "fd00:ec2::254",
                                            "fdff::",
                                            "fe80::1",
                                            "fe80::1%eth0",
                                            "febf::1",
                                            "fec0::1",
                                            "ff02::1",
                                            "localhost",
                                            "LocalHost",
                                            "localhost.",
                                            "a.localhost",
                                            "metadata.google.internal",
                                            "metadata",
                                            "METADATA.goog",
                                            "printer.local",
                                            "instance-data",
                                            "0x7f000001",
                                            "0x7f000001.",
                                            "2130706433",
                                            "0177.1",
                                            "0xa9fea9fe..",
                                            "10.1",
                                            "internal",
                                            "xlocalhost",
                                            "ip6-localhost",
                                            "nas.home.arpa",
                                            "2001:0:4136:e378:8000:63bf:80ff:fffd"};
static const char *const public_hosts[] = {
    "1.1.1.1",        "8.8.8.8",          "9.255.255.255",    "11.0.0.0",
    "100.63.255.255", "100.128.0.0",      "126.255.255.255",  "128.0.0.1",
    "168.63.129.17",  "169.253.255.255",  "169.255.0.0",      "172.15.255.255",
    "172.32.0.0",     "192.0.1.1",        "192.167.255.255",  "192.169.0.0",
    "198.17.255.255", "198.20.0.0",       "223.255.255.255",  "2606:4700::1111",
    "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:808:808::1",  "fb00::1",
    "fe00::1",        "huggingface.co",   "s3.amazonaws.com", "localhost.example.com",
    "0x08080808.",    "8.2056",           "2001:1::1"};

TEST(private_addresses_are_recognized_in_every_spelling)
{
    for (size_t i = 0; i < sizeof private_hosts / sizeof *private_hosts; i++)
        if (!is_private(private_hosts[i]))
            check_fail(__FILE__, __LINE__, "%s is public", private_hosts[i]);
    for (size_t i = 0; i < sizeof public_hosts / sizeof *public_hosts; i++)
        if (is_private(public_hosts[i]))
            check_fail(__FILE__, __LINE__, "%s is private", public_hosts[i]);
}

TEST(private_addresses_of_sockets)
{
    struct sockaddr_in four = {.sin_family = AF_INET};
    struct sockaddr_in6 six = {.sin6_family = AF_INET6};
    struct sockaddr other = {.sa_family = AF_UNIX};
    CHECK_INT(inet_pton(AF_INET, "169.254.169.254", &four.sin_addr), 1);
    CHECK(fsti_sockaddr_is_private((const struct sockaddr *)&four));
    CHECK_INT(inet_pton(AF_INET, "93.184.216.34", &four.sin_addr), 1);
    CHECK(!fsti_sockaddr_is_private((const struct sockaddr *)&four));
    CHECK_INT(inet_pton(AF_INET6, "::ffff:127.0.0.1", &six.sin6_addr), 1);
    CHECK(fsti_sockaddr_is_private((const struct sockaddr *)&six));
    CHECK_INT(inet_pton(AF_INET6, "2606:4700::1111", &six.sin6_addr), 1);
    CHECK(!fsti_sockaddr_is_private((const struct sockaddr *)&six));
    CHECK(fsti_sockaddr_is_private(&other));
}

static http_response read_head(const char *const *lines) {
    http_response answer;
    fsti_response_begin(&answer);
    for (; *lines != NULL; lines++)
        (void)fsti_response_line(&answer, *lines, strlen(*lines), 784111777 - 30);
    return answer;
}

/// The variable with the proxy of a URL, or "".
static const char *proxy_variable(const char *url, const char *exempt) {
    static char text[320];
    setenv("no_proxy", exempt, 1);
    fsti_http_read_environment();
    if (!fsti_http_proxy_of(url, text, sizeof text)) return "";
    text[strcspn(text, ":")] = '\0';
    return text;
}

/// As libcurl decides it.
TEST(hosts_without_a_proxy)
{
    static const char *const exempt[] = {"h.test",  ".h.test",   "test",
                                         "h.test.", "a, h.test", "a b\t,test",
                                         "H.TEST",  "a,test.",   "localhost,h.test"};
    static const char *const others[] = {"x,*", "*,x", ".est", "est", "a.h.test", "h.tes", "1.2"};
    static char list[3000];
    unsetenv("all_proxy");
    unsetenv("ALL_PROXY");
    unsetenv("HTTPS_PROXY");
    setenv("http_proxy", "http://user:secret@proxy:3128", 1);
    setenv("https_proxy", "proxy:1", 1);
    for (size_t i = 0; i < sizeof exempt / sizeof *exempt; i++) {
        CHECK_TEXT(proxy_variable("http://h.test/x", exempt[i]), "");
        CHECK_TEXT(proxy_variable("https://h.test./x", exempt[i]), "");
    }
    CHECK_TEXT(proxy_variable("http://h.test/x", "*"), "");
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        CHECK_TEXT(proxy_variable("http://h.test/x", others[i]), "http_proxy");
        CHECK_TEXT(proxy_variable("https://h.test/x", others[i]), "https_proxy");
    }
    // A list may be long.
    memset(list, 'a', sizeof list - 1);
    memcpy(list + sizeof list - 8, ",h.test", 7);
    CHECK_TEXT(proxy_variable("http://h.test/x", list), "");
    for (int i = 0; i < 2; i++) unsetenv(i == 0 ? "http_proxy" : "https_proxy");
    unsetenv("no_proxy");
    fsti_http_read_environment();
}

TEST(response_headers_are_parsed)
{
    http_response answer = read_head(
        (const char *const[]){"HTTP/1.1 206 Partial Content\r\n", "ETag:  \"abc\" \r\n",
                              "content-range: bytes 0-9/100\r\n", "Content-Length: 10\r\n",
                              "Retry-After: Sun, 06 Nov 1994 08:49:37 GMT\r\n", NULL});
    CHECK_INT(answer.status, 206);
    CHECK_TEXT(answer.etag, "\"abc\"");
    CHECK_INT(answer.range_end, 10);
    CHECK_INT(answer.total_bytes, 100);
    CHECK_INT(answer.retry_after_ms, 30000);
    static const char *const wrong[] = {"Content-Range: bytes 9-0/100\r\n",
                                        "Content-Range: bytes 0-9\r\n",
                                        "Content-Range: octets 0-9/100\r\n",
                                        "Content-Range: bytes 0-9/-1\r\n",
                                        "Content-Length: -1\r\n",
                                        "Content-Length: 18446744073709551616\r\n",
                                        "Content-Length: 1, 2\r\n"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        answer = read_head((const char *const[]){"HTTP/1.1 206 x\r\n", wrong[i], NULL});
        CHECK(answer.is_broken);
    }
    CHECK(!fsti_response_line(&answer, wrong[0], RESPONSE_HEAD_BYTES_MAX + 1 > 40 ? 30 : 0, 0) ||
          answer.head_bytes <= RESPONSE_HEAD_BYTES_MAX);
}

TEST(a_long_retry_after_counts_as_the_longest)
{
    static const char *const values[] = {
        "9223372036854775807", "9223372036854775808", "18446744073709551616",
        "99999999999999999999999999999999999999999999999999999999"};
    http_response longest =
        read_head((const char *const[]){"HTTP/1.1 503 x\r\n", "Retry-After: 4294967296\r\n", NULL});
    CHECK_INT(longest.retry_after_ms, 60000);
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        char line[200];
        snprintf(line, sizeof line, "Retry-After: %s\r\n", values[i]);
        http_response answer = read_head((const char *const[]){"HTTP/1.1 503 x\r\n", line, NULL});
        CHECK_INT(answer.retry_after_ms, longest.retry_after_ms);
    }
    static const char *const ignored[] = {"Retry-After: -1\r\n", "Retry-After: 1.5\r\n",
                                          "Retry-After: \r\n", "Retry-After: soon\r\n"};
    for (size_t i = 0; i < sizeof ignored / sizeof *ignored; i++) {
        http_response answer =
            read_head((const char *const[]){"HTTP/1.1 503 x\r\n", ignored[i], NULL});
        CHECK_INT(answer.retry_after_ms, -1);
    }
}

TEST(response_dates)
{
    CHECK_INT(fsti_response_date("Sun, 06 Nov 1994 08:49:37 GMT"), 784111777);
    CHECK_INT(fsti_response_date("Sun, 06 Nov 1994 08:49:37 CET"), -1);
    CHECK_INT(fsti_response_date("tomorrow"), -1);
}

static http_verdict judge(const char *const *lines, const resource_version *pin) {
    http_response answer = read_head(lines);
    const char *why;
    response_expectation expected = {.is_range = true, .begin = 10, .end = 20, .required = pin};
    return fsti_response_evaluate(&answer, &expected, &why);
}

#define RANGE "Content-Range: bytes 10-19/100\r\n"
#define HEAD(...) ((const char *const[]){__VA_ARGS__, NULL})

TEST(responses_are_checked_before_bytes_are_used)
{
    const resource_version pin = {.is_set = true, .total_bytes = 100, .etag = "\"v1\""};
    const resource_version weak = {.is_set = true, .total_bytes = 100, .modified = "then"};
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE, "ETag: \"v1\"\r\n"), &pin), HTTP_OK);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE, "ETag: \"v2\"\r\n"), &pin), HTTP_CHANGED);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE), &pin), HTTP_CHANGED);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE, "Last-Modified: then"), &weak), HTTP_OK);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE, "Last-Modified: now"), &weak), HTTP_CHANGED);
    const resource_version soft = {
        .is_set = true, .total_bytes = 100, .etag = "W/\"1\"", .modified = "t"};
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE, "ETag: W/\"2\"", "Last-Modified: t"), &soft),
              HTTP_CHANGED);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE, "ETag: W/\"1\"", "Last-Modified: u"), &soft),
              HTTP_CHANGED);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE, "ETag: W/\"1\"", "Last-Modified: t"), &soft),
              HTTP_OK);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", "Content-Range: bytes 10-19/99"), &pin), HTTP_CHANGED);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", "Content-Range: bytes 10-19/*"), NULL), HTTP_WRONG);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", "Content-Range: bytes 9-19/100"), NULL), HTTP_WRONG);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x"), NULL), HTTP_WRONG);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE, "Content-Length: 11"), NULL), HTTP_WRONG);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE, "Content-Encoding: gzip"), NULL), HTTP_WRONG);
    CHECK_INT(judge(HEAD("HTTP/1.1 200 OK", "Content-Length: 10"), NULL), HTTP_WRONG);
    CHECK_INT(judge(HEAD("HTTP/1.1 412 x"), &pin), HTTP_CHANGED);
    CHECK_INT(judge(HEAD("HTTP/1.1 416 x"), &pin), HTTP_CHANGED);
    CHECK_INT(judge(HEAD("HTTP/1.1 429 x"), NULL), HTTP_SLOWER);
    CHECK_INT(judge(HEAD("HTTP/1.1 502 x"), NULL), HTTP_RETRY);
    CHECK_INT(judge(HEAD("HTTP/1.1 302 x"), NULL), HTTP_REDIRECT);
    CHECK_INT(judge(HEAD("HTTP/1.1 999"), NULL), HTTP_REFUSED);
    CHECK_INT(judge(HEAD("HTTP/1.1 x"), NULL), HTTP_WRONG);
}

#define MODIFIED "Last-Modified: Mon, 01 Jan 2024 12:00:30 GMT"

TEST(only_dates_of_old_objects_identify_a_version)
{
    static const struct {
        const char *lines[4];
        bool is_exact;
    } cases[] = {
        {{"HTTP/1.1 206 x", MODIFIED, "Date: Mon, 01 Jan 2024 12:01:29 GMT"}, false},
        {{"HTTP/1.1 206 x", MODIFIED, "Date: Mon, 01 Jan 2024 12:01:30 GMT"}, true},
        {{"HTTP/1.1 206 x", MODIFIED, "Date: Mon, 01 Jan 2024 11:59:30 GMT"}, false},
        {{"HTTP/1.1 206 x", MODIFIED}, true}, // by the clock of this machine
        {{"HTTP/1.1 206 x", MODIFIED, "Date: today"}, true},
        {{"HTTP/1.1 206 x", "Last-Modified: long ago", "Date: Mon, 01 Jan 2024 12:01:30 GMT"},
         false},
        {{"HTTP/1.1 206 x", "ETag: W/\"1\""}, false},
        {{"HTTP/1.1 206 x", "ETag: \"1\""}, true},
        {{"HTTP/1.1 206 x", "X-Goog-Generation: 1"}, true},
        {{"HTTP/1.1 206 x"}, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        http_response answer;
        resource_version version;
        fsti_response_begin(&answer);
        for (size_t k = 0; cases[i].lines[k] != NULL; k++)
            fsti_response_line(&answer, cases[i].lines[k], strlen(cases[i].lines[k]), 1704200000);
        fsti_version_set(&version, &answer);
        CHECK_INT(fsti_version_is_exact(&version), cases[i].is_exact);
    }
}

TEST(waits_are_random_below_a_bound_that_doubles)
{
    for (uint64_t random = 0; random < 5000; random++) {
        CHECK(fsti_retry_wait_ms(1, 100, 20000, -1, random) <= 200);
        CHECK(fsti_retry_wait_ms(12, 100, 20000, -1, random) <= 20000);
        CHECK(fsti_retry_wait_ms(1, 100, 20000, 3000, random) == 3000);
        CHECK(fsti_retry_wait_ms(1, 100, 2000, 60000, random) == 2000);
    }
    CHECK(fsti_retry_wait_ms(3, 100, 20000, -1, 800) == 800);
}

TEST(waits_for_a_restart_are_at_least_half_of_their_bound)
{
    uint64_t least_ms = 0;
    for (uint64_t random = 0; random < 5000; random++) {
        uint64_t wait_ms = fsti_retry_restart_wait_ms(2, 100, 20000, random);
        CHECK(wait_ms >= 200 && wait_ms <= 400);
        CHECK(fsti_retry_restart_wait_ms(30, 100, 20000, random) >= 10000);
        CHECK(fsti_retry_restart_wait_ms(30, 100, 20000, random) <= 20000);
        CHECK(fsti_retry_restart_wait_ms(1, 0, 20000, random) == 0);
    }
    // The seven waits of eight tries outlast a server that is down for several seconds.
    for (uint32_t tries = 1; tries < 8; tries++)
        least_ms += fsti_retry_restart_wait_ms(tries, 100, 20000, 0);
    CHECK(least_ms >= 12000);
}

TEST(responsive_hosts_are_keyed_by_scheme_name_and_port)
{
    uint64_t key = fsti_host_key("https://restart.example:8443/a/b");
    CHECK(key != 0 && fsti_host_key("no URL") == 0);
    CHECK(fsti_host_key("https://restart.example:8443/other?query") == key);
    CHECK(!fsti_host_has_answered(key));
    fsti_host_note_response(key);
    fsti_host_note_response(0);
    CHECK(fsti_host_has_answered(key) && !fsti_host_has_answered(0));
    CHECK(!fsti_host_has_answered(fsti_host_key("https://restart.example:8444/a/b")));
    CHECK(!fsti_host_has_answered(fsti_host_key("http://restart.example:8443/a/b")));
}

TEST(a_window_grows_while_that_helps)
{
    http_window window;
    uint64_t now = 1000;
    fsti_window_begin(&window, 64, now);
    // A server that is as fast as there are connections: up to the bound.
    for (int i = 0; i < 2000; i++) {
        now += 1000000 / window.size;
        fsti_window_grow(&window, 1 << 20, now);
    }
    CHECK_INT(window.size, 64);
    // A server that is not faster with more connections: the window grows by one or two steps.
    fsti_window_begin(&window, 64, now);
    for (int i = 0; i < 2000; i++) fsti_window_grow(&window, 1 << 20, now += 1000000);
    CHECK(window.size <= 16);
    uint32_t before = window.size;
    fsti_window_halve(&window, now += 1000000000);
    fsti_window_halve(&window, now + 1000); // the same moment's
    CHECK_INT(window.size, before / 2);
    // What the user allows is never passed.
    fsti_window_begin(&window, 2, now);
    for (int i = 0; i < 2000; i++) fsti_window_grow(&window, 1 << 20, now += 1000000);
    CHECK_INT(window.size, 2);
}

TEST(late_requests_are_detected_by_the_median)
{
    http_times times = {.count = 0};
    for (uint64_t i = 1; i <= 7; i++) fsti_times_add(&times, i);
    CHECK_INT(fsti_times_median(&times), 0);
    for (uint64_t i = 0; i < 100; i++) fsti_times_add(&times, 1000 + i % 3);
    CHECK_INT(fsti_times_median(&times), 1001);
}
