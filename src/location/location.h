// SPDX-License-Identifier: Apache-2.0
/// Interface of the location module: what a path names, a file or an object, and its parts. Nothing
/// else looks at schemes. Pure: no location is examined.
///
/// Knows: schemes, hosts, keys and names in a path.
/// Does not know: whether something is there.
/// Main types: fsti_location_kind, url_parts.
#ifndef FSTI_LOCATION_H
#define FSTI_LOCATION_H

#include "base/primitives.h"
#include "url.h"

typedef enum fsti_location_kind {
    FSTI_LOCATION_FILE,  ///< a path of a file system
    FSTI_LOCATION_WEB,   ///< http:// or https://
    FSTI_LOCATION_S3,    ///< s3://
    FSTI_LOCATION_GCS,   ///< gs://
    FSTI_LOCATION_AZURE, ///< az://
    FSTI_LOCATION_HUB    ///< hf://
} fsti_location_kind;

/// What a path names.
fsti_location_kind fsti_location_kind_of(const char *path);
/// Whether a path is a URL that can be read.
bool fsti_location_is_url(const char *path);
/// Whether a path is a URL, or was one before a path object collapsed its slashes ("https:/host").
bool fsti_location_looks_like_url(const char *path);
/// FST_E_UNSUPPORTED for a URL of another scheme, which must not become a folder of that name.
fst_status fsti_location_check_scheme(const char *path, fst_error *error);
/// FST_E_UNSUPPORTED for a path that looks like a URL of any scheme: `what` works with files only.
fst_status fsti_location_require_file(const char *path, const char *what, fst_error *error);
/// The same where no URL is expected: the message says whether a path object collapsed it.
fst_status fsti_location_require_path(const char *path, fst_error *error);
/// Fails with FST_E_UNSUPPORTED: `what` does not work with URLs.
fst_status fsti_url_refuse(const char *path, const char *what, fst_error *error);
/// FST_E_ARGUMENT or FST_E_UNSUPPORTED for a text that can be neither a path nor a valid URL.
fst_status fsti_location_check(const char *path, fst_error *error);
/// Whether a path means the same in every working folder.
bool fsti_location_is_absolute(const char *path);
/// Whether a path is a whole bucket: s3://bucket is the folder s3://bucket/.
bool fsti_location_is_bucket(const char *path);

/// Whether two paths or URLs are the same text. Upper and lower case of a scheme and host, the
/// number of slashes after the scheme, and how a store's key is escaped make no difference.
bool fsti_location_is_same(const char *one, const char *other);

/// Appends to a path; for a URL before its query. From fsti_alloc(), or NULL.
char *fsti_location_join(const char *start, const char *end);
/// The folder of a path, with a final slash; "" is the current folder. A local folder (`is_folder`)
/// is its own, as is a URL with a final slash. From fsti_alloc(), or NULL.
char *fsti_location_folder(const char *path, bool is_folder);
/// The last part of a path; of a URL without query, and unescaped. The result is `text`, or, if
/// that is too short, the unchanged part of `path`.
const char *fsti_location_name(const char *path, char *text, size_t size);
/// The path relative to `folder` (redacted, with a final slash), unescaped for a URL. If it is not
/// below `folder`, its last part. `text` has space for it.
const char *fsti_location_below(const char *path, const char *folder, char *text, size_t size);
/// Copies a path for messages: a URL without its query and password. From fsti_alloc(), or NULL.
char *fsti_location_redact(const char *path);

#endif
