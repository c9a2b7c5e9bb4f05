"""Writes the public and the private results of each step, and its line on the console.

The console is inside the trust boundary.
"""

import contextlib
import io
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.text import Text

from data.files import write_durably
from data.reading.loader import Loader
from data.reading.streaming import StreamingLoader
from privacy.accounting.rounding import rounded_up
from privacy.boundary import Private, Public, Reason
from privacy.errors import BUDGET_SPENT, DONE, placed, say
from privacy.files.durable import torn_line_end
from privacy.ranks import collectives
from privacy.run.run import Run
from privacy.step.averaging import WeightAverage
from privacy.step.step import StepRecord
from trainer.config.recipe import RunConfig
from trainer.hardware import known_peak
from trainer.loop.heldout import Heldout, HeldoutResults
from trainer.loop.metrics import PrivateMetrics, PublicMetrics, Session, as_fp32

PLAIN_INTERVAL_SECONDS = 30.0
IMPORTANCE = ("eps", "eta", "loss")
"""The first facts of a line, which is cut at the terminal's width or at 80 columns.

private/metrics.jsonl has the rest."""
SHOWN_CAPTIONS = 4
"""On the console; the others are in the picture of samples."""
WHERE_TRAINING_LOSS_IS = (
    "This page shows what may be published. The training loss, the sizes of batches and all times "
    "come from single training examples without noise; they are private: `tensorboard --logdir "
    "RUN_DIR/private/tensorboard`."
)


@dataclass(frozen=True)
class Training:
    """Holds an open run and the parts that the trainer built for it.

    Attributes:
        flops_per_example: floating-point operations of one example's forward and backward without
            privacy.
        model_facts: model, tokenizer and initialisation, as a checkpoint's manifest states them.
    """

    config: RunConfig
    run: Run
    loader: Loader | StreamingLoader
    heldout: Heldout | None
    average: WeightAverage | None
    flops_per_example: int
    model_facts: dict[str, Any]


class ProgressLine:
    """Shows step, percent, remaining time and the given facts, cut at the terminal's width.

    Only rank 0 makes one.
    """

    def __init__(self, first_step: int, num_steps: int) -> None:
        self._first_step = first_step
        self._num_steps = num_steps
        self._started = time.monotonic()
        self._printed = 0.0
        self._step = first_step
        self._facts = dict[str, str]()
        self.eta_seconds: float | None = None
        self._console = Console()
        self._live = Live(self, console=self._console) if sys.stdout.isatty() else None
        if self._live is not None:
            self._live.start()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yields the line, cropped at the terminal's present width."""
        num_marks = 10 * self._step // self._num_steps
        yield Text(self._line(f"[{'#' * num_marks:10}] "), no_wrap=True, overflow="crop")

    def _line(self, bar: str = "") -> str:
        names = sorted(self._facts, key=lambda name: (*IMPORTANCE, name).index(name))
        facts = [f"{name} {self._facts[name].partition(' (')[0]}" for name in names]
        share = self._step / self._num_steps
        return "  ".join([f"step {self._step}/{self._num_steps} {bar}{share:.1%}", *facts])

    def update(self, step: int, facts: Mapping[str, str]) -> None:
        """Shows a finished step.

        Without a terminal, lines appear at most every half minute, and for the last step.
        """
        # rich's own estimate forgets steps older than half a minute, and a step may take longer.
        clock_time = time.monotonic()
        num_done = step - self._first_step
        self.eta_seconds = None
        eta = "?"
        if num_done > 0:
            seconds_per_step = (clock_time - self._started) / num_done
            self.eta_seconds = seconds_per_step * (self._num_steps - step)
            eta = str(timedelta(seconds=int(self.eta_seconds)))
        self._step = step
        self._facts = {"eta": eta, **facts}
        is_due = clock_time - self._printed >= PLAIN_INTERVAL_SECONDS or step == self._num_steps
        if self._live is None and is_due:
            self._printed = clock_time
            line = self._line()
            if len(line) > 80:
                line = line[:82].rpartition("  ")[0]
            print(line, flush=True)

    def close(self) -> None:
        """Stops updating the terminal's line."""
        if self._live is not None:
            self._live.stop()


FAR_BELOW = 1e-4
"""Gradients of less than this part of C are below the step of a large model's sums.

See privacy/sums/grid.py."""


class StepReporter:
    """Writes metrics and console lines on rank 0.

    Held-out evaluation is collective and runs on all ranks.
    """

    def __init__(self, training: Training) -> None:
        run = training.run
        self._training = training
        self._run = run
        self._is_main = collectives.rank() == 0
        self._has_warned = False
        if self._is_main:
            attempts = run.ledger.attempts if run.plan.enabled else None
            session = Session(run.step, attempts, run.ledger.starts)
            self._public = PublicMetrics(run.folder.root, session)
            self._private = PrivateMetrics(run.folder.private, session)
            if run.ledger.starts == 0:
                self._public.text(
                    0, "where the training loss is", Public(WHERE_TRAINING_LOSS_IS, Reason.SETTINGS)
                )
            self._progress = ProgressLine(run.step, training.config.train.num_steps)

    def close(self) -> None:
        """Writes the run's last status and closes the sinks."""
        if self._is_main:
            states = {DONE: "done", BUDGET_SPENT: "budget spent"}
            self._status(states.get(self._run.outcome or 0, "stopped"))
            self._progress.close()
            self._public.close()
            self._private.close()

    def step(self, step: int, record: StepRecord, duration: Private[float]) -> None:
        """Writes the metrics of a finished step, which took `duration` seconds."""
        config = self._training.config
        plan = self._run.plan
        num_steps = config.train.num_steps
        every_steps = config.heldout.every_steps if config.heldout else None
        if every_steps and step % every_steps == 0 and step < num_steps:
            self.heldout(step)
        if not self._is_main:
            return
        claim = self._run.ledger.claim()
        private = self._private_values(record, duration)
        if step % config.train.log_every == 0 or step == num_steps:
            public = {
                "optimizer/lr": record.lr,
                "optimizer/noised_grad_norm": record.noised_grad_norm,
            }
            if claim is not None:
                public["privacy/epsilon"] = Public(claim[0], Reason.CHARGED)
                num_charged = self._run.ledger.num_charged
                public["privacy/charged_attempts"] = Public(num_charged, Reason.CHARGED)
            self._public.scalars(step, public)
            self._private.scalars(step, private)
        numbers = {name: box.inside() for name, box in private.items()}
        num_nonfinite = int(numbers["train/nonfinite_examples"])
        num_unusable = int(numbers["train/undecodable_examples"])
        num_zero = num_nonfinite + num_unusable
        if num_nonfinite == numbers["train/batch_size"] and num_zero > 0:
            say(
                f"warning: step {step} was noise alone: all its {num_zero} examples count as zero "
                f"({num_nonfinite} with gradients that are not finite, {num_unusable} that cannot "
                "be used); every such step is charged",
                folds=True,
            )
        norm = numbers["train/mean_grad_norm"]
        is_far_below = 0 < norm < FAR_BELOW * plan.max_grad_norm
        has_noise = plan.enabled and plan.noise_multiplier > 0
        if has_noise and is_far_below and not self._has_warned:
            self._has_warned = True
            say(
                f"warning: gradients of step {step} are {norm:.1g} long on average and C is "
                f"{plan.max_grad_norm:g}: they vanish in noise and rounding; give a much smaller "
                "privacy.max_grad_norm",
                folds=True,
            )
        facts = {
            "eps": rounded_up(claim[0]) if claim is not None else "none (no formal guarantee)",
            "loss": f"{numbers['train/loss']:.3f}",
            "lr": f"{record.lr.value:.1e}",
            "ex/s": f"{numbers['performance/examples_per_second']:.0f}",
            "data": f"{numbers['performance/data_wait_fraction']:.0%}",
        }
        for phase, seconds in record.seconds.items():
            facts[phase] = f"{seconds.inside() / duration.inside():.0%}"
        facts["TFLOP/s"] = f"{numbers['performance/model_flops_per_second'] / 1e12:.2g}"
        if "performance/mfu" in numbers:
            facts["mfu"] = f"{numbers['performance/mfu']:.0%}"
        facts["mem"] = f"{numbers['performance/peak_memory_gib']:.1f}G"
        self._progress.update(step, facts)
        self._status("running", step)

    def _status(self, state: str, step: int | None = None) -> None:
        """Writes the progress of the run to private/status.json, for whoever is on call.

        A run that died stays "running". Times are private. The file is whole at any moment, and may
        be an older one after a crash.
        """
        run = self._run
        claim = run.ledger.claim()
        epsilon, delta = (None, None) if claim is None else claim
        status = {
            "state": state,
            "step": run.step if step is None else step,
            "num_steps": run.plan.num_steps,
            "epsilon": epsilon,
            "delta": delta,
            "eta_seconds": self._progress.eta_seconds,
            "last_checkpoint": run.saved,
            "time": time.time(),
        }
        file = run.folder.status
        part = file.with_suffix(".tmp")
        with placed(file):
            part.write_text(json.dumps(status) + "\n")
            part.replace(file)

    def _private_values(
        self, record: StepRecord, duration: Private[float]
    ) -> dict[str, Private[float]]:
        """Returns the values of the console and private/.

        They are sums without noise, and the time and memory of a step, which include the decoding
        of single examples.
        """
        sums = {name: box.inside() for name, box in record.private.items()}
        count = max(sums["num_examples"], 1.0)
        seconds = duration.inside()
        device = self._run.engine.device
        # The rates are of the expected batch size, never of the realised one.
        batch_size = self._run.plan.expected_batch_size
        flops = self._training.flops_per_example * batch_size / collectives.world_size()
        peak_flops = known_peak(device, self._run.engine.compute_dtype)
        if device.type == "cuda":
            peak_memory = torch.cuda.max_memory_allocated(device)
        else:
            # In KiB, but on macOS in bytes.
            unit = 1 if sys.platform == "darwin" else 1024
            peak_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        numbers = {
            "train/loss": sums["loss_sum"] / count,
            "train/clipped_fraction": sums["num_clipped"] / count,
            "train/mean_grad_norm": sums["norm_sum"] / count,
            "train/batch_size": sums["num_examples"],
            "train/nonfinite_examples": sums["num_nonfinite"],
            "train/cancelled_examples": sums["num_cancelled"],
            "train/undecodable_examples": sums["num_undecodable"],
            "performance/step_seconds": seconds,
            "performance/examples_per_second": batch_size / seconds,
            "performance/model_flops_per_second": flops / seconds,
        }
        if peak_flops is not None:
            numbers["performance/mfu"] = flops / seconds / peak_flops
        for phase, phase_seconds in record.seconds.items():
            numbers[f"performance/{phase}_seconds"] = phase_seconds.inside()
        numbers["performance/communication_bytes"] = record.communication_bytes.inside()
        numbers["performance/data_wait_fraction"] = self._training.loader.data_wait / seconds
        numbers["performance/peak_memory_gib"] = peak_memory / 2**30
        return {name: Private(number) for name, number in numbers.items()}

    def has_heldout(self, step: int) -> bool:
        """Returns whether this step has the last held-out results that were written. Collective."""
        section = self._training.config.heldout
        assert section is not None
        folder = self._run.folder.evaluation if section.is_public else self._run.folder.private
        return collectives.on_main(lambda: last_step(folder / "heldout.jsonl") == step)

    def heldout(self, step: int) -> None:
        """Evaluates held-out examples: loss, a classifier's accuracy, samples.

        The results are public only where the recipe declares the data public.
        """
        run = self._run
        heldout = self._training.heldout
        section = self._training.config.heldout
        assert heldout is not None and section is not None
        box = heldout.results(run.engine, self._training.average, section.num_captions)
        if not self._is_main:
            return
        results = box.inside()
        numbers = results.means | results.baselines
        line = f"held-out {heldout.loss_name} after step {step}:"
        labels = {
            "loss": "",
            "accuracy": ", accuracy",
            "blind_loss": "; blind",
            "shuffled_loss": ", shuffled",
        }
        for name, label in labels.items():
            if name in numbers:
                line += f"{label} {numbers[name]:.4f}"
        lines = [line]
        if step == run.plan.num_steps:
            lines += [f"  {verdict}" for verdict in verdict_lines(results.means, results.baselines)]
            samples = results.samples.lines if results.samples else []
            for generated, reference in samples[:SHOWN_CAPTIONS]:
                lines.append(f"  model: {generated!r}   reference: {reference!r}")
        say(*lines, folds=True)
        if section.is_public:
            declared = Public(results, Reason.DECLARED)
            write_public(step, declared, self._public, run.folder.evaluation)
        else:
            write_private(step, box, self._private, run.folder.private)


def write_public(
    step: int, results: Public[HeldoutResults], metrics: PublicMetrics, folder: Path
) -> None:
    """Writes held-out results into a public folder; numbers are rounded to fp32."""
    _write(
        step, results.value, metrics, lambda value: Public(value, results.because), folder, as_fp32
    )


def write_private(
    step: int, results: Private[HeldoutResults], metrics: PrivateMetrics, folder: Path
) -> None:
    """Writes held-out results inside the trust boundary, in full precision."""
    _write(step, results.inside(), metrics, Private, folder, lambda number: number)


def _write(
    step: int,
    results: HeldoutResults,
    metrics: Any,
    box: Callable[[Any], Any],
    folder: Path,
    rounded: Callable[[Any], Any],
) -> None:
    """Writes a line of heldout.jsonl, metrics, and the picture of samples.

    A start that finds the line writes nothing again.
    """
    numbers = results.means | results.baselines
    samples = results.samples
    lines = samples.lines if samples is not None else []
    fields: dict[str, Any] = dict(metrics.place(step))
    fields |= {name: rounded(number) for name, number in numbers.items()}
    fields["captions"] = lines
    path = folder / "heldout.jsonl"
    with placed(path), path.open("a+") as file:
        file.write(torn_line_end(file.fileno()).decode())
        file.write(json.dumps(fields) + "\n")
    if results.loss_of_average is not None:
        numbers["loss_of_average"] = results.loss_of_average
    metrics.scalars(step, {f"heldout/{name}": box(number) for name, number in numbers.items()})
    if lines:
        markdown = "\n".join(f"* {generated!r} for {reference!r}" for generated, reference in lines)
        metrics.text(step, "heldout/samples", box(markdown))
    if samples is not None:
        metrics.picture(step, "heldout/samples", box(samples.picture_HWC))
        png = io.BytesIO()
        Image.fromarray(samples.picture_HWC).save(png, "PNG")
        write_durably(folder / f"samples-{step:08d}.png", png.getvalue())


def last_step(file: Path) -> int | None:
    """Returns the step of the last line, or None for no line or a line that a crash tore."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    with contextlib.suppress(ValueError, LookupError):
        return int(json.loads(lines[-1])["step"])
    return None


def verdict_lines(means: dict[str, float], baselines: dict[str, float]) -> list[str]:
    """Returns lines that compare the model's loss with that of guesses without looking.

    So they tell in plain words whether the model has learned anything.
    """
    lines = []
    loss = means["loss"]
    blind_loss = baselines.get("blind_loss")
    shuffled_loss = baselines.get("shuffled_loss")
    if blind_loss is not None:
        accuracy = ""
        if "blind_accuracy" in baselines:
            accuracy = f", accuracy {baselines['blind_accuracy']:.4f}"
        negation = "" if loss < blind_loss else "not yet "
        lines.append(
            f"without looking: {blind_loss:.4f}{accuracy}; the loss is {negation}below that of "
            "fixed guesses"
        )
    if shuffled_loss is not None:
        verdict = "looks" if shuffled_loss > 1.05 * loss else "hardly looks"
        lines.append(
            f"with another example's picture: {shuffled_loss:.4f}; the model {verdict} at its "
            "pictures"
        )
    return lines
