#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run `make demo` and `make test` in a minimal Debian that has only what the README asks for.

The system is made by debootstrap in build/minimal/RELEASE and entered by chroot, so this needs
root and debootstrap; without them it is skipped (exit status 77). Processes and mounts are in
namespaces of their own and end with the program. With --quick `make demo` and the tests that depend
most on the system are run.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SKIPPED = 77
# Exactly the prerequisites that the README names.
PACKAGES = ("gcc", "libc6-dev", "make", "python3", "python3-venv", "python3-dev",
            "ca-certificates")
# Settings of this machine's network and package index, which the new system needs as well.
COPIED = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/etc/xdg/pip/pip.conf",
          "/etc/xdg/pip/constraints.txt", "/etc/ssl/certs/ca-certificates.crt")
QUICK_TESTS = ("test_load.py", "test_remote.py", "test_remote_cache.py",
               "test_remote_cache_identity.py", "test_packed.py", "test_sign.py")
LIMIT_S = 3600


def missing_tool() -> str | None:
    """Return the reason why the test can't run here, or None."""
    if os.geteuid() != 0:
        return "it needs root"
    for name in ("debootstrap", "chroot", "unshare", "git"):
        if shutil.which(name) is None:
            return f"{name} is not installed"
    return None


def make_system(release: str) -> pathlib.Path:
    """Make the system, or reuse that of an earlier run."""
    system = ROOT / "build/minimal" / release
    if not (system / ".complete").exists():
        shutil.rmtree(system, ignore_errors=True)
        system.mkdir(parents=True)
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}",
                        release, str(system)], check=True, stdout=subprocess.DEVNULL)
        (system / ".complete").touch()
    for name in COPIED:
        source, target = pathlib.Path(name), system / name[1:]
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    return system


def shared_folders() -> list[str]:
    """Return folders outside of the project that pip's configuration names."""
    shown = subprocess.run([sys.executable, "-m", "pip", "config", "list"], text=True,
                           capture_output=True, check=False).stdout
    words = [word.strip("'\"").removeprefix("file://") for word in shown.replace("=", " ").split()]
    return sorted({word for word in words if word.startswith("/") and os.path.isdir(word)})


def script(system: pathlib.Path, targets: str) -> str:
    """Return the shell commands to run in a separate mount namespace."""
    binds = [("/dev", False), *((name, True) for name in shared_folders())]
    lines = ["set -e", f"mount -t proc proc {system}/proc"]
    for name, is_read_only in binds:
        lines.append(f"mkdir -p {system}{name}")
        option = " -o ro" if is_read_only else ""
        lines.append(f"mount --rbind{option} {name} {system}{name}")
    settings = " ".join(f"{name}='{value}'" for name, value in os.environ.items()
                        if name.startswith("PIP_"))
    lines.append(f"exec chroot {system} /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin "
                 f"HOME=/root {settings} sh -c 'cd /root/checkout && {targets}'")
    return "\n".join(lines)


def main() -> int:
    """Make the system and run the targets in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", default="bookworm", help="Debian's name of it")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    reason = missing_tool()
    if reason is not None:
        print(f"the test in a minimal system: {reason}")
        return SKIPPED
    system = make_system(arguments.release)
    shutil.rmtree(system / "root/checkout", ignore_errors=True)
    subprocess.run(["git", "clone", "-q", str(ROOT), str(system / "root/checkout")], check=True)
    tests = " ".join(f"python/tests/{name}" for name in QUICK_TESTS)
    targets = "make demo && make test"
    if arguments.quick:
        targets = ("make demo && make -s all .venv/.test-ready .venv/.package-ready && "
                   f".venv/bin/python -m pytest -q -p no:cacheprovider --timeout=300 {tests}")
    # All processes of the namespace end with unshare.
    done = subprocess.run(["unshare", "--mount", "--propagation", "private", "--pid", "--fork",
                           "--kill-child", "sh", "-c", script(system, targets)],
                          timeout=LIMIT_S, check=False)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
