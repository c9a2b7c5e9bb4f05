"""Makes cases from the schemas: the recipe's pydantic models, the ds_config's tables, the parsers of the commands."""

import argparse
import copy
import functools
import random
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from tests.fuzz import values
from tests.fuzz.commands import SCRIPTS, WORKING, options, parser_of
from trainer.config.machine import CHECKPOINTING_KEYS, MACHINE_KEYS, OFFLOAD_KEYS, RECIPE_KEYS, ZERO_KEYS
from trainer.config.recipe import RunConfig
from trainer.studies.grid import StudyConfig

ROOT = Path(__file__).resolve().parents[2]
MACHINE: dict[str, Any] = {"zero_optimization": {"stage": 1}}
STUDY: dict[str, Any] = {
    "name": "fuzz",
    "recipe": "{case}/recipe.toml",
    "seeds": [0],
    "base": {"data": {"provenance": "public"}},
    "axis": {"batch": {"privacy": {"expected_batch_size": [24, 48]}}},
    "tan": {"reference_batch_size": 24, "reference_noise_multiplier": 1.2},
}
ENVIRONMENT = [
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID", "SLURM_JOB_ID",
    "SLURM_STEP_NODELIST", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TMPDIR", "HOME", "PATH", "CC",
    "COLUMNS", "OMP_NUM_THREADS", "TERM", "NO_COLOR",
]  # fmt: skip
LAUNCHERS: list[dict[str, str]] = [
    {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512"},
    {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True",
     "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29513"},
    {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
    {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0"},
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7",
     "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_NUM_TASKS": "1"},
]  # fmt: skip
"""What launchers set; a case has one of these in which something is wrong."""
CONDITIONS = (
    *("stdin closed", "stdout closed", "stdout full", "stdout ended", "umask", "no folder"),
    *("files #", "disk #", "memory #", "space #", "folder readonly"),
)
"""What `tests.fuzz.forks` does before the command starts; # stands for a number. `disk` limits the size of files, `space` what
is left on the disk of the case's folder."""
LIMITS = {"files": (8, 200), "disk": (0, 300_000), "memory": (64, 600), "space": (0, 400_000)}


@dataclass
class Case:
    """One start of one command.

    Attributes:
        arguments, environment: {case} and {made} stand for folders.
        recipe, machine, study: contents of the files that arguments may name.
        damage: chooses a file of the finished run and what is wrong with it.
    """

    script: str
    arguments: list[str]
    recipe: bytes
    machine: bytes
    study: bytes
    environment: dict[str, str] = field(default_factory=dict)
    conditions: list[str] = field(default_factory=list)
    damage: int | None = None


def tiny() -> dict[str, Any]:
    """The recipe that cases change: one or two steps of it, and it ends by itself whatever its number of steps."""
    tree = copy.deepcopy(_tiny())
    tree["train"] |= {"num_steps": 2, "max_minutes": 0.05}
    tree["data"] |= {"num_workers": 0, "shards": "data/demo/train-00000.tar"}
    tree["heldout"] |= {"num_examples": 2, "num_captions": 1}
    return tree


@functools.cache
def _tiny() -> dict[str, Any]:
    return tomllib.loads((ROOT / "recipes" / "tiny.toml").read_text())


def make_case(seed: int, number: int) -> Case:
    """The same for the same numbers, on every machine."""
    rng = random.Random(f"{seed}/{number}")
    script = rng.choice([*SCRIPTS, "train", "train", "train", "plan", "evaluate", "prepare"])
    arguments = rng.choice(WORKING[script]).split()
    recipe, machine, study = tiny(), dict(MACHINE), dict(STUDY)
    case = Case(script, arguments, b"", b"", b"")
    texts = {}
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
        match rng.choice(_kinds(script)):
            case "recipe":
                _set(recipe, *_leaf(RunConfig, rng), rng)
            case "override":
                path, annotation = _leaf(RunConfig, rng)
                case.arguments.append(f"{'.'.join(path)}={_word(_of_type(annotation, rng), rng)}")
            case "machine":
                machine = _machine(machine, rng)
            case "study":
                _set(study, *_leaf(StudyConfig, rng), rng)
            case "text":
                texts[rng.choice(["recipe", "machine", "study"])] = rng.randrange(10**9)
            case "option":
                _change_arguments(case.arguments, script, rng)
            case "environment":
                case.environment[rng.choice(ENVIRONMENT)] = _environment_value(rng)
            case "launcher":
                launcher = rng.choice(LAUNCHERS)
                case.environment |= launcher | {rng.choice(list(launcher)): _environment_value(rng)}
            case "condition":
                what, _, how = rng.choice(CONDITIONS).partition(" ")
                case.conditions.append(
                    f"{what} {rng.randint(*LIMITS[what])}" if how == "#" else f"{what} {how}".strip()
                )
            case "damage":
                case.damage = rng.randrange(10**9)
    case.recipe, case.study = made_toml(recipe), made_toml(study)
    case.machine = values.to_json(machine).encode(errors="surrogatepass")
    for name, number in texts.items():
        setattr(case, name, damaged(getattr(case, name), random.Random(number)))
    return case


def _kinds(script: str) -> list[str]:
    common = ["option", "option", "option", "environment", "condition", "damage"]
    if script == "train":
        return [
            *common,
            "launcher",
            "condition",
            "recipe",
            "recipe",
            "recipe",
            "override",
            "override",
            "override",
            "machine",
            "machine",
            "text",
        ]
    if script == "plan":
        return [*common, "option", "recipe", "machine", "text"]
    return [*common, "study", "study", "recipe", "text"] if script == "study" else [*common, "option", "option"]


def leaves(kind: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every key of a section and of its sections, with its type."""
    for name, found in kind.model_fields.items():
        inner = [one for one in (found.annotation, *get_args(found.annotation)) if _is_section(one)]
        yield (*path, name), found.annotation
        for one in inner:
            yield from leaves(one, (*path, name))


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _leaf(kind: type[BaseModel], rng: random.Random) -> tuple[tuple[str, ...], Any]:
    if rng.random() < 0.05:
        return (rng.choice(["train", "data", "é", "model"]), rng.choice(["nosuch", "", "a b", "\U0001f98a"])), int
    found = list(leaves(kind))
    if kind is RunConfig:
        names = [
            "encoder_width", "encoder_depth", "encoder_num_heads", "patch_size", "decoder_width", "encoder_mlp_ratio",
            "max_logits", "parallel_share", "tied_head", "decoder_position", "encoder_norm_eps", "num_channels", "vocab_size",
        ]  # fmt: skip
        found += [(("model", "overrides", name), int | float) for name in names]
    return rng.choice(found)


def _of_type(annotation: Any, rng: random.Random) -> Any:
    """Mostly what the schema asks for, so that more than the first check is reached."""
    if rng.random() < 0.2:
        return values.in_file(rng)
    kinds = set(flat(annotation))
    words = [kind for kind in kinds if isinstance(kind, str)]
    if words:
        return rng.choice([*words, values.text(rng)])
    makers = [
        make for kind, make in ((int, values.integer), (float, values.number), (str, values.text)) if kind in kinds
    ]
    if bool in kinds and (not makers or rng.random() < 0.2):
        return rng.random() < 0.5
    return rng.choice(makers)(rng) if makers else values.in_file(rng)


def flat(annotation: Any) -> Iterator[Any]:
    """The plain types, and the words, that a key may have."""
    if get_origin(annotation) is Literal or get_args(annotation):
        for one in get_args(annotation):
            yield from flat(one)
    else:
        yield annotation


def _set(tree: dict[str, Any], path: tuple[str, ...], annotation: Any, rng: random.Random) -> None:
    value = _of_type(annotation, rng)
    for key in path[:-1]:
        inner = tree.get(key)
        tree[key] = dict(inner) if isinstance(inner, dict) else {}
        tree = tree[key]
    tree[path[-1]] = value


def _machine(machine: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    held = machine.get("zero_optimization")
    zero = dict(held) if isinstance(held, dict) else {}
    value = values.in_file(rng)
    match rng.randrange(5):
        case 0:
            return machine | {rng.choice([*MACHINE_KEYS, *RECIPE_KEYS, "é", "nosuch"]): value}
        case 1:
            offload = {rng.choice([*OFFLOAD_KEYS]): rng.choice([value, "cpu", "none", True])}
            return machine | {"zero_optimization": zero | {rng.choice(["offload_optimizer", "offload_param"]): offload}}
        case 2:
            return machine | {"activation_checkpointing": {rng.choice([*CHECKPOINTING_KEYS]): value}}
        case 3:
            return machine | {rng.choice(["bf16", "fp16"]): {"enabled": rng.choice([True, False, value])}}
        case _:
            key, stages = rng.choice([(key, stages) for key, (stages, _) in ZERO_KEYS.items()])
            good = rng.choice([value, values.integer(rng), True])
            return machine | {"zero_optimization": {"stage": rng.choice([*stages, 3]), key: good}}


def made_toml(tree: Mapping[str, Any]) -> bytes:
    """The file of a recipe or a study."""
    return "".join(f"{key} = {values.to_toml(value)}\n" for key, value in tree.items()).encode(errors="surrogatepass")


def damaged(content: bytes, rng: random.Random) -> bytes:
    """A file as a disk, an editor or somebody else may have left it."""
    changed = bytearray(content)
    match rng.randrange(7):
        case 0:
            for _ in range(rng.randrange(1, 10)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
        case 1:
            del changed[rng.randrange(len(changed)) :]
        case 2:
            return b"\xef\xbb\xbf" + content
        case 3:
            return content.decode(errors="replace").encode("utf-16")
        case 4:
            return rng.choice(
                [
                    b"",
                    b"\x00" * 100,
                    b"[" * 100_000,
                    b'{"a":' * 100_000,
                    b"a." * 50_000 + b"b = 1",
                    b"null",
                    b"[]",
                    b"1",
                ]
            )
        case 5:
            return (
                content
                + rng.choice(["[a" + ".a" * 5000 + "]\n", "\nx = " + "[" * 5000, f"\nx = {values.DIGITS}\n"]).encode()
            )
        case _:
            at = rng.randrange(len(changed))
            changed[at:at] = rng.choice([b"{", b"}", b'"', b"\\u", b"\xff", b"\n[train]\n", b"1e999", b"-", b"="])
    return bytes(changed)


@functools.cache
def _options(script: str) -> list[tuple[tuple[str, ...], argparse.Action]]:
    return list(options(parser_of(script)))


def _change_arguments(arguments: list[str], script: str, rng: random.Random) -> None:
    found = _options(script)
    mine = [action for path, action in found if path == tuple(arguments[: len(path)])] or [
        action for _, action in found
    ]
    where = rng.randrange(len(arguments))
    match rng.randrange(10):
        case 0 if len(arguments) > 1:
            del arguments[where]
        case 1:
            arguments[where] = values.argument(rng)
        case 2:
            arguments.append(values.argument(rng))
        case _:
            action = rng.choice(mine)
            name = rng.choice(action.option_strings)
            words = [_option_word(action, rng)] if action.nargs != 0 else []
            if name in arguments and words and rng.random() < 0.9:
                arguments[arguments.index(name) + 1 : arguments.index(name) + 2] = words
            else:
                arguments += [name, *words]


def _option_word(action: argparse.Action, rng: random.Random) -> str:
    if action.choices and rng.random() < 0.8:
        return str(rng.choice(list(action.choices)))
    kind = rng.random()
    if kind < 0.4 and action.default is not None and isinstance(action.default, int | float):
        return str(values.integer(rng) if isinstance(action.default, int) else values.number(rng))
    if kind < 0.4 and action.type is Path:
        return values.text(rng)
    return values.argument(rng)


def _word(value: Any, rng: random.Random) -> str:
    if isinstance(value, str) and not isinstance(value, values.Raw):
        return value.replace("\x00", "") if rng.random() < 0.9 else value.replace("\x00", "") + "\udcff"
    return values.to_toml(value)[:100_000].replace("\x00", "")  # one word of a command line is no longer than 128 KiB


def _environment_value(rng: random.Random) -> str:
    small = ["0", "1", "2", "-1", "1000", "29500", "127.0.0.1", "localhost", "host.invalid", "True", "{case}/nowhere"]
    return (rng.choice(small) if rng.random() < 0.5 else values.argument(rng)).replace("\x00", "")
