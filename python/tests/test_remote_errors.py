# SPDX-License-Identifier: Apache-2.0
"""Errors of remote loads name the cause: the proxy, the certificate file, the token file."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import numpy
import pytest
from object_store import object_store
from web_server import skip_without_libcurl

from fastsafetensors import numpy as fst_numpy
from fastsafetensors import remote

LOAD_PROGRAM = """
import sys
from fastsafetensors import numpy, remote
remote.configure(retry_base_ms=1)
try:
    numpy.load_file(sys.argv[1])
except OSError as error:
    print(type(error).__name__, error)
"""


@contextmanager
def closed_port() -> Iterator[int]:
    """A port of the loopback interface where nothing listens."""
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        yield unused.getsockname()[1]


def load_error(url: str, **variables: str) -> str:
    """Return the error of a load in a process with these environment variables."""
    skip_without_libcurl()
    unwanted = ("proxy", "aws", "azure", "google", "ssl_", "curl_")
    environment = {
        name: value for name, value in os.environ.items()
        if not any(part in name.lower() for part in unwanted)
    }
    done = subprocess.run(
        [sys.executable, "-c", LOAD_PROGRAM, url], env={**environment, **variables},
        capture_output=True, text=True, check=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    ("scheme", "variable"),
    [("http", "http_proxy"), ("https", "https_proxy"), ("https", "HTTPS_PROXY"),
     ("http", "all_proxy"), ("https", "ALL_PROXY")],
)
def test_a_proxy_that_accepts_no_connection_is_named(scheme: str, variable: str) -> None:
    """The message has the variable and the proxy's address, and never its password."""
    with closed_port() as port:
        proxy = f"http://user:secret@127.0.0.1:{port}/"
        told = load_error(f"{scheme}://models.example/m.safetensors", **{variable: proxy})
        assert f"proxy refused the connection ({variable}: http://127.0.0.1:{port})" in told
        assert "the host refused the connection" not in told
        assert "secret" not in told and "user" not in told
        # With an unescaped slash the address is wrong, and still no part of the password is shown.
        proxy = f"http://user:secret@pass/word@127.0.0.1:{port}/"
        told = load_error(f"{scheme}://models.example/m.safetensors", **{variable: proxy})
        assert "proxy" in told and "secret" not in told and "word" not in told


@pytest.mark.parametrize("exempt", ["*", "127.0.0.1", "localhost, 127.0.0.1"])
def test_a_proxy_that_is_not_used_is_not_named(exempt: str) -> None:
    """If no_proxy has the host, the error names the host and not the proxy."""
    with closed_port() as port, closed_port() as other:
        proxy = f"http://127.0.0.1:{other}"
        url = f"http://127.0.0.1:{port}/m.safetensors"
        told = load_error(url, http_proxy=proxy, no_proxy=exempt)
        assert "the host refused the connection" in told and "proxy" not in told


@pytest.mark.parametrize("variable", ["AWS_CA_BUNDLE", "SSL_CERT_FILE", "CURL_CA_BUNDLE"])
def test_a_bad_certificate_file_is_named_with_its_variable(
    variable: str, tmp_path: pathlib.Path
) -> None:
    """Three variables compete, so the message has the one that was used."""
    missing = str(tmp_path / "missing.pem")
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"https://127.0.0.1:{server.getsockname()[1]}/m.safetensors"
        told = load_error(url, **{variable: missing})
    assert f"certificate file can't be read: {missing}, from {variable}" in told


@pytest.mark.parametrize(
    ("url", "variables"),
    [
        ("s3://bucket/m.safetensors",
         {"AWS_WEB_IDENTITY_TOKEN_FILE": "FILE", "AWS_ROLE_ARN": "arn:aws:iam::1:role/r",
          "AWS_EC2_METADATA_DISABLED": "true", "AWS_REGION": "us-east-1"}),
        ("s3://bucket/m.safetensors",
         {"AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": "FILE", "AWS_REGION": "us-east-1",
          "AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1:9/keys"}),
        ("az://account/container/m.safetensors",
         {"AZURE_FEDERATED_TOKEN_FILE": "FILE", "AZURE_TENANT_ID": "t", "AZURE_CLIENT_ID": "c"}),
        ("gs://bucket/m.safetensors", {"GOOGLE_APPLICATION_CREDENTIALS": "FILE"}),
    ],
)
def test_a_missing_credentials_file_is_named(
    url: str, variables: dict[str, str], tmp_path: pathlib.Path
) -> None:
    """The message has variable, path and ENOENT; the error is not that of a missing model."""
    missing = str(tmp_path / "absent_token")
    variable = next(name for name, value in variables.items() if value == "FILE")
    given = {name: missing if value == "FILE" else value for name, value in variables.items()}
    told = load_error(url, HOME=str(tmp_path), **given)
    assert variable in told and f"{missing} (ENOENT: " in told
    assert told.startswith("PermissionError")


def test_create_only_reports_equal_content(tmp_path: pathlib.Path) -> None:
    """The object that is there has the bytes of this save, from this save or an earlier one."""
    tensors = {"a": numpy.arange(100)}
    with object_store() as server:
        try:
            remote.configure(endpoint=server.url, anonymous=True, create_only=True)
            fst_numpy.save_file(tensors, "s3://bucket/m.safetensors")
            with pytest.raises(FileExistsError) as same:
                fst_numpy.save_file(tensors, "s3://bucket/m.safetensors")
            with pytest.raises(FileExistsError) as other:
                fst_numpy.save_file({"a": numpy.ones(100)}, "s3://bucket/m.safetensors")
        finally:
            remote.configure()
    assert "It has the same content as this save" in str(same.value)
    assert "it is unknown" not in str(same.value)
    assert "same content" not in str(other.value)
