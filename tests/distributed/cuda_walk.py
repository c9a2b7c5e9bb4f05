"""`cuda_walk EVERY` walks with DS_ACCELERATOR=cuda through everything that needs no device; prints how each part ended as JSON.

Every EVERY-th pair of an engine and a ds_config is tried, such that each engine and each ds_config is among them.
"reached CUDA" means that torch itself ended it, because it is built without CUDA: everything before that call works.
"""

import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

from tests.distributed.ranks import ROOT
from tests.distributed.test_engines import MICRO_BATCH, OPTIMIZER, clipped_steps, fresh_captioner
from trainer.config.machine import load_machine_settings, resolve
from trainer.config.recipe import EngineName
from trainer.engines import build_engine, sharder
from trainer.errors import ConfigError

ROOMS = ("trainer", "privacy", "models", "data", "evaluation", "launch_scripts")
NO_CUDA = (
    "Torch not compiled with CUDA enabled",
    "PyTorch is not linked with support for cuda devices",
    "module 'torch._C' has no attribute '_cuda",
)


class CudaOpsOnCpu(CPU_Accelerator):
    """Lists and builds DeepSpeed's ops as on CUDA; computes on the CPU."""

    class_dict = None
    _lazy_init_class_dict = CUDA_Accelerator._lazy_init_class_dict
    create_op_builder = CUDA_Accelerator.create_op_builder
    get_op_builder = CUDA_Accelerator.get_op_builder
    op_builder_dir = CUDA_Accelerator.op_builder_dir


def outcome(walk: Callable[[], object]) -> str:
    """ "done", "reached CUDA", or why our own code refused it; anything else is raised."""
    try:
        walk()
    except ConfigError as error:
        return f"refused: {error}"
    except (AssertionError, AttributeError, RuntimeError) as error:
        if not any(words in str(error) for words in NO_CUDA):
            raise
        return "reached CUDA"
    return "done"


def modules() -> list[str]:
    """All of ours, imported; without those that need triton, where it is not installed."""
    found = []
    for room in ROOMS:
        for module in pkgutil.walk_packages([str(ROOT / room)], f"{room}."):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if error.name != "triton":
                    raise
            else:
                found.append(module.name)
    return found


def walk(path: Path, engine: EngineName, device: torch.device) -> None:
    """Builds an engine; where that needs no CUDA, takes a step."""
    machine = load_machine_settings(path)
    deepspeed.DeepSpeedConfig(resolve(machine, micro_batch_size=MICRO_BATCH, world_size=1))
    model = fresh_captioner(after=sharder(engine, machine, device, MICRO_BATCH))
    clipped_steps(build_engine(engine, model, OPTIMIZER, machine, device, MICRO_BATCH), 1)


def main(every: int) -> None:
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    accelerator = get_accelerator()
    found: dict[str, object] = {"accelerator": accelerator.device_name(), "modules": modules()}
    for name, device in (("cuda", torch.device("cuda", 0)), ("ops of cuda", torch.device("cpu"))):
        if device.type == "cpu":
            set_accelerator(CudaOpsOnCpu())
        for i, path in enumerate(sorted((ROOT / "ds_configs").glob("*.json"))):
            for engine in get_args(EngineName)[i % every :: every]:
                found[f"{name}, {engine}, {path.name}"] = outcome(lambda: walk(path, engine, device))  # noqa: B023 - at once
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]))
