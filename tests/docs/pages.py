"""The project's pages as their readers take them apart: links, code spans, blocks, commands."""

import functools
import os
import re
import shlex
import shutil
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in (
        *("*.md", "docs/*.md", "examples/*.md", "recipes/*.md", "ds_configs/*.md", "privacy/*.md"),
        *("data/*/*.md", "benchmarks/*.md", "benchmarks/results/**/*.md", "tests/records/*.md"),
    )
    for path in ROOT.glob(pattern)
)
GUIDES = [
    page for page in PAGES if not page.startswith(("tests/", "benchmarks/results/", "CHANGELOG"))
]
"""Pages whose commands readers copy. The others tell what was done once."""
_FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n)+(?=\n|\Z)")
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A block of code: `text` without its fence or indentation."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One simple command of a shell block, without redirections; `text` is the line it stands in."""

    block: Block
    words: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.block}: {self.text}"


@functools.cache
def project_files() -> frozenset[str]:
    """All files of the project, without what commands leave behind."""
    found = set()
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [
            name
            for name in folders
            if name not in ("runs", "site", "__pycache__") and (name == ".ci" or name[0] != ".")
        ]
        found |= {(Path(folder) / name).relative_to(ROOT).as_posix() for name in files}
    return frozenset(found)


def read(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str) -> list[Block]:
    """Fenced and indented blocks in their order."""
    text = read(page)
    found = [(m.start(), m[2], textwrap.dedent(m[3])) for m in _FENCED.finditer(text)]
    found += [
        (m.start(), "bash", re.sub(r"^ {4}", "", m[0], flags=re.M))
        for m in _INDENTED.finditer(_prose(text))
    ]
    return [
        Block(page, text[:start].count("\n") + 1, language, code)
        for start, language, code in sorted(found)
    ]


def _prose(text: str) -> str:
    """Without fenced blocks, but with every character where it was."""
    return _FENCED.sub(lambda m: re.sub(r"[^\n]", "`", m[0]), text)


def prose(page: str) -> str:
    """Without blocks of code."""
    return _INDENTED.sub("\n", _FENCED.sub("\n", read(page)))


def spans(page: str) -> list[str]:
    """Inline code."""
    return _SPAN.findall(prose(page))


def commands(block: Block) -> list[Command]:
    """The commands of a shell block, taken apart as a shell would."""
    found = []
    for line in block.text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        redirected = False
        for word in [*lexer, ";"]:
            if word in ("&&", "||", ";", "|"):
                if words:
                    found.append(
                        Command(
                            block, tuple(words), re.sub(r"\s+", " ", line.split("  #")[0].strip())
                        )
                    )
                words = []
            elif redirected or word in (">", ">>"):
                redirected = not redirected
            else:
                words.append(word)
    return found


def shell_commands(page: str) -> list[Command]:
    return [
        command for block in blocks(page) if block.language == "bash" for command in commands(block)
    ]


def anchors(page: str) -> set[str]:
    """What `#...` may name, by GitHub's rule."""
    seen: dict[str, int] = {}
    found = set()
    for heading in re.findall(r"^#+ +(.*?)\s*$", _FENCED.sub("", read(page)), re.M):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"`", "", heading.lower())).replace(" ", "-")
        number = seen.get(slug, 0)
        seen[slug] = number + 1
        found.add(f"{slug}-{number}" if number else slug)
    return found


def copy_project(folder: Path) -> None:
    """To try commands in: without what runs left behind, and with the environment as it is."""
    for name in project_files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(ROOT / ".venv")
