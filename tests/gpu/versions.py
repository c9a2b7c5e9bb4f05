"""Versions, device, and what is not installed."""

import os
import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from tests.gpu.checks import ROOT, Check, Setting

REQUIRED = (
    "torch numpy deepspeed dp-accounting pydantic tokenizers pillow cryptography scipy pytest"
)
OPTIONAL = "triton fairscale opacus transformers webdataset tensorboard"


def checks(setting: Setting) -> Iterator[Check]:
    found = {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "cuda": torch.version.cuda,
    }
    if setting.is_cuda:
        device = torch.cuda.get_device_properties(setting.device)
        found |= {
            "device": device.name,
            "gib": round(device.total_memory / 2**30, 1),
            "capability": f"{device.major}.{device.minor}",
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    yield Check("machine", True, found | {"commit": commit.strip() or None}, "for the record")
    for package in (*REQUIRED.split(), *OPTIONAL.split()):
        try:
            yield Check(f"package {package}", True, version(package), "installed")
        except PackageNotFoundError:
            yield Check(f"package {package}", None, "not installed", "installed")
