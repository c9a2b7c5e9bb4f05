"""The privacy card as one HTML file: the Markdown page's own words and numbers, with plots; no script, nothing to fetch."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from privacy.card.markdown import to_markdown
from privacy.card.plots import Plot, plots
from privacy.card.warnings import TOO_LARGE

_CELL_BORDER = re.compile(r"(?<!\\)\|")
_INLINE = re.compile(r"`([^`]*)`|\*\*(.+?)\*\*")
_NUMBER = re.compile(r"[\s\d.,%*eE+-]*\d[\s\d.,%*eE+-]*|none")


class Picture(NamedTuple):
    """A PNG of public content that a card names; the page holds its bytes."""

    name: str
    title: str
    caption: str
    png: bytes


def to_html(card: dict[str, Any], pictures: Sequence[Picture] = ()) -> str:
    """The page for `card`. It says exactly what `to_markdown(card)` says.

    Args:
        pictures: end the section on utility.
    """
    blocks = [block for block in to_markdown(card).strip().split("\n\n") if block]
    body, drawn, heading = [], plots(card), ""
    for block in blocks:
        if block.startswith("## "):
            body.append(_figures(heading, drawn, card))
            heading = block.split(". ", 1)[1]
        body.append(_block(block, card))
    body.append(_figures(heading, drawn, card))
    body += [_picture(picture) for picture in pictures]
    title = inline(blocks[0].removeprefix("# "))
    return _PAGE.format(title=title, style=_STYLE, body="\n".join(part for part in body if part))


def _figures(heading: str, drawn: dict[str, list[Plot]], card: dict[str, Any]) -> str:
    """The plots that end a section, or why it has none."""
    if heading == "Accounting" and heading not in drawn:
        return f'<p class="none">{html.escape(_why_no_plot(card))}</p>'
    parts = [
        f'<figure id="{plot.name}">\n{plot.svg}\n<figcaption><strong>{html.escape(plot.title)}.</strong> '
        f"{html.escape(plot.caption)}</figcaption>\n</figure>"
        for plot in drawn.get(heading, [])
    ]
    return "\n".join(parts)


def _picture(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode()
    title, caption = html.escape(picture.title), html.escape(picture.caption)
    return (
        f'<figure id="{picture.name}">\n<img alt="{title}" src="data:image/png;base64,{data}">\n'
        f"<figcaption><strong>{title}.</strong> {caption}</figcaption>\n</figure>"
    )


def _why_no_plot(card: dict[str, Any]) -> str:
    if not card["formal_guarantee"]:
        return f"No plot of epsilon: the run makes no formal claim ({'; '.join(card['reasons'])})."
    return f"No plot of epsilon: {TOO_LARGE}."


def _block(block: str, card: dict[str, Any]) -> str:
    lines = block.split("\n")
    if lines[0].startswith("> "):
        return _claim(lines, bool(card["formal_guarantee"]))
    for mark, render in _BLOCKS.items():
        if lines[0].startswith(mark):
            return render(lines)
    return f"<p>{inline(' '.join(lines))}</p>"


def _section_heading(lines: Sequence[str]) -> str:
    return f"<h2>{inline(lines[0].removeprefix('## '))}</h2>"


def _title(lines: Sequence[str]) -> str:
    return f"<h1>{inline(lines[0].removeprefix('# '))}</h1>"


def _claim(lines: Sequence[str], formal: bool) -> str:
    text = "<br>".join(inline(line.removeprefix("> ")) for line in lines)
    return f'<div class="claim {"formal" if formal else "informal"}">{text}</div>'


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{inline(line.removeprefix('* '))}</li>" for line in lines) + "</ul>"


def _table(lines: Sequence[str]) -> str:
    head, _, *rows = [[cell.strip() for cell in _CELL_BORDER.split(line)[1:-1]] for line in lines]
    first = "".join(f"<th>{inline(cell)}</th>" for cell in head)
    rest = "\n".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table>\n<thead><tr>{first}</tr></thead>\n<tbody>\n{rest}\n</tbody></table></div>'


def _cell(text: str) -> str:
    kind = ' class="number"' if _NUMBER.fullmatch(text) else ""
    return f"<td{kind}>{inline(text)}</td>"


def inline(markdown: str) -> str:
    """One line of our own Markdown (code, bold, escapes) as HTML; everything else in it is plain text."""
    parts, end = [], 0
    for match in _INLINE.finditer(markdown):
        parts.append(_text(markdown[end : match.start()]))
        code, bold = match.groups()
        parts.append(f"<strong>{inline(bold)}</strong>" if code is None else f"<code>{_text(code)}</code>")
        end = match.end()
    return "".join(parts) + _text(markdown[end:])


def _text(markdown: str) -> str:
    """Undoes the escapes of the Markdown page, then escapes for HTML."""
    return html.escape(re.sub(r"\\([\\|])", r"\1", markdown).replace("&lt;", "<"))


_BLOCKS: dict[str, Callable[[Sequence[str]], str]] = {
    "## ": _section_heading,
    "# ": _title,
    "* ": _list,
    "| ": _table,
}

_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1b1f24; --soft: #57606a; --line: #d5dae0; --card: #f5f7f9;
  --grid: #e3e7eb; --faint: #8a939c; --first: #1f5fbf; --second: #b5420b; --third: #2a7d4f; --warn: #b5420b; }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --ink: #e4e8ec; --soft: #a4adb7; --line: #343b43;
  --card: #1d2228; --grid: #2c333a; --faint: #7d8792; --first: #7ab0ff; --second: #ff9c66; --third: #6fd39b;
  --warn: #ff9c66; } }
@media print { :root { color-scheme: light; --page: #fff; --ink: #000; --soft: #333; --line: #bbb; --card: #fff;
  --grid: #ddd; --faint: #777; --first: #1f5fbf; --second: #b5420b; --third: #2a7d4f; --warn: #b5420b; }
  main { max-width: none; padding: 0; } }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 54rem; margin: 0 auto; padding: 1.5rem 1.25rem 3rem; }
h1 { font-size: 1.7rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; padding-bottom: .2rem; border-bottom: 1px solid var(--line);
  break-after: avoid; }
p, ul { margin: .6rem 0; }
ul { padding-left: 1.3rem; }
.claim { background: var(--card); border-left: 5px solid var(--third); padding: .8rem 1rem; font-size: 1.08rem; }
.claim.informal { border-color: var(--warn); }
.none { color: var(--soft); font-style: italic; }
.wide { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .92rem; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
tr { break-inside: avoid; }
code { font-size: .88em; overflow-wrap: anywhere; background: var(--card); padding: .05em .3em; border-radius: 3px; }
figure { margin: 1.2rem 0; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; }
figure img { display: block; max-width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: .88rem; margin-top: .2rem; }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
