# SPDX-License-Identifier: Apache-2.0
"""Processes that run programs with torch. They are forked from one that has imported it, because
the import takes longer than most of the programs.
"""

import atexit
import functools
import itertools
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

# Reads requests, one per line, and runs each program in a child. Writes [number of the request,
# pid, None], and [number, pid, exit status] when the program has ended (negative: by that signal).
SERVER = r"""
import gc, json, os, select, sys, types
import numpy, torch, torch.distributed
import torch.distributed.checkpoint, torch.distributed.tensor

answers = int(sys.argv[1])
gc.freeze()
numbers, request = {}, None
while True:
    if select.select([0], [], [], 0.01 if numbers else None)[0]:
        line = sys.stdin.buffer.raw.readline()
        if not line:
            sys.exit()
        request, pid = json.loads(line), os.fork()
        if pid == 0:
            break
        numbers[pid] = request["number"]
        os.write(answers, json.dumps([request["number"], pid, None]).encode() + b"\n")
    ended, status = os.waitpid(-1, os.WNOHANG) if numbers else (0, 0)
    if ended:
        status = os.waitstatus_to_exitcode(status)
        os.write(answers, json.dumps([numbers.pop(ended), ended, status]).encode() + b"\n")
os.close(answers)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
for descriptor, path in enumerate(request["outputs"], 1):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
os.chdir(request["folder"])
os.environ.clear()
os.environ.update(request["environment"])
sys.argv = ["-c", *request["words"]]
sys.modules["__main__"] = types.ModuleType("__main__")
exec(compile(request["code"], "<string>", "exec"), sys.modules["__main__"].__dict__)
"""
_numbers = itertools.count()


class Ended(NamedTuple):
    """A process that has ended."""

    status: int | None  # negative: of a signal; None: it was lost
    stdout: str
    stderr: str


class _Server:
    """The process that has imported torch; it ends with this one."""

    def __init__(self) -> None:
        """Start it."""
        read, write = os.pipe()
        self._process = subprocess.Popen([sys.executable, "-c", SERVER, str(write)],
                                         stdin=subprocess.PIPE, pass_fds=[write])
        os.close(write)
        self._answers = os.fdopen(read, "rb", buffering=0)
        self._pid = os.getpid()
        atexit.register(self._end)

    def _end(self) -> None:
        if self._pid == os.getpid():
            self._process.stdin.close()
            self._process.wait()

    def send(self, request: dict) -> None:
        """Ask for a process."""
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self, seconds: float) -> list:
        """Wait for the next answer."""
        if not select.select([self._answers], [], [], max(seconds, 0))[0]:
            raise TimeoutError(f"programs still run after {seconds:.0f} s")
        line = self._answers.readline()
        assert line, f"the server has ended with status {self._process.wait()}"
        return json.loads(line)


@functools.cache
def _server(_pid: int) -> _Server:
    return _Server()


def run_together(
    code: str, words: list[list], seconds: float, lost: int | None = None
) -> list[Ended]:
    """Run a program once for each list of words, all at the same time.

    Args:
        code: the program.
        words: sys.argv[1:] of each process.
        seconds: how long they may take.
        lost: the index of a process that is killed when the others have ended.

    Raises:
        TimeoutError: some took longer. They were killed.
    """
    server, end = _server(os.getpid()), time.monotonic() + seconds
    pids: dict[int, int] = {}
    statuses: dict[int, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        outputs = {next(_numbers): [f"{folder}/{at}.{kind}" for kind in ("stdout", "stderr")]
                   for at in range(len(words))}
        for arguments, (number, paths) in zip(words, outputs.items(), strict=True):
            server.send({"number": number, "code": code, "words": [*map(str, arguments)],
                         "outputs": paths, "folder": os.getcwd(), "environment": dict(os.environ)})
        awaited = {number for at, number in enumerate(outputs) if at != lost}
        try:
            while awaited - statuses.keys():
                number, pid, status = server.answer(end - time.monotonic())
                if status is None:
                    pids[number] = pid
                elif number in outputs:
                    statuses[number] = status
        finally:
            for number, pid in pids.items():
                if number not in statuses:
                    os.kill(pid, signal.SIGKILL)
        return [Ended(statuses.get(number), *(pathlib.Path(path).read_text(errors="replace")
                                              for path in paths))
                for number, paths in outputs.items()]
