"""Private values and clocks do not fit writers of public files, by type (contract 12)."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from privacy import verify
from privacy.boundary import PUBLISHED, Reason, reason_of
from tests.test_structure import PACKAGES, ROOT, parsed, python_files, relative

CLOCKS = {
    "monotonic",
    "monotonic_ns",
    "perf_counter",
    "perf_counter_ns",
    "process_time",
    "process_time_ns",
    "thread_time",
    "time",
    "time_ns",
    "strftime",
    "gmtime",
    "localtime",
    "clock_gettime",
    "now",
    "utcnow",
    "today",
    "st_mtime",
    "st_mtime_ns",
    "st_atime",
    "st_ctime",
    "st_ctime_ns",
    "getmtime",
    "getrusage",
    "max_memory_allocated",
}
"""Attributes that read a clock or a memory meter, of whatever module or object."""
READS_A_CLOCK = {
    "data/index/shard.py": "whether a shard changed while it was indexed",
    "data/reading/loader.py": "data_wait, which trainer/loop/reporting.py boxes as private",
    "data/reading/staging.py": "the wait for another process that copies shards",
    "data/reading/storage.py": "whether a shard is still the one that was indexed",
    "evaluation/results.py": "the day of an evaluation",
    "evaluation/sources.py": "a fingerprint of public files",
    "launch_scripts/prepare.py": "the console",
    "launch_scripts/quickstart.py": "the name of a new folder, before any data are read; the console",
    "privacy/command/main.py": "the date of an audit, after the run",
    "privacy/ledger/chain.py": "the wait for a lock",
    "privacy/ledger/ledger.py": "the start of the program, before it reads data",
    "privacy/ledger/shared.py": "the creation of a data owner's ledger, before any run",
    "trainer/audit/sandbox.py": "the order of fsyncs and releases in the sandbox of an audit, which keeps no time",
    "privacy/ranks/clock.py": "private by type",
    "trainer/loop/metrics.py": "lines in private/",
    "trainer/loop/reporting.py": "memory, boxed as private; the time left, on the console",
    "trainer/loop/stopping.py": "deadlines",
    "trainer/memory.py": "memory, for the clipping mode of a start: its numbers go to private/chosen.json and the console",
    "trainer/progress.py": "the console",
    "trainer/ranks/distributed.py": "how long a rank waits, said on the console",
    "trainer/ranks/heartbeat.py": "deadlines",
    "trainer/ranks/rendezvous.py": "deadlines",
    "privacy/step/run_folder.py": "the wait for a lock",
}
"""Every file that reads a clock, and why nothing of it reaches a public file of a run. An auditor reads these."""

PLANTED = """
import time

import numpy as np

from privacy.boundary import Private, Public, Reason
from privacy.step import clock
from trainer.loop.metrics import PrivateMetrics, PublicMetrics
from trainer.loop.reporting import StepReporter, write_public
from privacy.step.step import StepRecord
from privacy.step.run_folder import RunFolder
from trainer.loop.heldout import HeldoutResults


def plant(
    public: PublicMetrics, private: PrivateMetrics, record: StepRecord, reporter: StepReporter, folder: RunFolder,
    results: Private[HeldoutResults],
) -> None:
    public.scalars(1, {"a": record.lr, "b": record.noised_grad_norm, **record.public})
    private.scalars(1, {"a": record.private["loss_sum"], "b": clock.now()})
    public.scalars(1, {"a": record.private["loss_sum"]})  # refused
    public.scalars(1, record.private)  # refused
    public.scalars(1, {"a": time.monotonic()})  # refused
    public.scalars(1, {"a": clock.since(clock.now())})  # refused
    public.scalars(1, {"a": Public(clock.now(), Reason.SETTINGS)})  # refused
    public.scalars(1, {"a": Public(record.private["loss_sum"], Reason.NOISED)})  # refused
    public.scalars(1, {"a": Public(record.private["loss_sum"] / 2, Reason.NOISED)})  # refused
    public.scalars(1, {"a": float(record.communication_bytes)})  # refused
    public.text(1, "a", Private("a caption"))  # refused
    public.text(1, "a", "a caption")  # refused
    public.picture(1, "a", Private(np.zeros((1, 1, 3))))  # refused
    private.scalars(1, {"a": time.monotonic()})  # refused
    reporter.step(1, record, time.monotonic())  # refused
    write_public(1, results, public, folder.evaluation)  # refused
"""


@pytest.mark.full
@pytest.mark.timeout(600)
def test_types_refuse_private_values_and_clocks_in_public_writers(tmp_path: Path) -> None:
    """mypy names every line of `PLANTED` that is marked, and no other."""
    (tmp_path / "planted.py").write_text(PLANTED)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(ROOT / "pyproject.toml"),
        "planted.py",
    ]
    command += ["--cache-dir", str(tmp_path / "cache"), "--no-error-summary"]
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    refused = {
        int(line.split(":")[1])
        for line in done.stdout.splitlines()
        if line.startswith("planted.py:")
    }
    marked = {number for number, line in enumerate(PLANTED.splitlines(), 1) if "# refused" in line}
    assert done.returncode == 1 and refused == marked, done.stdout + done.stderr


MADE_PUBLIC = {
    "trainer/loop/reporting.py: heldout": "held-out results, where the recipe declares the data public"
}
"""Every function that publishes what a private box held, and why."""


def from_boxes(function: ast.AST) -> bool:
    """Whether a `Public` is made of what `.inside()` of a box gave, also over other names of the function."""
    nodes, known = list(ast.walk(function)), set[str]()

    def holds(tree: ast.AST) -> bool:
        inner = list(ast.walk(tree))
        opened = any(isinstance(node, ast.Attribute) and node.attr == "inside" for node in inner)
        return opened or any(isinstance(node, ast.Name) and node.id in known for node in inner)

    while True:
        pairs = [(node.targets, node.value) for node in nodes if isinstance(node, ast.Assign)]
        pairs += [
            ([node.target], node.iter)
            for node in nodes
            if isinstance(node, ast.For | ast.comprehension)
        ]
        named = {
            n.id
            for to, value in pairs
            if holds(value)
            for one in to
            for n in ast.walk(one)
            if isinstance(n, ast.Name)
        }
        if named <= known:
            break
        known |= named
    calls = (
        node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "Public"
    )
    return any(holds(argument) for call in calls for argument in call.args)


def test_what_a_private_box_held_is_published_where_it_is_known_why() -> None:
    found = set()
    for path in python_files(*PACKAGES):
        if "inside()" in path.read_text():
            functions = [
                node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef)
            ]
            found |= {f"{relative(path)}: {one.name}" for one in functions if from_boxes(one)}
    assert found == set(MADE_PUBLIC)
    planted = "def step(private):\n    shown = {n: v.inside() for n, v in private.items()}\n    return Public(shown['a'], 1)"
    assert from_boxes(ast.parse(planted))


def test_a_published_name_has_one_reason_and_the_verifier_knows_no_other() -> None:
    words = {"where the training loss is", "heldout/samples"}  # TensorBoard alone
    names = set(PUBLISHED) - words
    assert names | {"step", "attempt"} == verify.PUBLIC_FIELDS["metrics.jsonl"]
    heldout = {name.removeprefix("heldout/") for name in names if name.startswith("heldout/")}
    assert (
        heldout | {"step", "attempt", "captions"}
        == verify.PUBLIC_FIELDS["evaluation/heldout.jsonl"]
    )
    assert reason_of("train/loss") is None and reason_of("linear-probe/top1") is Reason.DECLARED


def test_clocks_are_read_where_it_is_known_why() -> None:
    """A new clock needs a line above, which says why nothing of it is published."""
    found, mentions = set(), re.compile(rf"\.({'|'.join(CLOCKS)})\b")
    for path in python_files(*PACKAGES):
        if relative(path).startswith(("benchmarks/", "tools/")) or not mentions.search(
            path.read_text()
        ):
            continue  # those two train nobody's data
        read = [
            node
            for node in ast.walk(parsed(path))
            if isinstance(node, ast.Attribute) and node.attr in CLOCKS
        ]
        if any(
            ast.unparse(node.value) != "clock" for node in read
        ):  # privacy/ranks/clock.py, private by type
            found.add(relative(path))
    assert found == set(READS_A_CLOCK)
