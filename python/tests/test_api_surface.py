# SPDX-License-Identifier: Apache-2.0
"""Every public name and signature of fastsafetensors 0.5 and safetensors, compared with ours.

Each is installed into a separate folder under build/, described there by public_surface.py,
and compared; a difference must be on the list of surface_differences.py, with its reason.
"""

import fnmatch
import importlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import surface_differences
from conftest import ROOT

SCRIPT = pathlib.Path(__file__).with_name("public_surface.py")
PLACES = {"POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD"}


def _installed(requirement):
    """Folder with the package alone; torch and numpy are this environment's."""
    folder = ROOT / "build/surface" / requirement.replace("==", "-")
    if not (folder / ".ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--pre",
                               "--disable-pip-version-check", "--target", folder, requirement,
                               "typer"], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{requirement} can't be installed: {done.stderr.strip()[-200:]}")
        (folder / ".ready").touch()
    return folder


def _described(package, before="pass", folder=None):
    code = (f"{before}; import json, sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); "
            f"from public_surface import read_surface; ")
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    if folder is not None:
        environment["PYTHONPATH"] = str(folder)
    code += f"print(json.dumps(read_surface({package})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          cwd=ROOT / "build", env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _parameter_rows(theirs, ours, where):
    places = {row[0]: (at, *row[1:]) for at, row in enumerate(ours)}
    takes_all = any(kind == "VAR_KEYWORD" for _, kind, _ in ours)
    for at, (name, kind, default) in enumerate(theirs):
        if kind.startswith("VAR"):
            continue
        if name not in places:
            if not takes_all or kind in PLACES:
                yield f"{where}({name})", "no such parameter"
            continue
        our_place, our_kind, our_default = places[name]
        if kind in PLACES and (our_kind not in PLACES or our_place != at):
            yield f"{where}({name})", "at another place"
        if default is not None and our_default != default:
            yield f"{where}({name})", f"the default is {our_default}, not {default}"
    known = {row[0] for row in theirs}
    for name, kind, default in ours:
        if name not in known and default is None and not kind.startswith("VAR"):
            yield f"{where}({name})", "one more is required"


def _rows(theirs, ours, where):
    """(name, difference) of a name that both have."""
    if theirs["kind"] == "function" and ours["kind"] == "value":
        yield where, "can't be called"
    if theirs.get("parameters") is not None and ours.get("parameters") is not None:
        yield from _parameter_rows(theirs["parameters"], ours["parameters"], where)
    for name, member in theirs.get("members", {}).items():
        mine = ours.get("members", {}).get(name)
        if mine is not None:
            yield from _rows(member, mine, f"{where}.{name}")
        elif not theirs["is_enum"]:
            yield f"{where}.{name}", "missing"


def differences(theirs, ours):
    """(name, difference) of every public name."""
    for module, names in theirs.items():
        if "error" in names or "error" in ours[module]:
            if "error" not in names:
                yield module, ours[module]["error"]
            continue
        for name, what in names.items():
            is_module = what["kind"] == "module" and "error" not in ours.get(
                f"{module}.{name}", {"error": ""})
            if name not in ours[module]:
                if not is_module:
                    yield f"{module}.{name}", "missing"
            else:
                yield from _rows(what, ours[module][name], f"{module}.{name}")


def _check(theirs, ours, accepted):
    found = list(differences(theirs, ours))
    new = [row for row in found
           if not any(fnmatch.fnmatchcase(row[0], pattern) for pattern in accepted)]
    assert not new, "\n".join(f"{name}: {what}" for name, what in new)
    unseen = [f"{module}." for module, names in theirs.items() if "error" in names]  # no jax here
    unused = [pattern for pattern in accepted
              if not any(fnmatch.fnmatchcase(name, pattern) for name, _ in found)
              and not pattern.startswith(tuple(unseen))]
    return unused, sum(len(names) for names in theirs.values())


def test_fastsafetensors_05():
    theirs = _described("'fastsafetensors'", folder=_installed("fastsafetensors==0.5.0"))
    ours = _described(f"'fastsafetensors', {list(theirs)}")
    unused, count = _check(theirs, ours, surface_differences.V05)
    assert unused == [] and count > 200


@pytest.mark.parametrize("version", ["0.8.0", "0.9.0rc1"])
def test_safetensors(version):
    """As programs get it: by compat.install(), where safetensors was."""
    theirs = _described("'safetensors'", folder=_installed(f"safetensors=={version}"))
    ours = _described(f"'safetensors', {list(theirs)}",
                      "import fastsafetensors.compat; fastsafetensors.compat.install()")
    unused, count = _check(theirs, ours, surface_differences.SAFETENSORS)
    assert count > 20 and (unused == [] or version == "0.8.0")  # names of 0.9


def test_differences_are_detected():
    """A name that was removed, a keyword with another name, a new required one."""
    def surface(source):
        import types

        from public_surface import describe_module

        module = types.ModuleType("fake")
        exec(source, module.__dict__)
        return {"fake": describe_module(module, "fake")}

    theirs = surface("def a(x, y=1): pass\ndef b(): pass\nclass C:\n    def m(self, k): pass")
    ours = surface("def a(z, y=2, *, w): pass\nclass C:\n    m = 3")
    assert {name for name, _ in differences(theirs, ours)} == {
        "fake.a(x)", "fake.a(y)", "fake.a(z)", "fake.a(w)", "fake.b", "fake.C.m"}


def test_old_paths_have_type_stubs():
    """One table: each old path has a .pyi file next to the package's modules, others have none."""
    import fastsafetensors
    from fastsafetensors._old_paths import OLD_PATHS

    folder = pathlib.Path(fastsafetensors.__file__).parent
    told = {path.relative_to(folder).with_suffix("").as_posix().replace("/", ".")
            .removesuffix(".__init__") for path in folder.rglob("*.pyi")} - {"_core"}
    wanted = {name for name in OLD_PATHS if not name.startswith("_")}
    assert wanted <= told
    assert {name.partition(".")[0] for name in told} == {n.partition(".")[0] for n in wanted}
    for name, new in OLD_PATHS.items():
        module = importlib.import_module(f"fastsafetensors.{name}")
        assert module.__name__ == f"fastsafetensors.{new}"
