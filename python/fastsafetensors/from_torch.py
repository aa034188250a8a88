# SPDX-License-Identifier: Apache-2.0
"""torch.save files as safetensors: ``python -m fastsafetensors.from_torch SOURCE TARGET``.

The command's ``convert`` calls this for torch files. They are read by torch's restricted loader
(weights_only), which runs no code of the file's.
"""

from __future__ import annotations

import argparse
import fnmatch
import pickle
import re
import sys
from typing import Any

# Where training programs put the weights beside other things.
_NESTED = ("state_dict", "model", "model_state_dict", "module")


def _say(error: object, source: str | None = None) -> None:
    """Print a failure, its first line, without what would drive the terminal."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().split("\n")[0]
    text = "".join(one if one.isprintable() else "?" for one in text)
    where = f", in {''.join(one if one.isprintable() else '?' for one in source)}" if source else ""
    print(f"fastsafetensors: {text}{where}", file=sys.stderr)


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


def convert_file(source: str, target: str, options: argparse.Namespace) -> str:
    """Convert one file; return a line that says what was done."""
    import torch

    from ._saving import save_rows, with_ties
    from ._tensor_memory import find_same
    from ._torch_state import make_rows

    try:
        content = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):
            raise
        # A file of torch before 1.6, which is no zip archive.
        content = torch.load(source, map_location="cpu", weights_only=True)
    tensors = _find_tensors(content, torch)
    if options.select:
        tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if any(fnmatch.fnmatchcase(name, glob) for glob in options.select)
        }
        if not tensors:
            raise ValueError("no tensor's name matches")
    tied = find_same(tensors)
    kept = {name: tensor for name, tensor in tensors.items() if name not in tied}
    converted = _convert(kept, options.dtype)
    if options.dtype and all(converted[name] is kept[name] for name in kept):
        _say(f"nothing is converted: no tensor has a dtype that becomes {options.dtype} "
             "(floats do, integers only wider ones)")
    kept = converted
    size = sum(tensor.nbytes for tensor in kept.values())
    if options.dry_run:
        return f"would write {target}: {len(kept)} tensors, {size / 2**20:.1f} MiB in 1 file"
    rows, owners = make_rows(kept)
    _, stats = save_rows(
        target,
        rows,
        with_ties({"format": "pt"}, tied),
        promise="quick" if options.quick else "durable",
        order=options.order,
        engine=options.engine,
        alignment=options.align,
        owners=owners,
    )
    seconds = stats["total_ns"] / 1e9
    return f"{target}: {len(kept)} tensors, {size / 2**20:.1f} MiB in 1 file, {seconds:.2f} s"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="fastsafetensors convert", description=__doc__)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--dtype")
    parser.add_argument("--align", type=int, default=0)
    parser.add_argument("--order", default="reference", choices=["reference", "name", "given"])
    parser.add_argument(
        "--engine", default="auto", choices=["auto", "buffered", "direct", "uring"]
    )
    parser.add_argument("--select", action="append", default=[])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--lenient", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--no-progress", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        print(convert_file(options.source, options.target, options))
    except ImportError:
        _say("reading a torch file needs torch: pip install torch")
        return 4
    except OSError as error:
        _say(error)
        return 2
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|class) (\S+)", str(error))
        what = f"it holds {found.group(1)}, " if found else ""
        _say(f"{what}which is no tensor: torch's restricted loader (weights_only) takes only "
             "tensors, numbers and texts" if what else error, options.source)
        return 1
    except Exception as error:  # whatever torch's loader finds wrong with the file
        _say(error, options.source)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
