"""The wheel holds the library and what it needs, and works without the project around it."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys
import torch
import auditable_dp
assert "privacy" not in sys.modules and {folder!r} in auditable_dp.__file__, auditable_dp.__file__
from auditable_dp.command.main import main
from auditable_dp.loop import PrivateLoop, floats, integers

x = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
model = torch.nn.Linear(4, 2)
with PrivateLoop(
    model, torch.optim.SGD(model.parameters(), lr=0.1), torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long()),
    example=(floats(4), integers(2)), loss=lambda x, y: torch.nn.functional.cross_entropy(model(x), y, reduction="none"),
    run_dir="run", expected_batch_size=40, num_steps=3, noise_multiplier=4.0, starts_from="public",
) as loop:
    for step in loop:
        if step.number == 2 and {leaves}:
            break
if not {leaves}:
    loop.write_card()
    assert main(["verify", "run"]) == main(["audit", "ledger", "run"]) == 0
    print("no trainer:", not any(name.startswith("trainer") for name in sys.modules))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling builds the wheel: the extra dev")
    folder = tmp_path_factory.mktemp("wheel")
    build = "import hatchling.build as b, sys; print(b.build_wheel(sys.argv[1]))"
    said = subprocess.check_output(
        [sys.executable, "-c", build, str(folder)], cwd=ROOT, text=True, timeout=120
    )
    return folder / said.splitlines()[-1]


@pytest.mark.full
def test_the_wheel_holds_every_file_of_the_library_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "privacy"]
    tracked = subprocess.check_output(listing, cwd=ROOT, text=True).splitlines()
    assert held == {"auditable_dp/" + name.removeprefix("privacy/") for name in tracked}


@pytest.mark.full
def test_the_wheel_trains_resumes_and_judges_in_another_folder(wheel: Path, tmp_path: Path) -> None:
    """Only the wheel and the packages of others: the project is not on the path."""
    installed = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    said = ""
    for leaves in (True, False):
        program = PROGRAM.format(folder=str(installed), leaves=leaves)
        command = [sys.executable, "-c", program]
        said = subprocess.check_output(
            command, cwd=tmp_path, env=environment, text=True, timeout=280
        )
    assert said.splitlines()[-1] == "no trainer: True" and "verify: consistent" in said
