"""The card's pages: every number on them is the card's, for the line that it stands in."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from privacy import verify
from privacy.card import render
from tests.privacy.cards import full_card
from tests.privacy.test_card_pages import NASTY
from tests.privacy.verify.judging import Judge, sentences

PAGES = ("privacy_card.md", "privacy_card.html")


def put(folder: Path, card: Any) -> verify.Folder:
    """The card and its pages in a folder that holds nothing else, as the check of pages sees it."""
    (folder / "report").mkdir(exist_ok=True)
    (folder / "report/privacy_card.json").write_text(card.to_json())
    (folder / "report/privacy_card.md").write_text(render.to_markdown(card))
    (folder / "report/privacy_card.html").write_text(render.to_html(card))
    return verify.Folder(folder, verify.Ledger("ledger.jsonl"), None)


@pytest.mark.parametrize("with_head", [False, True])
def test_pages_of_a_card_that_holds_everything_are_its_own(with_head: bool, tmp_path: Path) -> None:
    folder = put(tmp_path, full_card("a text, 2 of them", with_head=with_head))
    assert "lines of privacy_card.md and privacy_card.html" in verify.check_pages(folder)


@pytest.mark.parametrize("text", NASTY)
def test_names_of_any_letters_are_no_forgery(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "plots", lambda card: {})
    verify.check_pages(put(tmp_path, full_card(text)))


def with_other_figures(text: str, visible: Callable[[int], bool]) -> list[tuple[str, str]]:
    """(what is changed, the text) for each number that a reader sees: another last digit."""
    found = []
    for match in re.finditer(r"\d([\d,]*\d)?(\.\d+)?(e-?\d+)?", text):
        if visible(match.start()):
            last = match.end() - 1
            other = f"{text[:last]}{(int(text[last]) + 1) % 10}{text[last + 1 :]}"
            found.append((text[max(0, match.start() - 40) : match.end()], other))
    return found


def refused(folder: verify.Folder, page: str, text: str) -> bool:
    (folder.path / "report" / page).write_text(text)
    try:
        verify.check_pages(folder)
    except verify.Violated:
        return True
    return False


def outside_of_tags(text: str) -> Callable[[int], bool]:
    """What a browser shows of a page: no tag, no comment, no style, and no tick of an axis."""
    hidden = [match.span() for match in re.finditer(r"<!--.*?-->|<style.*?</style>|<[^>]*>", text, re.DOTALL)]
    hidden += [match.span() for match in re.finditer(r">[-\N{MINUS SIGN}\d.,]+</t", text)]
    return lambda place: not any(start <= place < end for start, end in hidden)


@pytest.mark.parametrize(
    ("page", "every"), [(page, 5) for page in PAGES] + [pytest.param(page, 1, marks=pytest.mark.full) for page in PAGES]
)
def test_every_number_of_a_page_is_compared(page: str, every: int, original: Path, tmp_path: Path) -> None:
    """Every n-th of them."""
    shutil.copytree(original / "report", tmp_path / "report")
    folder = verify.Folder(tmp_path, verify.Ledger("ledger.jsonl"), None)
    verify.check_pages(folder)
    text = (tmp_path / "report" / page).read_text()
    heading = re.compile(r"(## |<h2>)\d+$")
    edits = with_other_figures(text, outside_of_tags(text) if page.endswith("html") else lambda place: True)
    passed = [
        where for where, other in edits[::every] if not heading.search(where) and not refused(folder, page, other)
    ]
    assert len(edits) > 100 and not passed, passed


ADDED = {
    "a number of some statement": "Another accountant gives epsilon = 1e-4 and 2022.",
    "a line": "A finer accountant gives epsilon = 0.01.",
    "a number of another place": "Tightly, epsilon = 2,000 / 40,000.",
    "full-width digits": "epsilon = \uff10\uff0e\uff10\uff11",
    "a fraction": "epsilon = \u00bd",
    "an entity": "epsilon = 0&#46;01",
    "an escape": "epsilon = 0\\.01",
    "marks between the digits": "epsilon = **0**.01",
    "a row": "| epsilon by another accountant | tiny | attested |",
}


@pytest.mark.parametrize("name", ADDED)
def test_a_number_that_was_added_is_found(name: str, folder: Path, judge: Judge) -> None:
    page = folder / "report/privacy_card.md"
    page.write_text(page.read_text() + f"\n{ADDED[name]}\n")
    code, found = judge(folder)
    assert code == 5 and "pages: privacy_card.md" in sentences(found), found["checks"]


@pytest.mark.parametrize(
    "added",
    [
        "<script>document.title = 'epsilon 0.01'</script>",
        "<style>p::before { content: 'epsilon 0.01' }</style>",
        "<p style=\"background: url('https://a.example/x.png')\">x</p>",
        '<img src="https://a.example/x.png" alt="x">',
        '<p onmouseover="x()">x</p>',
        "<iframe></iframe>",
        '<meta http-equiv="refresh" content="0; url=https://a.example">',
        '<img srcset="https://a.example/x.png">',
        '<p title="epsilon 0.01">x</p>',
        "<svg><text>epsilon 0.01</text></svg>",
        "<p>epsilon 0<em>.</em>01</p>",
        "<table><tr><td>epsilon</td><td>tiny</td><td>attested</td></tr></table>",
        # Where browsers and Python's parser differ, what style sheets show or hide, and numbers that nobody wrote.
        "<!--><p>epsilon 0.01</p><!-- -->",
        "<!-- x --!><p>epsilon 0.01</p><!-- -->",
        "<svg><style><p>epsilon 0.01</p></style></svg>",
        "<style>h1::before{CONTENT:'epsilon 0.01'}</style>",
        "<style>h1::before{content/**/:'epsilon 0.01'}</style>",
        "<style>p{list-style-type:'epsilon 0.01'}</style>",
        '<p>epsilon <em style="display:none">7</em></p>',
        '<tspan style="font-size:0">x</tspan>',
        "<p hidden>x</p>",
        "<p>epsilon <svg><text>0.01</text></svg></p>",
        '<ol start="1"><li>is the epsilon of everything</li></ol>',
        "<p>1. is the epsilon of everything</p>",
    ],
)
def test_what_no_page_of_a_card_holds_is_found(added: str, folder: Path, judge: Judge) -> None:
    page = folder / "report/privacy_card.html"
    page.write_text(page.read_text().replace("</main>", f"{added}</main>"))
    code, found = judge(folder)
    assert code == 5 and "pages: " in sentences(found), found["checks"]


@pytest.mark.parametrize(
    ("label", "forged"),
    [
        ("the claim", "epsilon ="), ("guessing", "no guarantee is needed"), ("charged attempts", "attempts of nobody"),
        ("no attack can be above", "no attack is above"), ("Every point of the curve holds at once", "No point holds"),
    ],
)  # fmt: skip
def test_words_in_plots_are_those_of_a_card(label: str, forged: str, original: Path, tmp_path: Path) -> None:
    """Words next to the numerals of an axis could state what the card does not."""
    shutil.copytree(original / "report", tmp_path / "report")
    folder = verify.Folder(tmp_path, verify.Ledger("ledger.jsonl"), None)
    text = (tmp_path / "report/privacy_card.html").read_text()
    plots = text[text.index("<svg") :]
    assert label in plots
    assert refused(folder, "privacy_card.html", text.replace(plots, plots.replace(label, forged, 1)))


def test_a_page_that_hides_its_lines_is_found(folder: Path, judge: Judge) -> None:
    page = folder / "report/privacy_card.md"
    page.write_text(f"<!--\n{page.read_text()}\n-->\nThe run spent an epsilon of one half.\n")
    code, found = judge(folder)
    assert code == 5 and "holds HTML" in sentences(found), found["checks"]


def test_a_claim_that_is_taken_away_is_missed(folder: Path, judge: Judge) -> None:
    page = folder / "report/privacy_card.md"
    lines = page.read_text().splitlines()
    page.write_text("\n".join(line for line in lines if not line.startswith("> The run is")))
    code, found = judge(folder)
    assert code == 5 and "privacy_card.md lacks" in sentences(found)


def test_a_page_without_its_card_is_not_believed(folder: Path, judge: Judge) -> None:
    (folder / "report/privacy_card.json").unlink()
    code, found = judge(folder)
    assert code == 6 and "here without privacy_card.json" in sentences(found, "inconclusive")


@pytest.mark.parametrize("digits", [1e-3, 1e-9])
def test_a_card_may_state_more_and_never_less_than_it_spent(digits: float, folder: Path, judge: Judge) -> None:
    """The page follows the card, so that only the card's own comparison can find it."""
    page, path = folder / "report/privacy_card.md", folder / "report/privacy_card.json"
    card = json.loads(path.read_text())
    for sign in (1, -1):
        forged = json.loads(json.dumps(card))
        forged["epsilon"] = forged["accounting"]["epsilon"] = card["epsilon"] + sign * digits
        path.write_text(json.dumps(forged))
        (folder / "report/privacy_card.html").unlink(missing_ok=True)
        page.unlink(missing_ok=True)
        code, found = judge(folder)
        assert code == (0 if sign > 0 else 5), found["checks"]
        assert sign < 0 or digits < 1e-6 or "larger than they need be are the bounds epsilon" in sentences(found, "ok")
