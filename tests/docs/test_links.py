"""Links lead somewhere, and what looks like a path, a key, an option or a test of the project is one. No network."""

import functools
import importlib
import re
from pathlib import Path

import pytest

from tests.docs.pages import GUIDES, PAGES, ROOT, anchors, project_files, prose, read, spans
from trainer.config.options import Options
from trainer.config.recipe import RunConfig
from trainer.config.sections import key_lines

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SUFFIXES = "safetensors|pth|py|md|toml|json|jsonl|sh|sbatch|txt|html|png|npz|npy|csv|example"
_FILE = re.compile(rf"[\w*{{}}.,-]+\.({SUFFIXES})(::\w+)?")
_PATH = re.compile(r"[\w.*{},-]+(/[\w.*{},-]+)+(::\w+)?/?")
MADE_UP = (
    *(
        "runs/",
        "/shared/",
        "imagenet/",
        "shards/",
        "train/",
        "val/",
        "index/",
        "coco/",
        "synthetic/",
        "vg/",
        "ADE/",
    ),
    *("results/",),  # in benchmarks/
)
"""Folders of the reader, in examples."""
RUN_FOLDER = (
    "private/",
    "checkpoints/",
    "report/",
    "tensorboard/",
    "evaluation/",
    "private_heads/",
    ".import/",
)
"""Folders inside of a run folder, or of a folder that a command writes."""
WRITTEN = {
    "config.toml",
    "ds_config.json",
    "environment.json",
    "ledger.jsonl",
    "metrics.jsonl",
    "manifest.json",
    "privacy_card.json",
    "privacy_card.md",
    "privacy_card.html",
    "provenance.json",
    "import-report.json",
    "points.csv",
    "groups.csv",
    "curves.csv",
    "study.json",
    "study.md",
    "head.json",
    "head.safetensors",
    "config.json",
    "preprocessor_config.json",
    "extents-*.npy",
    "model.pth",
    "model.safetensors",
    "adapter_config.json",
    "metadata.csv",
    "metadata.jsonl",
    "captions.csv",
    "captions.jsonl",
    "tokenizer.json",
    "names.txt",
    "points.txt",
    "instances.json",
    "vocab.txt",
    "captions_train2017.json",
    "KEY.txt",
    "left.png",
    "right.png",
    "x.txt",
    "0.txt",
    "1.txt",
}
"""Files that commands write into folders that the page names, and files of other projects or of the reader."""


@functools.cache
def names() -> frozenset[str]:
    return frozenset(Path(name).name for name in project_files())


@functools.cache
def existing_tests() -> frozenset[str]:
    sources = "\n".join(
        (ROOT / name).read_text() for name in project_files() if re.fullmatch(r"tests/.*\.py", name)
    )
    return frozenset(re.findall(r"^ *def (test_\w+)", sources, re.M))


def exists(path: str, page: str) -> bool:
    """From the root or the page's folder; `*` and `{a,b}` as a shell has them, each with a match.

    What lies in benchmarks/results/ is written under a name that the record then adds a suffix to.
    """
    options = re.search(r"\{([^{}]*,[^{}]*)\}", path)
    if options:
        return all(exists(path.replace(options[0], one), page) for one in options[1].split(","))
    pattern, _, test = path.partition("::")
    pattern = f"{pattern}*" if pattern.startswith("benchmarks/results/") else pattern
    found = [
        match
        for folder in (ROOT, (ROOT / page).parent)
        for match in folder.glob(pattern.strip("/"))
    ]
    return bool(found) and (not test or test in existing_tests())


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in _LINK.findall(prose(page)):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), f"{page} links to {target}"
        assert not anchor or anchor in anchors(file.resolve().relative_to(ROOT).as_posix()), (
            f"{page}: {target}"
        )


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if not page.startswith(("tests/records/", "benchmarks/results/"))],
)
def test_paths_exist(page: str) -> None:
    """Of pages that say what is so now; a dated record names what was there on its day."""
    for span in spans(page):
        for word in span.split():
            problem = wrong_path(word.strip("'\"(),;"), page)
            assert not problem, f"{page}: `{span}`: {problem}"
    for word in re.findall(
        rf"(?<![\w/.:`-])(?:docs|tests|trainer|privacy|models|data|evaluation)/[\w/]+\.(?:{SUFFIXES})\b",
        prose(page),
    ):
        assert exists(word, page), f"{page}: {word}"


def wrong_path(word: str, page: str) -> str:
    """What is wrong with a word that looks like a path or a file of the project; nothing for other words."""
    word = word.partition("=")[2] if re.match(r"[\w.]+=", word) else word
    if word.startswith(MADE_UP) or (word.startswith(RUN_FOLDER) and not exists(word, page)):
        return ""
    if _PATH.fullmatch(word):
        top = word.split("/")[0]
        ours = (ROOT / top).is_dir() or ((ROOT / page).parent / top).is_dir()
        if ours or _FILE.fullmatch(word.split("/")[-1]):
            return "" if exists(word, page) else f"there is no {word}"
    elif _FILE.fullmatch(word) and word not in WRITTEN:
        name = word.split("::")[0]
        known = (
            name in names() or exists(word, page) or any(Path(one).match(name) for one in names())
        )
        return "" if known else f"no file is called {name}"
    return ""


@pytest.mark.parametrize("page", [page for page in PAGES if "test_" in read(page)])
def test_named_tests_exist(page: str) -> None:
    for span in spans(page):
        for name in re.findall(r"(?:^|::)(test_\w+)(?!\S)", span):
            assert name in existing_tests() or f"{name}.py" in names(), f"{page}: {name}"


@functools.cache
def recipe_keys() -> frozenset[str]:
    """section.key of everything that a recipe may hold, and its sections."""
    leaves = [line.split(" ")[0].split(".") for line in key_lines(RunConfig)]
    return frozenset(
        ".".join(parts[:number]) for parts in leaves for number in range(1, len(parts) + 1)
    )


@pytest.mark.parametrize("page", GUIDES)
def test_keys_of_recipes_exist(page: str) -> None:
    sections = {key.split(".")[0] for key in recipe_keys() if "." in key}
    for span in spans(page):
        key = re.match(r"([a-z]+)((?:\.[a-z_]+)+)(?=$| ?=)", span)
        if key is None or key[1] not in sections:
            continue
        is_file = key[0].endswith(tuple(f".{suffix}" for suffix in SUFFIXES.split("|")))
        known = key[0] in recipe_keys() or key[0].startswith(
            "model.overrides."
        )  # the model refuses an unknown one
        assert known or is_file or is_module(key[0]), f"{page}: no recipe has {span}"


def is_module(dotted: str) -> bool:
    """A module of ours, or a name in one."""
    parts = dotted.split(".")
    folders = ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return any(
        (ROOT / f"{one}.py").is_file() or ((ROOT / one).is_dir() and "/" in one) for one in folders
    )


@functools.cache
def known_options() -> frozenset[str]:
    """Every option of a command's model, every string that begins with -- in our programs, and launchers' options."""
    rooms = r"(launch_scripts|evaluation|data|trainer|benchmarks|privacy|examples)/.*\.(py|s\w+)$"
    sources = [name for name in project_files() if re.match(rooms, name)]
    text = "\n".join((ROOT / name).read_text() for name in sources)
    foreign = {
        "--hostfile",
        "--num_gpus",
        "--launcher",
        "--signal",
        "--export",
        "--local_rank",
        "--logdir",
        "--nodes",
    }
    foreign |= {
        "--exclude",
        "--mtime",
        "--sort",
        "--local-dir",
        "--standalone",
        "--nproc_per_node",
        "--max_restarts",
    }  # of tar, hf, torchrun
    for script in (ROOT / "launch_scripts").glob("*.py"):
        importlib.import_module(f"launch_scripts.{script.stem}")
    models, built = [Options], set()
    for model in models:
        models += model.__subclasses__()
        built |= {f"--{field.alias or name}" for name, field in model.model_fields.items()}
    return frozenset(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) | built | foreign


@pytest.mark.parametrize("page", GUIDES)
def test_options_exist(page: str) -> None:
    for span in spans(page):
        for option in re.findall(r"(?<!\S)--[a-z][\w-]*", span):
            assert option in known_options(), f"{page}: `{span}`: no program takes {option}"


def test_the_architecture_names_every_folder() -> None:
    """All at the top, and every package in ours."""
    text = read("docs/architecture.md")
    folders = {
        name.split("/")[0] for name in project_files() if "/" in name and not name.startswith(".")
    }
    packages = {
        Path(name).parent
        for name in project_files()
        if re.match(r"(?!tests/)\w+/\w.*/__init__\.py$", name)
    }
    for folder in folders | {package.name for package in packages}:
        assert f"{folder}/`" in text, f"docs/architecture.md does not name {folder}/"


_PAGE_IN_THE_CODE = re.compile(r"\bdocs/[\w/]+\.(?:md|svg|json)\b")


def test_pages_that_the_code_names_exist() -> None:
    """Docstrings, errors and comments that send a reader to a page."""
    sources = [n for n in project_files() if re.search(r"\.(py|sh|sbatch|toml)$|^Makefile$", n)]
    named = {
        (name, page)
        for name in sources
        for page in _PAGE_IN_THE_CODE.findall((ROOT / name).read_text())
    }
    assert len(named) > 10
    wrong = [f"{name} names {page}" for name, page in sorted(named) if not (ROOT / page).is_file()]
    assert not wrong, wrong
