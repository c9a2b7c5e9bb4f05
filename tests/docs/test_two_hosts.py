"""A newcomer with docs/running.md alone: from a bare machine to a run between two hosts, typed line by line."""

import os
import pty
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.docs.copies import copy_project
from tests.docs.pages import Block, blocks, read
from tests.e2e.launch import count, kill_group
from tests.hosts.hosts import SSH_PROGRAMS, why_not

WITHIN = 240
PROMPT = "[reader] $ "
_AT_PROMPT = re.compile(r"\[(reader|node1)\] \$ \Z")


def two_hosts_block() -> Block:
    """The first block under the heading of docs/running.md."""
    line = read("docs/running.md").split("\n## Two hosts")[0].count("\n")
    return next(block for block in blocks("docs/running.md") if block.line > line)


class Terminal:
    """A shell that is typed at: the next line when it asks for one."""

    def __init__(self, cwd: Path) -> None:
        ours, theirs = pty.openpty()
        environment = {k: v for k, v in os.environ.items() if k in ("HOME", "USER", "LANG", "TMPDIR")}
        self.process = subprocess.Popen(
            ["setsid", "--ctty", "bash", "--norc", "--noprofile"], cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs,
            env={"PATH": os.defpath + ":/usr/sbin:/sbin", "PS1": PROMPT, "TERM": "dumb", **environment},
        )  # fmt: skip
        os.close(theirs)
        self._ours = ours
        self.said = ""

    def type(self, line: str) -> str:
        """What the line says until the shell asks for the next one."""
        self._until_prompt()
        start = len(self.said)
        os.write(self._ours, line.encode() + b"\n")
        self.said += "\n"  # not at a prompt any more, until something new comes
        self._until_prompt()
        return self.said[start:]

    def _until_prompt(self) -> None:
        deadline = time.monotonic() + WITHIN
        while not _AT_PROMPT.search(self.said):
            assert time.monotonic() < deadline, f"no prompt within {WITHIN} s:\n{self.said[-4000:]}"
            if select.select([self._ours], [], [], 1)[0]:
                self.said += os.read(self._ours, 65536).decode(errors="replace").replace("\r", "")

    def close(self) -> None:
        kill_group(self.process)
        os.close(self._ours)


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_newcomer_types_what_the_page_says(tmp_path: Path) -> None:
    reason = why_not(*SSH_PROGRAMS, "pdsh", "setsid")
    if reason:
        pytest.skip(reason)
    copy_project(tmp_path / "project")
    terminal = Terminal(tmp_path / "project")
    try:
        said = {}
        for line in two_hosts_block().text.replace("\\\n", " ").splitlines():
            said[line] = terminal.type(line)
            assert "error" not in terminal.type("echo code $?") and "code 0\n" in terminal.said[-40:], said[line]
    finally:
        terminal.close()
    assert "2 ranks on 2 hosts (node1, node2)" in terminal.said
    run_dir = tmp_path / "project" / "runs" / "two-hosts"
    assert count(run_dir, "close") == 1 and list((run_dir / "report").glob("*.html"))
    assert said["exit"].rstrip().endswith(PROMPT.strip()), "back on the machine that it began on"
    shutil.rmtree(tmp_path / "project")
