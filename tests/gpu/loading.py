"""Whether this machine's cores decode as many pictures as the device trains on."""

import io
import os
import time
from collections.abc import Iterator

import numpy as np
import torch
from PIL import Image

from benchmarks.step import make_step
from data.examples.examples import CaptionExample
from data.examples.tokenizer import EMBEDDED_TOKENIZER
from data.reading.reader import RawExample
from tests.gpu.checks import Check, Setting
from tests.gpu.micro_batches import FULL, REDUCED


def checks(setting: Setting) -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0))
    decoded = cores * 1e3 / decoding_ms()
    workload = setting.choose(FULL, REDUCED)[-1]
    step = make_step(
        "bookkeeping",
        workload,
        setting.device,
        torch.bfloat16 if setting.is_cuda else torch.float32,
    )
    step()
    trained = workload.batch_size / min(setting.seconds(step) for _ in range(3))
    yield Check(
        f"pictures decoded per second, {workload.name}",
        decoded >= trained or not setting.is_cuda,
        {
            "decoded": decoded,
            "trained": trained,
            "cores": cores,
            "cores_needed": cores * trained / decoded,
        },
        "at least as many as are trained",
    )


def decoding_ms() -> float:
    """CPU time of one photograph-like JPEG of 640 x 480, about the size of those of the large run."""
    make = CaptionExample(image_size=224, num_tokens=40, tokenizer_path=EMBEDDED_TOKENIZER)
    small = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8))
    buffer = io.BytesIO()
    small.resize((640, 480), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=85)
    raw = RawExample(buffer.getvalue(), {"txt": b"a photograph of something"})
    make(raw, 0)
    started = time.process_time()
    for key in range(200):
        make(raw, key)
    return 1e3 * (time.process_time() - started) / 200
