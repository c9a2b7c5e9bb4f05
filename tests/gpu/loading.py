"""Whether this machine's cores decode as many pictures as the device trains on."""

import os
from collections.abc import Iterator

import torch

from benchmarks.loader import decoding
from benchmarks.workloads import make_step
from tests.gpu.checks import Check, Setting
from tests.gpu.micro_batches import FULL, REDUCED


def checks(setting: Setting) -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0))
    decoded = cores * 1e3 / decoding()["cpu_ms_per_image"]
    workload = setting.choose(FULL, REDUCED)[-1]
    step = make_step("bookkeeping", workload, setting.device, torch.bfloat16 if setting.is_cuda else torch.float32)
    step()
    trained = workload.batch_size / min(setting.seconds(step) for _ in range(3))
    yield Check(
        f"pictures decoded per second, {workload.name}", decoded >= trained or not setting.is_cuda,
        {"decoded": decoded, "trained": trained, "cores": cores, "cores_needed": cores * trained / decoded},
        "at least as many as are trained",
    )  # fmt: skip
