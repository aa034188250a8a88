# SPDX-License-Identifier: Apache-2.0
"""One rank of a model of vLLM's own classes, loaded by vLLM's loader and by ours.

    vllm_rank.py RANK WORLD URL SCENARIOS.json

Prints a JSON line for each scenario: what differs, and the bytes of both.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

import fastsafetensors.lazy as lazy
import fastsafetensors.vllm

STATS: list[dict[str, int]] = []


def watch_stats() -> None:
    """Note what every lazy model has read."""
    close = lazy.LazyModel.close

    def closing(self: Any) -> None:
        close(self)
        STATS.append(self.stats())

    lazy.LazyModel.close = closing  # type: ignore[method-assign]


def make_config(scenario: dict[str, Any], load_format: str, extra: dict[str, Any]) -> VllmConfig:
    """The configuration of a load."""
    parallel = ParallelConfig(
        tensor_parallel_size=scenario.get("tp", 1), pipeline_parallel_size=scenario.get("pp", 1),
        enable_expert_parallel=scenario.get("ep", False),
        distributed_executor_backend="external_launcher", **scenario.get("parallel", {}),
    )
    model = ModelConfig(scenario["folder"], skip_tokenizer_init=True, dtype="bfloat16",
                        enforce_eager=True)
    load = LoadConfig(load_format=load_format, model_loader_extra_config=extra,
                      use_tqdm_on_load=False)
    return VllmConfig(model_config=model, device_config=DeviceConfig("cpu"),
                      parallel_config=parallel, load_config=load)


def load(scenario: dict[str, Any], load_format: str, extra: dict[str, Any]) -> Any:
    """A model with its weights."""
    config = make_config(scenario, load_format, extra)
    with set_current_vllm_config(config):
        with set_default_torch_dtype(torch.bfloat16):
            model = initialize_model(vllm_config=config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data.fill_(-77)
        loader = get_model_loader(config.load_config)
        loader.load_weights(model, config.model_config)
    return model


def build(scenario: dict[str, Any], load_format: str, extra: dict[str, Any]) -> Any:
    """(configuration, model) of vLLM's whole way to a model."""
    config = make_config(scenario, load_format, extra)
    with set_current_vllm_config(config):
        loader = get_model_loader(config.load_config)
        return config, loader.load_model(vllm_config=config, model_config=config.model_config)


def reload(scenario: dict[str, Any]) -> Any:
    """(their parameters of the second folder, ours after a reload, whether addresses stayed)."""
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    config, model = build(scenario, "fastsafetensors", scenario.get("extra", {}))
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    STATS.clear()
    with set_current_vllm_config(config):
        reload_weights(config, model, None, scenario["reload"], True)
    ours = dict(model.named_parameters())
    stayed = before == {name: p.data_ptr() for name, p in ours.items()}
    _, other = build({**scenario, "folder": scenario["reload"]}, "safetensors", {})
    return dict(other.named_parameters()), ours, stayed


def both(scenario: dict[str, Any]) -> Any:
    """(their parameters, ours, True)."""
    theirs = dict(load(scenario, "safetensors", {}).named_parameters())
    STATS.clear()
    ours = load(scenario, "fastsafetensors", scenario.get("extra", {}))
    return theirs, dict(ours.named_parameters()), True


def run(scenario: dict[str, Any]) -> dict[str, Any]:
    """Load both ways and compare."""
    config = make_config(scenario, "safetensors", {})
    with set_current_vllm_config(config):
        parallel_state.initialize_model_parallel(
            scenario.get("tp", 1), scenario.get("pp", 1), backend="gloo")
    try:
        theirs, ours, stayed = (reload if "reload" in scenario else both)(scenario)
    finally:
        parallel_state.destroy_model_parallel()
    different = [name for name in theirs
                 if name not in ours or not torch.equal(theirs[name], ours[name])]
    return {"name": scenario["name"], "parameters": len(theirs), "different": different[:5],
            "untouched": [n for n, p in ours.items() if bool((p == -77).all())][:5],
            "bytes": sum(p.nbytes for p in ours.values()), "stats": STATS[-1],
            "same_addresses": stayed}


def main() -> None:
    """Run all scenarios."""
    import vllm.model_executor.layers.fused_moe.experts.cpu_moe as cpu_moe

    cpu_moe.cpu_prepack_moe_weight = lambda weight, isa: weight  # is compiled
    torch.accelerator.empty_cache = lambda: None  # torch 2.13's needs a device
    rank, world, url, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    watch_stats()
    fastsafetensors.vllm.register()
    fastsafetensors.vllm.register()
    scenarios = json.loads(Path(path).read_text())
    config = make_config(scenarios[0], "safetensors", {})
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(world, rank, url, rank, "gloo")
    for scenario in scenarios:
        print(json.dumps(run(scenario)), flush=True)


if __name__ == "__main__":
    main()
