"""6,000 steps of `PrivateLoop` and 20 crashes by SIGKILL on a model of eight numbers: every start and record is a real one.

The run stops at a quarter, a half, three quarters and its end. At each stop it is resumed, and card, verify.py and audits read
what is there, so that what grows with the length of the ledger can be seen.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tests.rehearsal.part import ROOT, Part, command, lap

NUM_EXAMPLES, BATCH = 712, 4
"""But for a fifth of a percent the sampling rate of recipes/dpcap_base.toml."""


@dataclass(frozen=True)
class Size:
    """How long the run is.

    Attributes:
        num_steps: steps of the plan.
        crashes: kills over the whole run, the same number before each stop.
        stops: how many times the run is stopped and examined, the end included.
        window: steps over which the seconds of one step are taken.
        noise_multiplier: of the plan; accounting for much noise takes little time.
    """

    num_steps: int
    crashes: int
    stops: int
    window: int
    noise_multiplier: float


FULL = Size(num_steps=6000, crashes=20, stops=4, window=200, noise_multiplier=0.708782)
"""As many steps as recipes/vip_base.toml, and the noise of recipes/dpcap_base.toml, which has 5,708."""


def rehearse(part: Part, size: Size = FULL) -> None:
    """Trains with crashes from stop to stop, and examines the run folder at each.

    Raises:
        AssertionError: a charge is missing, two readers of the folder disagree, or a step has become slower with the ledger.
    """
    run, walks = Run(part.folder / "run", size), list[dict[str, Any]]()
    part.stage("start", run.open)
    part.stage("resume at 0", run.open)
    for number in range(1, size.stops + 1):
        first, last = (size.num_steps * stop // size.stops for stop in (number - 1, number))
        crashes = size.crashes * number // size.stops - size.crashes * (number - 1) // size.stops
        name = f"steps {first + 1} to {last}, {crashes} crashes"
        walks.append(part.stage(name, lambda last=last, crashes=crashes: run.walk(last, crashes)))
        examine(part, run, last)
    part.stage("audit schedule at the end", lambda: audit(run, "schedule"))
    part.stage("the whole run", lambda: whole(run, walks))
    part.ran(num_steps=size.num_steps, crashes=size.crashes)


def examine(part: Part, run: "Run", at: int) -> None:
    """Resumes the run and has all readers of its folder judge it; the card comes first, since the others compare it."""
    part.stage(f"resume at {at}", run.open)
    part.stage(f"card at {at}", lambda: card(run, at))
    part.stage(f"verify.py at {at}", lambda: verify(run, at))
    part.stage(f"audit ledger at {at}", lambda: audit(run, "ledger"))


class Program(Protocol):
    """A process, of which no more is asked."""

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def wait(self) -> int: ...


def launch(words: list[str], log: Path) -> Program:
    """Starts Python with these words; what it prints goes to the log."""
    with log.open("ab") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=environment, stdout=file, stderr=file
        )


class Run:
    """The run as the one who starts and kills its program sees it.

    Attributes:
        folder: the run folder.
        start_seconds: how long the last start took that was not killed before its first step.
    """

    def __init__(self, folder: Path, size: Size) -> None:
        self.folder, self.size, self.start_seconds = folder, size, 0.0
        self._log, self._reports, self._kills = (
            folder.with_name(name) for name in ("log", "reports.jsonl", "kills.jsonl")
        )

    def start(
        self, until: int, *, asks_epsilon: bool = False
    ) -> tuple[Program, Iterator[dict[str, Any]]]:
        """Starts the program; returns it with what it reports, which ends when the program ends."""
        self._reports.touch()
        words = [
            "-m",
            "tests.rehearsal.steps",
            self.folder,
            "--reports",
            self._reports,
            "--until",
            until,
        ]
        words += [
            "--num_steps",
            self.size.num_steps,
            "--noise_multiplier",
            self.size.noise_multiplier,
        ]
        written = self._reports.stat().st_size
        program = launch(
            [str(word) for word in words + ["--asks_epsilon"] * asks_epsilon], self._log
        )

        def reports() -> Iterator[dict[str, Any]]:
            with self._reports.open() as file:
                file.seek(written)
                line, has_ended = "", False
                while not has_ended:
                    has_ended = program.poll() is not None
                    while (line := line + file.readline()).endswith("\n"):
                        yield json.loads(line)
                        line = ""
                    time.sleep(0.002)

        return program, reports()

    def finish(self, until: int, *, asks_epsilon: bool = False) -> list[dict[str, Any]]:
        """Runs the program until it has taken a step, and returns its reports."""
        program, reports = self.start(until, asks_epsilon=asks_epsilon)
        told = list(reports)
        assert program.poll() == 0, f"exit {program.poll()}\n{self._log.read_text()[-3000:]}"
        return told

    def open(self) -> dict[str, Any]:
        """Starts the program where the run stands, and takes no step."""
        opened, ended = self.finish(0)
        return {**opened, **ended, **self.sizes()}

    def walk(self, last: int, crashes: int) -> dict[str, Any]:
        """Takes the steps up to `last`, with kills at random places on the way."""
        chance, steps = random.Random(last), list[dict[str, Any]]()
        earlier = [
            kill for kill in self.kills() if kill["before"] == last
        ]  # of a stage that was interrupted
        first = self.steps_done() + 1
        ahead = range(
            first, last - min(10, (last - first) // 2)
        )  # so that no program ends before it is killed
        for number, target in enumerate(sorted(chance.choices(ahead, k=crashes - len(earlier)))):
            steps += self.kill_at(target, last, chance, at_start=number % 5 == 4)
        *reports, ended = self.finish(last, asks_epsilon=True)
        steps += [report for report in reports if "step" in report]
        kills = [kill for kill in self.kills() if kill["before"] == last]
        assert len(kills) == crashes and self.steps_done() == last
        measured = {
            "taken": len(steps),
            "killed_after": dict(Counter(kill["after"] for kill in kills)),
        }
        for place, window in (
            ("first", steps[: self.size.window]),
            ("last", steps[-self.size.window :]),
        ):
            for unit in ("seconds", "processor_seconds"):
                measured[f"{place}_step_{unit}"] = round(
                    statistics.median(report[unit] for report in window), 5
                )
        return measured | ended | self.sizes()

    def kill_at(
        self, target: int, last: int, chance: random.Random, *, at_start: bool
    ) -> list[dict[str, Any]]:
        """Kills the program within about two steps after `target`, or while it starts; returns the steps that it took."""
        steps, began = list[dict[str, Any]](), time.monotonic()
        program, reports = self.start(last)
        if at_start:
            time.sleep(chance.random() * self.start_seconds)
        else:
            for report in reports:
                if "step" not in report:
                    self.start_seconds = time.monotonic() - began
                else:
                    steps.append(report)
                    if report["step"] >= target:
                        break
            time.sleep(chance.random() * 2 * steps[-1]["seconds"])
        assert program.poll() is None, (
            f"it ended before it was killed\n{self._log.read_text()[-3000:]}"
        )
        program.kill()
        program.wait()
        after = "while it started" if at_start else self.records()[-1]["type"]
        with self._kills.open("a") as file:
            file.write(json.dumps({"before": last, "after": after}) + "\n")
        return steps

    def kills(self) -> list[dict[str, Any]]:
        """All kills so far: the stop before which each came, and the ledger's last record then."""
        return (
            [json.loads(line) for line in self._kills.read_text().splitlines()]
            if self._kills.exists()
            else []
        )

    def records(self) -> list[dict[str, Any]]:
        """The records of the ledger, read by nothing of the project."""
        return [
            json.loads(line) for line in (self.folder / "ledger.jsonl").read_text().splitlines()
        ]

    def steps_done(self) -> int:
        return max(
            (record["step"] for record in self.records() if record["type"] == "done"), default=0
        )

    def sizes(self) -> dict[str, int]:
        """What lies in the folder."""
        names = {"ledger": "ledger.jsonl", "members": "private/members.jsonl"}
        return {
            f"{name}_bytes": (self.folder / file).stat().st_size for name, file in names.items()
        }


def card(run: Run, at: int) -> dict[str, Any]:
    """Makes the card, whose counts are those of the records, and looks at its curve: a loop of one's own publishes no other."""
    measured = dict[str, Any]()
    with lap(measured, "command"):
        command(sys.executable, "-m", "privacy.command.main", "report", run.folder)
    made = json.loads((run.folder / "report/privacy_card.json").read_text())
    kinds = Counter(record["type"] for record in run.records())
    attempts = made["accounting"]["attempts"]
    assert made["formal_guarantee"] and made["steps_done"] == at
    assert (attempts["charged"], attempts["done"], attempts["torn_lines"]) == (
        kinds["intent"],
        kinds["done"],
        0,
    )
    assert len(made["sessions"]) == kinds["session"]
    assert made["checkpoints_recorded"] == kinds["checkpoint"]
    assert not [line for line in made["warnings"] if "noise" in line or "claim" in line], made[
        "warnings"
    ]
    if at:
        curve = made["accounting"]["attack"]["curve"]
        assert (
            len(curve) > 100
            and curve == sorted(curve)
            and all(rate <= bound <= 1 for rate, bound in curve)
        )
        assert "<svg" in (run.folder / "report/privacy_card.html").read_text()
    return {
        "epsilon": made["epsilon"],
        "charged": kinds["intent"],
        "starts": kinds["session"],
    } | measured


def verify(run: Run, at: int) -> dict[str, Any]:
    """Runs the folder's own verify.py: epsilon is the card's to the last digit, and charges are the intents."""
    measured, made = (
        dict[str, Any](),
        json.loads((run.folder / "report/privacy_card.json").read_text()),
    )
    with lap(measured, "command"):
        told = command(sys.executable, "-I", run.folder / "verify.py", "--json")
    found = json.loads(told[told.index("{") :])
    assert found["verdict"] == "consistent", found
    attested = found["attested"]
    assert (attested["last step done"], attested["charged attempts"]) == (
        at,
        made["attempts_charged"],
    )
    assert found["epsilon"] == made["epsilon"], (found["epsilon"], made["epsilon"])
    return measured


def audit(run: Run, kind: str) -> dict[str, Any]:
    """Runs an audit with the private part of the folder."""
    measured = dict[str, Any]()
    with lap(measured, "command"):
        told = command(
            sys.executable, "-m", "privacy.command.main", "audit", kind, run.folder, "--json"
        )
    assert json.loads(told[told.index("{") :])["verdict"] == "consistent", told
    return measured


def whole(run: Run, walks: list[dict[str, Any]]) -> dict[str, Any]:
    """What all crashes cost, and whether a step has become slower."""
    records, made = run.records(), json.loads((run.folder / "report/privacy_card.json").read_text())
    kinds = Counter(record["type"] for record in records)
    done = Counter(record["step"] for record in records if record["type"] == "done")
    nonces = [record["nonce"] for record in records if record["type"] == "session"]
    assert records[-1]["type"] == "close" and records[-1]["num_charged"] == kinds["intent"]
    assert sorted(done) == list(range(1, run.size.num_steps + 1))
    assert len(run.kills()) == run.size.crashes and len(set(nonces)) == len(nonces)
    lost = kinds["intent"] - run.size.num_steps
    assert 0 <= lost <= made["accounting"]["attempts"]["allowed"] - run.size.num_steps
    assert made["epsilon"] == walks[-1]["epsilon"], "the loop claims another epsilon than its card"
    first, last = walks[0]["first_step_processor_seconds"], walks[-1]["last_step_processor_seconds"]
    assert last <= 2 * first, (
        f"a step takes {last} s of a processor at the end, and took {first} s at the start"
    )
    return {
        "lines": len(records),
        "starts": kinds["session"],
        "checkpoints": kinds["checkpoint"],
        "attempts_lost": lost,
        "killed_after": dict(Counter(one["after"] for one in run.kills())),
        "growth_of_a_step": round(last / first, 2),
    }


def take_steps(
    folder: Path,
    reports: Path,
    num_steps: int,
    noise_multiplier: float,
    until: int,
    *,
    asks_epsilon: bool,
) -> None:
    """The program that is killed: opens or resumes the run, and takes its steps.

    Args:
        reports: gets a line of JSON for the start, each step and the end.
        until: the step after which it leaves the loop.
        asks_epsilon: whether epsilon is asked for after every step, as most programs do.
    """
    import torch
    import torch.nn.functional as F

    from privacy.loop import PrivateLoop, floats, integers

    began, used, parent, epsilon_times = (
        time.monotonic(),
        time.process_time(),
        os.getppid(),
        list[tuple[float, float]](),
    )
    torch.manual_seed(0)
    x, model = torch.randn(NUM_EXAMPLES, 3), torch.nn.Linear(3, 2)
    loop = PrivateLoop(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()),
        example=(floats(3), integers(2)),
        loss=lambda x, y: F.cross_entropy(model(x), y, reduction="none"),
        run_dir=folder,
        starts_from="public",
        expected_batch_size=BATCH,
        num_steps=num_steps,
        noise_multiplier=noise_multiplier,
    )
    with loop, reports.open("a", buffering=1) as file:

        def tell(**report: float) -> None:
            file.write(json.dumps(report) + "\n")

        tell(
            opened_seconds=round(time.monotonic() - began, 3),
            processor_seconds=round(time.process_time() - used, 3),
        )
        while loop.steps_done < until and os.getppid() == parent:
            began, used = time.monotonic(), time.process_time()
            step = loop.step()
            tell(
                step=step.number,
                seconds=time.monotonic() - began,
                processor_seconds=time.process_time() - used,
            )
            if asks_epsilon:
                began, used = time.monotonic(), time.process_time()
                assert 0 <= step.epsilon < 50
                epsilon_times.append((time.monotonic() - began, time.process_time() - used))
        report: dict[str, float] = {
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        }
        if asks_epsilon:
            seconds, processor_seconds = (
                round(sum(times), 2) for times in zip(*epsilon_times, strict=True)
            )
            report |= {
                "epsilon": loop.epsilon,
                "epsilon_seconds": seconds,
                "epsilon_processor_seconds": processor_seconds,
            }
        tell(**report)


def main() -> None:
    parser = argparse.ArgumentParser(description=take_steps.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--reports", type=Path, required=True)
    parser.add_argument("--num_steps", type=int, required=True)
    parser.add_argument("--noise_multiplier", type=float, required=True)
    parser.add_argument("--until", type=int, required=True)
    parser.add_argument("--asks_epsilon", action="store_true")
    take_steps(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
