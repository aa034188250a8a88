#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the version that include/fastsafetensors/version.h declares: the single source."""

import pathlib
import re

header = pathlib.Path(__file__).parent.parent / "include/fastsafetensors/version.h"
parts = dict(re.findall(r"#define FST_VERSION_(\w+) (\d+)", header.read_text()))
print("{MAJOR}.{MINOR}.{PATCH}".format(**parts))
