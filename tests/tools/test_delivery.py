"""The image, the workflow, the hook and the citation call and name what there is. No daemon and no network."""

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import yaml

from tests.docs.pages import GUIDES, blocks

ROOT = Path(__file__).resolve().parents[2]


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) of the Dockerfile, with its lines joined."""
    lines = [
        line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")
    ]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [
        (word, rest)
        for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)
    ]


def recipe_of(target: str) -> str:
    """The lines that make runs for a target. (Even `make -n` runs a line that calls make again.)"""
    found = re.search(
        rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert found is not None, f"the Makefile has no target {target}"
    return found.group(1)


def test_the_packages_of_the_image_install_from_what_was_copied_before(tmp_path: Path) -> None:
    """In an empty folder, the files of the first COPY are all that `make venv` reads."""
    copied: list[str] = []
    for word, rest in instructions():
        if word == "COPY" and not copied:
            copied = [name for name in rest.split() if not name.startswith("--")][:-1]
        if word == "RUN" and rest.startswith("make "):
            break
    else:
        raise AssertionError("the image installs nothing")
    assert rest == "make venv" and copied
    for name in copied:
        shutil.copy(ROOT / name, tmp_path / name)
    done = subprocess.run(
        ["make", "-n", "venv"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    (requirements,) = re.findall(r"-r (\S+\.txt)", done.stdout)
    assert (tmp_path / requirements).is_file() and (tmp_path / "pyproject.toml").is_file()
    ((command,),) = [[json.loads(rest)] for word, rest in instructions() if word == "CMD"]
    assert command[0] == "make" and recipe_of(command[1])
    assert ("USER", "1000") in instructions(), "no container trains as root"


def test_the_workflow_calls_what_a_reader_is_told() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    called = [
        shlex.split(step["run"]) for job in jobs.values() for step in job["steps"] if "run" in step
    ]
    targets = {words[1] for words in called if words[0] == "make"}
    for target in targets:
        recipe_of(target)
    assert targets == {"quickstart", "test", "test-all", "docs", "examples"}
    assert all(words[0] in ("make", "docker") for words in called)


def test_version_citation_and_changelog_agree() -> None:
    """pyproject.toml decides; CITATION.cff, the changelog, a tag and every BibTeX entry of the pages name the same release."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and cited["version"] == newest[1] == version
    tags = subprocess.run(
        ["git", "tag", "--points-at", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    assert not tags or f"v{version}" in tags
    entries = [
        block.text for page in GUIDES for block in blocks(page) if block.language == "bibtex"
    ]
    authors = " and ".join(author["name"] for author in cited["authors"])
    told = {
        "title": cited["title"],
        "author": authors,
        "version": version,
        "year": str(cited["date-released"].year),
    }
    assert entries
    for entry in entries:
        assert dict(re.findall(r"(\w+) = \{+(.*?)\}+,?\n", entry)) == told
