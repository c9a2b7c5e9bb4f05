"""The README's example of the library is a program, and says what it prints."""

import pytest

from tests.docs.pages import blocks


def test_the_example_runs_and_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [block for block in blocks("README.md") if block.language == "python"]
    exec(compile(block.text, str(block), "exec"), {})
    assert capsys.readouterr().out.strip() == block.text.rstrip().rpartition("  # ")[2]
