#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/environment.md: every environment variable that the code reads, and its meaning.

    tools/make_environment.py [--check]

The names are taken from src/, cli/ and python/. A name without a description here, and a
description of a name that the code does not read, are errors. --check compares.
"""

from __future__ import annotations

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/environment.md"

# (section, audience, [(variable, meaning)])
SECTIONS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("The command", "Read by the command `fastsafetensors` only.", [
        ("NO_COLOR", "Set and not empty: no colours."),
        ("TERM", "`dumb`: no colours and no progress bar."),
        ("TMPDIR", "Folder for a model that comes through a pipe, kept in an unnamed temporary "
                   "file. Default: `/tmp`."),
        ("PATH", "Where `convert` looks for `python3` to read torch files, after the folder of "
                 "the command itself. Relative folders are skipped."),
        ("PYTHONPATH", "Passed to that `python3` without its relative folders."),
    ]),
    ("Python: classes of fastsafetensors 0.5", "Read by `SafeTensorsFileLoader`, `AutoLoader` "
     "and their siblings, except where a row says more.", [
        ("FASTSAFETENSORS_CONFIG", "Path of a JSON file with settings for `AutoLoader`. Default: "
                                   "`./fastsafetensors.json`, if it exists."),
        ("FASTSAFETENSORS_ODIRECT", "`0`: read through the page cache; `1`: direct I/O. Default: "
                                    "automatic."),
        ("FASTSAFETENSORS_DEBUG", "`true`: log the statistics of each load at level INFO."),
        ("FASTSAFETENSORS_UNIFIED_MEM", "`1`: the GPU shares memory with the CPU; `0`: it does "
                                        "not. Default: as the driver says. Read by every load "
                                        "to a GPU."),
        ("FASTSAFETENSORS_EP_SLICE", "`1`: load only this rank's experts."),
        ("FASTSAFETENSORS_EP_NUM_EXPERTS", "The number of experts."),
        ("FASTSAFETENSORS_EP_SIZE", "The number of expert-parallel ranks. Default: the size of "
                                    "the torch.distributed group, else `WORLD_SIZE`."),
        ("FASTSAFETENSORS_EP_RANK", "This rank. Default: the rank of the torch.distributed "
                                    "group, else `RANK`."),
        ("WORLD_SIZE", "See `FASTSAFETENSORS_EP_SIZE`."),
        ("RANK", "See `FASTSAFETENSORS_EP_RANK`."),
    ]),
    ("The disk cache", "Read by the C library when a URL is opened, and by "
     "`fastsafetensors cache`. [Remote models](remote.md#the-disk-cache) describes the cache.", [
        ("FASTSAFETENSORS_CACHE_DIR", "Folder of the cache, `auto` or `off`. Default: off. "
                                      "`remote.configure(cache_dir=...)` and `--cache-dir` "
                                      "override it."),
        ("XDG_CACHE_HOME", "`auto` uses `fastsafetensors/objects` in this folder, if the path is "
                           "absolute."),
        ("HOME", "Without `XDG_CACHE_HOME`, `auto` uses `.cache/fastsafetensors/objects` in this "
                 "folder. `~/.aws` and gcloud's folder are looked for here, too."),
    ]),
    ("Compiled GPU kernels", "Read by the C library when a process converts on an AMD GPU for the "
     "first time. [Loading to a GPU](gpu.md#the-kernel) describes the folder.", [
        ("FASTSAFETENSORS_KERNEL_CACHE_DIR", "Folder of compiled kernels, an absolute path; any "
                                             "other text, such as `off`: keep none. Default: "
                                             "`fastsafetensors/kernels` in `XDG_CACHE_HOME`, "
                                             "else in `.cache` of `HOME`."),
    ]),
    ("Shared memory", "Read by the C library in loads with `share=\"node\"`, and by "
     "`fastsafetensors cache`. [Share weights on a node](howto/share-weights-on-a-node.md) "
     "describes it.", [
        ("FASTSAFETENSORS_SHARE_DIR", "Folder of the shared memory, on a tmpfs. It must belong to "
                                      "the user, and no other user may have access. Default: "
                                      "`/dev/shm/fastsafetensors-UID`. `cache --share-dir` "
                                      "overrides it."),
        ("FASTSAFETENSORS_SHARE_GRACE", "Seconds that shared memory stays after its last process, "
                                        "unless the load names a number. Default: 0."),
        ("FASTSAFETENSORS_SHARE_MAX", "The most shared memory of the user, in bytes or as `20G` "
                                      "(K, M, G, T). Default: half of the machine's memory."),
    ]),
    ("The network", "Read by the C library when a URL is opened.", [
        ("FASTSAFETENSORS_OFFLINE", "`1`: use no network; cached objects are still served "
                                    "([remote models](remote.md#offline)). `0`, `false`, `no` "
                                    "and `off` leave it on. It applies even with "
                                    "`remote.configure(offline=False)`."),
        ("FASTSAFETENSORS_PRIVATE_REDIRECTS", "`1`: follow redirects to private addresses "
                                              "([remote models](remote.md#redirects)). It applies "
                                              "even with "
                                              "`remote.configure(private_redirects=False)`."),
        ("HTTPS_PROXY", "The proxy for https, also as `https_proxy`; `http_proxy` is the one for "
         "http, `no_proxy` lists hosts without a proxy. libcurl uses them. The library itself "
         "reads them for messages, and to check redirects."),
        ("NO_PROXY", "Hosts that are reached without a proxy, also as `no_proxy`."),
        ("ALL_PROXY", "The proxy for URLs of schemes without one, also as `all_proxy`."),
    ]),
    ("TLS", "Read by the C library when a URL is opened.", [
        ("AWS_CA_BUNDLE", "File of certificates to trust. The first of these three that is set "
                          "counts; `remote.configure(ca_file=...)` overrides them."),
        ("SSL_CERT_FILE", "See `AWS_CA_BUNDLE`."),
        ("CURL_CA_BUNDLE", "See `AWS_CA_BUNDLE`."),
    ]),
    ("S3", "Read by the C library when an `s3://` URL is opened. [Remote models]"
     "(remote.md#credentials-and-their-order) has the order.", [
        ("AWS_ENDPOINT_URL_S3", "Another server that speaks the S3 protocol."),
        ("AWS_ENDPOINT_URL", "The same, if `AWS_ENDPOINT_URL_S3` is not set."),
        ("AWS_REGION", "The region."),
        ("AWS_DEFAULT_REGION", "The region, if `AWS_REGION` is not set."),
        ("AWS_ACCESS_KEY_ID", "Access key. An error if `AWS_SECRET_ACCESS_KEY` is missing."),
        ("AWS_SECRET_ACCESS_KEY", "Secret key."),
        ("AWS_SESSION_TOKEN", "Session token of temporary keys."),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "File with a web identity token. Keys are fetched from "
                                        "STS for the role `AWS_ROLE_ARN`."),
        ("AWS_ROLE_ARN", "The role for the web identity."),
        ("AWS_ROLE_SESSION_NAME", "Name of the session that STS logs."),
        ("AWS_ENDPOINT_URL_STS", "Another STS server. Default: `AWS_ENDPOINT_URL`, else STS of "
                                 "the region."),
        ("AWS_PROFILE", "Profile in the two files below. Default: `default`."),
        ("AWS_SHARED_CREDENTIALS_FILE", "Default: `~/.aws/credentials`."),
        ("AWS_CONFIG_FILE", "Default: `~/.aws/config`."),
        ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "Keys are fetched from the container service "
                                                   "at this path (ECS)."),
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "Keys are fetched from this URL, https or a "
                                               "loopback or link-local host (EKS)."),
        ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "File with the token for that request."),
        ("AWS_CONTAINER_AUTHORIZATION_TOKEN", "The token, if no file is set."),
        ("AWS_EC2_METADATA_DISABLED", "`true`: do not ask the instance metadata service for "
                                      "keys."),
        ("AWS_EC2_METADATA_SERVICE_ENDPOINT", "Another metadata service. Default: "
                                              "`http://169.254.169.254`."),
    ]),
    ("Google Cloud Storage", "Read by the C library when a `gs://` URL is opened.", [
        ("GOOGLE_OAUTH_ACCESS_TOKEN", "An access token."),
        ("GOOGLE_APPLICATION_CREDENTIALS", "File of a service account or an authorized user."),
        ("CLOUDSDK_CONFIG", "gcloud's folder, where its credentials are. Default: "
                            "`~/.config/gcloud`."),
        ("STORAGE_EMULATOR_HOST", "Another server that speaks Google's XML protocol. Tokens are "
                                  "then not fetched from the metadata service, unless "
                                  "`GCE_METADATA_HOST` is set."),
        ("GCE_METADATA_HOST", "Another metadata service; it is used even if `NO_GCE_CHECK` is "
                              "set."),
        ("NO_GCE_CHECK", "Set and not empty: do not ask the metadata service for a token."),
    ]),
    ("Azure Blob Storage", "Read by the C library when an `az://` URL is opened.", [
        ("AZURE_STORAGE_ACCOUNT_NAME", "The account."),
        ("AZURE_STORAGE_CONNECTION_STRING", "Connection string with the account's key or a "
                                            "shared access signature."),
        ("AZURE_STORAGE_SAS_TOKEN", "Shared access signature."),
        ("AZURE_STORAGE_ACCOUNT_KEY", "The account's key."),
        ("AZURE_STORAGE_KEY", "The same, if `AZURE_STORAGE_ACCOUNT_KEY` is not set."),
        ("AZURE_FEDERATED_TOKEN_FILE", "File with a federated token. An error without "
                                       "`AZURE_TENANT_ID` and `AZURE_CLIENT_ID`."),
        ("AZURE_TENANT_ID", "The tenant of the federated token."),
        ("AZURE_CLIENT_ID", "The client of the federated token, or of a managed identity."),
        ("AZURE_AUTHORITY_HOST", "Default: `https://login.microsoftonline.com/`."),
        ("AZURE_POD_IDENTITY_AUTHORITY_HOST", "Metadata service for managed identities. Default: "
                                              "`http://169.254.169.254`."),
        ("IDENTITY_ENDPOINT", "Managed identity of an App Service, with `IDENTITY_HEADER`."),
        ("IDENTITY_HEADER", "See `IDENTITY_ENDPOINT`."),
    ]),
    ("Hugging Face Hub", "Read by the C library when an `hf://` URL is opened.", [
        ("HF_TOKEN", "The token."),
        ("HUGGING_FACE_HUB_TOKEN", "The token, if `HF_TOKEN` is not set."),
        ("HF_ENDPOINT", "Another server. Default: `https://huggingface.co`."),
    ]),
]

HEAD = """\
<!-- Made by tools/make_environment.py from the code. -->
# Environment variables

The C library reads environment variables for URLs, in loads with `share="node"`, and to find the
folder of compiled GPU kernels. It uses `secure_getenv()`; an empty variable counts as not set.
[SECURITY.md](../SECURITY.md) lists the libraries that are opened.
"""
TAIL = """\
## Read by other libraries

| variable | read by |
|---|---|
| `CUDA_VISIBLE_DEVICES`, `HIP_VISIBLE_DEVICES` and others | the GPU drivers |
| `VLLM_PLUGINS`, `SGLANG_PLUGINS` | the engines: which plug-ins they load |
"""

# Calls that read a variable whose name is a literal in the call.
CALL = re.compile(r'(?:getenv|_environment|environ\.get|_number)\(\s*"([A-Z][A-Z0-9_]+)"'
                  r'|environ\[\s*"([A-Z][A-Z0-9_]+)"')
# Other literals in files with such calls that look like a variable, such as entries of tables.
TEXT = re.compile(r'"([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)"')
READS = re.compile(r"getenv|_environment\(|os\.environ")


def read_names() -> set[str]:
    """Every variable that the code names."""
    found: set[str] = set()
    for folder, pattern in (("src", "*.c"), ("cli", "*.c"), ("python/src", "*.c"),
                            ("python/fastsafetensors", "*.py")):
        for path in (ROOT / folder).rglob(pattern):
            text = path.read_text()
            found.update(a or b for a, b in CALL.findall(text))
            if READS.search(text) or path.parent.name in ("http", "store"):
                found.update(TEXT.findall(text))
    return found


def write_page() -> str:
    """The page's text."""
    out = [HEAD]
    for section, reader, rows in SECTIONS:
        out += [f"## {section}", "", reader, "", "| variable | meaning |", "|---|---|"]
        out += [f"| `{name}` | {meaning} |" for name, meaning in rows]
        out.append("")
    return "\n".join([*out, TAIL])


def main() -> int:
    """Write the page, or compare it."""
    described = {name for _, _, rows in SECTIONS for name, _ in rows}
    names = read_names()
    for name in sorted(names - described):
        print(f"tools/make_environment.py: the code reads {name}, which has no description")
    for name in sorted(described - names):
        print(f"tools/make_environment.py: {name} is described, but the code does not read it")
    if names != described:
        return 1
    text = write_page()
    if "--check" in sys.argv[1:]:
        if PAGE.read_text() != text:
            print("docs/environment.md: run tools/make_environment.py")
            return 1
        return 0
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
