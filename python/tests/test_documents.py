# SPDX-License-Identifier: Apache-2.0
"""The examples in the documents run, and the pages agree with the code and each other."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap

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
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "torch.Size([100, 4])\n"


def test_the_readme_s_commands_run(command, tmp_path, torch):
    """The block of commands that name model.safetensors; each prints something."""
    from fastsafetensors.torch import save_file

    text = (PAGE.parents[1] / "README.md").read_text()
    block = next(code for code in re.findall(r"```sh\n(.*?)```", text, re.S) if "show" in code)
    save_file({"embeddings.weight": torch.ones(300, 4)}, tmp_path / "model.safetensors")
    folder = str(pathlib.Path(command).parent)
    for line in block.splitlines():
        done = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True,
                              env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"})
        assert done.returncode == 0 and done.stdout + done.stderr, (line, done.stderr)


ROOT = PAGE.parents[1]
PAGES = sorted(path for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "testing/*.md",
                                    "benchmarks/*.md") for path in ROOT.glob(pattern))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page):
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


def test_metadata_has_no_dead_urls():
    """No URLs of other projects with the same name, such as the page of the format."""
    text = (ROOT / "pyproject.toml").read_text()
    table = text.partition("[project.urls]")[2].partition("\n[")[0]
    urls = re.findall(r'"(https?://[^"]+)"', table)
    assert urls == ["https://huggingface.co/docs/safetensors"]
    assert "no public address yet" in (ROOT / "docs/package.md").read_text()


def test_environment_page_is_complete(tmp_path):
    """A variable without a row fails; a variable that another page names has a row, too."""
    tool = ROOT / "tools/make_environment.py"
    done = subprocess.run([sys.executable, tool, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    for name in ("tools", "docs", "cli"):
        (tmp_path / name).mkdir()
    (tmp_path / "tools/tool.py").write_text(tool.read_text())
    (tmp_path / "cli/a.c").write_text('const char *a = getenv("FASTSAFETENSORS_UNDESCRIBED");')
    done = subprocess.run([sys.executable, tmp_path / "tools/tool.py", "--check"],
                          capture_output=True, text=True)
    assert done.returncode == 1 and "reads FASTSAFETENSORS_UNDESCRIBED" in done.stdout
    known = (ROOT / "docs/environment.md").read_text()
    for page in PAGES:
        for name in re.findall(r"\b(?:FASTSAFETENSORS|AWS|AZURE|GOOGLE|GCE|HF|XDG)_[A-Z0-9_]+\b",
                               re.sub(r"`(?:tests|python)/[^`]*`", "", page.read_text())):
            assert name in known or name.endswith("_"), (page, name)


def test_the_word_list_is_a_ratchet(tmp_path):
    """One phrase more than allowed is an error that names the area. --update never raises a
    count."""
    (tmp_path / "tools").mkdir()
    for name in ("check_words.py", "words.txt"):
        (tmp_path / "tools" / name).write_text((ROOT / "tools" / name).read_text())
    left = tmp_path / "tools/words_left.txt"

    def check(text, *arguments):
        (tmp_path / "README.md").write_text(text)
        return subprocess.run([sys.executable, tmp_path / "tools/check_words.py", *arguments],
                              capture_output=True, text=True)

    phrase = "The file goes away when nobody reads it.\n"
    assert check(phrase, "--update").returncode == 0
    assert "readme 2" in left.read_text()
    assert check("    nobody\n`nobody`\n" + phrase).returncode == 0
    done = check(phrase + "Nothing is told.\n")
    assert done.returncode == 1 and "readme: 3 phrases" in done.stdout
    assert check(phrase + "Nothing is told.\n", "--update").returncode == 1
    assert check("The file is deleted.\n", "--update").returncode == 0
    assert "readme 0" in left.read_text() and check(phrase).returncode == 1


def test_the_index_leads_to_every_page():
    index = (ROOT / "docs/index.md").read_text()
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/howto").glob("*.md")]
    for page in pages:
        name = page.relative_to(ROOT / "docs").as_posix()
        assert name in ("index.md", "package.md") or f"({name})" in index, name


def test_only_the_benchmark_page_links_to_the_history():
    for page in PAGES:
        if page.relative_to(ROOT).as_posix() != "docs/benchmarks/README.md":
            assert "history/" not in page.read_text(), page


def test_the_tutorial_s_programs_run(tmp_path):
    """With a model of 1 MiB, and two runs instead of ten."""
    text = (ROOT / "docs/tutorial.md").read_text()
    make, compare, use = re.findall(r"```python\n(.*?)```", text, re.S)
    programs = {"make_model.py": make.replace("4096, 8192", "64, 512"),
                "compare.py": compare.replace("range(5)", "range(1)"),
                "use.py": use}
    for name, code in programs.items():
        (tmp_path / name).write_text(code)
        done = subprocess.run([sys.executable, name], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, (name, done.stderr)
    assert done.stdout == "16 tensors\ntorch.Size([2, 512])\n"


HOW_TOS = sorted((ROOT / "docs/howto").glob("*.md"))


@pytest.mark.parametrize("page", HOW_TOS, ids=lambda page: page.stem)
def test_how_to_imports_exist(page, tmp_path, torch):
    """Programs compile and imports work. Calls are not made: they need a network or a model."""
    imports = []
    for code in re.findall(r"^ *```python\n(.*?)```", page.read_text(), re.S | re.M):
        code = textwrap.dedent(code)
        compile(code, str(page), "exec")
        imports += [line for line in code.splitlines()
                    if re.match(r"(from|import) (fastsafetensors|torch)", line)]
    done = subprocess.run([sys.executable, "-c", "\n".join(imports)], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_verification_how_to_s_commands_work(command, tmp_path, torch):
    """In their order, with a new key; the changed model then fails its check."""
    from fastsafetensors.torch import save_file

    if not shutil.which("openssl"):
        pytest.skip("no openssl to make a key with")
    text = (ROOT / "docs/howto/verify-in-ci.md").read_text()
    lines = [line for block in re.findall(r"^ *```sh\n(.*?)```", text, re.S | re.M)
             for line in textwrap.dedent(block).splitlines()]
    keys = re.findall(r"`(openssl [^`]*)`", text)
    assert len(lines) == 6 and len(keys) == 2
    (tmp_path / "folder").mkdir()
    save_file({"weight": torch.ones(4)}, tmp_path / "folder/model.safetensors")
    path = f"{pathlib.Path(command).parent}:{os.environ['PATH']}"

    def run(line):
        return subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True,
                              env={**os.environ, "PATH": path})

    for line in [*keys, *lines]:
        done = run(line)
        if done.returncode == 4:
            pytest.skip(done.stderr)
        assert done.returncode == 0, (line, done.stderr)
    (tmp_path / "folder/more").write_text("not signed")
    assert run(lines[3]).returncode == 1


def test_the_checkpoint_how_to_s_saves_work(tmp_path, torch):
    text = (ROOT / "docs/howto/training-checkpoints.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))
    code += ("import torch\nfrom fastsafetensors.torch import load_file\n"
             "model = torch.nn.Linear(4, 3)\nsave_checkpoint(model, 7)\n"
             "save_shards(model.state_dict(), 'shards')\nsave_ranks(model.state_dict(), 'ranks')\n"
             "load_ranks(model.state_dict(), 'ranks')\n"
             "loaded = load_file('checkpoint.safetensors', verify=True)\n"
             "assert loaded.keys() == {'weight', 'bias'}\n"
             "assert load_file('shards').keys() == load_file('ranks').keys()\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr


def test_the_library_s_manual_is_made_of_the_headers():
    """Each header has a man page, and every exported function is on one."""
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
    """It compiles without a warning, links with the built library, and loads a file."""
    if not shutil.which("cc"):
        pytest.skip("no cc")
    text = (ROOT / "README.md").read_text()
    (tmp_path / "t.c").write_text(re.search(r"```c\n(.*?)```", text, re.S).group(1))
    library = pathlib.Path(command).parents[1] / "src"
    subprocess.run(["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/include", "t.c",
                    "-o", "t", f"-L{library}", "-lfastsafetensors", f"-Wl,-rpath,{library}"],
                   cwd=tmp_path, check=True)
    header = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    done = subprocess.run([tmp_path / "t"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "a: 2 bytes\n")
    (tmp_path / "model.safetensors").unlink()
    done = subprocess.run([tmp_path / "t"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "model.safetensors" in done.stderr


def test_the_figures_are_the_newest_measurements():
    """README.md, the benchmark page and their pictures."""
    done = subprocess.run([sys.executable, ROOT / "tools/draw_figure.py", "--check"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_newest_measurement_is_chosen_by_date(tmp_path):
    """By the date and time in a file's name, not by the words before them."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import benchmark_data
    finally:
        sys.path.pop(0)
    names = ["starts-streams-2026-11-22.md", "starts-places-2026-11-24-0840.md",
             "starts-grid-2026-11-24.md", "starts-zero-2026-11-23-2359.md"]
    found = benchmark_data.newest(tmp_path / name for name in names)
    assert found.name == "starts-places-2026-11-24-0840.md"
    table = "## Views\n\n| disk | 1 GiB | {} | {} [1.0-9.0] | - | - | - |\n"
    for name, ours in ((names[0], "2.0"), (names[1], "3.0")):
        (tmp_path / name).write_text(table.format("ours", ours)
                                     + table.format("safetensors", "6.0").split("\n\n")[1])
    rows = {}
    for name in names[:2]:
        rows[name] = benchmark_data.rows_of_starts(tmp_path / name)["Views", "disk", "1 GiB", 0]
    assert [rows[name].speedup for name in names[:2]] == [3.0, 2.0]
    assert rows[names[1]].stamp > rows[names[0]].stamp
    benchmark_data.FOLDERS = (tmp_path,)
    assert benchmark_data.newest_rows()["Views", "disk", "1 GiB", 0].ours.median == 3.0


# A decimal number with a unit of time or speed, or a factor. Whole numbers are limits and sizes.
FIGURE = re.compile(r"(?<![\w.])(\d+\.\d+) ?(x|s|ms|us|GB/s)(?![\w])")
# Pages with their own measurements. None of them may repeat a row of the benchmark page.
FIGURE_PAGES = [path for path in PAGES if path.name not in ("CHANGELOG.md", "FORMAT.md")
                and "benchmarks" not in path.parts and "history" not in path.parts]


@pytest.mark.parametrize("page", FIGURE_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_figures_are_those_of_the_benchmark_page(page):
    """Every time, speed or factor on any page is also on the benchmark page, so pages agree."""
    bench = (ROOT / "docs/benchmarks/README.md").read_text()
    factors = {value for value, unit in FIGURE.findall(bench) if unit == "x"}
    numbers = set(re.findall(r"(?<![\w.])\d+\.\d+(?![\w.]*\d)", bench)) | factors
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    wrong = [match.group() for match in FIGURE.finditer(text)
             if match.group(1) not in (factors if match.group(2) == "x" else numbers)]
    assert not wrong, f"{wrong} are not on docs/benchmarks/README.md"
    if page.name == "integrations.md" or "howto" in page.parts:
        assert not FIGURE.search(text), "link to the benchmark page instead of repeating a figure"


def test_pages_have_every_status_and_only_real_commands(command):
    """docs/errors.md has every status; the README's commands are commands."""
    names = re.findall(r'X\(FST_\w+, "(\w+)"', (ROOT / "src/base/status_map.h").read_text())
    page = (ROOT / "docs/errors.md").read_text()
    assert len(names) > 25
    assert not [name for name in names if name not in ("Ok", "End") and name not in page]
    known = subprocess.run([command, "__complete", ""], capture_output=True, text=True).stdout
    for text in re.findall(r"^fastsafetensors (\w+) ", (ROOT / "README.md").read_text(), re.M):
        assert text in known.split(), text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_in_pages_exist(page, command):
    """Subcommands and their options, targets of make, and paths of the tree."""
    def complete(*words):
        return subprocess.run([command, "__complete", *words], capture_output=True,
                              text=True).stdout.split()

    text = page.read_text()
    for line in re.findall(r"(?:`|^\$ |^)fastsafetensors (\w+(?![\w./])[^`\n#&|]*)", text,
                           re.M):
        word, *rest = line.split()
        if word in ("COMMAND", "PATH", "help") or not word.islower():
            continue
        assert word in complete(""), line
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", " ".join(rest)):
            assert option in complete(word, "--"), line
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"[a-z][a-z0-9-]*", makefile.partition(".PHONY:")[2].split("\n")[0]))
    for target in re.findall(r"`make ([a-z][a-z0-9-]*)", text):
        assert target in targets, target
    for path in re.findall(r"`((?:tools|tests|benchmarks|python|examples|src|cli|docs|bench|fuzz)/"
                           r"[\w/.-]+\.\w+)`", text):
        assert (ROOT / path).exists() or path == "tools/style_exceptions.txt", path


STATES_GPU = ["CHANGELOG.md", "README.md", "docs/gpu.md", "docs/known-limits.md", "docs/package.md",
              "docs/python.md", "docs/reliability.md"]


def test_pages_state_the_same_gpu_status():
    """All pages about GPUs state the one that the code ran on, and that no AMD GPU was tried."""
    for name in STATES_GPU:
        text = " ".join((ROOT / name).read_text().replace("**", "").split())
        assert "NVIDIA H200" in text and "AMD" in text, name
        assert "never run on a real GPU" not in text, name
    for page in PAGES:
        text = " ".join(re.sub(r"^> ?", "", page.read_text(), flags=re.M).replace("**", "").split())
        for sentence in re.findall(r"[^.]*\b(?:real GPU|real hardware|on hardware)\b[^.]*", text):
            negation = r"\b(never|no|not|untested|until|without|only|have a gpu)\b"
            assert re.search(negation, sentence, re.I), (page.name, sentence)


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
