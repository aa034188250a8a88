# SPDX-License-Identifier: Apache-2.0
"""Files that several ranks have written become a set: one of them publishes it, all or nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ._agreement import Agreement
from ._core import Writer, publish_set
from ._errors import serialization_error


@dataclass(frozen=True)
class SetPlace:
    """Where a set goes: STEM-00001-of-0000N.safetensors in a folder, perhaps without an index."""

    folder: str
    stem: str
    durable: bool
    without_index: bool = False
    manifest: Mapping[str, Any] = field(default_factory=dict)  # of manifest_options()


def _hand_over(writers: Mapping[int, Writer]) -> dict[int, str]:
    """{number of the file: its hidden name}: everything is written."""
    try:
        return {number: os.path.basename(writer.hand_over()[0])
                for number, writer in writers.items()}
    except OSError as error:
        raise serialization_error(error) from error


def publish_together(
    pg: Any,
    agreement: Agreement,
    writers: Mapping[int, Writer],
    place: SetPlace,
    error: Exception | None = None,
) -> None:
    """Write the files of all ranks, {number: writer} of this one's; then rank 0 names them.

    The writers must stay open until this returns. error: what went wrong here before. Until rank 0
    publishes, an error on any rank is one on all, and the old model is there; a writer that is
    closed takes its file back.
    """
    hidden: dict[int, str] = {}
    if error is None:
        try:
            hidden = _hand_over(writers)
        except Exception as failure:
            error = failure
    agreement.agree("the end of writing", error=error)
    every: dict[str, str] = {}
    for text in pg.exchange_texts(json.dumps(hidden), "the hidden files"):
        every.update(json.loads(text))
    if pg.rank() == 0:
        paths = [os.path.join(place.folder, every[str(at)]) for at in range(len(every))]
        try:
            publish_set(place.folder, paths, place.stem, place.durable, place.without_index,
                        place.manifest.get("manifest"), place.manifest.get("digest", "xxh3-128"))
        except Exception as failure:
            error = failure
    agreement.agree("the new names", error=error)
