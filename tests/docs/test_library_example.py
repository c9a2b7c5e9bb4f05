"""The examples of the library are programs, and say what they print."""

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from privacy.gradients.compiled import CompiledTap, tap
from tests.docs.pages import ROOT, Block, blocks


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """The library under its own name, as its wheel has it: modules of their own, which know no `privacy`."""
    spec = importlib.util.spec_from_file_location(
        "auditable_dp",
        ROOT / "privacy/__init__.py",
        submodule_search_locations=[str(ROOT / "privacy")],
    )
    assert spec is not None and spec.loader is not None
    sys.modules["auditable_dp"] = importlib.util.module_from_spec(spec)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "auditable_dp"]:
            del sys.modules[name]


def require_said(found: list[Block], capsys: pytest.CaptureFixture[str]) -> None:
    """What follows the last `#` of a program is its last line, or that of its line before."""
    variables: dict[str, object] = {}
    for block in found:
        exec(compile(block.text, str(block), "exec"), variables)
        printed = capsys.readouterr().out.strip().splitlines()
        said = [
            line.rpartition("# ")[2] for line in block.text.splitlines() if "# epsilon " in line
        ]
        assert not said or said == printed[-1:], (block, printed)


def test_the_example_of_the_first_page_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is also the first of the package's own page, which an index of packages shows."""
    monkeypatch.chdir(tmp_path)
    (program,) = (block for block in blocks("README.md") if block.language == "python")
    assert [block.text for block in blocks("privacy/README.md") if block.language == "python"] == [
        program.text
    ]
    with installed():
        require_said([program], capsys)


def test_the_clone_and_the_installed_library_in_one_process_keep_their_compiled_taps_apart() -> (
    None
):
    seen: list[Tensor] = []
    ours = CompiledTap(lambda x, output: seen.append(x), lambda x, gradient: None)
    with installed():
        importlib.import_module("auditable_dp.gradients.compiled")
        tap(
            torch.ones(2),
            torch.zeros((), requires_grad=True),
            torch.zeros(2),
            ours.key,
            ours.num_calls,
        )
    assert len(seen) == 1


@pytest.mark.full
def test_the_programs_of_the_page_run_and_what_they_leave_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with installed():
        programs = [block for block in blocks("docs/own_loop.md") if block.language == "python"]
        alone = [block for block in programs if "init_process_group" not in block.text]
        assert (
            len(alone) == len(programs) - 1
        )  # tests/distributed/test_own_shards.py runs the other one, on two ranks
        require_said(alone, capsys)
        from auditable_dp.command.main import main  # type: ignore[import-not-found]

        for arguments in (
            "verify runs/loop",
            "audit ledger runs/loop",
            "audit schedule runs/loop",
            "report runs/scheduled",
        ):
            assert main(arguments.split()) == 0, arguments
        assert main(["audit", "run", "runs/loop"]) == 2
        said = capsys.readouterr()
        assert (
            "verify: consistent: epsilon 1.319" in said.out
            and "take launch_scripts/audit.py" in said.err
        )
