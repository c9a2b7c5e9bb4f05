"""Whether a command of the documentation would be accepted: its script's own parser, the trainer's own loaders, no run."""

import ast
import contextlib
import importlib
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from privacy import verify
from privacy.command import main as library
from tests.docs.pages import ROOT, Command

PLACEHOLDERS = {
    "ARGUMENTS": "--ds_config ds_configs/zero3_bf16.json --recipe recipes/dpcap_base.toml --run_dir /shared/runs/name",
    "ARGUMENTS_WITHOUT_RUN_DIR": "--ds_config ds_configs/zero3_bf16.json --recipe recipes/dpcap_base.toml",
}
"""What a page writes once, and a reader fills in."""
ORDINARY = (
    "export",
    "printf",
    ".",
    "exit",
    "tensorboard",
    "apt-get",
    "mkdir",
    "touch",
    "rsync",
    "sha256sum",
)
"""Programs that are not ours; what they are given is not looked at."""
TAKES_A_VALUE = {
    "deepspeed": {
        "--hostfile",
        "--num_gpus",
        "--launcher",
        "--master_addr",
        "--master_port",
        "--launcher_args",
    },
    "mpirun": {"-n", "-ppn", "-hosts"},
    "python": set[str](),
}
FLAGS = {"deepspeed": {"--no_ssh_check", "-q"}, "mpirun": set[str](), "python": {"-u"}}
_SCRIPT = re.compile(r"(launch_scripts|benchmarks|tools)/(\w+/)*\w+\.py")
_BATCH = re.compile(r"(launch_scripts/cluster|tests)/\w+\.(sh|sbatch)")


class Refused(AssertionError):
    """A command that a reader cannot type."""


def check(command: Command) -> None:
    """
    Raises:
        Refused: naming page, line and reason.
    """
    words = [
        one
        for word in command.words
        for one in (PLACEHOLDERS[word].split() if word in PLACEHOLDERS else [word])
    ]
    try:
        with contextlib.chdir(ROOT):
            _check(words)
    except (Refused, Exception) as error:
        raise Refused(f"{command}: {error}") from error


def _check(words: list[str]) -> None:
    variables = []
    while words and re.match(r"[A-Z][A-Z_0-9]*=", words[0]):
        variables.append(words.pop(0).split("=")[0])
    if not words:
        return
    place = next(
        (n for n, word in enumerate(words) if _SCRIPT.fullmatch(word) or _BATCH.fullmatch(word)),
        None,
    )
    name = Path(words[0]).name
    if place is not None:
        _check_start(words[:place])
        script, rest = words[place], words[place + 1 :]
        source = (ROOT / script).read_text() + (ROOT / "trainer/ranks/discovery.py").read_text()
        if unread := [name for name in variables if not re.search(rf"\b{name}\b", source)]:
            raise Refused(f"{script} does not read {unread[0]}")
        if _BATCH.fullmatch(
            script
        ):  # executable unless sbatch reads it; behind its own arguments stand those of train.py
            if script.endswith(".sh") and not os.access(ROOT / script, os.X_OK):
                raise Refused(f"{script} is not executable, or not there")
            own = {"openmpi.sh": 1, "slurm_array.sbatch": 2}.get(Path(script).name, 0)
            if len(rest) < own:
                raise Refused(f"{script} takes {own} arguments before those of train.py")
            script, rest = ("launch_scripts/train.py" if "cluster/" in script else ""), rest[own:]
        added = (
            ["--local_rank=0"] if words[0] == "deepspeed" else []
        )  # by the launcher, before everything else
        if script:
            check_script(script, [*added, *rest])
    elif words[0] == "make":
        known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        if missing := [target for target in words[1:] if "=" not in target and target not in known]:
            raise Refused(f"the Makefile has no target {missing[0]}")
    elif words[:2] == ["pip", "install"]:
        if "-r" in words and not (ROOT / words[words.index("-r") + 1]).is_file():
            raise Refused("no such requirements")
    elif name == "python" and words[1] == "-m":
        importlib.import_module(words[2])
    elif name == "python" and (
        at := [n for n, word in enumerate(words[:3]) if Path(word).name == "verify.py"]
    ):
        verify.parse_args(words[at[0] + 1 :])  # it lies in run folders
    elif words[0] == "auditable-dp":
        verify.parse_args(words[2:]) if words[1] == "verify" else library._parser().parse_args(
            words[1:]
        )
    elif words[0] == "python" and words[1].startswith("examples/"):
        ast.parse((ROOT / words[1]).read_text())  # tests/examples runs it
    elif words[0] == "python" and words[1] == "-c":
        ast.parse(words[2])
    elif words[0] not in ORDINARY:
        raise Refused(f"nobody knows {words[0]}")


def _check_start(words: Sequence[str]) -> None:
    """What starts a script: nothing, an interpreter, a launcher with its options, and combinations of them."""
    if words and words[0] == "sbatch":
        if wrong := [word for word in words[1:] if not re.fullmatch(r"--[a-z-]+(=.+)?", word)]:
            raise Refused(f"sbatch: {wrong[0]}")
        return
    program, rest = "", list(words)
    while rest:
        word = rest.pop(0)
        if Path(word).name in FLAGS and not word.startswith("-"):
            program = Path(word).name
        elif word in TAKES_A_VALUE.get(program, ()):
            rest.pop(0)
        elif word not in FLAGS.get(program, ()) and word.split("=")[0] not in TAKES_A_VALUE.get(
            program, ()
        ):
            raise Refused(f"{program or 'this command'} is not known to take {word}")


def check_script(script: str, arguments: Sequence[str]) -> None:
    """The script's own parser takes the arguments, and the trainer's loaders the recipe, ds_config or study that they name."""
    if script.startswith("benchmarks/"):  # their parsers are made where they run
        assert (ROOT / script).is_file(), f"there is no {script}"
        return
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
            options = module.parse_args(list(arguments))
    except SystemExit:  # --help
        return
    given: dict[str, Any] = vars(options)
    if "study" in given:
        check_study(options.study)
    if given.get("overrides") and given.get("recipe", True) is None:
        raise Refused("overrides without a recipe")
    recipe = Path("recipes/quickstart.toml") if "quickstart" in script else given.get("recipe")
    if recipe is None:
        return
    from trainer.config.machine import load_machine_settings, resolve
    from trainer.config.recipe import load_config
    from trainer.engines import require_supported

    config = load_config(recipe, options.overrides)
    if given.get("ds_config") is not None:
        machine = load_machine_settings(Path(options.ds_config))
        world_size = given.get("world_size") or 8
        resolve(machine, micro_batch_size=config.train.micro_batch_size, world_size=world_size)
        require_supported(given.get("engine") or "deepspeed", machine, world_size)


def check_study(path: Path) -> int:
    """The number of its points; each has a recipe that trains."""
    from trainer.studies.grid import load_study, plan_points

    return len(plan_points(load_study(path), "study", ROOT))
