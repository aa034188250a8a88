# SPDX-License-Identifier: Apache-2.0
"""torch.save files as safetensors, for the command's ``convert``, which has read the options.

They are read by torch's restricted loader (weights_only), which runs no code of the file's.
"""

from __future__ import annotations

import fnmatch
import json
import pickle
import re
import sys
from dataclasses import dataclass
from typing import Any

# Where training programs put the weights beside other things.
_NESTED = ("state_dict", "model", "model_state_dict", "module")



@dataclass(frozen=True)
class Options:
    """What the command was asked for, in the words of Writer; dtype: of the format, or None."""

    dtype: str | None = None
    alignment: int = 0
    order: str = "reference"
    engine: str = "auto"
    promise: str = "durable"
    compress: str = "none"
    manifest: str | None = None  # by which algorithm
    dry_run: bool = False
    to_pipe: bool = False
    as_json: bool = False
    select: tuple[str, ...] = ()


def _printable(text: str) -> str:
    return "".join(one if one.isprintable() else "?" for one in text)


def _say(error: object, source: str | None = None) -> None:
    """Print a failure, its first line, without what would drive the terminal."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().split("\n")[0]
    where = f", in {_printable(source)}" if source else ""
    print(f"fastsafetensors: {_printable(text)}{where}", file=sys.stderr)


def _holds_tensors(value: Any, torch: Any) -> bool:
    """Tell whether weights would be lost with a value; an optimizer's state is none."""
    if isinstance(value, torch.Tensor):
        return True
    return (isinstance(value, dict) and bool(value)
            and all(isinstance(one, torch.Tensor) for one in value.values()))


def _find_tensors(content: Any, torch: Any) -> dict[str, Any]:
    """Return the dict of tensors of a checkpoint."""
    whole = content
    for name in _NESTED:
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
            left_out = sorted(str(key) for key, value in whole.items()
                              if key != name and _holds_tensors(value, torch))
            if left_out:
                raise ValueError(f"besides {name!r} the file holds tensors in {left_out}: "
                                 "save what is meant alone")
            dropped = sorted(str(key) for key in whole if key != name)
            if dropped:
                _say(f"only the tensors of {name!r} are kept, not {', '.join(dropped)}")
            break
    if not isinstance(content, dict):
        raise ValueError(f"the file holds no dict of tensors but {type(content).__name__}")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise ValueError(f"the file holds more than tensors: {name!r} is {kind}")
    return content


def _convert(tensors: dict[str, Any], wish: str | None) -> dict[str, Any]:
    """Floats in another dtype, integers in wider ones; others as they are."""
    from ._torch_state import dtype_name, torch_dtype

    target = torch_dtype(wish) if wish else None
    if wish and target is None:
        raise ValueError(f"torch has no dtype {wish}")
    result = {}
    for name, tensor in tensors.items():
        own = dtype_name(tensor.dtype) or ""
        floats = tensor.dtype.is_floating_point and target and target.is_floating_point
        widens = (
            wish
            and own[:1] in "IU"
            and wish[:1] in "IU"
            and int(wish[1:]) > int(own[1:])
            and (own[0] == "U" or wish[0] == "I")
        )
        result[name] = tensor.to(target) if floats or widens else tensor
    return result


def _read(source: str, select: tuple[str, ...]) -> dict[str, Any]:
    """Return the tensors of a file, all or those whose names match."""
    import torch

    try:
        content = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):
            raise
        # A file of torch before 1.6, which is no zip archive.
        content = torch.load(source, map_location="cpu", weights_only=True)
    tensors = _find_tensors(content, torch)
    if not select:
        return tensors
    chosen = {name: tensor for name, tensor in tensors.items()
              if any(fnmatch.fnmatchcase(name, glob) for glob in select)}
    if not chosen:
        raise ValueError("no tensor's name matches")
    return chosen


def _write(target: str, tensors: dict[str, Any], tied: dict[str, str], options: Options) -> Any:
    """Write the target; return the statistics, None of a pipe."""
    from ._core import serialize
    from ._saving import manifest_options, save_rows, with_ties
    from ._torch_state import make_rows

    rows, owners = make_rows(tensors)
    metadata = with_ties({"format": "pt"}, tied)
    how: dict[str, Any] = {"order": options.order, "alignment": options.alignment}
    if not options.to_pipe:
        return save_rows(target, rows, metadata, promise=options.promise, engine=options.engine,
                         owners=owners, compress=options.compress,
                         **manifest_options(options.manifest or False), **how)[1]
    sys.stdout.buffer.write(serialize(None, rows, metadata, **how))
    return None


def convert_file(source: str, target: str, options: Options) -> dict[str, Any]:
    """Convert one file; return what the command tells of it."""
    from ._tensor_memory import find_same

    tensors = _read(source, options.select)
    tied = find_same(tensors)
    kept = {name: tensor for name, tensor in tensors.items() if name not in tied}
    written = _convert(kept, options.dtype)
    converted = sum(written[name] is not kept[name] for name in kept)
    if options.dtype and not converted and not options.as_json:
        _say(f"nothing is converted: no tensor has a dtype that becomes {options.dtype} "
             "(floats become floats, integers wider ones)")
    answer = {"target": target, "tensors": len(written), "converted": converted, "files": 1,
              "bytes": sum(tensor.nbytes for tensor in written.values())}
    if options.dry_run:
        return {**answer, "dry_run": True}
    stats = _write(target, written, tied, options)
    if stats is None:
        return {}
    return {**answer, "seconds": stats["total_ns"] / 1e9, "engine": stats["engine"],
            "promise": options.promise}


def _answer(told: dict[str, Any], options: Options) -> None:
    """Say what was done, as the command says it."""
    if options.as_json:
        print(json.dumps(told))
    elif told:
        count = told["tensors"]
        begin = "would write " if options.dry_run else ""
        end = "" if options.dry_run else f", {told['seconds']:.2f} s"
        print(f"{begin}{_printable(told['target'])}: {count} tensor{'s' if count != 1 else ''}, "
              f"{told['bytes'] / 2**20:.1f} MiB in 1 file{end}")


def _explain(error: Exception) -> tuple[int, str, object]:
    """(exit code, kind for programs, what to say) of a failure."""
    if isinstance(error, ImportError):
        return 4, "Missing", "reading a torch file needs torch: pip install torch"
    if isinstance(error, OSError):
        return 2, "Io", error
    if isinstance(error, pickle.UnpicklingError):
        found = re.search(r"(?:GLOBAL|class) (\S+)", str(error))
        if found:
            return 1, "NotTensors", (
                f"it holds {found.group(1)}, which is no tensor: torch's restricted loader "
                "(weights_only) takes only tensors, numbers and texts")
    return 1, "TorchFile", error  # whatever torch's loader finds wrong with the file


def main(words: list[str]) -> int:
    """Run what the command asks for: SOURCE TARGET OPTIONS (JSON) GLOB..; return the exit code."""
    source, target, text, *select = words
    options = Options(**json.loads(text), select=tuple(select))
    try:
        _answer(convert_file(source, target, options), options)
    except Exception as error:
        code, kind, what = _explain(error)
        if options.as_json:
            print(json.dumps({"error": {"kind": kind, "message": str(what), "file": source}}))
        else:
            _say(what, source if code == 1 else None)
        return code
    return 0
