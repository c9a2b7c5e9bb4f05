"""Sources of the documentation site: the pages of the project, and an API reference.

    make docs        # builds `site/`; needs the extra `docs`

Pages link to each other by their places in the repository, so the site has the same places: this
copies the pages, and the files that they link to, into runs/site-pages, and writes one page of
`api/` for each part of the API, which mkdocstrings fills from docstrings.
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
        "privacy.card.model privacy.card.ledger_card privacy.audit.run_audit",
    ),
    "step": (
        "One step",
        "privacy.step.step privacy.ranks.engine privacy.checkpoints.read privacy.checkpoints.write",
    ),
    "recipe": (
        "Recipe and machine",
        "trainer.config.recipe trainer.config.sections trainer.config.machine",
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
"""Packages that the site shows by the names that a user imports, in this order."""
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def build(target: Path) -> None:
    """Writes the sources of the site into `target`, in place of older ones.

    Raises:
        FileNotFoundError: a page links to a file that does not exist.
    """
    shutil.rmtree(target, ignore_errors=True)
    for pattern in PAGES:
        for page in sorted(ROOT.glob(pattern)):
            _write(target, page.relative_to(ROOT), _with_indices(page, target))
    for notebook in sorted(ROOT.glob("examples/*.ipynb")):
        _write(target, notebook.relative_to(ROOT).with_suffix(".md"), _as_page(notebook))
    for name, (title, modules) in API.items():
        parts = [f"# {title}"]
        for module in modules.split():
            # The library is shown under the name of its installed package.
            installed_name = module.replace("privacy.", "auditable_dp.", 1)
            for name_in_module in FIRST.get(module, ("",)):
                parts.append(f"::: {installed_name}.{name_in_module}".rstrip("."))
        _write(target, Path("api") / f"{name}.md", "\n\n".join(parts) + "\n")
    package = target.parent / "site-library/auditable_dp"
    package.parent.mkdir(exist_ok=True)
    package.unlink(missing_ok=True)
    package.symlink_to(ROOT / "privacy")
    shutil.copy(ROOT / "tools/site.css", target / "site.css")


def _with_indices(page: Path, target: Path) -> str:
    """Returns the text of a page whose links lead to other pages; copies other linked files.

    A link to a folder leads to its README, a link to a notebook to its page.
    """

    def new_link(link: re.Match[str]) -> str:
        opening, path, anchor, closing = link.groups()
        if ":" in path:
            return link.group(0)
        linked = page.parent / path
        if linked.is_dir():
            path = f"{path.rstrip('/')}/README.md"
            linked = linked / "README.md"
        if linked.suffix == ".ipynb":
            path = path.replace(".ipynb", ".md")
            linked = linked.with_suffix(".md")
        if linked.suffix != ".md":
            copy = target / os.path.relpath(linked, ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(linked, copy)
        return f"{opening}{path}{anchor or ''}{closing}"

    return _LINK.sub(new_link, page.read_text())


def _as_page(notebook: Path) -> str:
    """Returns the cells of a notebook with their printed output, as Markdown."""
    parts = []
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        printed = ""
        for output in cell.get("outputs", ()):
            printed += "".join(output.get("text", ()))
        if printed:
            # Four backticks: the output may have a fence of three.
            parts.append(f"````text\n{printed.rstrip()}\n````")
    return "\n\n".join(parts) + "\n"


def _write(target: Path, name: Path, text: str) -> None:
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    (target / name).write_text(text)


if __name__ == "__main__":
    build(ROOT / "runs/site-pages")
