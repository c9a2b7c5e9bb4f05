"""No text from a file can forge the pages of the card: it shows as it is, in its place."""

from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jinja2 import UndefinedError

from privacy.card import render
from privacy.card.render import to_html
from privacy.card.text import one_line
from tests.privacy.cards import full_card

MARKS = st.text(st.sampled_from("\\`*_{}[]()<>#+-=.!|~&;:\"'/ \n\t\r1aZ\x00\x0b\u200b\u202eé"), min_size=1)
NASTY = (
    "<script>alert(1)</script>", "a | b", "\\|", "\\", "`", "``a`` | b", "**", "__a__", "_", "[x](javascript:alert(1))",
    "![x](http://a.b/c)", "<http://a.b>", "&lt;b&gt;", "&#60;", "# 1", "1. a", "1)", "- a", "---", "===", "~~~", "> a",
    "* a", "+", "a\n\n## 99. b", "a\n| --- |", "</td></table>", "{{ 1 }}", "{% if %}", "a  ", "#", "a #", "http://a.b",
    '" onload="x', "<!-- a", "<![CDATA[", "\u202eabc", "consistent",
)  # fmt: skip


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


@pytest.fixture(scope="module", autouse=True)
def _no_plots():  # type: ignore[no-untyped-def]
    """They cost most of the time, and their words are escaped by the same template."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render, "plots", lambda card: {})
        yield


def _examples(test):  # type: ignore[no-untyped-def]
    for text in NASTY:
        test = example(text, False)(test)
    return test


@_examples
@given(MARKS | st.text(min_size=1), st.booleans())
def test_any_text_shows_as_it_is_and_changes_nothing_else(text: str, with_head: bool) -> None:
    shown = one_line(text)
    if shown in ("", "consistent"):  # a verdict that stands out less than the others
        return
    plain, page = (Page(to_html(full_card(word, with_head=with_head))) for word in ("WORD", text))
    assert page.tags == plain.tags and page.text == plain.text.replace("WORD", shown)


@_examples
@given(MARKS | st.text(min_size=1), st.booleans())
def test_names_of_free_values_show_as_they_are(text: str, with_head: bool) -> None:
    shown = one_line(text)
    if shown == "" or text in ("start", "method", "num_classes", "covers"):
        return
    plain, page = (Page(to_html(full_card("a", with_head=with_head, key=key))) for key in ("WORD", text))
    assert page.tags == plain.tags and page.text == plain.text.replace("WORD", shown)


@given(MARKS | st.sampled_from(NASTY) | st.text(min_size=1))
def test_a_statement_holds_code_spans_and_no_other_mark(text: str) -> None:
    if not one_line(text):
        return
    plain, page = (Page(to_html(full_card("a", statement=words))) for words in ("WORD", text))
    assert page.tags == plain.tags
    assert page.text.replace("`", "") == plain.text.replace("WORD", one_line(text)).replace("`", "")


@pytest.mark.parametrize("text", ["a\ud800b", "a\x00b", "a\u202eb", "a\u200bb"])
def test_what_cannot_be_seen_is_marked(text: str) -> None:
    assert one_line(text) == "a\N{REPLACEMENT CHARACTER}b"


def test_a_key_that_the_card_does_not_have_is_an_error() -> None:
    environment = render._template("card.md.j2", is_html=False).environment
    with pytest.raises(UndefinedError):
        environment.from_string("{{ card.epsilom }}").render(card=full_card("a"))
