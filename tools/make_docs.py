#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds the documents' site into build/site: pages, the Python and the C reference.

The pages are those of docs/ and the pages of the root folder that they link to. The Python
reference is made from docstrings, the C reference from the public headers. A broken link fails the
build.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

from read_headers import HEADERS, read_header

ROOT = pathlib.Path(__file__).resolve().parent.parent
STAGE = ROOT / "build/docs"
SITE = ROOT / "build/site"
ROOT_PAGES = ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md", "SUPPORT.md", "RELEASING.md")
# The modules that programs import. Names that begin with "_" are private.
MODULES = ("fastsafetensors", "fastsafetensors.torch", "fastsafetensors.numpy",
           "fastsafetensors.lazy", "fastsafetensors.distributed", "fastsafetensors.checkpoint",
           "fastsafetensors.integrations", "fastsafetensors.compat",
           "fastsafetensors.fast_loading")
CONFIGURATION = """\
site_name: fastsafetensors
docs_dir: {stage}
site_dir: {site}
use_directory_urls: false
theme:
  name: material
  font: false
  palette:
    - media: "(prefers-color-scheme: light)"
      scheme: default
      toggle: {{icon: material/weather-night, name: dark}}
    - media: "(prefers-color-scheme: dark)"
      scheme: slate
      toggle: {{icon: material/weather-sunny, name: light}}
plugins:
  - search
  - mkdocstrings:
      handlers:
        python:
          paths: [{python}]
          options: {{show_source: false, show_root_heading: true, heading_level: 2}}
markdown_extensions: [tables, admonition, pymdownx.superfences]
validation:
  links: {{not_found: warn, anchors: warn, absolute_links: warn}}
nav:
  - Start here: index.md
  - Tutorial: tutorial.md
  - How-to:
      - vLLM and SGLang cold start: howto/vllm-cold-start.md
      - S3 with a disk cache: howto/s3-disk-cache.md
      - Share weights on a node: howto/share-weights-on-a-node.md
      - Checkpoints while training: howto/training-checkpoints.md
      - Verification in CI: howto/verify-in-ci.md
      - ComfyUI: howto/comfyui.md
      - LoRA training: howto/lora-training.md
      - Python by task: python.md
      - Integrations: integrations.md
      - Troubleshooting: troubleshooting.md
  - Reference:
      - The command: command.md
      - C library: c-library.md
      - Inference engines: engines.md
      - Remote models: remote.md
      - Verified loads: verify.md
      - Compressed weights: compression.md
      - Errors: errors.md
      - Environment variables: environment.md
      - File format: FORMAT.md
      - Compatibility: compatibility.md
      - Python: reference-python.md
      - C: reference-c.md
  - Explanation:
      - Architecture: ARCHITECTURE.md
      - Inside:
          - Loads: internals/loading.md
          - Saves: internals/saving.md
          - Weight deltas: internals/deltas.md
          - Python: internals/python.md
          - Decisions: internals/decisions.md
      - GPUs: gpu.md
      - Many ranks: scaling.md
      - Reliability: reliability.md
      - Benchmarks: benchmarks/README.md
  - Project: [CONTRIBUTING.md, SECURITY.md, SUPPORT.md, RELEASING.md, CHANGELOG.md]
"""


def stage_page(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copy a page. Links to root pages become links to their copies, and links to other files plain
    names."""
    def change(match: re.Match[str]) -> str:
        text, link = match.group(1), match.group(2)
        path, hash_mark, anchor = link.partition("#")
        if "://" in link or not path:
            return match.group(0)
        place = (source.parent / path).resolve()
        if not place.exists():
            raise SystemExit(f"{source.relative_to(ROOT)}: {link} leads nowhere")
        name = place.relative_to(ROOT).as_posix()
        if name in ROOT_PAGES and target.parent == STAGE:
            return f"[{text}]({name}{hash_mark}{anchor})"
        if place.is_relative_to(ROOT / "docs") and place.is_file():
            return match.group(0)
        if name == "docs/benchmarks":
            return f"[{text}](benchmarks/README.md)"
        return f"{text} (`{name}`)"  # a file of the source tree

    text = source.read_text()
    target.write_text(re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", change, text))


def c_reference() -> str:
    """Return a page of the public headers: every comment with its declaration."""
    out = ["# C reference", "", "Made of the public headers, which are the reference.", ""]
    for name in HEADERS:
        out += [f"## {name}.h", ""]
        for block in read_header(name):
            out += [*block.comment, ""] if block.comment else ["```c", block.code, "```", ""]
    return "\n".join(out) + "\n"


def python_reference() -> str:
    """Return a page with the docstrings of the public modules."""
    out = ["# Python reference", ""]
    for module in MODULES:
        out += [f"::: {module}", ""]
    return "\n".join(out)


def main() -> int:
    """Stage the pages and build the site."""
    shutil.rmtree(STAGE, ignore_errors=True)
    shutil.copytree(ROOT / "docs", STAGE)
    for source in (ROOT / "docs").rglob("*.md"):
        stage_page(source, STAGE / source.relative_to(ROOT / "docs"))
    for name in ROOT_PAGES:
        stage_page(ROOT / name, STAGE / name)
    (STAGE / "package.md").unlink(missing_ok=True)  # of package indexes
    (STAGE / "reference-c.md").write_text(c_reference())
    (STAGE / "reference-python.md").write_text(python_reference())
    configuration = ROOT / "build/mkdocs.yml"
    configuration.write_text(CONFIGURATION.format(stage=STAGE, site=SITE, python=ROOT / "python"))
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f",
                           str(configuration)], cwd=ROOT,
                          env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    if done.returncode == 0:
        print(f"{SITE.relative_to(ROOT)}/index.html: {len(list(SITE.rglob('*.html')))} pages")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
