// SPDX-License-Identifier: Apache-2.0
/// Reads a bundle. Its signature is verified over the received bytes before they are parsed.
#include <string.h>

#include "open_model.h"

void fsti_signed_bundle_close(signed_bundle *signed_by) {
    fsti_statement_clear(&signed_by->statement);
    fsti_bundle_clear(&signed_by->bundle);
}

static fst_status refuse(const char *path, const char *what, fst_error *error) {
    fsti_error_location location = FSTI_NO_LOCATION;
    location.file = path;
    return fsti_error_set(error, FST_E_SIGNATURE, location, "%s", what);
}

static fst_status check_key(const fsti_bundle *bundle, const char *path, const fsti_key *key,
                            fst_error *error) {
    char hint[FSTI_KEY_HINT_BYTES];
    size_t size;
    FST_TRY(fsti_key_hint(key, hint, error));
    if (strlen(hint) != bundle->hint_size || memcmp(hint, bundle->hint, bundle->hint_size) != 0)
        return refuse(path, "the bundle was signed with a different key", error);
    char *text = fsti_bundle_signed_text(bundle->payload, bundle->payload_size, &size);
    if (text == NULL) return fsti_error_memory(error, bundle->payload_size);
    bool good = fsti_key_verify(key, text, size, &bundle->signature);
    fsti_free(text);
    return good ? FST_OK : refuse(path, "the signature is invalid", error);
}

static fst_status read_key(const char *path, fsti_key **out, fst_error *error) {
    char *text;
    size_t size;
    FST_TRY(fsti_model_read_text(path, &text, &size, error));
    fst_status status = fsti_key_read(text, path, false, out, error);
    fsti_free(text);
    return status;
}

fst_status fsti_signed_bundle_open(const char *path, const char *public_key, signed_bundle *out,
                                   fst_error *error) {
    fsti_key *key;
    FST_TRY(read_key(public_key, &key, error));
    fst_status status = fsti_signed_bundle_read(path, key, out, error);
    fsti_key_free(key);
    return status;
}

fst_status fsti_signed_bundle_read(const char *path, const fsti_key *key, signed_bundle *out,
                                   fst_error *error) {
    char *text;
    size_t size;
    *out = (signed_bundle){.bundle = {0}};
    FST_TRY(fsti_model_read_text(path, &text, &size, error));
    char *redacted = fsti_location_redact(path);
    if (redacted == NULL) {
        fsti_free(text);
        return fsti_error_memory(error, strlen(path));
    }
    fst_status status = fsti_bundle_parse(text, size, redacted, &out->bundle, error);
    if (status == FST_OK) status = check_key(&out->bundle, redacted, key, error);
    if (status == FST_OK)
        status = fsti_statement_parse(&out->bundle, redacted, &out->statement, error);
    fsti_free(redacted);
    if (status != FST_OK) fsti_signed_bundle_close(out);
    return status;
}
