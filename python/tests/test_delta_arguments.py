# SPDX-License-Identifier: Apache-2.0
"""Arguments of the functions for weight deltas: versions, paths and words that they refuse."""

import inspect
import shutil

import pytest
from delta_folders import make_states, write_chain, write_checkpoint, write_delta

import fastsafetensors
from fastsafetensors import deltas

pytest.importorskip("zstandard", reason="needs the zstandard package")


@pytest.fixture
def base(tmp_path):
    """Return the folder of a checkpoint, and its first deltas in `chain`."""
    states = make_states(3)
    write_checkpoint(tmp_path / "base", states[0])
    write_chain(tmp_path, states)
    return tmp_path / "base"


def first(base):
    """Return the folder of the first delta."""
    return base.parent / "weight_v000001"


@pytest.mark.parametrize("dialect", ["sglang", "modelexpress"])
@pytest.mark.parametrize("is_chain", [False, True])
@pytest.mark.parametrize(("base_version", "version"), [
    (None, "0"), ("000001", None), ("5", "05"), ("5", "1")])
def test_convert_refuses_a_version_that_is_not_newer(base, dialect, is_chain, base_version,
                                                     version):
    folder = first(base)
    delta = deltas.Delta(folder, folder.parent / "weight_v000002") if is_chain else folder
    if is_chain and base_version == "000001":
        base_version = "000002"
    with pytest.raises(ValueError, match="^version '.*' must be newer than base_version"):
        deltas.convert(base, delta, base.parent / "made", version=version,
                       base_version=base_version, dialect=dialect)
    assert not (base.parent / "made").exists()


def test_convert_demands_the_next_number_of_one_version(base, tmp_path):
    with pytest.raises(ValueError, match=r"^SGLang's version must be base_version \+ 1, not '7'"):
        deltas.convert(base, first(base), tmp_path / "made", version="7")
    assert not (tmp_path / "made").exists()
    deltas.convert(base, first(base), tmp_path / "seven", version="7", base_version="6")
    deltas.convert(base, first(base), tmp_path / "words", version="7", dialect="modelexpress")
    # A chain spans several numbers, also when it was folded before.
    chain = deltas.Delta(first(base), tmp_path / "weight_v000002")
    deltas.convert(base, chain, tmp_path / "folded")
    deltas.convert(base, tmp_path / "folded", tmp_path / "again", encoding="overwrite")
    for number, made in enumerate(("words", "folded", "again", "seven")):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(base, copy)
        deltas.apply(copy, tmp_path / made)


def test_versions_that_are_words_become_numbers(base, tmp_path):
    states = make_states(2)
    folder = write_delta(tmp_path / "words", *states, "step-b", "step-a")
    with pytest.raises(ValueError, match="^SGLang's versions are decimal"):
        deltas.convert(base, folder, tmp_path / "made")
    with pytest.raises(ValueError, match=r"^SGLang's version must be base_version \+ 1"):
        deltas.convert(base, folder, tmp_path / "made", version="3", base_version="1")
    deltas.convert(base, folder, tmp_path / "made", version="2", base_version="1")


def test_an_empty_version_is_an_error(base):
    delta = deltas.Delta(first(base))
    for call in (lambda: deltas.verify(base, first(base), version=""),
                 lambda: deltas.apply(base, first(base), version=""),
                 lambda: delta.prepare({}, version="")):
        with pytest.raises(ValueError, match="^version is empty"):
            call()
    for name in ("version", "base_version"):
        given = {"version": "1", "base_version": "0", name: ""}
        for call in (lambda given=given: deltas.make(base, base, base.parent / "new", **given),
                     lambda given=given: deltas.convert(base, delta, base.parent / "new",
                                                        **given)):
            with pytest.raises(ValueError, match=f"^{name} is empty"):
                call()


@pytest.mark.parametrize("value", [None, 3, ["x"]], ids=repr)
def test_paths_are_named(base, value):
    delta, out = deltas.Delta(first(base)), base.parent / "out"
    named = {"version": "1", "base_version": "0"}
    calls = {
        "folder": [lambda: deltas.Delta(value), lambda: deltas.apply(base, value),
                   lambda: deltas.verify(base, value), lambda: deltas.convert(base, delta, value),
                   lambda: deltas.make(base, base, value, **named)],
        "delta": [lambda: deltas.convert(base, value, out)],
        "old": [lambda: deltas.make(value, base, out, **named),
                lambda: fastsafetensors.changed_tensors(base, value)],
        "checkpoint": [lambda: deltas.pending(value, base), lambda: deltas.pull(value, base),
                       lambda: deltas.convert(value, delta, out), lambda: delta.verify(value),
                       lambda: delta.patches(value), lambda: delta.weights(value),
                       lambda: deltas.reading(value).__enter__()],
        "source": [lambda: deltas.pending(base, value), lambda: deltas.pull(base, value)],
        "filename": [lambda: fastsafetensors.changed_tensors(value, "old.manifest")],
    }
    if value is not None:
        calls["manifest"] = [lambda: fastsafetensors.changed_tensors(base, "old", value)]
    for name, those in calls.items():
        for number, call in enumerate(those):
            with pytest.raises(TypeError, match=f"^{name} must be a path"):
                call()
                pytest.fail(f"{name} {number}")


def test_words_of_patches(base):
    delta = deltas.Delta(first(base))
    for name in ("framework", "indices"):
        with pytest.raises(TypeError, match=f"^{name} must be one of"):
            delta.patches(base, **{name: 3})
        with pytest.raises(ValueError, match=f"^unknown {name} 'x'; expected one of"):
            delta.patches(base, **{name: "x"})


def test_every_update_is_durable_by_default():
    """As with the command, so that a power cut does not leave a note of a version that is lost."""
    for call in (deltas.apply, deltas.Delta.apply, deltas.recover, deltas.pull, deltas.make,
                 deltas.convert):
        assert inspect.signature(call).parameters["durable"].default is True, call


def test_versions_are_not_looked_for_at_a_url(base):
    for call in (deltas.pull, deltas.pending):
        with pytest.raises(ValueError, match="^http://localhost/v: versions are found in a local"):
            call(base, "http://localhost/v")
