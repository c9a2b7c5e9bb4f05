"""The HTML card without a browser (tests/e2e/test_card_html.py looks at it in one)."""

import ast
import base64
import html
import itertools
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from privacy.accounting import accountants as accounting
from privacy.accounting.accountants import ReleaseGroup
from privacy.accounting.rounding import rounded_down, rounded_up
from privacy.card import plots as report_plots
from privacy.card.model import AuditResult, HeldoutLoss, Samples, Utility
from privacy.card.numbers import attack_bounds
from privacy.card.plots import draw_attempts, draw_trade_off, plots
from privacy.card.render import to_html, to_markdown
from privacy.card.report import privacy_card
from privacy.ledger.ledger import Ledger
from privacy.plan import make_plan
from privacy.plan_request import PlanRequest

NASTY = '<script>alert(1)</script> | `x` **y** & "z" \\| \' &lt;img src=http://a.b/c&gt;'
UTILITY = Utility(
    heldout_file="evaluation/heldout.jsonl",
    heldout_loss=(HeldoutLoss(step=0, loss=8.5), HeldoutLoss(step=5, loss=6.25)),
    samples=Samples(file="evaluation/samples-00000005.png", step=5),
)
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])")
VOID = {"meta", "br", "link", "img", "hr", "input"}


@pytest.fixture(scope="module")
def card(tmp_path_factory):
    """Five of six steps, one of them repeated."""
    folder = tmp_path_factory.mktemp("run")
    return privacy_card(_ledger(folder)).updated(run_name="a-run", utility=UTILITY)


@pytest.fixture(scope="module")
def page(card):
    return to_html(card)


def _ledger(folder, **changes):
    numbers = {"num_examples": 2000, "expected_batch_size": 100, "num_steps": 6, "noise_multiplier": 4.0}
    plan = make_plan(PlanRequest(**numbers | {"target_delta": 1e-5, "sensitivity_slack": 1e-3} | changes))
    fields = {"plan": plan.frozen_fields(), "key_commitment": "ab" * 32, "commit": "c0ffee"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _descriptor: None)
        with Ledger.create(folder / "ledger.jsonl", fields) as ledger:
            for steps in ([1, 2, 3], [3, 4, 5]):
                ledger.start_session({"commit": "c0ffee", "modified": False})
                for step in steps:
                    release = {"name": "gradient", "std": plan.noise_multiplier, "sensitivity": 1.0}
                    ledger.intent(step, ledger.next_attempt(step), [release])
                    ledger.done(step, ledger.next_attempt(step) - 1)
    return folder / "ledger.jsonl"


class _Page(HTMLParser):
    """Checks that every element is closed in order; collects attributes and the text outside of plots and styles."""

    def __init__(self, page):
        super().__init__()
        self.open, self.attributes, self.tags, self.words = [], [], set(), []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"svg", "style", "title", "figcaption"} & set(self.open):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def test_page_is_well_formed_and_fetches_nothing(page):
    parsed = _Page(page)
    assert parsed.tags.isdisjoint({"script", "link", "img", "image", "iframe", "object", "base", "form"})
    assert "http" not in page and "@import" not in page
    assert all(found.startswith("#") for found in re.findall(r"url\((.*?)\)", page))
    references = [value for name, value in parsed.attributes if name in ("href", "src", "xlink:href", "srcset")]
    assert all(value.startswith("#") for value in references)
    assert not [name for name, _ in parsed.attributes if name.startswith("on")]


def test_ids_are_unique_and_every_reference_has_its_target(page):
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]*)', page)) <= set(ids)


def test_page_says_what_the_markdown_says(card, page):
    def letters(text):
        return re.sub(r"[\s*|`#>\\-]", "", html.unescape(text))

    assert letters(_Page(page).text) == letters(to_markdown(card))


def _leaves(tree):
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield str(name)
            yield from _leaves(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _leaves(value)
    else:
        yield tree


def _printed(value):
    """The ways in which the page may print a number of the JSON."""
    return {
        *(f"{value:{form}}" for form in ("", ",", "g", ".6g", ".4g", ",.4g", ".4f", ".3g")),
        rounded_up(value),
        rounded_down(value),
        rounded_up(100 * value, 2),
    }


def _own_words():
    """Numbers in the fixed texts of the code (years, section numbers)."""
    for path in Path("privacy/card").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    yield re.sub(r"(?s)\{\{.*?\}\}|\{%.*?%\}", " ", Path("privacy/card/templates/card.md.j2").read_text())
    yield Path("privacy/card/templates/statements.toml").read_text()


def test_every_number_on_the_page_is_in_the_json(card, page):
    leaves = list(_leaves(card.model_dump(mode="json")))
    numbers = [leaf for leaf in leaves if isinstance(leaf, int | float) and not isinstance(leaf, bool)]
    allowed = set().union(*map(_printed, numbers)) | {f"{1 / 2000:.4g}", f"{1e-5 * 2000:.4g}"}
    for text in [leaf for leaf in leaves if isinstance(leaf, str)] + list(_own_words()):
        allowed |= set(NUMBER.findall(text))
    sections = {str(number) for number in range(1, 15)}
    found = set(NUMBER.findall(_Page(page).text)) - sections
    assert len(found) > 30
    assert found <= allowed
    assert rounded_up(card.epsilon) in found


def test_names_from_files_are_escaped(tmp_path):
    plain = privacy_card(_ledger(tmp_path, informal_reasons=(NASTY,)))
    audit = AuditResult(
        file=NASTY, kind=NASTY, verdict=NASTY, date_utc=NASTY, of_this_ledger=True, violated_checks=(NASTY,)
    )
    nasty = plain.updated(run_name=NASTY, audits=(audit,), utility=UTILITY)
    page = to_html(nasty)
    parsed = _Page(page)
    assert parsed.tags.isdisjoint({"script", "img"}) and "<script" not in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 6
    rows = re.findall(r"<tr>(.*?)</tr>", page)
    assert all(row.count("<td") in (0, 2, 5, 6, 8) for row in rows)


def test_a_picture_of_samples_is_in_the_page_itself(card, page):
    png, nasty = b"\x89PNG of a sample", UTILITY.updated(samples=Samples(file=NASTY, step=5))
    with_picture = to_html(card.updated(utility=nasty), png)
    assert base64.b64encode(png).decode() in with_picture and "<script" not in with_picture
    assert with_picture.count("<img ") == 1 and "<img " not in page
    assert "evaluation/samples-00000005.png" in to_markdown(card)
    assert "samples-" not in to_markdown(card.updated(utility=UTILITY.updated(samples=None)))


def test_contract_11_informal_page_has_no_plot_of_epsilon_and_says_why(tmp_path):
    card = privacy_card(_ledger(tmp_path, noise_multiplier=0.0)).updated(utility=UTILITY)
    page = to_html(card)
    assert "There is no plot of epsilon" in page and "the noise multiplier is 0" in page
    assert 'id="epsilon-by' not in page and 'id="trade-off"' not in page
    assert 'id="heldout-loss"' in page and 'class="informal"' in page


def test_plots_draw_the_numbers_of_the_json(card):
    numbers = card.accounting
    lines = _drawn(draw_attempts, card).get_lines()
    attempts, drawn = lines[0].get_xydata().T
    for (before, _), (count, bound) in itertools.pairwise(numbers.epsilon_by_attempts):
        covered = np.interp(np.arange(before + 1, count + 1), attempts, drawn)
        assert (covered >= bound).all(), "the line never understates what holds for these attempts"
        assert covered[0] == bound
    assert tuple(lines[0].get_xydata()[0]) == (0, 0) and drawn[-1] == card.epsilon
    levels = {line.get_label(): line.get_ydata()[0] for line in lines[2:]}
    assert levels == {
        f"budget with the reserve: {rounded_up(numbers.epsilon_with_reserve)}": numbers.epsilon_with_reserve,
        f"planned: {rounded_up(numbers.epsilon_planned)}": numbers.epsilon_planned,
    }
    axes = _drawn(draw_trade_off, card)
    assert axes.get_xscale() == "log"
    assert [tuple(point) for point in axes.get_lines()[0].get_xydata()] == list(numbers.attack.curve)
    dots = {float(x): y for x, y in (line.get_xydata()[0] for line in axes.get_lines()[2:])}
    assert dots == {float(rate): bound for rate, bound in numbers.attack.true_positive.items()}


def _drawn(draw, card):
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    assert draw(axes, card)
    return axes


def test_plots_of_other_files_are_marked_on_the_plot_itself(card):
    for plot in plots(card)["Utility (not attested)"]:
        assert "not attested" in plot.svg
    assert len(plots(card)["Accounting"]) == 2 and len(plots(card)["Utility (not attested)"]) == 1


def test_same_card_same_bytes_and_no_stand_in_colour_is_left(card, page):
    assert page == to_html(card)
    for colour in (report_plots.INK, report_plots.GRID, report_plots.FIRST, report_plots.SECOND, report_plots.FAINT):
        assert colour not in page


def test_attack_bounds_are_those_of_a_gaussian():
    """One release without sampling: the trade-off function is known (Dong et al. 2022, equation 6)."""
    group = ReleaseGroup(1.0, 1.0, 1)
    attack = attack_bounds([group], accounting.epsilon([group], 1e-5), 0.0)
    for rate, bound in attack.curve:
        exact = norm.cdf(norm.ppf(rate) + 1) if rate < 1 else 1.0
        assert exact - 1e-9 <= bound <= exact * 1.01
    assert attack.advantage == pytest.approx(2 * norm.cdf(0.5) - 1, rel=1e-3)
