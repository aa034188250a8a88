# SPDX-License-Identifier: Apache-2.0
"""Real servers for tests: nginx, SeaweedFS, moto and fake-gcs-server, if installed.

Programs are searched on the PATH, next to this Python, and in build/servers (which
`make build/servers/.ready` fills).
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = [ROOT / "build" / "servers" / "bin", pathlib.Path(sys.executable).parent]


def find_program(name: str) -> str | None:
    """A program's path; None where it is not installed."""
    places = [str(folder) for folder in FOLDERS] + os.environ.get("PATH", "").split(":")
    found = shutil.which(name, path=":".join([*places, "/usr/sbin"]))
    if found is None and name == "fake-gcs-server":
        for folder in FOLDERS:
            inside = sorted(folder.parent.glob("lib*/python*/site-packages/**/fake-gcs-server*"))
            found = next((str(p) for p in inside if p.is_file() and os.access(p, os.X_OK)), None)
            if found is not None:
                break
    return found


def free_port() -> int:
    """A free port below those of outgoing connections. The port 10,000 above it is free too,
    because some servers listen there as well."""
    while True:
        port = random.SystemRandom().randrange(10000, 22000)
        with (
            contextlib.suppress(OSError),
            contextlib.closing(socket.create_server(("127.0.0.1", port))),
            contextlib.closing(socket.create_server(("127.0.0.1", port + 10000))),
        ):
            return port


def wait_for(port: int, process: subprocess.Popen[bytes], limit_s: float = 120) -> None:
    """Wait until a server accepts connections at the port."""
    end = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"{process.args} did not start (exit {process.poll()})")
        time.sleep(0.02)


@contextlib.contextmanager
def running(port: int, words: list[str], **options: object) -> Iterator[None]:
    """Run a program that listens at a port, during a `with` block."""
    process = subprocess.Popen(
        words,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        **options,  # type: ignore
    )
    try:
        wait_for(port, process)
        yield
    finally:
        process.terminate()
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


NGINX = """
daemon off; master_process off; worker_processes 1; pid nginx.pid; error_log error.log;
events {{ worker_connections 512; }}
http {{
  access_log access.log; sendfile on; client_body_temp_path b; proxy_temp_path p;
  fastcgi_temp_path f; uwsgi_temp_path u; scgi_temp_path s;
  server {{ listen 127.0.0.1:{port}{tls}; location / {{ alias {folder}/; }} }}
}}
"""


@contextlib.contextmanager
def nginx(
    work: pathlib.Path, folder: pathlib.Path, certificate: tuple[str, str] | None = None
) -> Iterator[str]:
    """Serve a folder with nginx, by TLS if `certificate` is (file, its key). Yields the URL."""
    port = free_port()
    tls = ""
    if certificate is not None:
        tls = f" ssl; ssl_certificate {certificate[0]}; ssl_certificate_key {certificate[1]}"
    work.mkdir(exist_ok=True)
    (work / "nginx.conf").write_text(NGINX.format(port=port, tls=tls, folder=folder))
    program = find_program("nginx")
    assert program is not None
    with running(port, [program, "-p", f"{work}/", "-c", "nginx.conf", "-e", "error.log"]):
        host = "localhost" if certificate else "127.0.0.1"
        yield f"{'https' if certificate else 'http'}://{host}:{port}/"


@contextlib.contextmanager
def seaweed(work: pathlib.Path, key: str, secret: str) -> Iterator[str]:
    """Run SeaweedFS, which checks signatures, with a bucket "bench"."""
    port = free_port()
    ports = {name: free_port() for name in ("master", "volume", "filer")}
    work.mkdir(exist_ok=True)
    words = [
        str(find_program("weed")), "mini", f"-dir={work}", "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1", f"-s3.port={port}", "-master.telemetry=false", "-admin.ui=false",
        "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-bucket=bench",
        *[f"-{name}.port={number}" for name, number in ports.items()],
    ]  # fmt: skip
    environment = {
        **os.environ, "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret,
    }  # fmt: skip
    with running(port, words, cwd=work, env=environment):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def moto() -> Iterator[str]:
    """Moto's server: S3 and STS."""
    port = free_port()
    with running(port, [str(find_program("moto_server")), "-H", "127.0.0.1", "-p", str(port)]):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def fake_gcs(work: pathlib.Path) -> Iterator[str]:
    """fake-gcs-server, which keeps objects in a folder."""
    port = free_port()
    work.mkdir(exist_ok=True)
    words = [
        str(find_program("fake-gcs-server")), "-scheme", "http", "-host", "127.0.0.1",
        "-port", str(port), "-backend", "filesystem", "-filesystem-root", str(work),
        "-public-host", f"127.0.0.1:{port}",
    ]  # fmt: skip
    with running(port, words):
        yield f"http://127.0.0.1:{port}"
