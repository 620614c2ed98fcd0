"""The page of a notebook: nothing runs, nothing is fetched, nothing tells where or by whom it was made."""

import base64
import getpass
import hashlib
import re
import socket
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from flashstudy.facts import checkout
from flashstudy.share import cells, markup, page
from flashstudy.share.progress import MARK
from flashstudy.share.scrub import scrub

ATTACKS = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg onload=alert(1)><script>alert(1)</script></svg>",
    '<a href="javascript:alert(1)">x</a>',
    '<iframe src="http://evil.example/"></iframe>',
    "<style>@import 'http://evil.example/'</style>",
    '<p style="background:url(http://evil.example/)" onclick="alert(1)">x</p>',
    "<object data=http://evil.example/></object>",
    '<form action="http://evil.example/"><input name=a autofocus onfocus=alert(1)></form>',
    "<math><mi xlink:href='javascript:alert(1)'>x</mi></math>",
    "<link rel=stylesheet href=http://evil.example/x.css>",
    "<base href=http://evil.example/>",
    "<meta http-equiv=refresh content='0;url=http://evil.example/'>",
)
SVG_ATTACK = """
<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 9 9" onload="alert(1)">
<script>alert(1)</script>
<foreignObject><body xmlns="http://www.w3.org/1999/xhtml"><script>alert(1)</script></body></foreignObject>
<a xlink:href="javascript:alert(1)"><text x="1" y="2">links are dropped whole</text></a>
<rect width="5" height="5" onclick="alert(1)" style="fill: url(http://evil.example/x); stroke: #0173b2"/>
<image xlink:href="http://evil.example/x.png" width="1" height="1"/><use xlink:href="http://evil.example/x.svg#a"/>
<style>@import "http://evil.example/x.css"; * { fill: red }</style>
<animate attributeName="href" to="javascript:alert(1)"/>
<text x="1" y="5" style="fill: #1f2428">label &lt;b&gt;</text></svg>""".strip()
CLIPPED = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"><defs><clipPath id="p"/></defs>
<path id="q" clip-path="url(#p)" d="M 0 0"/></svg>"""
ACTIVE_TAGS = set(
    re.findall(r"\w+", "script iframe object embed form input base foreignobject animate audio video source")
)
ACTIVE_TAGS |= {"style", "meta", "link"}
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"0" * 20).decode()


def html_output(text: str, **metadata):
    return new_output("display_data", {"text/html": text, "text/plain": "plain"}, metadata=metadata)


def notebook(*more) -> nbformat.NotebookNode:
    return new_notebook(cells=[new_markdown_cell("# Is it safe?\n\nTwo sentences. In a row."), *more])


def code(source: str, *outputs, tags=()) -> nbformat.NotebookNode:
    return new_code_cell(source, outputs=list(outputs), metadata={"tags": list(tags)})


def harmless(text: str) -> bool:
    """Whether no tag or attribute of the text could run or fetch anything; links may lead to the web."""
    tags = re.findall(r"<([a-zA-Z][^\s>/]*)([^>]*)>", text)
    bad_tags = {name.lower() for name, _ in tags} & ACTIVE_TAGS
    bad_attributes = [
        rest for _, rest in tags if re.search(r"\s(on\w+|style|srcset|action|formaction)\s*=", rest, re.I)
    ]
    fetched = [
        address
        for name, rest in tags
        for address in re.findall(r"\s(?:src|href|data|xlink:href)\s*=\s*[\"']?([^\"'\s>]+)", rest)
        if not re.match(r"#|data:image/png;base64,|style\.css$|index\.html", address)
        and not (name == "a" and address.startswith(("http://", "https://")))
    ]
    return not bad_tags and not bad_attributes and not fetched


def test_the_checker_itself_sees_each_attack():
    assert not [attack for attack in (*ATTACKS, SVG_ATTACK) if harmless(attack)]
    assert harmless('<p>a <a href="https://example.org/">link</a> and <b>text</b></p>')


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_in_outputs_and_prose_are_neutralized(attack):
    text = page.render(
        notebook(
            new_markdown_cell(f"Prose {attack} and [link](javascript:alert(1)) ![picture](http://evil.example/p.png)"),
            new_markdown_cell(f"$\\text{{{attack}}}$"),
            code("x", html_output(f"<b>kept</b> {attack}"), new_output("stream", name="stdout", text=attack)),
            code("y", new_output("error", ename=attack, evalue=attack, traceback=[attack])),
            code(f"n: str = {attack!r}  # {attack}", tags=["parameters"]),
            code("z", new_output("display_data", {"text/markdown": attack})),
        )
    )
    assert harmless(text.partition("</head>")[2])
    assert "<b>kept</b>" in text


def test_of_dropped_elements_not_even_the_text_stays():
    assert markup.safe_html("<b>kept</b><script>alert(1)</script><style>p {}</style><!-- note -->") == "<b>kept</b>"


def test_an_svg_keeps_its_drawing_and_loses_the_rest():
    safe = markup.safe_svg(SVG_ATTACK, prefix="f-", label='a "figure" <here>')
    assert harmless(safe)
    assert "evil" not in safe and "alert" not in safe
    assert "label &lt;b&gt;" in safe and 'fill="var(--fig-ink)"' in safe and 'stroke="var(--fig-blue)"' in safe
    assert 'aria-label="a &quot;figure&quot; &lt;here&gt;"' in safe


def test_ids_of_two_figures_do_not_meet():
    one, two = (markup.safe_svg(CLIPPED, prefix=prefix, label="") for prefix in ("a-", "b-"))
    assert 'id="a-p"' in one and "url(#a-p)" in one and 'id="b-p"' in two
    assert 'id="a-q"' not in one  # nothing refers to it


@pytest.mark.parametrize(
    "text", ["no xml", "<html/>", '<!DOCTYPE x [<!ENTITY a "b">]><svg xmlns="http://www.w3.org/2000/svg"/>']
)
def test_what_is_no_svg_is_refused(text):
    with pytest.raises(ValueError):
        markup.safe_svg(text, prefix="", label="")


def test_only_png_becomes_a_picture():
    assert markup.safe_png(PNG).startswith("data:image/png;base64,")
    with pytest.raises(ValueError, match="not a PNG"):
        markup.safe_png(base64.b64encode(b"<svg onload=alert(1)>").decode())
    with pytest.raises(ValueError, match="not base64"):
        markup.safe_png('"><script>')


def test_formulas_become_mathml_and_bad_ones_code():
    text = cells.markdown(r"Time is $t \ge \frac{B}{\beta}$ and costs $5 or $6." + "\n\n$$T_{prefill} = 1$$")
    assert "<mfrac><mrow><mi>B</mi></mrow><mrow><mi>β</mi></mrow></mfrac>" in text
    assert "costs $5 or $6" in text
    assert "<mtext>prefill</mtext>" in text and 'display="block"' in text
    assert markup.safe_math(r"\frac{", display=False) == "<code>\\frac{</code>"


def test_widgets_scripts_and_the_progress_line_are_dropped():
    text = page.render(
        notebook(
            code(
                "a",
                new_output("display_data", {"application/vnd.jupyter.widget-view+json": {}, "text/plain": "Slider()"}),
            ),
            code("b", new_output("display_data", {"application/javascript": "alert(1)", "text/plain": "js"})),
            code("c", html_output("<p>3 of 5</p>", **MARK)),
            code("d", html_output("<p>kept</p>")),
        )
    )
    assert "Slider" not in text and "alert" not in text and "3 of 5" not in text
    assert "<p>kept</p>" in text


def test_of_a_figure_the_svg_is_taken_and_described():
    svg = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 10 10"><path d="M 0 0" style="fill: #d55e00"/></svg>'
    text = page.render(notebook(code("fig", new_output("display_data", {"image/svg+xml": svg, "image/png": PNG}))))
    assert text.count("<figure") == 1 and "data:image/png" not in text
    assert 'aria-label="Figure: Is it safe?"' in text
    fallback = page.render(
        notebook(code("fig", new_output("display_data", {"image/svg+xml": "broken", "image/png": PNG})))
    )
    assert 'alt="Figure: Is it safe?"' in fallback and "data:image/png" in fallback


def test_parameters_show_what_differs_from_the_defaults():
    source = "bits: list[int] = [8, 4]  # widths to try\nbudget_s: float = 1.0  # seconds <each>"
    text = page.render(
        notebook(code(source, tags=["parameters"]), code("# Parameters\nbudget_s = 2.5", tags=["injected-parameters"]))
    )
    assert "Parameters: budget_s = 2.5, the others at their defaults" in text
    assert "2.5 (default 1.0)" in text and "seconds &lt;each&gt;" in text and "widths to try" in text
    assert "# Parameters" not in text
    assert "Parameters: all at their defaults" in page.render(notebook(code(source, tags=["parameters"])))


def test_parameters_that_are_no_literals_stay_code():
    text = page.render(notebook(code("x = 128 // 4  # derived", tags=["parameters"])))
    assert 'class="code"' in text and "<table" not in text


def test_setup_is_folded_and_warnings_too():
    text = page.render(
        notebook(code("import os", tags=["hide-input"]), code("w", new_output("stream", name="stderr", text="careful")))
    )
    assert "<summary>Set-up code</summary>" in text and "<summary>Warnings</summary>" in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/alice/secret/run.py:12", "…/run.py:12"),
        ("in /home/alice and /Users/bob/", "in … and …"),
        (r"C:\Users\carol\notes\a.txt", "…/a.txt"),
        (r"D:\data\models\a.gguf", "…/a.gguf"),
        ("PosixPath('/data/my models/a.gguf')", "PosixPath('…/a.gguf')"),
        ("file:///srv/data/x.html", "…/x.html"),
        ("/usr/lib/python3.11/ssl.py", "…/ssl.py"),
        ("path=/var/lib/x", "path=…/x"),
    ],
)
def test_paths_keep_their_last_part_only(text, shown):
    assert scrub(text).replace("…\\", "…/") == shown


@pytest.mark.parametrize(
    "text",
    [
        "1.2 GB/s, tokens/s and/or FLOP/byte",
        "3/4 of a/b/c",
        "https://example.org/home/alice/x",
        "results/slowdown/run",
        "a </p> b",
        "~",
    ],
)
def test_what_is_no_path_stays(text):
    assert scrub(text) == text


def test_this_machine_does_not_show(monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "mallory")
    monkeypatch.setattr(socket, "gethostname", lambda: "workstation-7.lab.example")
    text = f"{checkout.root()}/results/x by mallory on workstation-7.lab.example ({Path.cwd()}) {Path.home()}/.cache/m"
    found = scrub(text)
    assert "mallory" not in found and "workstation-7" not in found
    assert str(checkout.root()) not in found and str(Path.home()) + "/" not in found
    assert "results/x" in found


def test_a_page_tells_no_path_of_any_cell(monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: "mallory")
    path = "/home/mallory/work/model.gguf"
    text = page.render(
        notebook(
            new_markdown_cell(f"See {path}"),
            code(f"model: str = {path!r}", tags=["parameters"]),
            code(
                f"open({path!r})",
                html_output(f"<p title='{path}'>{path}</p>"),
                new_output("stream", name="stdout", text=path),
            ),
            code(
                "e", new_output("error", ename="OSError", evalue=path, traceback=[f"File {path}", "\x1b[31mred\x1b[0m"])
            ),
            code("f", new_output("execute_result", {"text/plain": f"PosixPath({path!r})"})),
        )
    )
    assert "mallory" not in text and "/home" not in text
    assert "…/model.gguf" in text and "\x1b" not in text


def test_long_output_is_cut_and_counted():
    text = page.render(notebook(code("x", new_output("stream", name="stdout", text="a" * 50_000))))
    assert len(text) < 30_000
    assert "30,000 more characters" in text


def test_a_page_is_small_and_its_policy_strict():
    text = page.render(page.read(checkout.notebooks_dir() / "quantization_error.ipynb"))
    assert len(text) < 30_000
    assert "default-src 'none'" in text and "unsafe-inline" not in text
    assert text.count("<h1") == 1 and '<html lang="en">' in text and harmless(text.partition("</head>")[2])


def test_a_page_that_travels_alone_carries_its_stylesheet():
    text = page.render(notebook(), standalone=True)
    style = re.search(r"<style>(.*?)</style>", text, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in text
    assert "style.css" not in text


def test_a_broken_notebook_is_refused_in_one_line(tmp_path):
    broken = tmp_path / "broken.ipynb"
    broken.write_text('{"cells": 3}')
    with pytest.raises(ValueError, match=r"^broken.ipynb is not a notebook: \w+$"):
        page.render(broken)
