"""Cells of an executed notebook as HTML without scripts: prose, code, and what is safe of the outputs.

Markdown's raw HTML is shown as text, formulas become MathML, pictures are inlined or left out. Widgets and JavaScript
are dropped, the progress line too; of a figure the SVG is taken, so that it follows the reader's theme.
"""

import ast
import base64
import html
import io
import re
import tokenize
from collections.abc import Iterator

import mistune
from nbformat import NotebookNode
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from flashstudy.share import markup
from flashstudy.share.progress import MARK
from flashstudy.share.scrub import scrub
from flashstudy.share.tables import render

LONGEST_TEXT = 20_000  # characters of one text output; the rest is counted, not shown
LONGEST_PICTURE = 1_500_000  # characters of one picture
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PAPERMILL_TAGS = {"injected-parameters", "papermill-error-cell-tag"}


def blocks(notebook: NotebookNode, label: str) -> Iterator[str]:
    """The HTML of each cell that has something to show. `label` is what a screen reader says of the figures."""
    injected = next((cell.source for cell in notebook.cells if "injected-parameters" in _tags(cell)), "")
    for number, cell in enumerate(notebook.cells, start=1):
        if cell.cell_type == "markdown" and not _tags(cell) & _PAPERMILL_TAGS:
            yield f'<section class="prose">{markdown(cell.source)}</section>'
        elif cell.cell_type == "code" and not _tags(cell) & _PAPERMILL_TAGS:
            yield from _code_blocks(cell, injected, label, f"c{number}-")


def question(notebook: NotebookNode) -> str:
    """The notebook's H1 as plain text, "" where it has none."""
    sources = (cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    found = next((m for source in sources if (m := re.search(r"^# +(.+?)\s*$", source, re.M))), None)
    return scrub(found[1]) if found else ""


def introduction(notebook: NotebookNode) -> str:
    """The prose below the H1 of the first cell, as HTML."""
    first = next((cell.source for cell in notebook.cells if cell.cell_type == "markdown"), "")
    return markdown(re.sub(r"\A\s*# +.+?$", "", first, flags=re.M))


def markdown(text: str) -> str:
    """Markdown as HTML; raw HTML in it becomes text, formulas MathML, images their description."""
    return mistune.create_markdown(renderer=_Renderer(escape=True), plugins=["table", "strikethrough", "math"])(
        scrub(text)
    )


class _Renderer(mistune.HTMLRenderer):
    """mistune's HTML with formulas, without anything that a browser would fetch."""

    def image(self, text: str, url: str, title: str | None = None) -> str:
        return f"<em>[{text or 'picture'}]</em>"

    def link(self, text: str, url: str, title: str | None = None) -> str:
        if not re.match(r"(https?://|#)", url, re.I):
            return text
        return f'<a href="{html.escape(url)}" rel="noopener noreferrer">{text}</a>'

    def inline_math(self, text: str) -> str:
        return markup.safe_math(html.unescape(text), display=False)

    def block_math(self, text: str) -> str:
        return f'<div class="scroll">{markup.safe_math(html.unescape(text), display=True)}</div>'

    def table(self, text: str) -> str:
        return _scrollable(f"<table>{text}</table>", "table")


def _code_blocks(cell: NotebookNode, injected: str, label: str, prefix: str) -> Iterator[str]:
    tags, source = _tags(cell), scrub(cell.source)
    outputs = [
        shown for n, output in enumerate(cell.get("outputs", [])) if (shown := _output(output, label, f"{prefix}{n}-"))
    ]
    if "parameters" in tags and (table := parameters_table(source, scrub(injected))):
        yield f'<details class="parameters">{table}</details>'
    elif "remove-input" not in tags and source.strip():
        hidden = "hide-input" in tags
        code = f'<pre class="code"><code>{_highlight(source)}</code></pre>'
        yield f"<details><summary>Set-up code</summary>{code}</details>" if hidden else code
    if outputs:
        yield f'<section class="output">{"".join(outputs)}</section>'


def parameters_table(source: str, injected: str) -> str:
    """The parameters cell as a summary of what differs from the defaults, then a table of name, value and help.

    "" where the cell is no list of literals.
    """
    try:
        defaults, used = _assigned(source), _assigned(injected)
        helps = _comments(source)
    except (SyntaxError, ValueError, tokenize.TokenError):
        return ""
    now = {name: used.get(name, given)[0] for name, given in defaults.items()}
    changed = [name for name, (value, _) in defaults.items() if now[name] != value]
    cells = [
        [name, f"{now[name]!r}" + (f" (default {value!r})" if name in changed else ""), helps.get(line, "")]
        for name, (value, line) in defaults.items()
    ]
    said = ", ".join(f"{name} = {now[name]!r}" for name in changed)
    words = f"Parameters: {said}, the others at their defaults" if changed else "Parameters: all at their defaults"
    table = render(["Parameter", "Value", "Meaning"], cells, [False] * 3)
    body = _scrollable(markup.safe_html(table.html), "parameters")
    return f"<summary>{html.escape(words)}</summary>{body}" if defaults else ""


def _assigned(source: str) -> dict[str, tuple[object, int]]:
    """Name -> (literal, line) of each top-level assignment."""
    found = {}
    for node in ast.parse(source).body:
        target = (
            node.target
            if isinstance(node, ast.AnnAssign)
            else node.targets[0]
            if isinstance(node, ast.Assign)
            else None
        )
        if isinstance(target, ast.Name) and node.value is not None:
            found[target.id] = (ast.literal_eval(node.value), node.lineno)
    return found


def _comments(source: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}


def _output(output: NotebookNode, label: str, prefix: str) -> str:
    """One output: an error, a stream, or the best safe form of a result."""
    if output.output_type == "stream":
        return _stream(output)
    if output.output_type == "error":
        name, value = (scrub(_plain(output.get(key, ""))) for key in ("ename", "evalue"))
        trace = _text_block("\n".join(output.get("traceback", [])))
        head = f'<p class="error"><strong>{html.escape(name)}</strong> {html.escape(value)}</p>'
        return f"{head}<details><summary>Traceback</summary>{trace}</details>"
    if all(output.get("metadata", {}).get(key) == value for key, value in MARK.items()):
        return ""
    return _rich(output.get("data", {}), label, prefix)


def _rich(data: dict, label: str, prefix: str) -> str:
    if any(kind.startswith("application/vnd.jupyter.widget") or "javascript" in kind for kind in data):
        return ""
    for kind, draw in (("image/svg+xml", _svg), ("image/png", _png)):
        if kind in data and (picture := draw(_joined(data[kind]), label, prefix)):
            return picture
    if "text/html" in data:
        return _scrollable(markup.safe_html(scrub(_joined(data["text/html"]))), "result")
    text = _joined(data.get("text/markdown", ""))
    if text:
        return f'<div class="prose">{markdown(text)}</div>'
    return _text_block(_joined(data["text/plain"])) if "text/plain" in data else ""


def _svg(text: str, label: str, prefix: str) -> str:
    if len(text) > LONGEST_PICTURE:
        return _left_out("figure", len(text))
    try:
        return figure(markup.safe_svg(scrub(text), prefix=prefix, label=label))
    except ValueError:
        return ""


def _png(data: str, label: str, prefix: str) -> str:
    if len(data) > LONGEST_PICTURE:
        return _left_out("figure", len(data))
    try:
        return figure(png_tag(data, label))
    except ValueError:
        return ""


def png_tag(data: str | bytes, label: str) -> str:
    """An image element of a PNG, given as bytes or in base64. Raises ValueError for anything else."""
    encoded = base64.b64encode(data).decode() if isinstance(data, bytes) else data
    return f'<img class="card" src="{markup.safe_png(encoded)}" alt="{html.escape(label)}">'


def figure(picture: str) -> str:
    """A picture in its frame, which scrolls by itself where the screen is narrower than the figure can bear."""
    wide = re.search(r'width="(\d+)"', picture[:400])
    kind = " wide" if wide and int(wide[1]) > 800 else ""
    return f'<figure class="figure{kind}" tabindex="0">{picture}</figure>'


def _stream(output: NotebookNode) -> str:
    block = _text_block(_joined(output.get("text", "")))
    if not block:
        return ""
    return f"<details><summary>Warnings</summary>{block}</details>" if output.get("name") == "stderr" else block


def _text_block(text: str) -> str:
    text = scrub(_plain(text)).strip("\n")
    if not text.strip():
        return ""
    cut = f"\n… {len(text) - LONGEST_TEXT:,} more characters" if len(text) > LONGEST_TEXT else ""
    return f'<pre class="text" tabindex="0">{html.escape(text[:LONGEST_TEXT] + cut)}</pre>'


def _left_out(what: str, size: int) -> str:
    return f"<p><em>A {what} of {size / 1e6:.1f} MB was left out.</em></p>"


def _scrollable(block: str, name: str) -> str:
    return f'<div class="scroll" role="region" aria-label="{html.escape(name)}" tabindex="0">{block}</div>'


def _highlight(source: str) -> str:
    return highlight(source, PythonLexer(), HtmlFormatter(nowrap=True)).rstrip("\n")


def _tags(cell: NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", []))


def _joined(value) -> str:
    return "".join(value) if isinstance(value, list) else str(value)


def _plain(text: str) -> str:
    """Terminal colors and carriage returns resolved: of each line what was printed last."""
    return "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in _ANSI.sub("", text).split("\n"))
