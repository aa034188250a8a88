#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The version that include/fastsafetensors/version.h declares, which is its single source."""

import pathlib
import re

HEADER = pathlib.Path(__file__).parent.parent / "include/fastsafetensors/version.h"
PARTS = dict(re.findall(r"#define FST_VERSION_(\w+) (\d+)", HEADER.read_text()))
VERSION = "{MAJOR}.{MINOR}.{PATCH}".format(**PARTS)

if __name__ == "__main__":
    print(VERSION)
