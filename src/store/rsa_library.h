// SPDX-License-Identifier: Apache-2.0
/// RSA signatures (RS256) of claims, by libcrypto loaded at run time. Private to the store module.
#ifndef FSTI_RSA_LIBRARY_H
#define FSTI_RSA_LIBRARY_H

#include "base/primitives.h"

#define RSA_SIGNATURE_BYTES_MAX 1024u

/// Signs with a private key in PEM. FST_E_UNSUPPORTED without libcrypto, FST_E_PERMISSION for an
/// invalid key.
fst_status fsti_rsa_sign(const char *key, const char *text, size_t size,
                         unsigned char out[RSA_SIGNATURE_BYTES_MAX], size_t *out_size,
                         fst_error *error);

#endif
