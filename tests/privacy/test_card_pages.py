"""The pages and the JSON of the privacy card: no text from a file can forge them, and they say what the card holds."""

import functools
import html
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from matplotlib.axes import Axes
from pydantic import ValidationError

from privacy.accounting.rounding import percent, rounded_down, rounded_up
from privacy.card import render
from privacy.card.model import Accounting, PrivacyCard, schema_text
from privacy.card.render import one_line, to_html, to_markdown
from tests.privacy.cards import full_card

SCHEMA = Path(__file__).parents[2] / "docs/schemas/privacy_card.schema.json"

MARKS = st.text(
    st.sampled_from("\\`*_{}[]()<>#+-=.!|~&;:\"'/ \n\t\r1aZ\x00\x0b\u200b\u202eé"), min_size=1
)
NASTY = (
    "<script>alert(1)</script>",
    "a | b",
    "\\|",
    "\\",
    "`",
    "``a`` | b",
    "**",
    "__a__",
    "_",
    "[x](javascript:alert(1))",
    "![x](http://a.b/c)",
    "<http://a.b>",
    "&lt;b&gt;",
    "&#60;",
    "# 1",
    "1. a",
    "1)",
    "- a",
    "---",
    "===",
    "~~~",
    "> a",
    "* a",
    "+",
    "a\n\n## 99. b",
    "a\n| --- |",
    "</td></table>",
    "{{ 1 }}",
    "{% if %}",
    "a  ",
    "#",
    "a #",
    "http://a.b",
    '" onload="x',
    "<!-- a",
    "<![CDATA[",
    "\u202eabc",
    "consistent",
)


class Page(HTMLParser):
    """Tags with attributes, without those of code spans, and the text that a reader sees."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[object] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "code":
            self.tags.append((tag, attrs))

    def handle_endtag(self, tag: str) -> None:
        if tag != "code":
            self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def undrawn(card: PrivacyCard) -> Page:
    """The page with an empty figure, which draws no text: to draw them a thousand times would take minutes."""
    with patch.object(render, "trade_off", lambda _card: "<svg></svg>"):
        return Page(to_html(card))


@functools.cache
def page_of(word: str, with_head: bool) -> Page:
    return undrawn(full_card(word, with_head=with_head, key=word))


def _examples(test):  # type: ignore[no-untyped-def]
    for text in NASTY:
        test = example(text, False)(test)
    return test


@_examples
@given(MARKS | st.text(min_size=1), st.booleans())
def test_any_text_and_any_name_of_a_value_shows_as_it_is_and_changes_nothing_else(
    text: str, with_head: bool
) -> None:
    shown = one_line(text)
    if shown in ("", "consistent") or text in ("start", "method", "num_classes", "covers"):
        return  # a verdict that stands out less than the others; names that a card has
    one, page = (page_of(word, with_head) for word in ("WORD", text))
    assert page.tags == one.tags and page.text == one.text.replace("WORD", shown)


@given(MARKS | st.sampled_from(NASTY) | st.text(min_size=1))
def test_a_statement_holds_code_spans_and_no_other_mark(text: str) -> None:
    if not one_line(text):
        return
    plain, page = (undrawn(full_card("a", statement=words)) for words in ("WORD", text))
    assert page.tags == plain.tags
    assert page.text.replace("`", "") == plain.text.replace("WORD", one_line(text)).replace("`", "")


@pytest.mark.parametrize("text", ["a\ud800b", "a\x00b", "a\u202eb", "a\u200bb"])
def test_what_cannot_be_seen_is_marked(text: str) -> None:
    assert one_line(text) == "a\N{REPLACEMENT CHARACTER}b"


def test_a_key_that_the_card_does_not_have_is_an_error() -> None:
    environment = render._template("card.md.j2", is_html=False).environment
    with pytest.raises(UndefinedError):
        environment.from_string("{{ card.epsilom }}").render(card=full_card("a"))


# What the pages say


NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])")


def test_the_page_fetches_nothing_and_says_what_the_markdown_says() -> None:
    card = full_card("word")
    page = to_html(card)
    parsed = Page(page)
    tags = {one[0] for one in parsed.tags if isinstance(one, tuple)}
    assert tags.isdisjoint({"script", "link", "iframe", "object", "base", "form"})
    assert "http" not in page and "@import" not in page
    attributes = [pair for one in parsed.tags if isinstance(one, tuple) for pair in one[1]]
    sources = [value for name, value in attributes if name in ("href", "src", "srcset")]
    within = {value for name, value in attributes if name == "id"}
    assert len(within) == sum(name == "id" for name, _ in attributes), "no id comes twice"
    assert all(source[1:] in within for source in sources)
    assert {target.strip('"') for target in re.findall(r"url\((.*?)\)", page)} <= {
        f"#{name}" for name in within
    }

    def letters(text: str) -> str:
        return re.sub(r"[\s*|`#>\\-]", "", html.unescape(text))

    text = re.sub(
        r"(?s)<figure.*?</figure>", "", to_html(card).partition("<main")[2].partition(">")[2]
    )
    shown = Page(text).text
    assert letters(shown) == letters(to_markdown(card))


@pytest.mark.parametrize(
    ("template", "with_head"), [("card", False), ("methods", False), ("methods", True)]
)
def test_every_number_on_a_page_is_in_the_json(template: str, with_head: bool) -> None:
    card, leaves = full_card("word", with_head=with_head), list[Any]()

    def collect(tree: Any) -> None:
        if isinstance(tree, dict | list):
            for value in [*tree, *tree.values()] if isinstance(tree, dict) else tree:
                collect(value)
        else:
            leaves.append(tree)

    collect(card.model_dump(mode="json"))
    allowed = {f"{1 / 2000:.4g}", f"{1e-5 * 2000:.4g}"}
    for value in leaves:
        if isinstance(value, int | float) and not isinstance(value, bool):
            forms = ("", ",", "g", ".6g", ".4g", ",.4g", ".4f", ".3g")
            allowed |= {f"{value:{form}}" for form in forms}
            allowed |= {rounded_up(value), rounded_down(value), percent(value).removesuffix(" %")}
        elif isinstance(value, str):
            allowed |= set(NUMBER.findall(value))
    templates = Path(render.__file__).parent / "templates"
    fixed = (templates / f"{template}.md.j2").read_text() + (
        templates / "statements.toml"
    ).read_text()
    allowed |= set(NUMBER.findall(re.sub(r"(?s)\{\{.*?\}\}|\{%.*?%\}", " ", fixed)))
    found = set(NUMBER.findall(to_markdown(card, f"{template}.md.j2")))
    assert (
        len(found) > (30 if template == "card" else 3)
        and found <= allowed
        and rounded_up(1.25) in found
    )


def test_the_plot_draws_the_numbers_of_the_card_and_contract_11_there_is_none_without_a_claim() -> (
    None
):
    card = full_card("word")
    attack = card.accounting.attack
    assert attack is not None
    with (
        patch.object(Axes, "semilogx") as curves,
        patch.object(Axes, "plot") as dots,
        patch.object(Axes, "legend"),
    ):
        render.trade_off(card)
    assert list(zip(*curves.call_args_list[0].args, strict=True)) == list(attack.curve)
    found = zip(*dots.call_args.args[:2], strict=True)
    assert dict(found) == {float(rate): bound for rate, bound in attack.true_positive.items()}
    assert to_html(card).count("<figure") == 1
    bare = card.accounting.updated(**dict.fromkeys(EPSILONS) | {"epsilon_group": {}})
    assert "<figure" not in to_html(
        card.updated(formal_guarantee=False, epsilon=None, composition=None, accounting=bare)
    )


# The published format


def test_the_published_schema_is_that_of_the_model() -> None:
    assert SCHEMA.read_text() == schema_text(), (
        "python -m privacy.card.model > docs/schemas/privacy_card.schema.json"
    )


def test_the_schema_describes_every_key_and_takes_no_other() -> None:
    schema = json.loads(schema_text())
    for name, part in {**schema["$defs"], "PrivacyCard": schema}.items():
        if part.get("type") != "object":
            continue
        assert part["description"], name
        assert part["additionalProperties"] is False, name
        assert set(part["required"]) == set(part["properties"]), name
        for key, value in part["properties"].items():
            assert value.get("description"), f"{name}.{key}"


@pytest.mark.parametrize("with_head", [False, True])
def test_a_card_comes_back_from_its_json(with_head: bool) -> None:
    card = full_card("a name", with_head=with_head)
    assert PrivacyCard.model_validate_json(card.to_json()) == card
    assert card.to_json().isascii() and "\n" not in card.to_json()


EPSILONS = [name for name in Accounting.model_fields if "epsilon" in name] + ["attack"]


@pytest.mark.parametrize("field", EPSILONS)
def test_contract_11_a_card_without_a_guarantee_cannot_hold_what_is_computed_from_epsilon(
    field: str,
) -> None:
    formal = full_card("a name")
    value = getattr(formal.accounting, field)
    assert value not in (None, ()), "the card of the test holds everything"
    bare = formal.accounting.updated(**dict.fromkeys(EPSILONS) | {"epsilon_group": {}})
    informal = formal.updated(
        formal_guarantee=False, reasons=("why",), epsilon=None, accounting=bare, composition=None
    )
    claims = {
        "accounting": bare.updated(**{field: value}),
        "epsilon": 1.0,
        "composition": formal.composition,
        "plan": informal.plan | {"target_epsilon": 1.0},
        "opened": informal.opened | {"epsilon": 1.0},
    }
    for name, claim in claims.items():
        with pytest.raises(ValidationError, match="holds no epsilon"):
            informal.updated(**{name: claim})


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_an_epsilon_that_is_no_number_is_null_and_any_other_such_number_is_refused(
    value: float,
) -> None:
    card = full_card("a name")
    assert card.updated(epsilon=value).epsilon is None
    with pytest.raises(ValidationError):
        card.updated(delta=value)
