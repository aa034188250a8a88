# SPDX-License-Identifier: Apache-2.0
"""Reloading only the tensors that changed on disk into a loaded model."""

import ast
import os
import pathlib
import re

import pytest

torch = pytest.importorskip("torch")

from fastsafetensors import SafetensorError, changed_tensors, write_manifest  # noqa: E402
from fastsafetensors._loading import module_weights  # noqa: E402
from fastsafetensors.torch import load_model, save_file  # noqa: E402


class Layers(torch.nn.Module):
    """Eight layers of 1.5 MiB, one of them with two names."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [torch.nn.Linear(600, 650, bias=False) for _ in range(8)])
        self.tied = self.layers[0]


def save(module, path, **options):
    state = {name: value for name, value in module.state_dict().items() if "tied" not in name}
    save_file(state, path, **options)


@pytest.fixture
def loads(monkeypatch):
    """Bytes that loads into modules have requested."""
    seen = []

    class Counted(module_weights.OpenLoad):
        def __exit__(self, *failure):
            seen.append(self._loader.stats()["bytes_requested"])
            super().__exit__(*failure)

    monkeypatch.setattr(module_weights, "OpenLoad", Counted)
    return seen


@pytest.fixture
def step(tmp_path):
    """(file, its older manifest, changed names, the module with the file's values)."""
    path, old = tmp_path / "m.safetensors", tmp_path / "old.manifest"
    torch.manual_seed(1)
    module = Layers()
    save(module, path, manifest=True)
    os.rename(f"{path}.manifest", old)
    names = ["layers.0.weight", "layers.5.weight"]
    with torch.no_grad():
        for name in names:
            module.get_parameter(name).add_(1)
    save(module, path, manifest=True)
    return path, old, names, module


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(),
                                                 strict=True))


def test_only_changed_tensors_are_read_and_written(step, loads):
    path, _, names, now = step
    module = Layers()
    module.load_state_dict(now.state_dict())
    with torch.no_grad():
        for name in names:
            module.get_parameter(name).zero_()
        module.layers[3].weight[0, 0] = 77  # unchanged, because the list does not have it
    before = [p.data_ptr() for p in module.parameters()]
    assert load_model(module, path, changed=names) == (set(), [])
    assert loads == [2 * 600 * 650 * 4]
    assert [p.data_ptr() for p in module.parameters()] == before
    assert module.layers[3].weight[0, 0] == 77
    for name in names:
        assert torch.equal(module.get_parameter(name), now.get_parameter(name))
    assert module.tied.weight is module.layers[0].weight


@pytest.mark.parametrize("assign", [False, True])
def test_modules_with_hooks(step, assign):
    path, _, names, now = step
    module = Layers()
    module._register_load_state_dict_pre_hook(lambda state, *rest: state.update(
        {name: value * 2 for name, value in state.items()}))
    kept = module.layers[3].weight.detach().clone()
    assert load_model(module, path, changed=names, assign=assign) == (set(), [])
    assert torch.equal(module.layers[5].weight, 2 * now.layers[5].weight)
    assert torch.equal(module.layers[3].weight, kept)


def test_nothing_changed(step, loads):
    path, _, _, _ = step
    module = Layers()
    kept = Layers()
    kept.load_state_dict(module.state_dict())
    load_model(module, path, changed=[])
    assert loads == [] and same(module, kept)


def test_manifests_report_changed_tensors(step):
    path, old, names, _ = step
    found = changed_tensors(path, old)
    # Chunks have 1 MiB and tensors 1.5 MiB, so neighbouring tensors may share a chunk.
    assert set(names) <= set(found) and len(found) <= 5
    assert changed_tensors(path, f"{path}.manifest") == []


def test_tensor_digests_report_exact_changes(step, tmp_path):
    path, _, names, now = step
    with torch.no_grad():
        for name in names:
            now.get_parameter(name).sub_(1)
    save(now, tmp_path / "old.safetensors")
    before, after = tmp_path / "before.manifest", tmp_path / "after.manifest"
    write_manifest(path, after, tensors=True)
    current = path.read_bytes()
    os.replace(tmp_path / "old.safetensors", path)
    write_manifest(path, before, tensors=True)
    path.write_bytes(current)
    assert changed_tensors(path, before, after) == names


def test_changed_header_reloads_everything(step, tmp_path):
    path, old, _, now = step
    save_file({"extra": torch.ones(3), **{n: v for n, v in now.state_dict().items()
                                          if "tied" not in n}}, path, manifest=True)
    assert len(changed_tensors(path, old)) == 9
    os.rename(path, tmp_path / "other.safetensors")
    assert len(changed_tensors(tmp_path / "other.safetensors", old, f"{path}.manifest")) == 9


@pytest.mark.parametrize("content", [b"", b"nothing\n", b"fastsafetensors-manifest 1 x 5\nfile 1",
                                     b'fastsafetensors-manifest 1 a 5\nfile 1 "\nseal 1\n'])
def test_no_manifest(step, tmp_path, content):
    path, _, _, _ = step
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(SafetensorError, match="bad: "):
        changed_tensors(path, tmp_path / "bad")


def test_mismatched_tensors_leave_the_weights_unchanged(step):
    path, _, names, _ = step
    module = Layers()
    kept = Layers()
    kept.load_state_dict(module.state_dict())
    with pytest.raises(KeyError):
        load_model(module, path, changed=["layers.9.weight"])
    with pytest.raises(TypeError):
        load_model(module, path, changed="layers.5.weight")
    with open(path, "r+b") as file:
        file.truncate(5_000_000)
    with pytest.raises(SafetensorError, match="m.safetensors"):
        load_model(module, path, changed=names)
    assert same(module, kept)


def test_full_reload_equals_the_file(step):
    path, old, _, now = step
    module = Layers()
    load_model(module, path)
    assert same(module, now)
    with torch.no_grad():
        module.layers[0].weight.sub_(1)
        module.layers[5].weight.sub_(1)
    load_model(module, path, changed=changed_tensors(path, old), verify=True)
    assert same(module, now)


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_what_is_no_file_is_not_read(tmp_path, kind):
    """A FIFO would wait for ever, and a device may have no end."""
    from fastsafetensors import LoaderConfig
    from fastsafetensors.fast_loading import load_embeddings_safetensors

    path = tmp_path / "a.safetensors.manifest"
    {"fifo": os.mkfifo, "device": lambda path: os.symlink("/dev/zero", path),
     "folder": os.mkdir}[kind](path)
    (tmp_path / "b.pt").symlink_to(path)
    save_file({"x": torch.zeros(3)}, tmp_path / "a.safetensors")
    write_manifest(tmp_path / "a.safetensors", tmp_path / "old")
    for call in (lambda: changed_tensors(tmp_path / "a.safetensors", tmp_path / "old"),
                 lambda: changed_tensors(tmp_path / "a.safetensors", path),
                 lambda: LoaderConfig.from_file(path),
                 lambda: load_embeddings_safetensors(tmp_path / "b.safetensors")):
        with pytest.raises(OSError, match="not a regular file"):
            call()


def test_the_package_opens_only_regular_files():
    """By open_regular(), read_regular() or the library: opening another one may wait."""
    import fastsafetensors

    package = pathlib.Path(fastsafetensors.__file__).parent
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            shown = ast.unparse(node) if isinstance(node, ast.Call) else ""
            is_open = re.match(r"open\((?!open_regular\()|.*\.read_(text|bytes)\(\)$", shown)
            if is_open and not re.search("/(proc|sys)/|closefd=False", shown):
                found.add(f"{path.relative_to(package)}: {shown}")
    assert found == {"v05/common.py: open(mounts_file)"}  # of the program, by default /proc/mounts
