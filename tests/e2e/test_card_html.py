"""The privacy card in a real browser: are its plots drawn?"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from privacy.card.folder import write_card
from tests.privacy.published import publish
from trainer.report import build_card

BROWSER = shutil.which("chromium")
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="Debian's chromium is not installed (tests/install_packages.sh installs it, as root)"
)
WIDTH, HEIGHT = 1100, 8000
FIGURES = ("epsilon-by-attempts", "trade-off", "heldout-loss")
COLORS = {"page": "#ffffff", "first": "#1f5fbf", "second": "#b5420b"}
"""Of the style sheet, in light; see privacy/card/templates/card.html.j2."""
PROBE = """<script>
const box = (e) => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
const found = { figures: {}, broken: 0, wide: document.documentElement.scrollWidth };
for (const f of document.querySelectorAll("figure")) found.figures[f.id] = {
  plot: box(f.querySelector("svg")), texts: [...f.querySelectorAll("svg text")].map(t => [t.textContent, ...box(t)]) };
for (const i of document.images) if (!i.complete || i.naturalWidth === 0) found.broken += 1;
document.body.insertAdjacentHTML("beforeend", "<pre>" + JSON.stringify(found).replaceAll("<", "") + "</pre>");
</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The card of a small run with public held-out losses."""
    run = publish(tmp_path_factory.mktemp("runs") / "small-run")
    (run / "evaluation").mkdir()
    losses = [{"step": step, "loss": 8 - step / 2} for step in range(5)]
    (run / "evaluation/heldout.jsonl").write_text("".join(json.dumps(line) + "\n" for line in losses))
    return write_card(run, build_card(run))[2]


def _browse(profile: Path, *arguments: str) -> str:
    assert BROWSER is not None
    quiet = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --hide-scrollbars --force-device-scale-factor=1"
    )
    command = [BROWSER, *quiet.split(), f"--user-data-dir={profile}", f"--window-size={WIDTH},{HEIGHT}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def _layout(page: Path, folder: Path) -> dict:
    """Where things are, asked of the browser in a copy of the page; the page itself has no script."""
    copy = folder / "probe.html"
    copy.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
    document = _browse(folder / "profile", "--dump-dom", copy.as_uri())
    found = re.search(r"<pre>(\{.*?\})</pre>", document, re.DOTALL)
    assert found is not None
    return json.loads(found[1].replace("&gt;", ">").replace("&amp;", "&"))


def _close_to(picture: np.ndarray, color: str) -> np.ndarray:
    wanted = np.array([int(color[start : start + 2], 16) for start in (1, 3, 5)])
    return np.abs(picture - wanted).max(axis=-1) <= 24


@pytest.mark.timeout(240)
def test_plots_are_drawn(page, tmp_path):
    layout = _layout(page, tmp_path)
    _browse(tmp_path / "profile", f"--screenshot={tmp_path / 'page.png'}", page.as_uri())
    picture = np.asarray(Image.open(tmp_path / "page.png").convert("RGB")).astype(int)
    assert layout["broken"] == 0 and layout["wide"] <= WIDTH
    assert tuple(layout["figures"]) == FIGURES
    assert _close_to(picture[:40, :40], COLORS["page"]).all()
    for name, figure in layout["figures"].items():
        left, top, right, bottom = (round(edge) for edge in figure["plot"])
        assert right - left > 600 and bottom - top > 250 and bottom <= HEIGHT, name
        region = picture[top:bottom, left:right]
        curve = _close_to(region, COLORS["first"])
        assert curve.sum() > 500, name
        # A curve, not a frame or a legend: it spans most of the plot's width.
        columns = np.flatnonzero(curve.any(axis=0))
        assert columns[-1] - columns[0] > 0.6 * (right - left), name
        # A missing picture, or one with nothing but its curve, has less ink; a black box has more.
        ink = ~_close_to(region, COLORS["page"])
        assert 0.01 < ink.mean() < 0.5, name
        assert _close_to(region, COLORS["second"]).sum() > 30, name


@pytest.mark.timeout(120)
def test_labels_do_not_overlap_and_stay_inside(page, tmp_path):
    for name, figure in _layout(page, tmp_path)["figures"].items():
        left, top, right, bottom = figure["plot"]
        texts = figure["texts"]
        assert len(texts) > 8, name
        for number, (label, x0, y0, x1, y1) in enumerate(texts):
            assert x0 >= left - 1 and y0 >= top - 1 and x1 <= right + 1 and y1 <= bottom + 1, (name, label)
            for other, u0, v0, u1, v1 in texts[number + 1 :]:
                shared = max(0, min(x1, u1) - max(x0, u0)) * max(0, min(y1, v1) - max(y0, v0))
                assert shared <= 0.2 * min((x1 - x0) * (y1 - y0), (u1 - u0) * (v1 - v0)), (name, label, other)
