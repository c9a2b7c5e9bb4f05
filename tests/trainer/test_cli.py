"""What every command says at its end: one line for what a user or a machine got wrong, a traceback for a defect alone."""

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from data.files import write_durably
from evaluation.results import Results, publish
from privacy.boundary import Public, Reason
from privacy.errors import PrivacyStateRefused, say
from privacy.files import durable
from tests.processes import ROOT
from trainer.config.cli import Parser, require_open_files, run_command
from trainer.errors import ConfigError, RemoteError, in_one_line
from trainer.loop.metrics import PublicMetrics
from trainer.planner.tables import _empty_table


def too_deep() -> None:
    too_deep()


@pytest.mark.parametrize(
    ("work", "code", "words"),
    [
        (lambda: Path("/nowhere/file").read_text(), 2, ["/nowhere/file", "No such file"]),
        (lambda: Path("x" * 3000).mkdir(), 2, ["File name too long", "..."]),
        (lambda: Path("/dev/null/inside").write_text("x"), 2, ["Not a directory"]),
        (lambda: Path("/dev/full").write_text("x"), 1, ["No space left"]),
        (lambda: bytearray(2**62), 1, ["memory"]),
        (lambda: torch.empty(2**60), 1, ["memory"]),
        (too_deep, 2, ["nested"]),
        (lambda: (_ for _ in ()).throw(RuntimeError("can't start new thread")), 1, ["threads"]),
        (
            lambda: (_ for _ in ()).throw(RuntimeError("could not create a primitive")),
            1,
            ["memory"],
        ),
    ],
)
def test_what_a_machine_refuses_is_one_line(
    work: Callable[[], None], code: int, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: work() and None)
    said = capsys.readouterr().err
    assert ended.value.code == code, said
    assert said.startswith("error: ") and said.count("\n") == 1 and len(said) < 600
    for word in words:
        assert word in said


def test_errors_of_ours_keep_their_code_and_defects_their_traceback() -> None:
    assert in_one_line(ConfigError("a\n  b")) == ("a b", 2)
    assert in_one_line(PrivacyStateRefused("no")) == ("no", 4)
    assert in_one_line(RemoteError("gone", 7)) == ("gone", 7)
    for defect in (
        ValueError("x"),
        KeyError("x"),
        RuntimeError("x"),
        AssertionError("x"),
        TypeError("x"),
    ):
        assert in_one_line(defect) is None
        with pytest.raises(type(defect)):
            run_command(lambda defect=defect: (_ for _ in ()).throw(defect))


def public_line(folder: Path) -> None:
    PublicMetrics(folder).scalars(1, {"privacy/epsilon": Public(0.5, Reason.CHARGED)})


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda folder: durable.write_new(folder / "verify.py", bytes(9), 0o600), "verify.py"),
        (lambda folder: durable.replace_file(folder / "config.toml", bytes(9)), ".config.toml."),
        (lambda folder: write_durably(folder / "study.md", bytes(9)), "study.md"),
        (public_line, "tensorboard/events"),
    ],
)
@pytest.mark.parametrize("allowed", [0, 6])  # bytes of a file: a write fails, or falls short
def test_a_file_that_may_not_grow_is_named(
    write: Callable[[Path], None], name: str, allowed: int, tmp_path: Path
) -> None:
    """As under `ulimit -f`, a quota or on a full disk, where the system names nothing."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (allowed, limits[1]))
    try:
        with pytest.raises(OSError) as refused:
            write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = in_one_line(refused.value)
    assert (
        said is not None and said.exit_code == 1 and said.line.startswith(f"{tmp_path}/{name}")
    ), said


@pytest.mark.parametrize("options", [(), ("-u",)])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_console_on_a_full_disk_is_named(stream: str, options: tuple[str, ...]) -> None:
    program = (
        "import sys\nfrom trainer.config.cli import prepare_console\nfrom trainer.errors import in_one_line\nprepare_console()\n"
        f"try:\n    print('line', file=sys.{stream}, flush=True)\n"
        f"except OSError as error:\n    print(in_one_line(error).line, file=sys.{'stderr' if stream == 'stdout' else 'stdout'})\n"
    )
    with open("/dev/full", "w") as full:
        streams: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            stream: full,
        }
        done = subprocess.run(
            [sys.executable, *options, "-c", program], cwd=ROOT, text=True, check=False, **streams
        )
    assert f"the console ({stream}): No space left on device" in (done.stdout or "") + (
        done.stderr or ""
    )


def test_a_disk_that_is_full_is_no_bad_input() -> None:
    """Exit code 2 tells a scheduler that trying again is of no use."""
    for number in (errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EDQUOT, errno.ENOMEM, errno.EAGAIN):
        said = in_one_line(OSError(number, os.strerror(number), "file"))
        assert said is not None and said.exit_code == 1


@given(st.text(st.characters()))
def test_whatever_an_error_says_is_one_printable_line(text: str) -> None:
    said = in_one_line(ConfigError(text))
    assert said is not None
    assert said.line.isprintable()
    said.line.encode()
    assert max(map(len, said.line.split(" "))) < 1000


LOUD = "\x1b[2J\nverify: consistent\x00\x7f\x9b\u202e\u2066\ud800[/red]"


def test_what_is_said_of_files_is_printable(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines, tables of plans, tables of evaluations and progress; an escaped line of JSON stays JSON."""
    say(LOUD, f"a {LOUD}")
    table = _empty_table("")
    table.add_row("note", LOUD, LOUD)
    Console(width=200).print(table)
    results = Results("captions", {}, (), table=[{LOUD: LOUD}], notes=[LOUD])
    publish(results, output=None, data_is_public=False, as_json=False, arguments=[])
    shown = capsys.readouterr().out
    assert (
        all(letter.isprintable() or letter == "\n" for letter in shown)
        and shown.count("[/red]") >= 6
    )
    assert "verify: consistent" not in [
        line[: len("verify: consistent")] for line in shown.splitlines()
    ]
    say(json.dumps({"text": LOUD}))
    assert json.loads(capsys.readouterr().out) == {"text": LOUD}


@pytest.mark.parametrize("word", ["\udcff", "caf\udce9", "data.caption_field=\udcff"])
def test_an_argument_that_is_no_text(word: str) -> None:
    parser = Parser(add_help=False)
    parser.add_argument("words", nargs="*")
    with pytest.raises(ConfigError, match="UTF-8"):
        parser.parse_args([word])
    assert parser.parse_args(["caf\u00e9"]).words == ["caf\u00e9"]


def test_a_limit_of_open_files_is_raised_as_far_as_ranks_need_and_refused_where_it_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = [(1024, 1_048_576)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: limits.append(pair))
    require_open_files(128)
    assert len(limits) == 1
    require_open_files(1024)
    assert limits.pop() == (4224, 1_048_576)
    limits[-1] = (1024, 4096)
    with pytest.raises(
        ConfigError, match=r"4096 open files, and at least 4224 .* 1,024 ranks: ulimit -n 4224"
    ):
        require_open_files(1024)
    limits[-1] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    require_open_files(1024)
    assert len(limits) == 1
