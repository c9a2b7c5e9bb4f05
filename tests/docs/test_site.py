"""The documentation site: all pages, an API reference, a search index, nothing loaded from elsewhere; and doctests."""

import doctest
import importlib
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import PAGES, ROOT, project_files
from tools.site import API, build

HAS_EXAMPLES = [
    name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for name in sorted(project_files())
    if re.match(r"(privacy|trainer|models|data|evaluation)/.*\.py$", name)
    and ">>>" in (ROOT / name).read_text()
]


class _Navigation(yaml.SafeLoader):
    """Reads docs/mkdocs.yml, in which a tag names a Python function."""


_Navigation.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def pages_of(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    inner = entry.values() if isinstance(entry, dict) else entry
    assert isinstance(inner, list) or not isinstance(inner, (int, float))
    return [page for part in inner for page in pages_of(part)]  # type: ignore[attr-defined]


def test_the_site_has_every_page_and_every_module_that_it_names(tmp_path: Path) -> None:
    build(tmp_path / "pages")
    for page in PAGES:
        assert (tmp_path / "pages" / page).is_file(), page
    named = pages_of(yaml.load((ROOT / "docs/mkdocs.yml").read_text(), _Navigation)["nav"])
    assert set(named) >= {page for page in PAGES if page.startswith("docs/")} | {
        f"api/{name}.md" for name in API
    }
    for page in named:
        assert (tmp_path / "pages" / page).is_file(), page
    for _, modules in API.values():
        for module in modules.split():
            assert importlib.util.find_spec(module) is not None, module


@pytest.mark.full
@pytest.mark.skipif(
    importlib.util.find_spec("mkdocstrings") is None, reason="the extra docs is not installed"
)
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(
    tmp_path: Path,
) -> None:
    build(tmp_path / "runs/site-pages")
    config = tmp_path / "docs/mkdocs.yml"  # its folders are relative to it, but that of the modules
    config.parent.mkdir()
    config.write_text(
        (ROOT / "docs/mkdocs.yml").read_text().replace("paths: [..,", f"paths: [{ROOT},")
    )
    options = ["--strict", "--quiet", "--config-file", str(config)]
    command = [sys.executable, "-m", "mkdocs", "build", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "site/search/search_index.json").read_text())
    titles = {page["title"] for page in found["docs"]}
    assert any("ClippedSum" in title for title in titles) and any(
        "Exit codes" in title for title in titles
    )
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|iframe)[^>]* src=\"?([^\" >]+)|<link[^>]* href=\"?([^\" >]+)",
            page.read_text(),
        )
        elsewhere = [a or b for a, b in loaded if re.match(r"(https?:)?//", a or b)]
        assert not elsewhere, f"{page}: {elsewhere}"


@pytest.mark.parametrize("name", HAS_EXAMPLES)
def test_examples_in_docstrings_do_what_they_say(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS).failed == 0
