// SPDX-License-Identifier: Apache-2.0
/// A pair of keys, created for fuzz targets and used for nothing else.
#ifndef FUZZ_KEYS_H
#define FUZZ_KEYS_H

static const char private_pem[] =
    "-----BEGIN EC PRIVATE KEY-----\n"
    "MHcCAQEEIABijAnrhBh44TeVJHGiu/rDrytNlaOg46SSP99637itoAoGCCqGSM49\n"
    "AwEHoUQDQgAEaVKfW17cJx8hnVc7spOLca3hzPvgf2PVLGvkQ71hcOnjn87uFitd\n"
    "duv9foPRGD8vcNzrzjg955M3jFCStMm4hQ==\n"
    "-----END EC PRIVATE KEY-----\n";
static const char public_pem[] =
    "-----BEGIN PUBLIC KEY-----\n"
    "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEaVKfW17cJx8hnVc7spOLca3hzPvg\n"
    "f2PVLGvkQ71hcOnjn87uFitdduv9foPRGD8vcNzrzjg955M3jFCStMm4hQ==\n"
    "-----END PUBLIC KEY-----\n";

#endif
