"""What each step publishes, what it keeps private, and its console line (which is inside the trust boundary)."""

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
"""What stands first on the line, which is cut at the terminal's width or at 80 columns; private/metrics.jsonl has the rest."""
SHOWN_CAPTIONS = 4
"""On the console; the others are in the picture of samples."""
WHERE_TRAINING_LOSS_IS = (
    "This page shows what may be published. The training loss, the sizes of batches and all times come from single training "
    "examples without noise; they are private: `tensorboard --logdir RUN_DIR/private/tensorboard`."
)


@dataclass(frozen=True)
class Training:
    """A run, and what the trainer knows of it besides the library.

    Attributes:
        flops_per_example: floating-point operations of one example's forward and backward without privacy.
        model_facts: what a checkpoint's manifest says about the model, its tokenizer and its initialisation.
    """

    config: RunConfig
    run: Run
    loader: Loader | StreamingLoader
    heldout: Heldout | None
    average: WeightAverage | None
    flops_per_example: int
    model_facts: dict[str, Any]


class ProgressLine:
    """Shows step, percent, the time left and the given facts, as far as a terminal is wide. Only rank 0 makes one."""

    def __init__(self, first_step: int, num_steps: int) -> None:
        self._first, self._total = first_step, num_steps
        self._started = time.monotonic()
        self._printed = 0.0
        self._step, self._facts = first_step, dict[str, str]()
        self.eta_seconds: float | None = None
        self._console = Console()
        self._live = Live(self, console=self._console) if sys.stdout.isatty() else None
        if self._live is not None:
            self._live.start()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """The line at the width that the terminal has now."""
        yield Text(
            self._line(f"[{'#' * (10 * self._step // self._total):10}] "),
            no_wrap=True,
            overflow="crop",
        )

    def _line(self, bar: str = "") -> str:
        names = sorted(self._facts, key=lambda name: (*IMPORTANCE, name).index(name))
        facts = [f"{name} {self._facts[name].partition(' (')[0]}" for name in names]
        return "  ".join(
            [f"step {self._step}/{self._total} {bar}{self._step / self._total:.1%}", *facts]
        )

    def update(self, step: int, facts: Mapping[str, str]) -> None:
        """Shows a finished step; plain lines appear at most every half minute, and for the last step."""
        # rich's own estimate forgets what is older than half a minute, and a step may take longer.
        now, done = time.monotonic(), step - self._first
        self.eta_seconds = (now - self._started) / done * (self._total - step) if done > 0 else None
        eta = "?" if self.eta_seconds is None else str(timedelta(seconds=int(self.eta_seconds)))
        self._step, self._facts = step, {"eta": eta, **facts}
        if self._live is None and (
            now - self._printed >= PLAIN_INTERVAL_SECONDS or step == self._total
        ):
            self._printed = now
            line = self._line()
            print(line if len(line) <= 80 else line[:82].rpartition("  ")[0], flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


FAR_BELOW = 1e-4
"""Gradients of less than this part of C are below the step of the sums of a large model (privacy/sums/grid.py)."""


class StepReporter:
    """Writes on rank 0; the collective parts (held-out evaluation) run on all ranks."""

    def __init__(self, training: Training) -> None:
        self._training, self._run = training, training.run
        run = training.run
        self._is_main, self._has_warned = collectives.rank() == 0, False
        if self._is_main:
            session = Session(
                run.step, run.ledger.attempts if run.plan.enabled else None, run.ledger.starts
            )
            self._public = PublicMetrics(run.folder.root, session)
            self._private = PrivateMetrics(run.folder.private, session)
            if run.ledger.starts == 0:
                self._public.text(
                    0, "where the training loss is", Public(WHERE_TRAINING_LOSS_IS, Reason.SETTINGS)
                )
            self._progress = ProgressLine(run.step, training.config.train.num_steps)

    def close(self) -> None:
        if self._is_main:
            self._status(
                {DONE: "done", BUDGET_SPENT: "budget spent"}.get(self._run.outcome or 0, "stopped")
            )
            self._progress.close()
            self._public.close()
            self._private.close()

    def step(self, step: int, record: StepRecord, duration: Private[float]) -> None:
        """Writes the metrics of a finished step, which took `duration` seconds."""
        every = self._training.config.heldout.every_steps if self._training.config.heldout else None
        if every and step % every == 0 and step < self._training.config.train.num_steps:
            self.heldout(step)
        if not self._is_main:
            return
        claim = self._run.ledger.claim()
        private = self._private_values(record, duration)
        if (
            step % self._training.config.train.log_every == 0
            or step == self._training.config.train.num_steps
        ):
            public = {
                "optimizer/lr": record.lr,
                "optimizer/noised_grad_norm": record.noised_grad_norm,
            }
            if claim is not None:
                public["privacy/epsilon"] = Public(claim[0], Reason.CHARGED)
                public["privacy/charged_attempts"] = Public(
                    self._run.ledger.num_charged, Reason.CHARGED
                )
            self._public.scalars(step, public)
            self._private.scalars(step, private)
        shown = {name: value.inside() for name, value in private.items()}
        nonfinite, unusable = (
            int(shown["train/nonfinite_examples"]),
            int(shown["train/undecodable_examples"]),
        )
        if nonfinite == shown["train/batch_size"] and nonfinite + unusable > 0:
            say(
                f"warning: step {step} was noise alone: all its {nonfinite + unusable} examples count as zero ({nonfinite} with "
                f"gradients that are not finite, {unusable} that cannot be used); every such step is charged",
                folds=True,
            )
        plan, norm = self._run.plan, shown["train/mean_grad_norm"]
        if (
            plan.enabled
            and plan.noise_multiplier > 0
            and 0 < norm < FAR_BELOW * plan.max_grad_norm
            and not self._has_warned
        ):
            self._has_warned = True
            say(
                f"warning: gradients of step {step} are {norm:.1g} long on average and C is {plan.max_grad_norm:g}: "
                "they vanish in noise and rounding; give a much smaller privacy.max_grad_norm",
                folds=True,
            )
        console = {
            "eps": rounded_up(claim[0]) if claim is not None else "none (no formal guarantee)",
            "loss": f"{shown['train/loss']:.3f}",
            "lr": f"{record.lr.value:.1e}",
            "ex/s": f"{shown['performance/examples_per_second']:.0f}",
            "data": f"{shown['performance/data_wait_fraction']:.0%}",
            **{
                phase: f"{s.inside() / duration.inside():.0%}"
                for phase, s in record.seconds.items()
            },
            "TFLOP/s": f"{shown['performance/model_flops_per_second'] / 1e12:.2g}",
            **({"mfu": f"{shown['performance/mfu']:.0%}"} if "performance/mfu" in shown else {}),
            "mem": f"{shown['performance/peak_memory_gib']:.1f}G",
        }
        self._progress.update(step, console)
        self._status("running", step)

    def _status(self, state: str, step: int | None = None) -> None:
        """Says in private/status.json, for whoever is on call, how far the run is; a run that died stays "running".

        Times are private. The file is whole at any moment, and may be an older one after a crash.
        """
        run, claim = self._run, self._run.ledger.claim()
        status = {
            "state": state,
            "step": run.step if step is None else step,
            "num_steps": run.plan.num_steps,
            "epsilon": None if claim is None else claim[0],
            "delta": None if claim is None else claim[1],
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
        """What the console and private/ show: sums without noise, and the time and memory that single examples take to decode."""
        sums = {name: value.inside() for name, value in record.private.items()}
        count, seconds = max(sums["num_examples"], 1.0), duration.inside()
        device, size = self._run.engine.device, self._run.plan.expected_batch_size
        flops = self._training.flops_per_example * size / collectives.world_size()
        peak_flops = known_peak(device, self._run.engine.compute_dtype)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
        values = {
            "train/loss": sums["loss_sum"] / count,
            "train/clipped_fraction": sums["num_clipped"] / count,
            "train/mean_grad_norm": sums["norm_sum"] / count,
            "train/batch_size": sums["num_examples"],
            "train/nonfinite_examples": sums["num_nonfinite"],
            "train/cancelled_examples": sums["num_cancelled"],
            "train/undecodable_examples": sums["num_undecodable"],
            "performance/step_seconds": seconds,
            # The rate is of the expected batch size, never of the realised one.
            "performance/examples_per_second": size / seconds,
            "performance/model_flops_per_second": flops / seconds,
            **({"performance/mfu": flops / seconds / peak_flops} if peak_flops is not None else {}),
            **{
                f"performance/{phase}_seconds": taken.inside()
                for phase, taken in record.seconds.items()
            },
            "performance/communication_bytes": record.communication_bytes.inside(),
            "performance/data_wait_fraction": self._training.loader.data_wait / seconds,
            "performance/peak_memory_gib": peak / 2**30,
        }
        return {name: Private(value) for name, value in values.items()}

    def has_heldout(self, step: int) -> bool:
        """Whether held-out results of this step are the last that were written. Collective."""
        section, folder = self._training.config.heldout, self._run.folder
        assert section is not None
        file = (folder.evaluation if section.is_public else folder.private) / "heldout.jsonl"
        return collectives.on_main(lambda: last_step(file) == step)

    def heldout(self, step: int) -> None:
        """Evaluates held-out examples: loss, a classifier's accuracy, samples. Public only where the recipe says the data are."""
        run, heldout, section = self._run, self._training.heldout, self._training.config.heldout
        assert heldout is not None and section is not None
        results = heldout.results(run.engine, self._training.average, section.num_captions)
        if not self._is_main:
            return
        found = results.inside()
        values = found.means | found.baselines
        words = {
            "loss": "",
            "accuracy": ", accuracy",
            "blind_loss": "; blind",
            "shuffled_loss": ", shuffled",
        }
        numbers = "".join(
            f"{word} {values[name]:.4f}" for name, word in words.items() if name in values
        )
        lines = [f"held-out {heldout.loss_name} after step {step}:{numbers}"]
        if step == run.plan.num_steps:
            lines += [f"  {line}" for line in learned(found.means, found.baselines)]
            samples = found.samples.lines[:SHOWN_CAPTIONS] if found.samples else ()
            lines += [
                f"  model: {generated!r}   reference: {reference!r}"
                for generated, reference in samples
            ]
        say(*lines, folds=True)
        if section.is_public:
            write_public(step, Public(found, Reason.DECLARED), self._public, run.folder.evaluation)
        else:
            write_private(step, results, self._private, run.folder.private)


def write_public(
    step: int, results: Public[HeldoutResults], metrics: PublicMetrics, folder: Path
) -> None:
    """Held-out results where everybody may read them; numbers are rounded to fp32."""
    _write(
        step, results.value, metrics, lambda value: Public(value, results.because), folder, as_fp32
    )


def write_private(
    step: int, results: Private[HeldoutResults], metrics: PrivateMetrics, folder: Path
) -> None:
    """The same inside the trust boundary, in full precision."""
    _write(step, results.inside(), metrics, Private, folder, lambda value: value)


def _write(
    step: int,
    found: HeldoutResults,
    metrics: Any,
    box: Callable[[Any], Any],
    folder: Path,
    written: Callable[[Any], Any],
) -> None:
    """A line of heldout.jsonl, metrics, and the picture of samples; a start that finds the line writes nothing again."""
    numbers = found.means | found.baselines
    lines = found.samples.lines if found.samples is not None else []
    line = {
        **metrics.place(step),
        **{name: written(value) for name, value in numbers.items()},
        "captions": lines,
    }
    path = folder / "heldout.jsonl"
    with placed(path), path.open("a+") as file:
        file.write(torn_line_end(file.fileno()).decode())
        file.write(json.dumps(line) + "\n")
    average = {} if found.loss_of_average is None else {"loss_of_average": found.loss_of_average}
    metrics.scalars(
        step, {f"heldout/{name}": box(value) for name, value in (numbers | average).items()}
    )
    if lines:
        markdown = "\n".join(f"* {generated!r} for {reference!r}" for generated, reference in lines)
        metrics.text(step, "heldout/samples", box(markdown))
    if found.samples is not None:
        metrics.picture(step, "heldout/samples", box(found.samples.picture_HWC))
        png = io.BytesIO()
        Image.fromarray(found.samples.picture_HWC).save(png, "PNG")
        write_durably(folder / f"samples-{step:08d}.png", png.getvalue())


def last_step(file: Path) -> int | None:
    """The step of the last line; None where there is none, or a crash tore it."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    with contextlib.suppress(ValueError, LookupError):
        return int(json.loads(lines[-1])["step"])
    return None


def learned(means: dict[str, float], baselines: dict[str, float]) -> list[str]:
    """Whether the model has learned anything, in plain words: its loss against what one gets without looking."""
    lines, loss = [], means["loss"]
    blind, shuffled = baselines.get("blind_loss"), baselines.get("shuffled_loss")
    if blind is not None:
        verdict = f"the loss is {'' if loss < blind else 'not yet '}below that of fixed guesses"
        others = (
            f", accuracy {baselines['blind_accuracy']:.4f}" if "blind_accuracy" in baselines else ""
        )
        lines.append(f"without looking: {blind:.4f}{others}; {verdict}")
    if shuffled is not None:
        verdict = "looks" if shuffled > 1.05 * loss else "hardly looks"
        lines.append(
            f"with another example's picture: {shuffled:.4f}; the model {verdict} at its pictures"
        )
    return lines
