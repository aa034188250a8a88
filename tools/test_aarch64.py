#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Cross-builds the C tests for aarch64 and runs them under qemu-aarch64.

Without the tools the run is skipped, and the message names them. On Debian they are
gcc-aarch64-linux-gnu and qemu-user.
"""

import shutil
import sys

from run_tests import ROOT, build_folder, closing_line, count_junit, run


def main() -> int:
    """Build and run."""
    tools = ("aarch64-linux-gnu-gcc", "qemu-aarch64")
    missing = [tool for tool in tools if not shutil.which(tool)]
    if missing:
        print(f"  skipped aarch64: {', '.join(missing)} not installed")
        print("0 passed, 0 failed, 1 skipped")
        return 0
    folder = build_folder("aarch64", ["--cross-file", str(ROOT / "tools/aarch64.ini"),
                                      "-Dwerror=true"])
    if folder is None:
        return 1
    done = run(["meson", "test", "-C", str(folder), "--print-errorlogs", "--no-rebuild",
                "--timeout-multiplier", "4", "--no-suite", "host"], capture_output=True)
    counts = count_junit(folder / "meson-logs/testlog.junit.xml")
    if done.returncode:
        print(done.stdout[-6000:])
    print(closing_line(counts))
    return bool(counts["failed"] or done.returncode)


if __name__ == "__main__":
    sys.exit(main())
