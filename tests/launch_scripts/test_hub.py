"""`export.py --push_to_hub`, with a stand-in that has the signatures of huggingface_hub's client."""

from pathlib import Path
from unittest import mock

import huggingface_hub
import pytest
from huggingface_hub.errors import HTTPError

from tests.launch_scripts.conftest import Run
from tests.trainer.trained_runs import recipe, trained


def test_an_export_becomes_a_private_repository(command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole folder goes there in one commit; who has no token gets one line, and keeps the folder."""
    kind = mock.create_autospec(huggingface_hub.HfApi)
    monkeypatch.setattr(huggingface_hub, "HfApi", kind)
    hub, out = kind.return_value, tmp_path / "out"
    hub.create_repo.return_value.repo_id = "lab/model"
    hub.upload_folder.return_value.commit_url = "https://hub/lab/model/commit/abc"
    trained(tmp_path / "run", recipe())
    export = ("--checkpoint", tmp_path / "run", "--format", "safetensors")
    assert "lab/model/commit/abc" in command(*export, out, "--push_to_hub", "model")
    hub.create_repo.assert_called_once_with("model", private=True, exist_ok=True)
    hub.upload_folder.assert_called_once_with(repo_id="lab/model", folder_path=out)
    hub.create_repo.side_effect = HTTPError("401 Client Error: who are you?")
    line = command(*export, tmp_path / "again", "--push_to_hub", "model", code=2)
    assert "--push_to_hub model: 401" in line and (tmp_path / "again/README.md").is_file()
