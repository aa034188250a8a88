// SPDX-License-Identifier: Apache-2.0
/// Functions of the net module without I/O: URLs, responses, delays, windows, signatures, listings.
#include "check.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <time.h>

#include "net/response.h"
#include "net/answered_hosts.h"
#include "net/provider.h"
#include "net/listing.h"
#include "net/net.h"
#include "net/private_address.h"
#include "net/retry.h"
#include "net/sha256.h"
#include "net/sigv4.h"
#include "net/url.h"

static int64_t told_s(const char *text) {
    static net_keys keys;
    memset(&keys, 0, sizeof keys);
    return fsti_provider_read_token(text, &keys, NULL) == FST_OK ? keys.expires_s : -1;
}

TEST(credential_expiry_times)
{
    static net_keys keys;
    int64_t now_s = (int64_t)time(NULL), most_s = (int64_t)1 << 31;
    CHECK_INT(told_s("{\"access_token\": \"x\"}"), 0);
    int64_t hour_s = told_s("{\"access_token\": \"x\", \"expires_in\": 3600}") - now_s;
    CHECK(hour_s >= 3600 && hour_s < 4600);
    int64_t far_s = told_s("{\"access_token\":\"x\",\"expires_in\":9223372036854775807}") - now_s;
    CHECK(far_s >= most_s && far_s < most_s + 1000);
    CHECK(told_s("{\"access_token\":\"x\",\"expires_in\":-9223372036854775808}") > now_s);
    CHECK_INT(told_s("{\"access_token\":\"x\",\"expires_on\":-9223372036854775808}"), 1);
    CHECK_INT(told_s("{\"access_token\":\"x\",\"expires_on\":\"1700000000\"}"), 1700000000);
    static const char *const none[] = {"", "{}", "{\"access_token\": \"\"}",
                                       "{\"access_token\": \"a\\nb\"}",
                                       "{\"access_token\": \"a\\u0001b\"}"};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++)
        CHECK_INT(fsti_provider_read_token(none[i], &keys, NULL), FST_E_PERMISSION);
}

static bool is_private(const char *host) { return fsti_host_is_private(host, strlen(host)); }

TEST(private_addresses_are_recognized_in_every_spelling)
{
    static const char *const private[] = {"0.0.0.0",
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
                                          "instance-data"};
    static const char *const public[] = {
        "1.1.1.1",        "8.8.8.8",          "9.255.255.255",    "11.0.0.0",
        "100.63.255.255", "100.128.0.0",      "126.255.255.255",  "128.0.0.1",
        "168.63.129.17",  "169.253.255.255",  "169.255.0.0",      "172.15.255.255",
        "172.32.0.0",     "192.0.1.1",        "192.167.255.255",  "192.169.0.0",
        "198.17.255.255", "198.20.0.0",       "223.255.255.255",  "2606:4700::1111",
        "::ffff:8.8.8.8", "64:ff9b::8.8.8.8", "2002:808:808::1",  "fb00::1",
        "fe00::1",        "huggingface.co",   "s3.amazonaws.com", "localhost.example.com",
        "internal",       "xlocalhost"};
    for (size_t i = 0; i < sizeof private / sizeof *private; i++)
        if (!is_private(private[i])) check_fail(__FILE__, __LINE__, "%s is public", private[i]);
    for (size_t i = 0; i < sizeof public / sizeof *public; i++)
        if (is_private(public[i])) check_fail(__FILE__, __LINE__, "%s is private", public[i]);
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

TEST(urls_are_parsed)
{
    net_url url;
    CHECK(fsti_url_parse("https://host.example:8443/a/b.safetensors?x=1&y", &url) == NULL);
    CHECK(fsti_url_part_is(url.host, "HOST.example"));
    CHECK_INT(url.port, 8443);
    CHECK(fsti_url_part_is(url.path, "/a/b.safetensors"));
    CHECK(fsti_url_part_is(url.query, "x=1&y"));
    CHECK(fsti_url_parse("http://[::1]:80", &url) == NULL);
    CHECK(fsti_url_part_is(url.host, "::1") && url.path.size == 0);
    static const char *const wrong[] = {"",
                                        "http:",
                                        "http://",
                                        "http:///x",
                                        "://x/",
                                        "http://h:0/",
                                        "http://h:65536/",
                                        "http://h:1x/",
                                        "http://u:p@h/",
                                        "http://[::1/",
                                        "http://h/a b",
                                        "http://h/a#b",
                                        "http://h\n/",
                                        "http://h%00/"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        CHECK(fsti_url_parse(wrong[i], &url) != NULL);
    CHECK(fsti_net_is_url("S3://bucket/key") && !fsti_net_is_url("s3:/bucket"));
    CHECK(!fsti_net_is_url("ftp://h/x"));
}

TEST(hosts_are_the_same_by_scheme_name_and_port)
{
    net_url a, b, c;
    CHECK(fsti_url_parse("https://h/x", &a) == NULL &&
          fsti_url_parse("https://H:443/y", &b) == NULL);
    CHECK(fsti_url_parse("http://h/x", &c) == NULL);
    CHECK(fsti_url_same_host(&a, &b) && !fsti_url_same_host(&a, &c));
}

TEST(urls_are_redacted)
{
    char text[64];
    fsti_url_redact("https://user:word@host/x?X-Amz-Signature=1", text, sizeof text);
    CHECK_TEXT(text, "https://host/x");
    fsti_url_redact("https://host/\x1b[31mx", text, sizeof text);
    CHECK(strchr(text, '\x1b') == NULL);
    fsti_url_redact("https://host/a-name-that-is-far-too-long", text, 16);
    CHECK_TEXT(text, "https://host/a-");
}

TEST(names_in_a_folder_keep_the_query)
{
    char *url = fsti_url_sibling("https://h/m/model.index.json?sig=1", "part 1?.safetensors");
    CHECK_TEXT(url, "https://h/m/part%201%3F.safetensors?sig=1");
    fsti_free(url);
    url = fsti_url_sibling("s3://b/m/model.index.json", "100%3F #1?.x");
    CHECK_TEXT(url, "s3://b/m/100%253F %231%3F.x");
    net_url parsed;
    char key[32];
    CHECK(fsti_url_parse(url, &parsed) == NULL && fsti_url_key(&parsed, key, sizeof key));
    CHECK_TEXT(key, "m/100%3F #1?.x");
    CHECK(!fsti_url_key(&parsed, key, 8));
    fsti_free(url);
    char text[8];
    CHECK(!fsti_url_unescape((url_part){"a%00b", 5}, text, sizeof text));
    CHECK(fsti_url_unescape((url_part){"a%2Fb%", 6}, text, sizeof text));
    CHECK_TEXT(text, "a/b%");
}

static net_response read_head(const char *const *lines) {
    net_response answer;
    fsti_response_begin(&answer);
    for (; *lines != NULL; lines++)
        (void)fsti_response_line(&answer, *lines, strlen(*lines), 784111777 - 30);
    return answer;
}

TEST(response_headers_are_parsed)
{
    net_response answer = read_head(
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

TEST(response_dates)
{
    CHECK_INT(fsti_response_date("Sun, 06 Nov 1994 08:49:37 GMT"), 784111777);
    CHECK_INT(fsti_response_date("Sun, 06 Nov 1994 08:49:37 CET"), -1);
    CHECK_INT(fsti_response_date("tomorrow"), -1);
}

static net_verdict judge(const char *const *lines, const net_pin *pin) {
    net_response answer = read_head(lines);
    const char *why;
    response_expectation expected = {.is_range = true, .begin = 10, .end = 20, .pin = pin};
    return fsti_response_evaluate(&answer, &expected, &why);
}

#define RANGE "Content-Range: bytes 10-19/100\r\n"
#define HEAD(...) ((const char *const[]){__VA_ARGS__, NULL})

TEST(responses_are_checked_before_bytes_are_used)
{
    const net_pin pin = {.is_set = true, .total_bytes = 100, .etag = "\"v1\""};
    const net_pin weak = {.is_set = true, .total_bytes = 100, .modified = "then"};
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE, "ETag: \"v1\"\r\n"), &pin), NET_OK);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE, "ETag: \"v2\"\r\n"), &pin), NET_CHANGED);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE), &pin), NET_CHANGED);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE, "Last-Modified: then"), &weak), NET_OK);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE, "Last-Modified: now"), &weak), NET_CHANGED);
    const net_pin soft = {.is_set = true, .total_bytes = 100, .etag = "W/\"1\"", .modified = "t"};
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE, "ETag: W/\"2\"", "Last-Modified: t"), &soft),
              NET_CHANGED);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE, "ETag: W/\"1\"", "Last-Modified: u"), &soft),
              NET_CHANGED);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE, "ETag: W/\"1\"", "Last-Modified: t"), &soft),
              NET_OK);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", "Content-Range: bytes 10-19/99"), &pin), NET_CHANGED);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", "Content-Range: bytes 10-19/*"), NULL), NET_WRONG);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", "Content-Range: bytes 9-19/100"), NULL), NET_WRONG);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x"), NULL), NET_WRONG);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE, "Content-Length: 11"), NULL), NET_WRONG);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE, "Content-Encoding: gzip"), NULL), NET_WRONG);
    CHECK_INT(judge(HEAD("HTTP/1.1 200 OK", "Content-Length: 10"), NULL), NET_WRONG);
    CHECK_INT(judge(HEAD("HTTP/1.1 412 x"), &pin), NET_CHANGED);
    CHECK_INT(judge(HEAD("HTTP/1.1 416 x"), &pin), NET_CHANGED);
    CHECK_INT(judge(HEAD("HTTP/1.1 429 x"), NULL), NET_SLOWER);
    CHECK_INT(judge(HEAD("HTTP/1.1 502 x"), NULL), NET_RETRY);
    CHECK_INT(judge(HEAD("HTTP/1.1 302 x"), NULL), NET_REDIRECT);
    CHECK_INT(judge(HEAD("HTTP/1.1 999"), NULL), NET_REFUSED);
    CHECK_INT(judge(HEAD("HTTP/1.1 x"), NULL), NET_WRONG);
}

TEST(waits_are_random_below_a_bound_that_doubles)
{
    for (uint64_t random = 0; random < 5000; random++) {
        CHECK(fsti_retry_wait_ms(1, 100, 20000, -1, random) <= 200);
        CHECK(fsti_retry_wait_ms(12, 100, 20000, -1, random) <= 20000);
        CHECK(fsti_retry_wait_ms(1, 100, 20000, 3000, random) == 3000);
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
    net_window window;
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
    net_times times = {.count = 0};
    for (uint64_t i = 1; i <= 7; i++) fsti_times_add(&times, i);
    CHECK_INT(fsti_times_median(&times), 0);
    for (uint64_t i = 0; i < 100; i++) fsti_times_add(&times, 1000 + i % 3);
    CHECK_INT(fsti_times_median(&times), 1001);
}

static const char *hash_text(const char *text) {
    static char hex[SHA256_HEX_BYTES];
    unsigned char digest[SHA256_BYTES];
    sha256 hash;
    fsti_sha256_begin(&hash);
    fsti_sha256_add_text(&hash, text);
    fsti_sha256_end(&hash, digest);
    fsti_sha256_hex(digest, hex);
    return hex;
}

#define NOTHING_HASH "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"

TEST(sha256_and_hmac_of_their_standards)
{
    char hex[SHA256_HEX_BYTES];
    unsigned char digest[SHA256_BYTES];
    CHECK_TEXT(hash_text(""), NOTHING_HASH);
    CHECK_TEXT(hash_text("abc"),
               "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK_TEXT(hash_text("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
               "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    fsti_hmac_sha256((hmac_key){"Jefe", 4}, "what do ya want for nothing?", 28, digest);
    fsti_sha256_hex(digest, hex); // RFC 4231, case 2
    CHECK_TEXT(hex, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
}

/// The examples of "Signature Calculations for the Authorization Header" of the S3 reference.
TEST(signatures_of_the_published_examples)
{
    char line[SIGV4_LINE_BYTES];
    sigv4_request request = {.method = "GET",
                             .host = "examplebucket.s3.amazonaws.com",
                             .path = "/test.txt",
                             .query = "",
                             .range = "bytes=0-9",
                             .payload_hash = NOTHING_HASH,
                             .date = "20130524T000000Z",
                             .region = "us-east-1",
                             .service = "s3",
                             .access_key = "AKIAIOSFODNN7EXAMPLE",
                             .secret_key = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"};
    CHECK(fsti_sigv4_sign(&request, line, sizeof line));
    CHECK_CONTAINS(line, "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41");
    request.range = NULL;
    request.path = "/";
    request.query = "lifecycle=";
    CHECK(fsti_sigv4_sign(&request, line, sizeof line));
    CHECK_CONTAINS(line, "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543");
    request.query = "max-keys=2&prefix=J";
    CHECK(fsti_sigv4_sign(&request, line, sizeof line));
    CHECK_CONTAINS(line, "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7");
    CHECK(!fsti_sigv4_sign(&request, line, 40));
    char date[SIGV4_DATE_BYTES];
    fsti_sigv4_date(1369353600, date);
    CHECK_TEXT(date, "20130524T000000Z");
}

static char precondition[256];

static bool see(void *context, const char *key) {
    (void)context;
    size_t used = strlen(precondition);
    snprintf(precondition + used, sizeof precondition - used, "%s|", key);
    return true;
}

static const char *list_text(const char *text, listing *out) {
    precondition[0] = '\0';
    return fsti_listing_read(text, strlen(text), see, NULL, out);
}

TEST(listings_are_read)
{
    listing page;
    CHECK(list_text("<?xml version=\"1.0\"?><ListBucketResult xmlns=\"x\"><Contents><Key>a&amp;b"
                    "</Key></Contents><Contents><Key>c&#x26;</Key><Size>1</Size></Contents>"
                    "<NextContinuationToken>t/1==</NextContinuationToken></ListBucketResult>",
                    &page) == NULL);
    CHECK_TEXT(precondition, "a&b|c&|");
    CHECK_TEXT(page.next, "t/1==");
    CHECK(list_text("<EnumerationResults ><Blobs><Blob><Name>n</Name></Blob></Blobs>"
                    "<NextMarker/></EnumerationResults>",
                    &page) == NULL);
    CHECK_TEXT(precondition, "n|");
    CHECK_TEXT(page.next, "");
    static const char *const wrong[] = {"",
                                        "<html>",
                                        "<!DOCTYPE x [<!ENTITY a \"b\">]><ListBucketResult>",
                                        "<ListBucketResult><Contents><Key>&a;</Key></Contents>",
                                        "<ListBucketResult><Contents></Contents>",
                                        "<ListBucketResult><Contents><Key>a<b/></Key></Contents>",
                                        "<ListBucketResult><Contents><Key>a</Key></Contents>",
                                        "<ListBucketResult><Contents><Key>a</Key></Contents>"
                                        "<Contents><Key>b</ListBucketResult>",
                                        "<ListBucketResult><IsTruncated>true</IsTruncated>"
                                        "</ListBucketResult>",
                                        "<ListBucketResult><Contents><Key>&#0;</Key></Contents>"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        CHECK(list_text(wrong[i], &page) != NULL);
}
