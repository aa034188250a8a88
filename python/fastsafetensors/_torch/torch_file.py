# SPDX-License-Identifier: Apache-2.0
"""Converts torch.save files, for the command's ``convert``, which has parsed the options.

Files are read by torch's restricted loader (weights_only), which runs no code from the file.
"""

from __future__ import annotations

import fnmatch
import json
import pickle
import re
import sys
import warnings
from dataclasses import dataclass
from typing import Any

from .._base.errors import printable

# Keys of training checkpoints that contain the weights.
_NESTED = ("state_dict", "model", "model_state_dict", "module")


@dataclass(frozen=True)
class Options:
    """Options from the command, with the names of Writer; dtype: the format's name, or None."""

    dtype: str | None = None
    alignment: int = 0
    order: str = "reference"
    engine: str = "auto"
    promise: str = "durable"
    compress: str = "none"
    manifest: str | None = None  # the algorithm
    dry_run: bool = False
    to_pipe: bool = False
    as_json: bool = False
    select: tuple[str, ...] = ()


def _say(error: object, source: str | None = None) -> None:
    """Print the first line of an error, with control characters removed."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().split("\n")[0]
    where = f", in {printable(source)}" if source else ""
    print(f"fastsafetensors: {printable(text)}{where}", file=sys.stderr)


def _holds_tensors(value: Any, torch: Any) -> bool:
    """Tell whether a value has weights that would be lost; an optimizer's state does not."""
    if isinstance(value, torch.Tensor):
        return True
    return (isinstance(value, dict) and bool(value)
            and all(isinstance(one, torch.Tensor) for one in value.values()))


def _find_tensors(content: Any, torch: Any) -> dict[str, Any]:
    """Return a checkpoint's dict of tensors."""
    whole = content
    for name in _NESTED:
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
            left_out = sorted(str(key) for key, value in whole.items()
                              if key != name and _holds_tensors(value, torch))
            if left_out:
                raise ValueError(f"besides {name!r} the file has tensors in {left_out}: "
                                 "save what is meant alone")
            dropped = sorted(str(key) for key in whole if key != name)
            if dropped:
                _say(f"only the tensors of {name!r} are kept, not {', '.join(dropped)}")
            break
    if not isinstance(content, dict):
        raise ValueError(f"the file contains {type(content).__name__}, not a dict of tensors")
    for name, value in content.items():
        if not isinstance(name, str):
            raise ValueError(f"names of tensors must be strings, and the file has {name!r}")
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise ValueError(f"the file contains more than tensors: {name!r} is {kind}")
    return content


def _convert(tensors: dict[str, Any], requested: str | None) -> dict[str, Any]:
    """Convert floats to another dtype and integers to wider ones; others are unchanged."""
    from .torch_state import dtype_name, torch_dtype

    target = torch_dtype(requested) if requested else None
    if requested and target is None:
        raise ValueError(f"torch has no dtype {requested}")
    result = {}
    for name, tensor in tensors.items():
        own = dtype_name(tensor.dtype) or ""
        floats = tensor.dtype.is_floating_point and target and target.is_floating_point
        widens = (
            requested
            and own[:1] in "IU"
            and requested[:1] in "IU"
            and int(requested[1:]) > int(own[1:])
            and (own[0] == "U" or requested[0] == "I")
        )
        result[name] = tensor.to(target) if floats or widens else tensor
    return result


def _read(source: str, select: tuple[str, ...]) -> dict[str, Any]:
    """Return the tensors of a file, all or those with matching names."""
    import torch

    # torch advises to load without restrictions, for which the command has no option.
    warnings.simplefilter("ignore")
    try:
        content = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):
            raise
        # A file written by torch before 1.6, which is not a zip archive.
        content = torch.load(source, map_location="cpu", weights_only=True)
    tensors = _find_tensors(content, torch)
    if not select:
        return tensors
    chosen = {name: tensor for name, tensor in tensors.items()
              if any(fnmatch.fnmatchcase(name, glob) for glob in select)}
    if not chosen:
        raise ValueError("no tensor name matches")
    return chosen


def _write(target: str, tensors: dict[str, Any], tied: dict[str, str], options: Options) -> Any:
    """Write the target; return the statistics, or None for a pipe."""
    from .._core import serialize
    from .._saving.save_options import manifest_options, save_rows, with_ties
    from .torch_state import make_rows

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
    """Convert one file; return the command's report."""
    from .tensor_memory import find_same

    tensors = _read(source, options.select)
    tied = find_same(tensors)
    kept = {name: tensor for name, tensor in tensors.items() if name not in tied}
    written = _convert(kept, options.dtype)
    converted = sum(written[name] is not kept[name] for name in kept)
    if options.dtype and not converted and not options.as_json:
        _say(f"warning: --dtype {options.dtype} has no effect: no tensor can be converted to it "
             "(floats convert to floats, integers to wider integers)")
    if tied and not options.as_json:
        shown = ", ".join(f"{name} (the same as {owner})" for name, owner in sorted(tied.items()))
        _say(f"note: tied tensors are saved once, without {shown}: load_model() ties them again")
    answer = {"target": target, "tensors": len(written), "converted": converted, "files": 1}
    if options.dry_run:
        tensor_bytes = sum(tensor.nbytes for tensor in written.values())
        shards = [{"tensors": len(written), "tensor_bytes": tensor_bytes}]
        return {**answer, "tensor_bytes": tensor_bytes, "dry_run": True, "shards": shards}
    stats = _write(target, written, tied, options)
    if stats is None:
        return {}
    return {**answer, "bytes": stats["bytes_total"], "seconds": stats["total_ns"] / 1e9,
            "engine": stats["engine"], "promise": options.promise}


def _answer(reported: dict[str, Any], options: Options) -> None:
    """Print what was done, like the command."""
    if options.as_json:
        print(json.dumps(reported))
    elif reported:
        count = reported["tensors"]
        begin = "would write " if options.dry_run else ""
        end = "" if options.dry_run else f", {reported['seconds']:.2f} s"
        mib = reported.get("bytes", reported.get("tensor_bytes", 0)) / 2**20
        print(f"{begin}{printable(reported['target'])}: {count} tensor{'s' if count != 1 else ''}"
              f", {mib:.1f} MiB in 1 file{end}")


def _explain(error: Exception) -> tuple[int, str, object]:
    """(exit code, kind for programs, message) of an error."""
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
        return 1, "NotTensors", (
            "torch's restricted loader (weights_only) refuses it, because reading it could run "
            "code. Save its tensors alone")
    return 1, "TorchFile", error  # any error of torch's loader


def main(words: list[str]) -> int:
    """Run with arguments SOURCE TARGET OPTIONS (JSON) GLOB...; return the exit code."""
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
