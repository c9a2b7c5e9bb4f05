"""Sources of the documentation site: the project's pages where they are in the project, and an API reference.

    make docs        # builds `site/`; needs the extra `docs`

Pages link to each other by their places in the repository, so the site has the same places: this copies them, and what they link
to, into runs/site-pages, and writes one page of `api/` for each part of the API, which mkdocstrings fills from docstrings.
"""

import json
import os
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    *(
        "*.md",
        "docs/*.md",
        "examples/*.md",
        "recipes/*.md",
        "ds_configs/*.md",
        "data/*/*.md",
        "privacy/README.md",
    ),
    *("benchmarks/*.md", "benchmarks/results/**/*.md", "tests/records/*.md"),
)
API = {
    "loop": ("A loop of your own", "privacy.loop privacy.loop.hugging_face privacy.loop.trainer"),
    "plan": (
        "Plans and accounting",
        "privacy.plan.numbers privacy.plan.request privacy.accounting.group_privacy",
    ),
    "sampling": (
        "Sampling",
        "privacy.sampling.poisson privacy.sampling.keys privacy.sampling.rows",
    ),
    "clipping": (
        "Clipping",
        "privacy.clipping.clipped_sum privacy.sums.grid privacy.sums.totals privacy.sums.local "
        "privacy.certified.certified_sum privacy.certified.integers "
        "privacy.gradients.coverage privacy.guards.selfcheck",
    ),
    "noise": ("Noise", "privacy.noise.source privacy.noise.rounded_normal"),
    "ledger": (
        "Ledger",
        "privacy.ledger.ledger privacy.ledger.shared privacy.boundary privacy.errors",
    ),
    "card": (
        "Card and audits",
        "privacy.card.model privacy.card.report privacy.audit.folder",
    ),
    "step": (
        "One step",
        "privacy.step.step privacy.ranks.engine privacy.checkpoints.read privacy.checkpoints.write",
    ),
    "recipe": (
        "Recipe and machine",
        "trainer.config.recipe trainer.config.optimizer trainer.config.machine",
    ),
    "trainer": ("Training", "trainer.run.start trainer.loop.fit trainer.tasks.base"),
    "models": (
        "Models",
        "models.config models.vit models.captioner models.masked_autoencoder models.classifier",
    ),
    "weights": (
        "Weights in and out",
        "trainer.weights.open_model trainer.weights.export models.converters",
    ),
    "data": (
        "Data",
        "data.index.tar_index data.examples.examples data.examples.tokenizer data.batch",
    ),
}
"""Pages of the API: name -> (title, modules)."""
FIRST = {"privacy.loop": ("PrivateLoop", "StepResult", "floats", "integers", "mask", "Field")}
"""Packages of which just what a user imports is shown, in this order."""
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def build(target: Path) -> None:
    """Writes the sources into `target`, in place of older ones.

    Raises:
        FileNotFoundError: a page links to what is not there.
    """
    shutil.rmtree(target, ignore_errors=True)
    for pattern in PAGES:
        for page in sorted(ROOT.glob(pattern)):
            _write(target, page.relative_to(ROOT), _with_indices(page, target))
    for notebook in sorted(ROOT.glob("examples/*.ipynb")):
        _write(target, notebook.relative_to(ROOT).with_suffix(".md"), _as_page(notebook))
    for name, (title, modules) in API.items():
        objects = [
            f"{module}.{one}".strip(".")
            for module in modules.split()
            for one in FIRST.get(module, ("",))
        ]
        parts = [
            f"# {title}",
            *(f"::: {one.replace('privacy.', 'auditable_dp.', 1)}" for one in objects),
        ]
        _write(target, Path("api") / f"{name}.md", "\n\n".join(parts) + "\n")
    # The library is shown under the name that it is installed by.
    package = target.parent / "site-library/auditable_dp"
    package.parent.mkdir(exist_ok=True)
    package.unlink(missing_ok=True)
    package.symlink_to(ROOT / "privacy")
    shutil.copy(ROOT / "tools/site.css", target / "site.css")


def _with_indices(page: Path, target: Path) -> str:
    """The text of a page, whose links to folders lead to their READMEs and to notebooks to their pages; copies other files."""

    def link(found: re.Match[str]) -> str:
        before, path, anchor, after = found.groups()
        if ":" in path:
            return found.group(0)
        linked = page.parent / path
        if linked.is_dir():
            path, linked = f"{path.rstrip('/')}/README.md", linked / "README.md"
        if linked.suffix == ".ipynb":
            path, linked = path.replace(".ipynb", ".md"), linked.with_suffix(".md")
        if linked.suffix != ".md":
            place = target / os.path.relpath(linked, ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(linked, place)
        return f"{before}{path}{anchor or ''}{after}"

    return _LINK.sub(link, page.read_text())


def _as_page(notebook: Path) -> str:
    """The cells of a notebook, with what they printed."""
    parts = []
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        printed = "".join("".join(output.get("text", ())) for output in cell.get("outputs", ()))
        parts += (
            [f"````text\n{printed.rstrip()}\n````"] if printed else []
        )  # it may have a fence of its own
    return "\n\n".join(parts) + "\n"


def _write(target: Path, name: Path, text: str) -> None:
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    (target / name).write_text(text)


if __name__ == "__main__":
    build(ROOT / "runs/site-pages")
