# SPDX-License-Identifier: Apache-2.0
"""Every operator of torch's registry gives the same on a lazy tensor as on a plain one.

Compared are values, dtypes, shapes, strides and storage offsets of results, the state of the tensor
afterwards, and errors. The plain tensor has the stored tensor's values, or is the same view of such
a tensor.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fastsafetensors.lazy import LazyModel, LazyTensor  # noqa: E402
from fastsafetensors.torch import save_file  # noqa: E402

MODES = ("auto", "map", "load")
IS_LONG = os.environ.get("FASTSAFETENSORS_TESTS") == "all"
SAMPLES = 1000 if IS_LONG else 3

Maker = Callable[[Any], Any]


def swap_ends(tensor: Any) -> Any:
    return tensor.transpose(0, -1)


def embed(values: Any, dim: int, before: int, after: int) -> Any:
    """A larger tensor that holds some values in the middle of a dimension."""
    sizes = list(values.shape)
    sizes[dim] += before + after
    made = torch.full(sizes, 1, dtype=values.dtype)
    made.narrow(dim, before, values.shape[dim]).copy_(values)
    return made


# For each kind of view, how its values are stored and how the view is made from them.
VIEWS: dict[str, tuple[Maker, Maker]] = {
    "whole": (lambda x: x, lambda t: t),
    "rows": (lambda x: embed(x, 0, 2, 1), lambda t: t[2:-1]),
    "columns": (lambda x: embed(x, -1, 1, 2), lambda t: t[..., 1:-2]),
    "transposed": (lambda x: embed(swap_ends(x), 0, 1, 1), lambda t: swap_ends(t[1:-1])),
    "transposed columns": (lambda x: embed(swap_ends(x), -1, 2, 1),
                           lambda t: swap_ends(t[..., 2:-1])),
    "bytes": (lambda x: embed(x, 0, 2, 1).unsqueeze(-1).contiguous().view(torch.uint8),
              lambda t: t[2:-1]),
}


def view_of(name: str, tensor: Any, dtype: Any) -> Any:
    """The view of a stored tensor, which may have the bytes of another dtype."""
    made = VIEWS[name][1](tensor)
    return made if made.dtype == dtype else made.view(dtype).squeeze(-1)


# The results of these operators are undefined, random, or addresses.
NO_VALUES = ("empty", "resize", "as_strided_partial")


def operators() -> list[Any]:
    registry = pytest.importorskip(
        "torch.testing._internal.common_methods_invocations",
        reason="torch's registry of operators needs the package expecttest")
    return list(registry.op_db)


def variants(operator: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "function", operator.op
    if operator.method_variant is not None:
        yield "method", operator.method_variant
    if operator.inplace_variant is not None:
        yield "in place", operator.inplace_variant


def geometry_of(tensor: Any) -> tuple[Any, ...]:
    kind = (tensor.dtype, tuple(tensor.shape), tensor.layout)
    if tensor.layout is not torch.strided or tensor.is_nested:
        return kind
    # The stride of a dimension of one element has no meaning, and torch gives it in passing.
    strides = tuple(stride if size != 1 else None
                    for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (*kind, strides, tensor.storage_offset(), tensor.is_contiguous(),
            tensor.is_conj(), tensor.is_neg())


def flat(result: Any) -> list[Any]:
    if isinstance(result, (tuple, list)):
        return [part for one in result for part in flat(one)]
    return [result]


def same_values(one: Any, other: Any) -> bool:
    if one.layout is not torch.strided or one.is_nested or one.is_quantized:
        return True
    one, other = one.detach(), other.detach()
    if one.dtype.is_floating_point or one.dtype.is_complex:
        return bool(torch.allclose(one.resolve_conj(), other.resolve_conj(), rtol=1e-4, atol=1e-5,
                                   equal_nan=True))
    return bool(torch.equal(one, other))


def call(function: Callable[..., Any], tensor: Any, sample: Any) -> Any:
    """The outcome of a call: results and the tensor afterwards, or the kind of error."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed() formats the stack for each GPU
    args = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, sample.args)
    kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, sample.kwargs)
    try:
        return [*flat(function(tensor, *args, **kwargs)), tensor]
    except Exception as error:
        return type(error)


def differences(plain: Any, lazy: Any, with_values: bool) -> str | None:
    if isinstance(plain, type) or isinstance(lazy, type):
        return None if plain is lazy else f"plain {plain}, lazy {lazy}"
    for one, other in zip(plain, lazy, strict=True):
        if not isinstance(one, torch.Tensor):
            if isinstance(one, (int, bool, torch.dtype, torch.Size)) and one != other:
                return f"plain {one}, lazy {other}"
            continue
        if geometry_of(one) != geometry_of(other):
            return f"plain {geometry_of(one)}, lazy {geometry_of(other)}"
        if isinstance(other, LazyTensor):
            other = other.clone()
        if with_values and not same_values(one, other):
            return "values differ"
    return None


def samples_of(operator: Any, dtype: Any) -> list[Any]:
    found = []
    for sample in operator.sample_inputs("cpu", dtype, requires_grad=False):
        if isinstance(sample.input, torch.Tensor) and sample.input.layout is torch.strided:
            found.append(sample)
        if len(found) == SAMPLES:
            break
    return found


def stored_of(samples: list[Any]) -> dict[str, Any]:
    stored = {}
    for number, sample in enumerate(samples):
        values = sample.input.detach()
        for name, (store, _) in VIEWS.items():
            if values.dim() and values.numel() or name == "whole":
                made = store(values)
                stored[f"{number} {name}"] = torch.zeros(made.shape, dtype=made.dtype).copy_(made)
    return stored


def compare(operator: Any, dtype: Any, path: Path) -> list[str]:
    """Return all differences between the results of lazy and plain tensors."""
    samples = samples_of(operator, dtype)
    stored = stored_of(samples)
    if not stored:
        return []
    save_file(stored, path)
    with_values = not any(part in operator.name for part in NO_VALUES)
    found = []
    for turn, mode in enumerate(MODES):
        with LazyModel(path, mode=mode) as model:
            # Each tensor in each mode takes too long for every run: one of three, in one mode,
            # others for each operator.
            step = 1 if IS_LONG else 3 * len(MODES)
            first = (turn + sum(operator.name.encode())) % step
            chosen = list(stored.items())[first::step]
            for key, base in chosen:
                number, view = key.split(" ", 1)
                for variant, function in variants(operator):
                    sample = samples[int(number)]
                    plain, lazy = (call(function, view_of(view, one, sample.input.dtype), sample)
                                   for one in (base.clone(), model[key]))
                    difference = differences(plain, lazy, with_values)
                    if difference is not None:
                        found.append(f"{operator.formatted_name} ({variant}), sample {number}, "
                                     f"mode {mode}, {view}: {difference}")
    return found


def walk(dtype: Any, path: Path) -> list[str]:
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for operator in operators():
            if dtype in operator.dtypes:
                found += compare(operator, dtype, path)
    return found


@pytest.mark.parametrize(
    "dtype", ["float32", *(["complex64", "int64", "bool"] if IS_LONG else [])])
def test_every_operator_of_the_registry(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # For each sample, torch looks for a unittest.TestCase on the stack, which takes most of the
    # time.
    monkeypatch.setattr("torch.testing._internal.common_utils.extract_test_fn", lambda: None)
    found = walk(getattr(torch, dtype), tmp_path / "m.safetensors")
    assert not found, f"{len(found)} differences:\n" + "\n".join(found[:20])


# Operations outside the registry whose result depends on a storage offset or on strides.
USES: dict[str, Callable[[Any], Any]] = {
    "as_strided": lambda t: t.as_strided((3,), (1,), 0),
    "as_strided after a read": lambda t: (t.sum(), t.as_strided((3,), (1,), 0))[1],
    "as_strided after a write": lambda t: t.mul_(2).as_strided((3,), (1,), 0)[:1],
    "as_strided_": lambda t: t.as_strided_((3,), (1,), 0),
    "as_strided_copy": lambda t: torch.as_strided_copy(t, (3,), (1,), 0),
    "as_strided_copy by keyword": lambda t: torch.as_strided_copy(input=t, size=(3,), stride=(1,)),
    "the operator": lambda t: torch.ops.aten.as_strided_copy(t, (3,), (1,), 0),
    "as_strided_scatter": lambda t: t.as_strided_scatter(torch.full((3,), -1.0), (3,), (1,)),
    "scatter's memory": lambda t: t.select_scatter(torch.zeros(t.shape[1:]), 0, 0).as_strided(
        (3,), (1,), 0),
    "resize_": lambda t: t.resize_(8),
    "storage": lambda t: t.untyped_storage().nbytes(),
    "strides after a write": lambda t: (t.mul_(1).stride(), t.storage_offset(), t.is_contiguous()),
    "strides of what was assigned to": lambda t: (t.__setitem__(0, 1.0), t.stride())[1],
    "a view after a write": lambda t: t.mul_(1).view(-1),
    "a view after a read": lambda t: (t.sum(), t.t().stride(), t.t().storage_offset())[1:],
    "detached after a write": lambda t: t.mul_(1).detach().storage_offset(),
    "transposed in place": lambda t: t.t_().stride(),
    "another dtype": lambda t: t.view(torch.int32),
}

# Views of another dtype; some sizes are an error for some views.
RETYPED: dict[str, Callable[[Any], Any]] = {
    "int32": lambda t: t.view(torch.int32),
    "uint8": lambda t: t.view(torch.uint8),
    "int64": lambda t: t.view(torch.int64),
    "complex": lambda t: t.view(torch.complex64),
    "real": lambda t: torch.view_as_real(t.view(torch.complex64)),
    "imag": lambda t: t.view(torch.complex64).imag,
    "as_complex": lambda t: torch.view_as_complex(t.unflatten(-1, (-1, 2))),
    "operator": lambda t: torch.ops.aten.view(t, torch.int32),
    "overload": lambda t: torch.ops.aten.view.dtype(t, torch.int32),
    "keyword": lambda t: t.view(dtype=torch.int16),
    "two": lambda t: t.view(torch.int32).view(torch.int16),
    "there and back": lambda t: t.view(torch.int32)[1:].view(torch.float32),
    "rows of bytes": lambda t: t.view(torch.uint8)[1:].view(torch.float32),
    "columns of bytes": lambda t: t.view(torch.uint8)[..., 8:],
    "a byte of each": lambda t: t.view(torch.uint8)[..., 3::4],
    "transposed": lambda t: t.view(torch.int32).t(),
}
# What is then done with them.
LOOKS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda t: t,
    "as_strided": lambda t: t.as_strided((3,), (1,), 0),
    "as_strided_": lambda t: t.as_strided_((3,), (1,), 0),
    "as_strided_copy": lambda t: torch.as_strided_copy(t, (3,), (1,), 0),
    "as_strided_scatter": lambda t: t.as_strided_scatter(t.as_strided((1,), (1,), 0), (1,), (1,)),
    "resize_": lambda t: t.resize_(8),
    "set_": lambda t: t.set_(t.untyped_storage(), 0, (3,), (1,)),
    "data": lambda t: t.data.as_strided((3,), (1,), 0),
    "storage": lambda t: (t.untyped_storage().nbytes(), bytes(t.untyped_storage())),
    "item": lambda t: t.flatten()[-1],
    "written": lambda t: t.add_(t),
}


def outcomes(use: Callable[[Any], Any], view: str, mode: str, path: Path) -> list[Any]:
    """The outcomes of a function for a plain view and a lazy one."""
    store = VIEWS[view][0]
    values = store(torch.arange(24.0).reshape(4, 6)).contiguous()
    others = {"a": torch.full((7,), -5.0), "z": torch.full((7,), 99.0)}
    save_file({"w": values.clone(), **others}, path)
    found = []
    with LazyModel(path, mode=mode) as model:
        for tensor in (values.clone(), model["w"]):
            try:
                result = use(view_of(view, tensor, torch.float32))
                found.append((result.tolist(), geometry_of(result))
                             if isinstance(result, torch.Tensor) else result)
            except RuntimeError as error:
                found.append(type(error))
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("use", USES)
def test_view_layout(use: str, view: str, mode: str, tmp_path: Path) -> None:
    plain, lazy = outcomes(USES[use], view, mode, tmp_path / "m.safetensors")
    assert plain == lazy


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("retype", RETYPED)
def test_views_of_another_dtype(retype: str, mode: str, tmp_path: Path) -> None:
    """Whatever is done with them, they are as in torch, and their memory around them too."""
    found = []
    for view in VIEWS:
        for name, look in LOOKS.items():
            plain, lazy = outcomes(lambda t, look=look: look(RETYPED[retype](t)), view, mode,
                                   tmp_path / "m.safetensors")
            if repr(plain) != repr(lazy):  # NaN is not equal to itself
                found.append(f"{view}, {name}: plain {plain}, lazy {lazy}")
    assert not found, "\n".join(found)
