"""The shape of the project: imports go one way, heavy packages stay behind their doors, files stay readable."""

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.planted import MISTAKES, Mistake
from tools.house import import_circle, import_graph, parse

ROOT = Path(__file__).resolve().parents[1]
LOWER = {"privacy", "models", "data"}
MAY_IMPORT = {
    "privacy": set[str](),
    "models": set[str](),
    "data": set[str](),
    "trainer": LOWER,
    "evaluation": LOWER | {"trainer"},
    "launch_scripts": LOWER | {"trainer", "evaluation"},
    "tools": LOWER | {"trainer"},
    "benchmarks": LOWER | {"trainer", "evaluation", "tools"},
}
"""Our packages that a package may import, besides itself. Type-only imports are free."""
PACKAGES = [name for name in MAY_IMPORT if any((ROOT / name).rglob("*.py"))]
TESTS = "tests"

ONLY_IN = {
    "deepspeed": ("trainer/engines/",),
    "fairscale": ("trainer/engines/",),
    "tensorboard": ("trainer/loop/metrics.py",),
    "torch.utils.tensorboard": ("trainer/loop/metrics.py",),
    "mpi4py": ("data/reading/pool.py",),
    "fsspec": ("data/reading/remote.py",),
    "aiohttp": ("data/reading/remote.py",),
    "torchvision": (),  # it does not import next to a CPU build of torch
    "unittest": ("trainer/audit/sandbox.py",),  # nothing that runs is patched
}
"""Where a package may be imported in what runs; tests are free."""
CARRIED = ROOT / "models/converters/modeling_captioner.py"
"""Goes with exported captioners to users of transformers; nothing of the project imports it."""
FOR_TRANSFORMERS = ROOT / "privacy/loop/trainer.py"
"""A Trainer of transformers, for those who have it; nothing of the project imports it either."""


def python_files(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found
    return found


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST, *, at_import_time: bool = False) -> Iterator[str]:
    """Dotted names of imported modules, without what stands under `if TYPE_CHECKING`.

    Args:
        at_import_time: leave out what stands inside of functions.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in (
            "TYPE_CHECKING",
            "typing.TYPE_CHECKING",
        ):
            for other in node.orelse:
                yield from imports(ast.Module([other], []), at_import_time=at_import_time)
        elif not (
            at_import_time and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        ):
            yield from imports(node, at_import_time=at_import_time)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return parse(path.read_text(), relative(path))


@functools.cache
def imports_of(path: Path, *, at_import_time: bool = False) -> tuple[str, ...]:
    return tuple(imports(parsed(path), at_import_time=at_import_time))


def is_part_of(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package}
    ours = set(MAY_IMPORT) | {TESTS}
    for path in python_files(package):
        for name in imports_of(path):
            top = name.partition(".")[0]
            assert top not in ours or top in allowed, f"{relative(path)} imports {name}"


def test_only_the_privacy_room_imports_relatively() -> None:
    """It is installed under a name of its own too; every other room runs from the clone alone."""
    for path in python_files(*PACKAGES):
        text, in_the_library = (
            path.read_text(),
            is_part_of(relative(path).replace("/", "."), "privacy"),
        )
        forbidden = r"^ *(from|import) privacy\b" if in_the_library else r"^ *from \."
        assert not re.search(forbidden, text, re.MULTILINE), (
            f"{relative(path)} mixes relative and absolute imports"
        )


@pytest.mark.parametrize("guarded", ONLY_IN)
def test_packages_behind_doors(guarded: str) -> None:
    for path in python_files(*PACKAGES):
        if not relative(path).startswith(ONLY_IN[guarded] or ("-",)):
            found = [name for name in imports_of(path) if is_part_of(name, guarded)]
            assert not found, f"{relative(path)} imports {found[0]}"


@pytest.mark.parametrize(
    "guarded", ["tensorboard", "torch.utils.tensorboard", "mpi4py", "opacus", "transformers"]
)
def test_imported_when_used(guarded: str) -> None:
    """Inside of functions only. (Engine modules may import theirs: each is imported only for its engine.)"""
    for path in python_files(*PACKAGES):
        if path in (CARRIED, FOR_TRANSFORMERS):
            continue
        found = [
            name for name in imports_of(path, at_import_time=True) if is_part_of(name, guarded)
        ]
        assert not found, f"{relative(path)} imports {found[0]} at import time"
        for one in ("models.converters.modeling_captioner", "privacy.loop.trainer"):
            assert one not in imports_of(path), f"{relative(path)} imports {one}"


def test_engine_modules_are_imported_for_their_engine() -> None:
    wrapped = [
        p for p in python_files("trainer/engines") if p.stem in ("deepspeed", "fairscale", "fsdp")
    ]
    assert wrapped
    names = {f"trainer.engines.{path.stem}" for path in wrapped}
    for path in python_files(*PACKAGES):
        found = [name for name in imports_of(path, at_import_time=True) if name in names]
        assert not found, f"{relative(path)} imports {found[0]} at import time"


def modules_after(code: str, **environment: str) -> dict[str, str]:
    """sys.modules of a fresh interpreter after `code`, with their files."""
    listing = "{n: getattr(m, '__file__', None) or '' for n, m in list(sys.modules.items())}"
    script = f"{code}\nimport json, sys\nprint(json.dumps({listing}))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_starting_imports_no_heavy_package() -> None:
    """What training does not use does not cost start-up time, and a missing one breaks nothing."""
    loaded = modules_after("import trainer.run.start")
    assert "trainer.loop.fit" in loaded and "torch" in loaded
    for name in (
        "deepspeed",
        "fairscale",
        "tensorboard",
        "mpi4py",
        "opacus",
        "transformers",
        "torchvision",
        "webdataset",
        "aiohttp",
        "torch.distributed.tensor",
        "sympy",
    ):
        assert name not in loaded


@pytest.mark.parametrize("module", ["privacy.plan.numbers", "privacy.ledger.ledger"])
def test_plans_and_ledgers_are_read_without_torch(module: str) -> None:
    loaded = modules_after(f"import {module}")
    assert module in loaded and "torch" not in loaded


NUMBERS = ("privacy.accounting.", "privacy.plan.", "privacy.errors")
"""What a plan consists of."""


def graph_of(*packages: str, with_types: bool = False) -> dict[str, set[str]]:
    """Module -> the modules that it imports, inside of functions too; for a type checker alone only `with_types`."""
    trees = {}
    for path in python_files(*packages):
        module = relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        trees[module] = parsed(path)
    return import_graph(trees, with_types=with_types)


def reached_from(modules: list[str], graph: dict[str, set[str]]) -> set[str]:
    """The modules that these import, through others too, and themselves."""
    waiting, reached = [*modules], set[str]()
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += graph[module]
    return reached


def test_a_plan_knows_nothing_of_the_mechanism() -> None:
    graph = graph_of("privacy")
    reached = reached_from([name for name in graph if name.startswith("privacy.plan.")], graph)
    others = {name for name in reached if not name.startswith(NUMBERS)}
    assert not others, sorted(others)


MECHANISM = (
    "numerics",
    "ranks",
    "sampling",
    "sums",
    "gradients",
    "clipping",
    "noise",
    "certified",
    "step",
)
"""What happens to an example. The rooms that watch over it stand above."""
ABOVE = ("guards", "run", "loop")


def room_of(module: str) -> str:
    return module.split(".")[1] if module.count(".") > 1 else ""


def test_the_mechanism_knows_nothing_of_those_that_watch_over_it() -> None:
    graph = graph_of("privacy", with_types=True)
    mechanism = [module for module in graph if room_of(module) in MECHANISM]
    assert {room_of(module) for module in mechanism} == set(MECHANISM)
    above = {module for module in reached_from(mechanism, graph) if room_of(module) in ABOVE}
    assert not above, sorted(above)


def test_the_rooms_of_the_library_form_no_circle() -> None:
    """Types that are imported for a type checker alone count too, among files and among rooms."""
    files = graph_of("privacy", with_types=True)
    assert import_circle(files) == []
    rooms: dict[str, set[str]] = {}
    for module, imported in files.items():
        if room := room_of(module):
            rooms.setdefault(room, set()).update(
                other for other in map(room_of, imported) if other not in ("", room)
            )
    assert import_circle(rooms) == []


def test_no_training_asks_the_planner() -> None:
    """`train.py` reaches it for dry runs alone."""
    graph = graph_of(*PACKAGES)
    assert "trainer.planner.probe" in reached_from(["trainer.run.dry_run"], graph)
    graph["launch_scripts.train"].remove("trainer.run.dry_run")
    reached = reached_from(["launch_scripts.train"], graph)
    assert "trainer.run.clipping_mode" in reached
    assert [name for name in reached if name.startswith("trainer.planner")] == []


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what)
def test_a_mistake_that_is_planted_has_its_place_in_the_code(mistake: Mistake) -> None:
    assert (ROOT / mistake.file).read_text().count(mistake.old) == 1
    assert all((ROOT / name).exists() for name in mistake.tests.split())


STARTS = """
import json, os, runpy, sys
import numpy, pydantic, rich.progress, scipy.stats, torch, torch.utils.data, dp_accounting.pld.accountant

os.chdir("/")
for script in sys.argv[1:]:
    if os.fork() == 0:
        sys.path[0] = os.path.dirname(script)
        sys.argv = ["command", "--help"]
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            assert not end.code
        import models, privacy, data, trainer, evaluation
        ours = (models, privacy, data, trainer, evaluation)
        print(json.dumps({"script": script, **{m.__name__: m.__file__ for m in ours}}), file=sys.stderr, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, script
"""


def test_every_command_starts_anywhere_and_its_packages_are_ours() -> None:
    """Their names are generic: Python puts launch_scripts/ first on the path, and an installed `models` must not win.

    Other tests fork their commands from a process that has imported everything; here each has the packages of others alone.
    """
    scripts = [str(path) for path in python_files("launch_scripts")]
    done = subprocess.run(
        [sys.executable, "-c", STARTS, *scripts],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    places = {
        name: str(ROOT / name / "__init__.py")
        for name in ("models", "privacy", "data", "trainer", "evaluation")
    }
    assert [json.loads(line) for line in done.stderr.splitlines()] == [
        {"script": one, **places} for one in scripts
    ]


def test_every_package_has_an_init() -> None:
    """Without one it is a namespace package, and an installed package of that name wins."""
    for package in PACKAGES:
        if package not in ("launch_scripts", "benchmarks"):
            for path in python_files(package):
                assert (path.parent / "__init__.py").is_file(), relative(path.parent)


def test_no_error_is_swallowed() -> None:
    """`contextlib.suppress` says which errors are meant to be; `except: pass` hides the others too."""
    for path in python_files(*PACKAGES):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ExceptHandler):
                is_bare = node.type is None
                does_nothing = all(isinstance(statement, ast.Pass) for statement in node.body)
                assert not is_bare and not does_nothing, (
                    f"{relative(path)}:{node.lineno} swallows errors"
                )


def test_no_file_imports_itself_through_others() -> None:
    """A circle of files is one file that nobody can read in parts."""
    assert import_circle(graph_of(*PACKAGES)) == []


def test_no_stand_in_for_a_type_outside_of_tests() -> None:
    """A SimpleNamespace is what no type checker sees through."""
    for path in python_files(*PACKAGES):
        for node in ast.walk(parsed(path)):
            named = (
                node.id
                if isinstance(node, ast.Name)
                else node.attr
                if isinstance(node, ast.Attribute)
                else ""
            )
            assert named != "SimpleNamespace", (
                f"{relative(path)}:{node.lineno} uses SimpleNamespace"
            )


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_new_field_of_the_step_fails_types_wherever_a_mechanism_is_built(tmp_path: Path) -> None:
    """What `train_step` reads must be given by a run, or mypy says so.

    mypy gets no paths, so this also shows that its configuration covers both.
    """
    for folder in (*PACKAGES, "pyproject.toml"):
        copy = shutil.copytree if (ROOT / folder).is_dir() else shutil.copy
        copy(ROOT / folder, tmp_path / folder)
    step = tmp_path / "privacy" / "step" / "step.py"
    lines = step.read_text().splitlines(keepends=True)
    body = ast.parse(step.read_text()).body
    (mechanism,) = (n for n in body if isinstance(n, ast.ClassDef) and n.name == "Mechanism")
    (function,) = (n for n in body if isinstance(n, ast.FunctionDef) and n.name == "train_step")
    assert mechanism.end_lineno is not None and mechanism.end_lineno < function.body[1].lineno
    lines.insert(function.body[1].lineno - 1, "    print(mechanism.planted)\n")
    lines.insert(mechanism.end_lineno, "    planted: float\n")
    step.write_text("".join(lines))
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--cache-dir",
        str(tmp_path / "cache"),
        "--no-error-summary",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    errors = done.stdout.splitlines()
    assert done.returncode == 1 and all(
        "planted" in line for line in errors if ": error:" in line
    ), done.stdout
    builders = {line.partition(":")[0] for line in errors if ": error:" in line}
    assert builders == {"privacy/run/mechanism.py"}, done.stdout
