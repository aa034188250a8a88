# SPDX-License-Identifier: Apache-2.0
"""One rank of a model of SGLang's own classes, loaded by SGLang's loader and by ours.

    sglang_rank.py RANK WORLD URL SCENARIOS.json

Prints a JSON line for each scenario: what differs, and the bytes of both. All scenarios of one
call have the same widths.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.layers import dp_attention
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

import fastsafetensors.lazy as lazy
import fastsafetensors.sglang

STATS: list[dict[str, int]] = []


def watch_stats() -> None:
    """Note what every lazy model has read."""
    close = lazy.LazyModel.close

    def closing(self: Any) -> None:
        close(self)
        STATS.append(self.stats())

    lazy.LazyModel.close = closing  # type: ignore[method-assign]


def load(scenario: dict[str, Any], load_format: str, extra: dict[str, Any]) -> Any:
    """A model with its weights."""
    from sglang.srt.model_loader.loader import get_model_loader

    config = ModelConfig(scenario["folder"], dtype="bfloat16")
    dp_attention.init_dp_gathered_buffer(config)
    load_config = LoadConfig(load_format=load_format, model_loader_extra_config=extra)
    loader = get_model_loader(load_config, config)
    return loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))


def run(scenario: dict[str, Any]) -> dict[str, Any]:
    """Load both ways and compare."""
    theirs = dict(load(scenario, "safetensors", {}).named_parameters())
    STATS.clear()
    ours = dict(load(scenario, "fastsafetensors", scenario.get("extra", {})).named_parameters())
    different = [name for name in theirs
                 if name not in ours or not torch.equal(theirs[name], ours[name])]
    return {"name": scenario["name"], "parameters": len(theirs), "different": different[:5],
            "bytes": sum(p.nbytes for p in ours.values()), "stats": STATS[-1]}


def main() -> None:
    """Run all scenarios."""
    rank, world, url, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    watch_stats()
    fastsafetensors.sglang.register()
    fastsafetensors.sglang.register()
    HookRegistry.apply_hooks()
    scenarios = json.loads(Path(path).read_text())
    first = scenarios[0]
    arguments = ServerArgs(
        model_path=first["folder"], device="cpu", tp_size=first.get("tp", 1),
        pp_size=first.get("pp", 1), ep_size=first.get("ep", 1), skip_tokenizer_init=True,
        disable_cuda_graph=True,
    )
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=rank))
    parallel_state.init_distributed_environment(world, rank, url, rank, "gloo")
    parallel_state.initialize_model_parallel(backend="gloo")
    dp_attention.initialize_dp_attention(arguments)
    for scenario in scenarios:
        print(json.dumps(run(scenario)), flush=True)


if __name__ == "__main__":
    main()
