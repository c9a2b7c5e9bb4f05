"""Small stand-ins for what the guides' commands take for granted: a study, and trained runs."""

import re
import shutil
from pathlib import Path

from tests.docs.pages import ROOT
from tests.e2e.launch import alone

_PICO = "{ encoder_width = 16, encoder_depth = 12, encoder_num_heads = 2, decoder_width = 16, decoder_num_heads = 2 }"


def small_study(project: Path) -> None:
    """The study of the guide with its first two batches, one seed and few steps."""
    path = project / "studies" / "batch_size_dpcap.toml"
    study = path.read_text()
    for key, values in {
        "privacy.expected_batch_size": [8, 16],
        "train.num_steps": [4, 2],
        "privacy.reserved_attempts": [2, 1],
        "schedule.warmup_steps": [1, 1],
        "heldout.every_steps": [2, 1],
        "train.micro_batch_size": [8, 8],
        "seeds": [0],
    }.items():
        study, count = re.subn(rf"^{key} = \[.*\]", f"{key} = {values}", study, flags=re.M)
        assert count == 1, key
    path.write_text(study)


def trained(folder: Path) -> Path:
    """Runs of one step: captioners as dpcap_base and synthetic_shapes, a masked autoencoder of twelve blocks as vip_base."""
    tiny = (ROOT / "recipes/tiny.toml").read_text()
    model = tiny[tiny.index("[model]") : tiny.index("[data]")]
    recipe = folder / "vip.toml"
    recipe.write_text(
        tiny.replace(
            model, f'[model]\nkind = "masked_autoencoder"\nsize = "pico"\noverrides = {_PICO}\n\n'
        )
    )
    for name, source in (("dpcap_base", "recipes/tiny.toml"), ("vip_base", str(recipe))):
        done = alone(
            [
                "--engine",
                "local",
                "--ds_config",
                "ds_configs/zero1.json",
                "--recipe",
                source,
                "--run_dir",
                str(folder / name),
                "train.num_steps=1",
                "heldout.num_captions=0",
                "data.num_tokens=24",
            ]
        )
        assert done.returncode == 0, done.stdout + done.stderr
    shutil.copytree(folder / "dpcap_base", folder / "synthetic_shapes")
    return folder


def put(page: str, project: Path, trained_runs: Path) -> None:
    """What the commands of a page find in a project: runs, what `make quickstart` leaves behind, or a small study."""
    if page == "README.md":  # runs/latest leads to a run of that day
        shutil.copytree(
            trained_runs / "dpcap_base", project / "runs" / "quickstart-20261125-120000"
        )
        (project / "runs" / "latest").symlink_to("quickstart-20261125-120000")
    elif page in ("docs/guarantee.md", "docs/run_folder.md"):
        for name in ("dpcap_base", "vip_base", "synthetic_shapes"):
            shutil.copytree(trained_runs / name, project / "runs" / name)
    elif page == "docs/studies.md":
        small_study(project)
