# SPDX-License-Identifier: Apache-2.0
"""Train a LoRA adapter on cached embeddings.

    python train.py config.yaml [key=value ...]
"""

import sys
import time

import torch
from base_model import fingerprint, load_base
from caches import CachedEmbeddings, CacheError, make_caches
from checkpoints import CheckpointError, Checkpoints, as_batch, save_adapter
from peft import LoraConfig, get_peft_model
from settings import SettingsError, load_settings
from utils.fast_loading import is_fastsafetensors_available


def batches(dataset, settings):
    """Yield batches without end, in an order that depends only on the seed."""
    generator = torch.Generator().manual_seed(settings.train.seed)
    while True:
        order = torch.randperm(len(dataset), generator=generator).tolist()
        for begin in range(0, len(order), settings.train.batch_size):
            chosen = order[begin : begin + settings.train.batch_size]
            yield as_batch([dataset[number] for number in chosen], settings.device)


def train(settings):
    """Train and return the loss of each step."""
    print(f"FastSafeTensors available: {is_fastsafetensors_available()}, "
          f"used: {settings.use_fastsafetensors and is_fastsafetensors_available()}")
    start = time.perf_counter()
    base = load_base(settings)
    print(f"base model loaded in {time.perf_counter() - start:.3f} s")
    make_caches(settings, base, fingerprint(base))
    dataset = CachedEmbeddings(settings.cache_dir, settings.use_fastsafetensors,
                               settings.fastsafetensors_num_threads)
    torch.manual_seed(settings.train.seed)
    model = get_peft_model(base, LoraConfig(
        r=settings.lora.rank, lora_alpha=settings.lora.alpha,
        target_modules=list(settings.lora.target_modules), task_type="CAUSAL_LM"))
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=settings.train.learning_rate)
    checkpoints = Checkpoints(settings, model, optimizer)
    try:
        done = 0
        if settings.train.resume:
            done = checkpoints.resume(settings.train.resume)
            print(f"resumed from step {done} of {settings.output_dir}")
        losses = run_steps(settings, dataset, (model, optimizer, checkpoints), done)
    finally:
        checkpoints.close()
    save_adapter(settings, model)
    return losses


def run_steps(settings, dataset, parts, done):
    """Train from the step after `done` on; return the losses."""
    model, optimizer, checkpoints = parts
    losses, last = [], settings.train.steps
    source = batches(dataset, settings)
    for _ in range(done):  # skip the batches of the earlier run
        next(source)
    for step in range(done + 1, last + 1):
        batch = next(source)
        loss = model(inputs_embeds=batch["prompt_embeds"], labels=batch["labels"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0 or step == last:
            print(f"step {step}: loss {losses[-1]:.4f}")
        checkpoints.save(step, is_last=step == last)
    return losses


def main():
    """Run the command line. Returns the exit code: 2 for bad settings, caches or checkpoints."""
    if len(sys.argv) < 2:
        print(__doc__.strip(), file=sys.stderr)
        return 2
    try:
        train(load_settings(sys.argv[1], sys.argv[2:]))
    except (SettingsError, CacheError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
