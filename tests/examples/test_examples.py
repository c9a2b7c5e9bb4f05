"""Every example runs as a reader runs it: as a program next to the installed library, without a network."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def needs(*packages: str) -> Any:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"the extra examples is not installed: {missing}")


@pytest.fixture
def library(tmp_path: Path) -> dict[str, str]:
    """The environment of a program that has the library under the name that its wheel gives it."""
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed/auditable_dp").symlink_to(ROOT / "privacy")
    found = os.pathsep.join(filter(None, (str(tmp_path / "installed"), os.environ.get("PYTHONPATH"))))
    return {**os.environ, **OFFLINE, "PYTHONPATH": found, "PYTHONDONTWRITEBYTECODE": "1"}


def output_of(words: list[str], library: dict[str, str], folder: Path) -> str:
    done = subprocess.run(words, cwd=folder, env=library, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def epsilon_of(text: str) -> float:
    return float(re.findall(r"epsilon (\d+\.\d{4}) at delta", text)[-1])


def verified(run: Path, library: dict[str, str], folder: Path) -> float:
    """Epsilon by the verifier in the run folder, which imports nothing of ours."""
    found = json.loads(output_of([sys.executable, "-I", str(run / "verify.py"), str(run), "--json"], library, folder))
    return float(found["epsilon"])


@pytest.mark.full
@pytest.mark.timeout(700)
def test_own_loop(library: dict[str, str], tmp_path: Path) -> None:
    """It learns, resumes as finished, and says what the verifier says."""
    command = [sys.executable, str(EXAMPLES / "own_loop.py"), str(tmp_path / "run")]
    said = output_of(command, library, tmp_path)
    assert float(re.findall(r"([\d.]+)% of the held-out", said)[-1]) > 60
    assert epsilon_of(said) == pytest.approx(verified(tmp_path / "run", library, tmp_path), abs=1e-4)
    assert epsilon_of(output_of(command, library, tmp_path)) == epsilon_of(said)
    assert (tmp_path / "run/report/privacy_card.html").is_file()


TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.mark.full
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    ("start", "name", "more"),
    [
        pytest.param(TWO_RANKS, "with_accelerate.py", [], marks=needs("accelerate")),
        pytest.param([], "finetune_vit.py", [], marks=needs("peft")),
        pytest.param([], "finetune_vit.py", ["--lora"], marks=needs("peft")),
        pytest.param([], "finetune_gpt2_lora.py", [], marks=needs("peft")),
    ],
)
def test_of_other_libraries(
    start: list[str], name: str, more: list[str], library: dict[str, str], tmp_path: Path
) -> None:
    """Epsilon is the verifier's; pictures are learned, and adapters are few weights and are saved."""
    said = output_of([sys.executable, *start, str(EXAMPLES / name), str(tmp_path / "run"), *more], library, tmp_path)
    assert epsilon_of(said) == pytest.approx(verified(tmp_path / "run", library, tmp_path), abs=1e-4)
    if name == "with_accelerate.py":
        assert "on 2 ranks" in said and said.count(" at delta ") == 1
    elif name == "finetune_vit.py":
        trained = int(re.findall(r"([\d,]+) weights are trained", said)[0].replace(",", ""))
        assert (trained < 2_000) == bool(more)
        assert bool(more) or float(re.findall(r"([\d.]+)% of the held-out", said)[-1]) > 30, "guessing: 10"
    else:
        assert (tmp_path / "run-adapters/adapter_model.safetensors").is_file()


@pytest.mark.full
@pytest.mark.timeout(700)
@needs("nbclient", "ipykernel")
@pytest.mark.filterwarnings("ignore")
def test_the_notebook(library: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cell by cell in a kernel of Jupyter."""
    import nbformat
    from nbclient import NotebookClient

    for name, value in library.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(EXAMPLES / "from_ten_lines_to_a_card.ipynb", as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = "".join(part.get("text", "") for cell in notebook.cells for part in cell.get("outputs", []))
    assert "goes on after step" in said and "refused:" in said and "formal_guarantee   True" in said


def test_every_example_is_in_the_list_and_in_a_test() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")]:
        assert f"`{path.name}`" in listed and path.name in Path(__file__).read_text(), path.name


def test_the_notebook_is_committed_without_outputs() -> None:
    """They would go stale; the site and CI show what a run of it says."""
    notebook = json.loads((EXAMPLES / "from_ten_lines_to_a_card.ipynb").read_text())
    assert all(not cell.get("outputs") for cell in notebook["cells"])
