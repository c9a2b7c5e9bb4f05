"""What each step publishes, what it keeps private, and its console line (which is inside the trust boundary)."""

import io
import json
import resource
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from data.files import write_durably
from trainer.engines.base import holds_whole_weights
from trainer.loop.metrics import MetricsWriter
from trainer.ranks import distributed

if TYPE_CHECKING:
    from trainer.loop.step import StepRecord
    from trainer.run.run import Run

PLAIN_INTERVAL_SECONDS = 10.0


class ProgressLine:
    """Shows step, percent, the given facts and the time left. Only rank 0 makes one."""

    def __init__(self, first_step: int, num_steps: int) -> None:
        self._first, self._total = first_step, num_steps
        self._started = time.monotonic()
        self._printed = 0.0
        self._bar: Progress | None = None
        if sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(),
                TextColumn("{task.percentage:.1f}%  {task.description}"),
                console=Console(),
            )
            self._task = self._bar.add_task("", total=num_steps, completed=first_step)
            self._bar.start()

    def update(self, step: int, facts: Mapping[str, str]) -> None:
        """Shows a finished step; plain lines appear at most every ten seconds, and for the last step."""
        # rich's own estimate forgets what is older than half a minute, and a step may take longer.
        now, done = time.monotonic(), step - self._first
        eta = timedelta(seconds=int((now - self._started) / done * (self._total - step))) if done > 0 else "?"
        text = "  ".join(f"{name} {value}" for name, value in {**facts, "eta": str(eta)}.items())
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
            return
        if now - self._printed >= PLAIN_INTERVAL_SECONDS or step == self._total:
            self._printed = now
            print(f"step {step}/{self._total}  {100 * step / self._total:.1f}%  {text}", flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class StepReporter:
    """Writes on rank 0; the collective parts (held-out evaluation) run on all ranks."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        self._is_main = distributed.rank() == 0
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
        """Writes the metrics of a finished step, which took `seconds`."""
        every = self._run.config.heldout.every_steps if self._run.config.heldout else None
        if every and step % every == 0 and step < self._run.config.train.num_steps:
            self.heldout(step)
        if not self._is_main:
            return
        epsilon, private = self._run.ledger.epsilon(), record.private
        count = max(private["num_examples"], 1.0)
        losses = {
            "train/loss": private["loss_sum"] / count,
            "train/clipped_fraction": private["num_clipped"] / count,
            "train/mean_grad_norm": private["norm_sum"] / count,
            "train/batch_size": private["num_examples"],
            "train/nonfinite_examples": private["num_nonfinite"],
            "train/undecodable_examples": private["num_undecodable"],
        }
        device = self._run.mechanism.engine.device
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
        # Private too: the time and memory that single examples take to decode are in all of them. Rates come from the expected
        # batch size, never from the realised one.
        timings = {
            "performance/step_seconds": seconds,
            "performance/examples_per_second": self._run.mechanism.plan.expected_batch_size / seconds,
            "performance/communication_bytes": record.communication_bytes,
            "performance/data_wait_fraction": self._run.loader.data_wait / seconds,
            "performance/peak_memory_gib": peak / 2**30,
        }
        if step % self._run.config.train.log_every == 0 or step == self._run.config.train.num_steps:
            public = {"optimizer/lr": record.lr, "optimizer/noised_grad_norm": record.noised_grad_norm, **record.public}
            if epsilon is not None:
                public |= {"privacy/epsilon": epsilon, "privacy/charged_attempts": self._run.ledger.num_charged}
            self._public.scalars(step, public)
            self._private.scalars(step, losses | timings)
        console = {
            "eps": f"{epsilon:.3f}" if epsilon is not None else "none (no formal guarantee)",
            "lr": f"{record.lr:.1e}",
            "loss": f"{losses['train/loss']:.3f}",
            "ex/s": f"{timings['performance/examples_per_second']:.0f}",
            "data": f"{timings['performance/data_wait_fraction']:.0%}",
            "mem": f"{timings['performance/peak_memory_gib']:.1f}G",
        }
        self._progress.update(step, console)

    def heldout(self, step: int) -> None:
        """Evaluates held-out examples: loss, a classifier's accuracy, samples. Public only where the recipe says the data are."""
        run = self._run
        assert run.heldout is not None and run.config.heldout is not None
        means = run.heldout.means(run.mechanism.engine)
        baselines = run.heldout.baselines(run.mechanism.engine)
        scalars = {f"heldout/{name}": value for name, value in (means | baselines).items()}
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
        for line in learned(means, baselines):
            print(f"  {line}", flush=True)
        texts = samples.lines if samples else []
        if samples:
            writer.picture(step, "heldout/samples", samples.picture_HWC)
            png = io.BytesIO()
            Image.fromarray(samples.picture_HWC).save(png, "PNG")
            write_durably(folder / f"samples-{step:08d}.png", png.getvalue())
        if texts:
            lines = [f"* {generated!r} for {reference!r}" for generated, reference in texts]
            writer.text(step, "heldout/samples", "\n".join(lines))
        for generated, reference in texts:
            print(f"  model: {generated!r}   reference: {reference!r}", flush=True)
        with (folder / "heldout.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **means, **baselines, "captions": texts}) + "\n")


def learned(means: dict[str, float], baselines: dict[str, float]) -> list[str]:
    """Whether the model has learned anything, in plain words: its loss beside what one gets without looking."""
    lines, loss = [], means["loss"]
    blind, shuffled = baselines.get("blind_loss"), baselines.get("shuffled_loss")
    if blind is not None:
        verdict = "the model knows more" if loss < blind else "the model has not learned anything from examples yet"
        others = f", accuracy {baselines['blind_accuracy']:.4f}" if "blind_accuracy" in baselines else ""
        lines.append(f"without looking: {blind:.4f}{others}; {verdict}")
    if shuffled is not None:
        verdict = "looks" if shuffled > 1.05 * loss else "hardly looks"
        lines.append(f"with another example's picture: {shuffled:.4f}; the model {verdict} at its pictures")
    return lines
