# SPDX-License-Identifier: Apache-2.0
"""The installed C library in other projects: pkg-config, examples, symbols, man pages."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def prefix(tmp_path_factory):
    """Install the library, as `make install PREFIX=DIR` does."""
    for tool in ("pkg-config", "cc", "make"):
        if not shutil.which(tool):
            pytest.skip(f"no {tool}")
    folder = tmp_path_factory.mktemp("prefix")
    done = subprocess.run(["make", "-C", ROOT, "install", f"PREFIX={folder}"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def library_folder(prefix):
    return next(prefix.rglob("libfastsafetensors.so")).parent


def pkg_config(prefix, *options):
    environment = dict(os.environ, PKG_CONFIG_PATH=str(library_folder(prefix) / "pkgconfig"))
    return subprocess.run(["pkg-config", *options, "fastsafetensors"], env=environment, check=True,
                          capture_output=True, text=True).stdout.split()


@pytest.mark.parametrize("static", [False, True], ids=["shared", "static"])
def test_examples(prefix, sharded, tmp_path, static):
    folder, tensors = sharded
    flags = pkg_config(prefix, "--cflags", "--libs", *(["--static"] if static else []))
    if static:
        flags = [str(library_folder(prefix) / "libfastsafetensors.a")
                 if f == "-lfastsafetensors" else f for f in flags]
    built = {}
    for source in sorted((ROOT / "examples/c").glob("*.c")):
        built[source.stem] = program = tmp_path / source.stem
        subprocess.run(["cc", "-std=c11", "-Wall", "-Wextra", "-Werror", source, "-o", program,
                        *flags, f"-Wl,-rpath,{library_folder(prefix)}"], check=True)
    assert set(built) == {"load_tensor", "stream_model", "save_tensors", "verify_model"}

    def run(*arguments):
        return subprocess.run(arguments, capture_output=True, text=True)

    done = run(built["load_tensor"], folder, "layer.4.weight")
    assert done.stdout == "layer.4.weight F32 [64, 64] 16384 bytes\n"
    assert run(built["load_tensor"], folder, "nope").returncode == 1
    total = sum(int(t.view(__import__("torch").uint8).sum()) for t in tensors.values())
    for budget in ("1", "256"):
        done = run(built["stream_model"], folder, budget)
        assert done.stdout == f"9 tensors, sum of bytes {total}\n", done.stderr
    for verified in (folder, folder):  # makes the manifest, then uses it
        done = run(built["verify_model"], verified)
        assert done.stdout.startswith("9 tensors, ") and "bytes verified" in done.stdout, (
            done.stderr
        )
    done = run(built["save_tensors"], tmp_path / "saved.safetensors")
    assert done.stdout.endswith("saved.safetensors: 2 tensors, 212 bytes\n"), done.stderr
    from fastsafetensors.torch import load_file

    saved = load_file(tmp_path / "saved.safetensors")
    assert saved["layer.weight"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert saved["layer.bias"].tolist() == [0.5, 0.25, 0]


SIZED = re.compile(
    r"(typedef struct (\w+) \{\n    size_t struct_size;.*?)(\n[^\n]*;[^\n]*)?(\n\} \w+;)", re.S
)


def grown(text: str) -> str:
    """A later version of a header: every struct that may grow has one more field."""
    return SIZED.sub(r"\1\3\n    uint64_t added_later;\4", text)


def shrunk(text: str) -> str:
    """An earlier version: every struct that may grow lacks its last field, fst_part excepted."""

    def cut(match: re.Match[str]) -> str:
        last = "" if match[2] != "fst_part" else match[3]
        return match[1] + last + match[4]

    return SIZED.sub(cut, text)


@pytest.mark.parametrize("version", [grown, shrunk])
def test_programs_of_other_versions(prefix, sharded, tmp_path, version):
    """Programs run that were compiled with headers whose structs are longer or shorter."""
    folder = sharded[0]
    headers = tmp_path / "include"
    shutil.copytree(prefix / "include", headers)
    changed = 0
    for header in headers.rglob("*.h"):
        text = header.read_text()
        header.write_text(version(text))
        changed += version(text) != text
    assert changed >= 6
    for name, arguments, words in (
        ("load_tensor", [folder, "layer.4.weight"], "[64, 64] 16384 bytes"),
        ("stream_model", [folder, "1"], "9 tensors, sum"),
        ("verify_model", [folder], "bytes verified"),
        ("save_tensors", [tmp_path / "s.safetensors"], "2 tensors, 212 bytes"),
    ):
        subprocess.run(
            [
                "cc",
                f"-I{headers}",
                ROOT / f"examples/c/{name}.c",
                "-o",
                tmp_path / name,
                f"-L{library_folder(prefix)}",
                "-lfastsafetensors",
                f"-Wl,-rpath,{library_folder(prefix)}",
            ],
            check=True,
        )
        done = subprocess.run([tmp_path / name, *arguments], capture_output=True, text=True)
        assert words in done.stdout, done.stderr


def test_installed_files(prefix):
    names = {str(p.relative_to(prefix)) for p in prefix.rglob("*") if p.is_file()}
    for wanted in ("bin/fastsafetensors", "include/fastsafetensors.h",
                   "include/fastsafetensors/loader.h", "share/man/man1/fastsafetensors.1",
                   "share/man/man3/libfastsafetensors.3",
                   "lib/pkgconfig/fastsafetensors.pc",
                   "lib/cmake/fastsafetensors/fastsafetensorsConfig.cmake",
                   "share/bash-completion/completions/fastsafetensors",
                   "share/zsh/site-functions/_fastsafetensors",
                   "share/fish/vendor_completions.d/fastsafetensors.fish"):
        assert wanted in names
    assert not any("internal" in n or n.startswith("include/src") for n in names)
    done = subprocess.run([prefix / "bin/fastsafetensors", "--version"], capture_output=True,
                          text=True, env={})
    assert done.returncode == 0, done.stderr  # it finds its library without help
    assert pkg_config(prefix, "--modversion") == [done.stdout.split()[1]]


def test_only_what_is_installed_is_built(prefix):
    log = (ROOT / "build/install.log").read_text()
    assert "tests/" not in log and "fuzz/" not in log and "bench/" not in log


def test_uncovered_lines_are_listed(prefix):
    """Programs find the library by the lines that the installation prints, and by no others."""
    done = subprocess.run(["sh", ROOT / "tools/say_installed.sh", prefix], capture_output=True,
                          text=True, env={"PATH": "/usr/bin:/bin"}, check=True)
    line = next(x for x in done.stdout.splitlines() if "PKG_CONFIG_PATH" in x)
    found = subprocess.run(
        ["sh", "-c", f"{line.partition(': ')[2]}; pkg-config --modversion fastsafetensors"],
        capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"})
    assert found.stdout.strip() and f"rpath,{prefix}/lib" in done.stdout


def test_cmake_finds_it(prefix, tmp_path):
    if not shutil.which("cmake"):
        pytest.skip("no cmake")
    shutil.copy(ROOT / "examples/c/load_tensor.c", tmp_path)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.13)\nproject(user C)\n"
        "find_package(fastsafetensors 1.0 REQUIRED)\nadd_executable(load_tensor load_tensor.c)\n"
        "target_link_libraries(load_tensor fastsafetensors::fastsafetensors)\n")
    for words in (["cmake", "-S", ".", "-B", "b", f"-DCMAKE_PREFIX_PATH={prefix}"],
                  ["cmake", "--build", "b"]):
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    done = subprocess.run([tmp_path / "b/load_tensor"], capture_output=True, text=True)
    assert "usage" in done.stderr + done.stdout  # it runs: the library is found
    text = (tmp_path / "CMakeLists.txt").read_text()
    (tmp_path / "CMakeLists.txt").write_text(text.replace("1.0 REQUIRED", "2.0 REQUIRED"))
    done = subprocess.run(["cmake", "-S", ".", "-B", "c", f"-DCMAKE_PREFIX_PATH={prefix}"],
                          cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0


def test_uninstall_leaves_nothing(prefix, tmp_path):
    """Move the installation to another folder without recompiling, and uninstall it."""
    if not shutil.which("ninja"):
        pytest.skip("no ninja")
    target = tmp_path / "prefix"
    for words in (["install", f"PREFIX={target}"], ["uninstall"]):
        done = subprocess.run(["make", "-C", ROOT, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert any(p.is_file() for p in target.rglob("*")) == (words[0] == "install")
    assert "Compiling" not in (ROOT / "build/install.log").read_text()
    assert (prefix / "bin/fastsafetensors").exists()  # the other one stays


@pytest.mark.parametrize("line", [
    "import fastsafetensors.torch", "import fastsafetensors.distributed",
    "import fastsafetensors.checkpoint", "from fastsafetensors import SafeTensorsFileLoader",
    "from fastsafetensors import ParallelLoader", "import fastsafetensors.numpy",
    "import fastsafetensors.flax", "import fastsafetensors.fast_loading",
    "from fastsafetensors import safe_open; safe_open('m', framework='pt').get_tensor('a')",
    "from fastsafetensors import safe_open; safe_open('m', framework='np').get_tensor('a')"])
def test_missing_dependency_is_named(line, tmp_path):
    """Without torch and numpy (None in sys.modules) the error's last line names the package to
    install."""
    header = b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
    (tmp_path / "m").write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    code = f"import sys; sys.modules['torch'] = sys.modules['numpy'] = None; {line}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True,
                          text=True)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    if done.returncode == 0:
        assert "Loader" in line or "fast_loading" in line  # needed when it is used
    else:
        assert "ModuleNotFoundError" in last and "pip install" in last, done.stderr


def test_help_lists_every_target():
    done = subprocess.run(["make", "-C", ROOT, "help"], capture_output=True, text=True, check=True)
    makefile = (ROOT / "Makefile").read_text()
    targets = makefile.partition(".PHONY:")[2].partition("\n")[0].split()
    told = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")}
    assert told == set(targets) - {"unittest"}


def test_soname_and_exports(prefix):
    library = library_folder(prefix) / "libfastsafetensors.so"
    output = subprocess.run(["readelf", "-d", library], capture_output=True, text=True).stdout
    assert "libfastsafetensors.so.1]" in output
    assert "BIND_NOW" in output or "NOW" in output
    for foreign in ("libcuda", "libstdc++", "libtorch", "libpython"):
        assert foreign not in output


def test_layer_check_can_fail(tmp_path):
    shutil.copytree(ROOT / "src", tmp_path / "src")
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    shutil.copytree(ROOT / "cli", tmp_path / "cli")
    shutil.copytree(ROOT / "include", tmp_path / "include")

    def check(name):
        return subprocess.run([sys.executable, tmp_path / "tools" / name, tmp_path],
                              capture_output=True, text=True)

    assert check("check_layers.py").returncode == 0
    assert check("check_style.py").returncode == 0
    cases = [
        ("check_layers.py", "src/io/engine_choice.c", '#include "plan/plan.h"\n', "may not use"),
        ("check_layers.py", "src/loader/load.c", '#include "io/io_private.h"\n',
         "not the interface header"),
        ("check_layers.py", "src/plan/plan.c", "#include <unistd.h>\n", "pure module"),
        ("check_layers.py", "src/transfer/schedule.c", "void f(void) { fsti_worker_run(0, 0); }\n",
         "call cycle of files"),
        ("check_layers.py", "src/format/header_validate.c",
         "void f(void) { fsti_packed_clear(0); }\n", "call cycle of files"),
        ("check_layers.py", "src/store/listing.c",
         "void f(void) { fsti_store_list(0, 0, 0, 0, 0); }\n", "call cycle of files"),
        ("check_layers.py", "src/http/response.c", '#include "store/store.h"\n', "may not use"),
        ("check_layers.py", "src/save/coverage.c",
         "void f(void) { fsti_writer_write(0, 0, 0, 0, 0, 0); }\n", "call cycle of files"),
        ("check_layers.py", "src/cache/cache_lock.c",
         "const cache_table fsti_planted[] = {{fsti_cache_seal}};\n", "call cycle of files"),
        ("check_layers.py", "src/transfer/worker.c", "const void *f = &fsti_sink_view;\n", "names"),
        ("check_layers.py", "src/transfer/worker.c", "void f(void) { fsti_cpu_count(); }\n",
         "which only facts.c may"),
        ("check_layers.py", "src/gpu/gpu.h", "/// Main types: no_such_type.\n", "not declared"),
        ("check_layers.py", "cli/main.c", '#include "base/primitives.h"\n', "not public"),
        ("check_style.py", "src/plan/plan.c",
         "static int long_one(void) {\n" + "    f();\n" * 70 + "}\n", "lines"),
        ("check_style.py", "src/plan/plan.c", "static void f(void) {\n    printf(\"x\");\n}\n",
         "printf"),
        ("check_style.py", "src/plan/plan.c", "// " + "x" * 100 + "\n", "columns"),
        ("check_style.py", "src/plan/plan.c",
         "static int f(int a, int b, int c, int d, int e, int g) {\n    return 0;\n}\n",
         "parameters"),
    ]
    for tool, name, text, words in cases:
        path = tmp_path / name
        before = path.read_text()
        path.write_text(before + text)
        done = check(tool)
        path.write_text(before)
        assert done.returncode == 1 and words in done.stdout, (tool, name, done.stdout)
    path = tmp_path / "src/cache/cache_lock.c"  # a name in a comment is no call
    path.write_text(path.read_text() + "// fsti_cache_seal()\n")
    assert check("check_layers.py").returncode == 0
    path = tmp_path / "tools/check_layers.py"
    start = "KNOWN_CIRCLES: dict[str, list[set[str]]] = {"
    assert start in path.read_text()
    path.write_text(path.read_text().replace(start, start + '"base": [{"error.c"}],'))
    done = check("check_layers.py")
    assert done.returncode == 1 and "remove it from KNOWN_CIRCLES" in done.stdout, done.stdout
    (tmp_path / "src/io/loader.h").write_text("// SPDX-License-Identifier: Apache-2.0\n")
    done = check("check_style.py")  # include/ has a loader.h
    assert done.returncode == 1 and "the same file name" in done.stdout, done.stdout


def test_wheel_and_sdist_in_empty_environments(tmp_path):
    """`make dist`: the wheel, built from the sdist, installs into a new environment and works."""
    import sys
    import zipfile

    dist = tmp_path / "dist"
    subprocess.run([sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check",
                    "--outdir", dist, ROOT], check=True, capture_output=True)
    wheel = next(dist.glob("*.whl"))
    show = subprocess.run([sys.executable, "-m", "auditwheel", "show", wheel], capture_output=True,
                          text=True, check=True)
    assert "manylinux_2_" in show.stdout
    assert wheel.stat().st_size < 2 << 20
    names = zipfile.ZipFile(wheel).namelist()
    sources = {f"fastsafetensors/{p.relative_to(ROOT / 'python/fastsafetensors')}"
               for p in (ROOT / "python/fastsafetensors").rglob("*.py")}
    assert sources <= set(names)
    assert any(name.endswith(".data/scripts/fastsafetensors") for name in names)
    smoke = ("import sys, time; start = time.perf_counter(); import fastsafetensors; "
             "seconds = time.perf_counter() - start; assert 'torch' not in sys.modules; "
             "assert fastsafetensors.SingleGroup().size() == 1; "
             "from fastsafetensors._core import Writer, Model, engines; assert engines(None); "
             "w = Writer('m.st', [('a', 'U8', (0,), None, 0)]); w.commit(); w.close(); "
             "assert Model('m.st').names() == ['a']")
    assert len(list(dist.glob("*.tar.gz"))) == 1
    venv, target = tmp_path / "venv", tmp_path / "target"
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", venv], check=True)
    subprocess.run([venv / "bin/python", "-m", "pip", "install", "-q", "--no-deps", "--target",
                    target, wheel], check=True, capture_output=True)
    done = subprocess.run([target / "bin/fastsafetensors", "--version"], capture_output=True,
                          text=True, check=True)
    module = subprocess.run([venv / "bin/python", "-m", "fastsafetensors", "--version"],
                            env={"PYTHONPATH": os.fspath(target)}, capture_output=True,
                            text=True, check=True)
    assert done.stdout == module.stdout and done.stdout.startswith("fastsafetensors ")
    subprocess.run([venv / "bin/python", "-I", "-c",
                    f"import sys; sys.path.insert(0, {os.fspath(target)!r}); {smoke}"],
                   check=True, cwd=tmp_path)


def test_a_short_soak():
    """In a short `make soak`, memory and descriptors do not grow, and concurrent loaders finish."""
    import sys

    done = subprocess.run([sys.executable, ROOT / "tools/soak.py", "--rounds", "300"],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "level and all finished" in done.stdout
