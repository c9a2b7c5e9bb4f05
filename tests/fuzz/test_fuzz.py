"""No recipe, ds_config, command line or environment ends in a traceback, and none hangs; recipes are made from the schema."""

import contextlib
import copy
import json
import math
import os
import resource
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from tests.distributed.ranks import ROOT, quiet_environment
from tests.processes import run_python
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import RunConfig, load_config
from trainer.errors import ConfigError

DIGITS = "9" * 5000
"""More than Python turns into a number."""
HUGE = [10**6, 10**9, 10**12, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**23]
FLOATS = [
    math.nan,
    math.inf,
    -math.inf,
    1e308,
    -1e308,
    5e-324,
    1e-300,
    1e-12,
    0.0,
    -0.0,
    -1.0,
    0.5,
    1.0,
    1e12,
    1e23,
]
ODD = [
    "",
    " ",
    "\t",
    "a\nb",
    "\u202egnp",
    "\ufeff",
    "\x7f",
    "é",
    "\U0001f98a",
    "%s%n",
    "{}",
    "{",
    "{0..9}",
    "{0..99999}{0..99999}",
    "[",
    "*",
    "**",
    "~",
    "~nobody",
    "-",
    "--",
    "=",
    "nan",
    "inf",
    "1e9",
    "0x10",
    "true",
    "null",
    "auto",
    "../..",
    "a=b",
    "x" * 3000,
    "x/" * 1500,
    "é" * 1500,
    "../" * 1000,
]
PLACES = [
    ".",
    "/",
    "/dev/null",
    "/proc/self/mem",
    "/sys/x",
    "nowhere/at/all",
    "README.md/inside",
    "data/demo",
    "data/demo/train-00000.tar",
    "ftp://host.invalid/a.tar",
    "http://127.0.0.1:9/a.tar",
    "s3://bucket/a.tar",
    "file:///etc/passwd",
    "hf:nowhere",
    "memory://a.tar",
    "://",
    "http://[::1/a.tar",
    "sftp://u:p@host.invalid/a.tar",
]
MODEL_KEYS = (
    *("encoder_width", "encoder_depth", "encoder_num_heads", "patch_size"),
    "max_logits",
    "tied_head",
    "vocab_size",
)


class Raw(str):
    """Text that stands in a file as it is, JSON or TOML: Python could not hold, or not print, what it says."""


integers = st.sampled_from([0, -1, 1, 2, 3, 7, -(10**12), *HUGE]) | st.integers(1, 10**12)
numbers = st.sampled_from(FLOATS) | st.floats()
texts = st.sampled_from([*ODD, *PLACES]) | st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20
)
deep = st.sampled_from(
    [
        Raw(a * n + "1" + b * n)
        for n in (3, 900, 30_000)
        for a, b in (("[", "]"), ('{"a":', "}"), ("{a=", "}"))
    ]
)
values = st.recursive(
    st.booleans() | integers | numbers | texts | deep | st.just(Raw(DIGITS)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "enabled", "é"]), inner, max_size=2)
    ),
    max_leaves=4,
)
"""What a file may hold in any place."""


def leaves(
    kind: type[BaseModel], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every key of a section and of its sections, with its type."""
    for name, found in kind.model_fields.items():
        yield (*path, name), found.annotation
        for one in (found.annotation, *get_args(found.annotation)):
            if isinstance(one, type) and issubclass(one, BaseModel):
                yield from leaves(one, (*path, name))


def flat(annotation: Any) -> Iterator[Any]:
    """The plain types, and the words, that a key may have."""
    if get_origin(annotation) is Literal or get_args(annotation):
        for one in get_args(annotation):
            yield from flat(one)
    else:
        yield annotation


def of_type(annotation: Any) -> st.SearchStrategy[Any]:
    """Mostly what the schema asks for, so that more than the first check is reached."""
    kinds = set(flat(annotation))
    words = [kind for kind in kinds if isinstance(kind, str)]
    made = {int: integers, float: numbers, str: texts, bool: st.booleans()}
    good = [made[kind] for kind in made if kind in kinds] + (
        [st.sampled_from(words)] if words else []
    )
    return st.one_of(*good, values)


def with_values(kind: type[BaseModel]) -> st.SearchStrategy[tuple[tuple[str, ...], Any]]:
    """A key of a schema, now and then one that it does not have, and a value."""
    known = list(leaves(kind))
    if kind is RunConfig:
        known += [(("model", "overrides", name), int | float) for name in MODEL_KEYS]
    unknown = st.tuples(
        st.tuples(st.sampled_from(["train", "é", "model"]), st.sampled_from(["nosuch", "", "a b"])),
        values,
    )
    keys = st.sampled_from(known).flatmap(
        lambda leaf: st.tuples(st.just(leaf[0]), of_type(leaf[1]))
    )
    return st.one_of(*[keys] * 9, unknown)


def changed(tree: dict[str, Any], kind: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    """The tree of a good file with one to three keys set to something else."""

    def apply(changes: list[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
        made = copy.deepcopy(tree)
        for path, value in changes:
            place = made
            for key in path[:-1]:
                if not isinstance(place.get(key), dict):
                    place[key] = {}
                place = place[key]
            place[path[-1]] = value
        return made

    return st.lists(with_values(kind), min_size=1, max_size=3).map(apply)


TINY = ROOT / "recipes" / "tiny.toml"
recipes = changed(tomllib.loads(TINY.read_text()), RunConfig)
overrides = with_values(RunConfig).map(lambda setting: f"{'.'.join(setting[0])}={word(setting[1])}")


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """A file as a disk, an editor or somebody else may have left it."""
    at = draw(st.integers(0, len(content) - 1))
    whole = [
        b"",
        b"\0" * 100,
        b"[" * 20_000,
        b'{"a":' * 20_000,
        b"a." * 500 + b"b = 1",
        b"null",
        b"[]",
        b"1",
    ]
    return draw(
        st.one_of(
            st.binary(min_size=1, max_size=9).map(
                lambda new: content[:at] + new + content[at + len(new) :]
            ),
            st.sampled_from([b"{", b"}", b'"', b"\\u", b"\xff", b"\n[train]\n", b"1e999"]).map(
                lambda new: content[:at] + new + content[at:]
            ),
            st.just(content[:at]),
            st.just(b"\xef\xbb\xbf" + content),
            st.just(content.decode(errors="replace").encode("utf-16")),
            st.just(content + f"\nx = {DIGITS}\n".encode()),
            st.sampled_from(whole),
        )
    )


def word(value: Any) -> str:
    """A word of a command line, which holds no NUL and is no longer than 128 KiB."""
    said = value if isinstance(value, str) and not isinstance(value, Raw) else to_toml(value)
    return said.replace("\0", "")[:100_000]


def to_toml(value: Any) -> str:
    """A TOML value."""
    match value:
        case Raw():
            return str(value)
        case dict():
            return (
                "{"
                + ", ".join(f"{to_toml(key)} = {to_toml(one)}" for key, one in value.items())
                + "}"
            )
        case list() | tuple():
            return "[" + ", ".join(map(to_toml, value)) + "]"
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case _:
            return repr(value)


def toml_file(tree: dict[str, Any]) -> bytes:
    return "".join(f"{key} = {to_toml(value)}\n" for key, value in tree.items()).encode(
        errors="surrogatepass"
    )


MOST_LINES = 8  # a ds_config with several faults has a line for each
MANY = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TRAIN = (
    "--engine local --ds_config ds_configs/zero1.json --recipe recipes/tiny.toml train.num_steps=1"
)


def ends_well(call: Callable[[], object]) -> None:
    """It returns, or refuses with a few lines; anything else is a defect."""
    with contextlib.suppress(SystemExit):  # of --help
        try:
            call()
        except ConfigError as error:
            said, code = str(error), error.exit_code
        else:
            return
        assert code == 2 and 1 <= len(said.splitlines()) <= MOST_LINES, said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@MANY
@given(tree=recipes, overrides=st.lists(overrides, max_size=2))
def test_recipes(folder: Path, tree: dict[str, Any], overrides: list[str]) -> None:
    recipe = written(folder / "recipe.toml", toml_file(tree))
    ends_well(lambda: load_config(recipe, overrides))


FILES: dict[str, tuple[bytes, Callable[[Path], object]]] = {
    "recipe": (TINY.read_bytes(), load_config),
    "machine": ((ROOT / "ds_configs" / "zero3_bf16.json").read_bytes(), load_machine_settings),
}


@MANY
@given(kind=st.sampled_from(sorted(FILES)), data=st.data())
def test_damaged_files(folder: Path, kind: str, data: st.DataObject) -> None:
    content, load = FILES[kind]
    path = written(folder / kind, data.draw(damaged(content)))
    ends_well(lambda: load(path))


NEW = f"{TRAIN} --run_dir {{folder}}/new"
SIZES = "--num_examples 60000 --expected_batch_size 600 --num_steps 1000"
LONG = "x" * 3000
KNOWN: dict[str, tuple[str, str]] = {
    "a model wider than any": ("train", f"{NEW} model.overrides.encoder_width=1000000000000"),
    "a model larger than this machine": (
        "train",
        f"{NEW} model.overrides.encoder_width=131072 model.overrides.encoder_depth=24",
    ),
    "shards by ftp": ("train", f"{NEW} data.shards=ftp://host/a.tar"),
    "a picture of a million pixels a side": ("train", f"{NEW} data.image_size=1000000"),
    "a caption field that is not UTF-8": ("train", f"{NEW} data.caption_field=\udcff"),
    "more noise than a float holds": ("train", f"{NEW} privacy.noise_multiplier=1e308"),
    "a micro-batch of a thousand million": ("train", f"{NEW} train.micro_batch_size=1000000000"),
    "a rendezvous for no number of seconds": ("train", f"{NEW} --rendezvous_seconds nan"),
    "a rendezvous for ever": ("train", f"{NEW} --rendezvous_seconds inf"),
    "a run folder of 3,000 characters": ("train", f"{TRAIN} --run_dir {{folder}}/{LONG}"),
    "a run folder of 2,500 folders": ("train", f"{TRAIN} --run_dir {{folder}}/{'x/' * 2500}"),
    "a report of a run folder of 3,000 characters": ("report", f"--run_dir {LONG}"),
    "an audit of a run folder of 3,000 characters": ("audit", f"ledger --run_dir {LONG}"),
    "the smallest epsilon": ("plan", f"{SIZES} --target_epsilon 1e-9"),
    "more noise than an accountant resolves": ("plan", f"{SIZES} --noise_multiplier 4e5"),
    "an epsilon that fills the memory": (
        "plan",
        "--num_examples 3000 --expected_batch_size 60 --num_steps 100000000 --noise_multiplier 1 --no_extras",
    ),
    "a file of other things as weights": ("export", "--import vip README.md {folder}/new"),
}
"""Command lines that once ended in a traceback. Each is refused now with one line."""
QUICK = (
    "a model wider than any",
    "a run folder of 2,500 folders",
    "more noise than an accountant resolves",
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.full) for n in KNOWN]
)
def test_what_once_ended_in_a_traceback_is_refused(name: str, tmp_path: Path) -> None:
    script, line = KNOWN[name]
    arguments = [one.replace("{folder}", str(tmp_path)) for one in line.split()]
    done = run_python([f"launch_scripts/{script}.py", *arguments])
    assert done.returncode == 2, done.stderr[-2000:]
    lines = done.stderr.splitlines()
    assert len(lines) <= MOST_LINES and lines[-1].startswith("error"), done.stderr[-2000:]


INDEX = "index data/demo/heldout-00000.tar --workers 1"
NUMBERS = (
    "--num_examples 3000 --expected_batch_size 60 --num_steps 50 --noise_multiplier 1.0 --no_extras"
)


def limited(kind: int, amount: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (amount, amount))


@pytest.mark.parametrize(
    ("script", "line", "before", "environment"),
    [
        ("train", f"{TRAIN} --run_dir {{folder}}/run", limited(resource.RLIMIT_NOFILE, 24), {}),
        (
            "plan",
            NUMBERS,
            lambda: (os.close(0), os.close(1)),
            {"LANG": "C", "PYTHONIOENCODING": "ascii"},
        ),
        ("prepare", f"{INDEX} --output {{folder}}/index", limited(resource.RLIMIT_FSIZE, 1000), {}),
        (
            "audit",
            "ledger --run_dir {folder}",
            limited(resource.RLIMIT_NOFILE, 12),
            {"HOME": "/nowhere", "TERM": "dumb"},
        ),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (
                    "plan",
                    NUMBERS,
                    lambda: os.dup2(os.open("/dev/full", os.O_WRONLY), 1),
                    {"PYTHONUTF8": "0", "LC_ALL": "C"},
                ),
                (
                    "train",
                    f"{TRAIN} --run_dir {{folder}}/run data.num_workers=2",
                    limited(resource.RLIMIT_NOFILE, 48),
                    {},
                ),
                (
                    "train",
                    f"{TRAIN} --run_dir {{folder}}/run",
                    limited(resource.RLIMIT_FSIZE, 100_000),
                    {},
                ),
                (
                    "train",
                    f"{TRAIN} --run_dir {{folder}}/run",
                    limited(resource.RLIMIT_AS, 1 << 31),
                    {},
                ),
                (
                    "train",
                    f"{TRAIN} --run_dir {{folder}}/run",
                    lambda: None,
                    {"RANK": "0", "WORLD_SIZE": "é", "MASTER_PORT": "-1"},
                ),
            )
        ),
    ],
)
def test_under_limits_and_in_odd_environments(
    script: str, line: str, before: Callable[[], None], environment: dict[str, str], tmp_path: Path
) -> None:
    """In a process of its own, since the interpreter starts and imports everything under these conditions."""
    command = [sys.executable, f"launch_scripts/{script}.py", *line.format(folder=tmp_path).split()]
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=quiet_environment(**environment),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            preexec_fn=before,
            timeout=240,
            check=False,
        )
    said = (tmp_path / "err").read_text()
    assert "Traceback" not in said, said
    assert done.returncode in (0, 1, 2), said
    assert len(said.splitlines()) <= MOST_LINES, said
    assert done.returncode == 0 or "error" in said.splitlines()[-1]
