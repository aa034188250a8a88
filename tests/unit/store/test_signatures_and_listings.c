// SPDX-License-Identifier: Apache-2.0
/// The pure parts of the store module: signatures, listings, answers of credential providers.
#include "check.h"

#include <time.h>

#include "store/listing.h"
#include "store/provider.h"
#include "store/sha256.h"
#include "store/sigv4.h"

static int64_t told_s(const char *text) {
    static store_keys keys;
    memset(&keys, 0, sizeof keys);
    return fsti_provider_read_token(text, &keys, NULL) == FST_OK ? keys.expires_s : -1;
}

TEST(credential_expiry_times)
{
    static store_keys keys;
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
