# SPDX-License-Identifier: Apache-2.0
"""Leaves all modes that torch's operations may run under.

Tensors of a file are cached and used later by others. Tensors read under torch.inference_mode(), in
a differentiated or mapped function (torch.func), or while tracing with fake tensors must be the
same as those read without.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from .._torch.torch_installed import torch as _torch

_mode_count = getattr(_torch._C, "_len_torch_dispatch_stack", lambda: 0)
_functions = getattr(_torch._C, "_functorch", None)
_innermost = getattr(_functions, "peek_interpreter_stack", lambda: None)
_trace = getattr(_torch._C, "_get_tracing_state", lambda: None)
_set_trace = getattr(_torch._C, "_set_tracing_state", lambda state: None)
_nothing = contextlib.nullcontext()


def outside_modes() -> contextlib.AbstractContextManager[Any]:
    """A context without this thread's modes; usually it has no modes."""
    is_inside = _torch.is_inference_mode_enabled() or _mode_count() or _trace() is not None
    return _outside() if is_inside or _innermost() is not None else _nothing


@contextlib.contextmanager
def _outside() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if _innermost() is not None:
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            stack.enter_context(temporarily_clear_interpreter_stack())
        if _mode_count():
            from torch.utils._python_dispatch import _disable_current_modes

            stack.enter_context(_disable_current_modes())
        if _trace() is not None:  # torch.jit.trace(): tensors that are read become its constants
            stack.callback(_set_trace, _trace())
            _set_trace(None)
        stack.enter_context(_torch.inference_mode(False))
        yield
