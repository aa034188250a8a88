# SPDX-License-Identifier: Apache-2.0
"""How models behind addresses are asked for: whatever takes a path to read takes an address."""

from __future__ import annotations

from typing import Any

from ._core import configure_remote


def configure(**settings: Any) -> None:
    """Say how objects are asked for that this process opens from now on.

    What is not given has its default: the environment, as the stores' own tools read it. Each call
    replaces all of the one before; configure() takes everything back.

    endpoint: of s3://, gs://, az:// or hf://, such as "http://127.0.0.1:9000".
    region, access_key, secret_key, session_token: of s3:// (keys also of gs://).
    bearer_token: of gs:// and hf://. account, sas_token: of az://.
    anonymous: nothing is signed, and no credentials are looked for.
    bucket_style: "path", "host" or "auto". ca_file: certificates to trust.
    connect_ms, first_byte_ms, stall_ms: patience. tries_max, retry_base_ms, retry_cap_ms: tries in
    a row without progress, and the waits between them. connections_max: at one host.
    no_overwrite: save only where no object is there (else FileExistsError).
    """
    configure_remote(**settings)
