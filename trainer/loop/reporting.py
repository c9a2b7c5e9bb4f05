"""What a step tells whom: public metrics, private metrics, and the console line (which is inside the trust boundary)."""

import io
import json
import resource
import sys
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image

from trainer.engines.base import holds_whole_weights
from trainer.loop.metrics import MetricsWriter
from trainer.loop.progress import ProgressLine
from trainer.run.files import write_durably

if TYPE_CHECKING:
    from trainer.loop.step import StepRecord
    from trainer.run.run import Run


class StepReporter:
    """Writes on rank 0; the collective parts (held-out evaluation) run on all ranks."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        self._is_main = run.is_main
        if self._is_main:
            self._public = MetricsWriter(run.folder.root, times=False)
            self._private = MetricsWriter(run.folder.private, times=True)
            self._progress = ProgressLine(run.first_step - 1, run.config.train.num_steps)

    def close(self) -> None:
        if self._is_main:
            self._progress.close()
            self._public.close()
            self._private.close()

    def step(self, step: int, record: "StepRecord", seconds: float) -> None:
        """After step `step`, which took `seconds`."""
        every = self._run.config.heldout.every_steps if self._run.config.heldout else None
        if every and step % every == 0 and step < self._run.config.train.num_steps:
            self.heldout(step)
        if not self._is_main:
            return
        epsilon = self._run.ledger.epsilon()
        timings = self._timings(seconds, record)
        if step % self._run.config.train.log_every == 0 or step == self._run.config.train.num_steps:
            public = {"optimizer/lr": record.lr, "optimizer/noised_grad_norm": record.noised_grad_norm, **record.public}
            if epsilon is not None:
                public |= {"privacy/epsilon": epsilon, "privacy/charged_attempts": self._run.ledger.num_charged}
            self._public.scalars(step, public)
            self._private.scalars(step, _private_metrics(record.private) | timings)
        self._progress.update(step, self._console(epsilon, record, timings))

    def _timings(self, seconds: float, record: "StepRecord") -> dict[str, float]:
        """Private: the time and memory that single examples take to decode are in all of them."""
        # Rates come from the expected batch size, never from the realised one.
        return {
            "performance/step_seconds": seconds,
            "performance/examples_per_second": self._run.mechanism.plan.expected_batch_size / seconds,
            "performance/communication_bytes": record.communication_bytes,
            "performance/data_wait_fraction": self._run.loader.data_wait / seconds,
            "performance/peak_memory_gib": _peak_memory_gib(self._run.mechanism.engine.device),
        }

    def _console(self, epsilon: float | None, record: "StepRecord", timings: dict[str, float]) -> dict[str, str]:
        return {
            "eps": f"{epsilon:.3f}" if epsilon is not None else "none (no formal guarantee)",
            "lr": f"{record.lr:.1e}",
            "loss": f"{_private_metrics(record.private)['train/loss']:.3f}",
            "ex/s": f"{timings['performance/examples_per_second']:.0f}",
            "data": f"{timings['performance/data_wait_fraction']:.0%}",
            "mem": f"{timings['performance/peak_memory_gib']:.1f}G",
        }

    def heldout(self, step: int) -> None:
        """Loss (of a classifier, accuracy too) and samples of held-out examples.

        Public only where the recipe declares the data public.
        """
        run = self._run
        assert run.heldout is not None and run.config.heldout is not None
        means = run.heldout.means(run.mechanism.engine)
        scalars = {f"heldout/{name}": value for name, value in means.items()}
        if run.average is not None and holds_whole_weights(run.mechanism.engine):
            with run.average.in_use():
                scalars["heldout/loss_of_average"] = run.heldout.loss(run.mechanism.engine)
        samples = run.heldout.samples(run.mechanism.engine, run.config.heldout.num_captions)
        if not self._is_main:
            return
        is_public = run.config.heldout.is_public
        writer = self._public if is_public else self._private
        folder = run.folder.evaluation if is_public else run.folder.private
        writer.scalars(step, scalars)
        others = "".join(f", {name} {value:.4f}" for name, value in means.items() if name != "loss")
        print(f"held-out {run.heldout.loss_name} after step {step}: {means['loss']:.4f}{others}", flush=True)
        texts = samples.lines if samples else []
        if samples:
            writer.picture(step, "heldout/samples", samples.picture_HWC)
            write_durably(folder / samples_name(step), _png(samples.picture_HWC))
        if texts:
            writer.text(step, "heldout/samples", "\n".join(f"* {own!r} for {reference!r}" for own, reference in texts))
        for own, reference in texts:
            print(f"  model: {own!r}   reference: {reference!r}", flush=True)
        lines = [{"step": step, **means, "captions": texts}]
        with (folder / "heldout.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def samples_name(step: int) -> str:
    """The picture of a step's samples, beside heldout.jsonl."""
    return f"samples-{step:08d}.png"


def _png(picture_HWC: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture_HWC).save(file, "PNG")
    return file.getvalue()


def _private_metrics(private: dict[str, float]) -> dict[str, float]:
    count = max(private["num_examples"], 1.0)
    return {
        "train/loss": private["loss_sum"] / count,
        "train/clipped_fraction": private["num_clipped"] / count,
        "train/mean_grad_norm": private["norm_sum"] / count,
        "train/batch_size": private["num_examples"],
        "train/nonfinite_examples": private["num_nonfinite"],
        "train/undecodable_examples": private["num_undecodable"],
    }


def _peak_memory_gib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
