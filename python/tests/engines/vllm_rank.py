# SPDX-License-Identifier: Apache-2.0
"""One rank of a model with vLLM's classes, loaded by vLLM's loader and by ours."""

from __future__ import annotations

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
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from rank_program import (
    STATS,
    UNTOUCHED,
    addresses,
    arguments,
    compare,
    disk_reads,
    refused,
    run_all,
    watch_stats,
)
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

import fastsafetensors.vllm

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


def initialize(config: VllmConfig) -> Any:
    """A model without loaded weights."""
    with set_default_torch_dtype(torch.bfloat16):
        model = initialize_model(vllm_config=config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.fill_(UNTOUCHED)
    return model


def load(scenario: dict[str, Any], load_format: str, extra: dict[str, Any]) -> Any:
    """A model with its weights."""
    config = make_config(scenario, load_format, extra)
    with set_current_vllm_config(config):
        model = initialize(config)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
    return model


def build(scenario: dict[str, Any], load_format: str, extra: dict[str, Any]) -> Any:
    """Return (configuration, model) as vLLM builds them."""
    config = make_config(scenario, load_format, extra)
    with set_current_vllm_config(config):
        loader = get_model_loader(config.load_config)
        return config, loader.load_model(vllm_config=config, model_config=config.model_config)


def reload(scenario: dict[str, Any]) -> dict[str, Any]:
    """Load, then reload from another folder. The new weights must be at the same addresses."""
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    config, model = build(scenario, "fastsafetensors", scenario.get("extra", {}))
    before = addresses(model)
    with set_current_vllm_config(config):
        def again(folder: str) -> Any:
            if scenario.get("second"):  # the truncated file follows the model's own files
                model.secondary_weights = [DefaultModelLoader.Source(folder, None)]
                folder = scenario["reload"]
            return reload_weights(config, model, None, folder, True)

        refusal = refused(scenario, again)
        if scenario.get("breaks") == 0:  # the old weights are untouched
            theirs = build(scenario, "safetensors", {})[1]
            return compare(scenario, theirs, model, same_addresses=before == addresses(model),
                           refusal=refusal)
        STATS.clear()
        with disk_reads(scenario, scenario["reload"]):
            reload_weights(config, model, None, scenario["reload"], True)
    plain = scenario.get("plain", scenario["reload"])
    _, other = build({**scenario, "folder": plain}, "safetensors", {})
    # Parameters that vLLM had begun to reload have other addresses after the next reload.
    same = before == addresses(model) or "breaks" in scenario
    return compare(scenario, other, model, same_addresses=same, refusal=refusal)


def sharded(scenario: dict[str, Any]) -> dict[str, Any]:
    """Every rank saves its sharded state and loads it again."""
    theirs = load(scenario, "safetensors", {})
    folder = Path(scenario["sharded"])
    folder.mkdir(exist_ok=True)
    ShardedStateLoader.save_model(theirs, str(folder))
    config = make_config(scenario, "fastsafetensors_sharded", scenario.get("extra", {}))
    with set_current_vllm_config(config):
        model = initialize(config)
        config.model_config.model = str(folder)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
    state = ShardedStateLoader._filter_subtensors(theirs.state_dict())  # with its buffers
    return {**compare(scenario, theirs, model), "bytes": sum(t.nbytes for t in state.values())}


def both(scenario: dict[str, Any]) -> dict[str, Any]:
    """Load both ways."""
    theirs = load({**scenario, "folder": scenario.get("plain", scenario["folder"])},
                  "safetensors", {})
    with disk_reads(scenario, scenario["folder"]):
        ours = load(scenario, "fastsafetensors", scenario.get("extra", {}))
    return compare(scenario, theirs, ours)


def run(scenario: dict[str, Any]) -> dict[str, Any]:
    """Load both ways and compare."""
    config = make_config(scenario, "safetensors", {})
    way = reload if "reload" in scenario else sharded if "sharded" in scenario else both
    with set_current_vllm_config(config):
        parallel_state.initialize_model_parallel(
            scenario.get("tp", 1), scenario.get("pp", 1), backend="gloo")
    try:
        return way(scenario)
    finally:
        parallel_state.destroy_model_parallel()


def main() -> None:
    """Run all scenarios."""
    import vllm.model_executor.layers.fused_moe.experts.cpu_moe as cpu_moe
    from vllm.model_executor.models import registry

    # vLLM inspects each class in a new process, which takes as long as importing vLLM.
    registry._run_in_subprocess = lambda inspect: inspect()
    cpu_moe.cpu_prepack_moe_weight = lambda weight, isa: weight  # is compiled
    torch.accelerator.empty_cache = lambda: None  # torch 2.13's needs a device
    rank, world, url, scenarios = arguments()
    watch_stats()
    fastsafetensors.vllm.register()
    fastsafetensors.vllm.register()
    config = make_config(scenarios[0], "safetensors", {})
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(world, rank, url, rank, "gloo")
    run_all(run, scenarios)


if __name__ == "__main__":
    main()
