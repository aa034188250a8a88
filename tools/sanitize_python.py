#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""sanitize_python.py [TEST...]: Python tests with the extension under ASan and UBSan.

Builds the extension with the sanitizers in build/pyasan, copies the package's Python files there,
and preloads the sanitizers' runtimes. Leak detection is off, because the interpreter keeps memory
until it exits.
"""

import os
import shutil
import subprocess
import sys

from run_tests import ROOT, build_folder

FOLDER = ROOT / "build/pyasan"
TESTS = ["test_load.py", "test_open.py", "test_errors.py", "test_save.py", "test_convert.py",
         "test_load_model.py", "test_fuzz_python.py"]


def main() -> int:
    """Build, lay out, run."""
    built = build_folder("pyasan", ["-Dwheel=true", "-Dtests=false", "-Db_lundef=false",
                                    "-Db_sanitize=address,undefined",
                                    "-Dbuildtype=debugoptimized"])
    if built is None:
        return 1
    package = FOLDER / "package/fastsafetensors"
    shutil.rmtree(package.parent, ignore_errors=True)
    shutil.copytree(ROOT / "python/fastsafetensors", package)
    for module in (FOLDER / "python").glob("_core*.so"):
        shutil.copy(module, package)
    runtimes = [subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True,
                               check=True).stdout.strip() for name in ("libasan.so", "libubsan.so")]
    environment = dict(os.environ, LD_PRELOAD=":".join(runtimes), PYTHONPATH=str(package.parent),
                       PYTHONMALLOC="malloc", PYTHONDONTWRITEBYTECODE="1",
                       ASAN_OPTIONS="detect_leaks=0:allocator_may_return_null=1",
                       UBSAN_OPTIONS="halt_on_error=1:print_stacktrace=1")
    tests = [str(ROOT / "python/tests" / name) for name in sys.argv[1:] or TESTS]
    return subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
                          cwd=FOLDER, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
