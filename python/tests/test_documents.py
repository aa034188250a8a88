# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/python.md run, each in a folder and a process of its own."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

PAGE = pathlib.Path(__file__).parents[2] / "docs/python.md"
EXAMPLES = re.findall(r"^## (.*?)$.*?```python\n(.*?)```", PAGE.read_text(), re.M | re.S)


@pytest.mark.parametrize(("title", "code"), EXAMPLES, ids=[title for title, _ in EXAMPLES])
def test_example(title, code, tmp_path, torch):
    from fastsafetensors.torch import save_file

    save_file({"weight": torch.ones(8, 4), "bias": torch.zeros(8)}, tmp_path / "model.safetensors")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr


def test_the_readme_s_program_runs(tmp_path, torch):
    from fastsafetensors.torch import save_file

    text = (PAGE.parents[1] / "README.md").read_text()
    code = "".join(re.findall(r"```python\n(.*?)```", text, re.S))
    assert "load_file" in code
    save_file({"embeddings.weight": torch.ones(300, 4)}, tmp_path / "model.safetensors")
    done = subprocess.run([sys.executable, "-c", code + "assert rows.shape == (100, 4)"],
                          cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


ROOT = PAGE.parents[1]
PAGES = sorted(path for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "testing/*.md",
                                    "benchmarks/*.md") for path in ROOT.glob(pattern))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """Relative links of every page name files that exist, and headings that they have."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    for link in links:
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / path) if path else page
        assert target.exists(), link
        if anchor:
            heads = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-")
                     for head in re.findall(r"^#+ (.*)$", target.read_text(), re.M)}
            assert anchor in heads, link


def test_the_page_of_package_indexes_has_no_relative_links():
    text = (ROOT / "docs/package.md").read_text()
    assert all("://" in link for link in re.findall(r"\]\(([^)]+)\)", text))
    assert 'readme = "docs/package.md"' in (ROOT / "pyproject.toml").read_text()


def test_the_metadata_names_no_address_that_is_not_there():
    """Of projects of the same name, say: the format's page, and what is said instead of ours."""
    text = (ROOT / "pyproject.toml").read_text()
    table = text.partition("[project.urls]")[2].partition("\n[")[0]
    urls = re.findall(r'"(https?://[^"]+)"', table)
    assert urls == ["https://huggingface.co/docs/safetensors"]
    assert "no public address yet" in (ROOT / "docs/package.md").read_text()


def test_the_index_leads_to_every_page():
    index = (ROOT / "docs/index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name in ("index.md", "package.md") or f"({page.name})" in index, page.name


def test_the_library_s_manual_is_made_of_the_headers():
    """A page a header; every exported function has its name."""
    done = subprocess.run([sys.executable, ROOT / "tools/make_library_manual.py", "--check"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    text = "".join(path.read_text() for path in (ROOT / "include").rglob("*.h"))
    declared = set(re.findall(r"FST_API[^;(]*?\b(fst_\w+)\(", text))
    names = dict(line.split() for line in (ROOT / "man/functions.txt").read_text().splitlines())
    assert set(names) == declared and len(declared) > 60
    for name, page in names.items():
        assert name in (ROOT / f"man/{page}.3").read_text()
    if not shutil.which("groff"):
        pytest.skip("no groff to look at the pages with")
    for page in (ROOT / "man").glob("*.[13]"):
        done = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-z", page], capture_output=True,
                              text=True)
        assert done.stderr == "", page


def test_the_readme_s_c_program_compiles_and_runs(command, tmp_path):
    """Against the built library, without a warning; it loads what is there."""
    if not shutil.which("cc"):
        pytest.skip("no cc")
    text = (ROOT / "README.md").read_text()
    include, body = re.search(r"```c\n(#include .*?\n)(.*?)```", text, re.S).groups()
    (tmp_path / "t.c").write_text(f"{include}int main(void) {{\n{body}return 0;\n}}\n")
    library = pathlib.Path(command).parents[1] / "src"
    subprocess.run(["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/include", "t.c",
                    "-o", "t", f"-L{library}", "-lfastsafetensors", f"-Wl,-rpath,{library}"],
                   cwd=tmp_path, check=True)
    header = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    assert subprocess.run([tmp_path / "t"], cwd=tmp_path).returncode == 0


def test_the_picture_is_drawn_from_the_data():
    done = subprocess.run([sys.executable, ROOT / "tools/draw_figure.py", "--check"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_pages_name_every_status_and_commands_that_there_are(command):
    """docs/errors.md has every status; the README's commands are commands."""
    names = re.findall(r'X\(FST_\w+, "(\w+)"', (ROOT / "src/base/status_map.h").read_text())
    page = (ROOT / "docs/errors.md").read_text()
    assert len(names) > 25
    assert not [name for name in names if name not in ("Ok", "End") and name not in page]
    known = subprocess.run([command, "__complete", ""], capture_output=True, text=True).stdout
    for text in re.findall(r"^\$ fastsafetensors (\w+) ", (ROOT / "README.md").read_text(), re.M):
        assert text in known.split() or text.endswith("safetensors"), text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_pages_name_is_there(page, command):
    """Subcommands and their options, targets of make, and paths of the tree."""
    def ask(*words):
        return subprocess.run([command, "__complete", *words], capture_output=True,
                              text=True).stdout.split()

    text = page.read_text()
    for line in re.findall(r"(?:`|^\$ |^)fastsafetensors (\w+(?![\w./])[^`\n#&|]*)", text,
                           re.M):
        word, *rest = line.split()
        if word in ("COMMAND", "PATH", "help") or not word.islower():
            continue
        assert word in ask(""), line
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", " ".join(rest)):
            assert option in ask(word, "--"), line
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"[a-z][a-z0-9-]*", makefile.partition(".PHONY:")[2].split("\n")[0]))
    for target in re.findall(r"`make ([a-z][a-z0-9-]*)", text):
        assert target in targets, target
    for path in re.findall(r"`((?:tools|tests|benchmarks|python|examples|src|cli|docs|bench|fuzz)/"
                           r"[\w/.-]+\.\w+)`", text):
        assert (ROOT / path).exists() or path == "tools/style_exceptions.txt", path


def test_the_readme_is_true_of_gpus():
    """Until a report of a real GPU is in the tree, the first page says that there is none."""
    said = "no real GPU has run it yet" in " ".join((ROOT / "README.md").read_text().split())
    reports = list((ROOT / "docs").glob("gpu-report*"))
    assert said or reports


def test_every_row_of_the_threat_model_has_its_test():
    root = PAGE.parents[1]
    rows = re.findall(r"^\| .* \| .* \| (.*) \|$", (root / "SECURITY.md").read_text(), re.M)
    assert len(rows) > 15
    sources = {path.name: path.read_text() for folder in ("tests", "python/tests")
               for path in (root / folder).rglob("test_*.[cp]*") if path.suffix in (".c", ".py")}
    for row in rows[1:]:
        named = re.findall(r"`(test_\w+\.\w+)::(\w+)`", row)
        assert named or set(row) <= {"-", "|"}, row
        for file, test in named:
            assert f"TEST({test})" in sources[file] or f"def {test}(" in sources[file], (file, test)
