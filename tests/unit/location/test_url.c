// SPDX-License-Identifier: Apache-2.0
/// Parsing, comparing, redacting and joining URLs.
#include "check.h"

#include "location/location.h"

TEST(urls_that_lead_to_one_object)
{
    CHECK(fsti_location_is_same("s3://bucket/model.safetensors", "S3://Bucket/model.safetensors"));
    CHECK(fsti_location_is_same("s3:/bucket/a", "s3://bucket/a"));
    CHECK(fsti_location_is_same("https://host/a?b", "HTTPS://HOST/a?b"));
    CHECK(!fsti_location_is_same("s3://bucket/model", "s3://bucket/Model"));
    CHECK(!fsti_location_is_same("s3://bucket/model", "s3://bucket/model2"));
    CHECK(!fsti_location_is_same("s3://bucket/model", "gs://bucket/model"));
    CHECK(!fsti_location_is_same("s3://bucket", "s3://bucket/"));
    CHECK(!fsti_location_is_same("s3://buck", "s3://bucket"));
    CHECK(fsti_location_is_same("s3://bucket/a%3Fb%25", "s3://bucket/a%3Fb%"));
    CHECK(!fsti_location_is_same("https://host/a%25", "https://host/a%"));
    CHECK(fsti_location_is_same("a/b", "a/b") && !fsti_location_is_same("a/b", "A/b"));
    CHECK(!fsti_location_is_same("s3:/", "s3") && !fsti_location_is_same("s3", "s3:/"));
}

TEST(urls_are_parsed)
{
    url_parts url;
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
    CHECK(fsti_location_is_url("S3://bucket/key") && !fsti_location_is_url("s3:/bucket"));
    CHECK(!fsti_location_is_url("ftp://h/x"));
}

TEST(hosts_are_the_same_by_scheme_name_and_port)
{
    url_parts a, b, c;
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
    url_parts parsed;
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

static void check_join(const char *start, const char *end, const char *wanted) {
    char *joined = fsti_location_join(start, end);
    CHECK_TEXT(joined, wanted);
    fsti_free(joined);
}

TEST(names_are_joined_with_one_slash)
{
    check_join("https://host/a?query", "/x", "https://host/a/x?query");
    check_join("https://host/a/?query", "/x", "https://host/a/x?query");
    check_join("s3://bucket/key/", "/x", "s3://bucket/key/x");
    check_join("folder//", "/x", "folder/x");
    check_join("/", "/x", "/x");
    check_join("folder/file", ".digest", "folder/file.digest");
}
