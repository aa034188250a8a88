// SPDX-License-Identifier: Apache-2.0
/// The pure parts of the net room: addresses, answers, waits, windows, signatures, listings.
#include "check.h"

#include <time.h>

#include "net/answer.h"
#include "net/lease.h"
#include "net/listing.h"
#include "net/net.h"
#include "net/retry.h"
#include "net/sha256.h"
#include "net/sigv4.h"
#include "net/url.h"

static int64_t told_s(const char *text) {
    static net_keys keys;
    memset(&keys, 0, sizeof keys);
    return fsti_lend_read_token(text, &keys, NULL) == FST_OK ? keys.expires_s : -1;
}

TEST(times_that_lenders_tell)
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
        CHECK_INT(fsti_lend_read_token(none[i], &keys, NULL), FST_E_PERMISSION);
}

TEST(addresses_are_taken_apart)
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

TEST(addresses_are_told_without_secrets)
{
    char text[64];
    fsti_url_tell("https://user:word@host/x?X-Amz-Signature=1", text, sizeof text);
    CHECK_TEXT(text, "https://host/x");
    fsti_url_tell("https://host/\x1b[31mx", text, sizeof text);
    CHECK(strchr(text, '\x1b') == NULL);
    fsti_url_tell("https://host/a-name-that-is-far-too-long", text, 16);
    CHECK_TEXT(text, "https://host/a-");
}

TEST(names_in_a_folder_keep_the_query)
{
    char *url = fsti_url_beside("https://h/m/model.index.json?sig=1", "part 1?.safetensors");
    CHECK_TEXT(url, "https://h/m/part%201%3F.safetensors?sig=1");
    fsti_free(url);
    url = fsti_url_beside("s3://b/m/model.index.json", "100%3F #1?.x");
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

static net_answer read_head(const char *const *lines) {
    net_answer answer;
    fsti_answer_begin(&answer);
    for (; *lines != NULL; lines++)
        (void)fsti_answer_line(&answer, *lines, strlen(*lines), 784111777 - 30);
    return answer;
}

TEST(heads_are_read)
{
    net_answer answer = read_head(
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
    CHECK(!fsti_answer_line(&answer, wrong[0], ANSWER_HEAD_BYTES_MAX + 1 > 40 ? 30 : 0, 0) ||
          answer.head_bytes <= ANSWER_HEAD_BYTES_MAX);
}

TEST(dates_of_answers)
{
    CHECK_INT(fsti_answer_date("Sun, 06 Nov 1994 08:49:37 GMT"), 784111777);
    CHECK_INT(fsti_answer_date("Sun, 06 Nov 1994 08:49:37 CET"), -1);
    CHECK_INT(fsti_answer_date("tomorrow"), -1);
}

static net_verdict judge(const char *const *lines, const net_pin *pin) {
    net_answer answer = read_head(lines);
    const char *why;
    answer_wish wish = {.is_range = true, .begin = 10, .end = 20, .pin = pin};
    return fsti_answer_judge(&answer, &wish, &why);
}

#define RANGE "Content-Range: bytes 10-19/100\r\n"
#define HEAD(...) ((const char *const[]){__VA_ARGS__, NULL})

TEST(answers_are_judged_before_a_byte_counts)
{
    const net_pin pin = {.is_set = true, .total_bytes = 100, .etag = "\"v1\""};
    const net_pin weak = {.is_set = true, .total_bytes = 100, .modified = "then"};
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE, "ETag: \"v1\"\r\n"), &pin), NET_GOOD);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE, "ETag: \"v2\"\r\n"), &pin), NET_CHANGED);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE), &pin), NET_CHANGED);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE, "Last-Modified: then"), &weak), NET_GOOD);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE, "Last-Modified: now"), &weak), NET_CHANGED);
    const net_pin soft = {.is_set = true, .total_bytes = 100, .etag = "W/\"1\"", .modified = "t"};
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE, "ETag: W/\"2\"", "Last-Modified: t"), &soft),
              NET_CHANGED);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE, "ETag: W/\"1\"", "Last-Modified: u"), &soft),
              NET_CHANGED);
    CHECK_INT(judge(HEAD("HTTP/1.1 206 x", RANGE, "ETag: W/\"1\"", "Last-Modified: t"), &soft),
              NET_GOOD);
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
    CHECK_INT(judge(HEAD("HTTP/1.1 502 x"), NULL), NET_AGAIN);
    CHECK_INT(judge(HEAD("HTTP/1.1 302 x"), NULL), NET_ELSEWHERE);
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
    // One that is no faster with more of them: a step or two.
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

TEST(late_is_measured_by_the_median)
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

static char seen[256];

static bool see(void *context, const char *key) {
    (void)context;
    size_t used = strlen(seen);
    snprintf(seen + used, sizeof seen - used, "%s|", key);
    return true;
}

static const char *list_text(const char *text, listing *out) {
    seen[0] = '\0';
    return fsti_listing_read(text, strlen(text), see, NULL, out);
}

TEST(listings_are_read)
{
    listing page;
    CHECK(list_text("<?xml version=\"1.0\"?><ListBucketResult xmlns=\"x\"><Contents><Key>a&amp;b"
                    "</Key></Contents><Contents><Key>c&#x26;</Key><Size>1</Size></Contents>"
                    "<NextContinuationToken>t/1==</NextContinuationToken></ListBucketResult>",
                    &page) == NULL);
    CHECK_TEXT(seen, "a&b|c&|");
    CHECK_TEXT(page.next, "t/1==");
    CHECK(list_text("<EnumerationResults ><Blobs><Blob><Name>n</Name></Blob></Blobs>"
                    "<NextMarker/></EnumerationResults>",
                    &page) == NULL);
    CHECK_TEXT(seen, "n|");
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
