"""A published folder, a copy of it for each test, and verify.py as a function of it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from privacy import verify
from tests.privacy.published import Judge, publish


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("published") / "run")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


@pytest.fixture
def judge(capsys: pytest.CaptureFixture[str]) -> Judge:
    def judged(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
        code = verify.main([str(folder), "--json", *arguments])
        said = capsys.readouterr()
        assert "Traceback" not in said.err and said.err.count("\n") <= 1
        if code == 2:
            assert said.out == "" and said.err.startswith("error: ")
            return code, {"error": said.err}
        found = json.loads(said.out)
        assert found["exit_code"] == code and said.out.count("\n") == 1
        return code, found

    return judged
