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

from tests.trainer.trained_runs import recipe, trained
from trainer.weights.export import export
from trainer.weights.open_model import open_model

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def needs(*packages: str) -> Any:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(
        bool(missing), reason=f"the extra examples is not installed: {missing}"
    )


@pytest.fixture
def library(tmp_path: Path) -> dict[str, str]:
    """The environment of a program that has the library under the name that its wheel gives it."""
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed/auditable_dp").symlink_to(ROOT / "privacy")
    found = os.pathsep.join(
        filter(None, (str(tmp_path / "installed"), os.environ.get("PYTHONPATH")))
    )
    return {**os.environ, **OFFLINE, "PYTHONPATH": found, "PYTHONDONTWRITEBYTECODE": "1"}


def output_of(words: list[str], library: dict[str, str], folder: Path) -> str:
    done = subprocess.run(
        words, cwd=folder, env=library, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def epsilon_of(text: str) -> float:
    return float(re.findall(r"epsilon (\d+\.\d{3}) at delta", text)[-1])


def verified(run: Path, library: dict[str, str], folder: Path) -> float:
    """Epsilon by the verifier in the run folder, which imports nothing of ours."""
    found = json.loads(
        output_of(
            [sys.executable, "-I", str(run / "verify.py"), str(run), "--json"], library, folder
        )
    )
    return float(found["epsilon"])


@pytest.mark.full
@pytest.mark.timeout(700)
def test_own_loop(library: dict[str, str], tmp_path: Path) -> None:
    """It learns, resumes as finished, and says what the verifier says."""
    command = [sys.executable, str(EXAMPLES / "own_loop.py"), str(tmp_path / "run")]
    said = output_of(command, library, tmp_path)
    assert float(re.findall(r"([\d.]+)% of the held-out", said)[-1]) > 60
    assert epsilon_of(said) == pytest.approx(
        verified(tmp_path / "run", library, tmp_path), abs=1e-3
    )
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
    said = output_of(
        [sys.executable, *start, str(EXAMPLES / name), str(tmp_path / "run"), *more],
        library,
        tmp_path,
    )
    assert epsilon_of(said) == pytest.approx(
        verified(tmp_path / "run", library, tmp_path), abs=1e-3
    )
    if name == "with_accelerate.py":
        assert "on 2 ranks" in said and said.count(" at delta ") == 1
    elif name == "finetune_vit.py":
        trained = int(re.findall(r"([\d,]+) weights are trained", said)[0].replace(",", ""))
        assert (trained < 2_000) == bool(more)
        assert bool(more) or float(re.findall(r"([\d.]+)% of the held-out", said)[-1]) > 30, (
            "guessing: 10"
        )
    else:
        assert (tmp_path / "run-adapters/adapter_model.safetensors").is_file()


GRADIO = """
from PIL import Image as Pictures
Image = Text = lambda **_: None
class Interface:
    def __init__(self, function, *_, title, description):
        self.said = function(Pictures.new("RGBA", (40, 30))), title, description
    def launch(self):
        print(*self.said, sep="\\n")
"""


@pytest.mark.full
@needs("transformers")
def test_caption_page(tmp_path: Path) -> None:
    """In place of gradio, one picture is shown to it."""
    trained(tmp_path / "run", recipe())
    card = export(open_model(tmp_path / "run"), "safetensors", tmp_path / "captioner")[0]
    (tmp_path / "gradio.py").write_text(GRADIO)
    command = [sys.executable, str(EXAMPLES / "caption_page.py"), "captioner"]
    environment = {
        **os.environ,
        **OFFLINE,
        "PYTHONPATH": str(tmp_path),
        "HF_HOME": str(tmp_path / "cache"),
    }
    *_, title, privacy = output_of(command, environment, tmp_path).splitlines()
    assert card is not None and card.epsilon is not None and title == recipe().name
    assert (
        card.epsilon <= float(re.findall(r"epsilon ([\d.]+) at", privacy)[0]) < card.epsilon + 0.001
    )


@pytest.mark.full
@pytest.mark.timeout(700)
@needs("nbclient", "ipykernel")
@pytest.mark.filterwarnings("ignore")
def test_the_notebook(
    library: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cell by cell in a kernel of Jupyter."""
    import nbformat
    from nbclient import NotebookClient

    for name, value in library.items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(EXAMPLES / "from_ten_lines_to_a_card.ipynb", as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    stored = nbformat.read(EXAMPLES / "from_ten_lines_to_a_card.ipynb", as_version=4)
    said, known = (
        "".join(part.get("text", "") for cell in one.cells for part in cell.get("outputs", []))
        for one in (notebook, stored)
    )
    assert "goes on after step" in said and "refused:" in said and "formal_guarantee   True" in said
    first_lines = [text.split("## ")[0].splitlines() for text in (said, known)]
    drawn = re.compile(r"norm [\d.]+|[\d.]+% of the held-out")  # by the noise of each run
    assert [drawn.sub("", line) for line in first_lines[0]] == [
        drawn.sub("", line) for line in first_lines[1]
    ]


def test_every_example_is_in_the_list_and_in_a_test() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")]:
        assert f"`{path.name}`" in listed and path.name in Path(__file__).read_text(), path.name


def test_the_notebook_is_stored_with_what_it_says_and_nothing_of_the_machine() -> None:
    """The site shows it. No path, no clock and no name of whoever ran it."""
    cells = json.loads((EXAMPLES / "from_ten_lines_to_a_card.ipynb").read_text())["cells"]
    coded = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in coded] == list(range(1, len(coded) + 1))
    assert all(cell["outputs"] for cell in coded if "print(" in "".join(cell["source"]))
    assert all(output["output_type"] == "stream" for cell in coded for output in cell["outputs"])
    assert {name for cell in cells for name in cell["metadata"]} == set()
    said = json.dumps([cell.get("outputs") for cell in cells])
    assert not re.search(r"/(tmp|home|root|Users|work)\b|\d\d:\d\d|\d{4}-\d\d-\d\d", said)
