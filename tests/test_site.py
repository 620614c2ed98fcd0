"""The site from fabricated runs in temporary folders: what is shown, what is refused, what never leaks."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import nbformat
import pandas as pd
import pytest

matplotlib.use("Agg")

from flashstudy.facts import checkout, claims
from flashstudy.runs import folders
from flashstudy.share import gallery, plots, site, tables
from flashstudy.studies import READING_ORDER

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"
CARD = {
    "cpu_model": "Example CPU 9000", "arch": "x86_64", "simd": ["avx2"], "physical_cores": 2, "usable_cpus": 2,
    "memory_limit_bytes": 8_000_000_000, "llc_bytes": 33_554_432, "n_threads": 2, "standard_dtype": "float32",
    "fast_bf16": False, "read_bytes_per_s": {"1": 2.1e10, "2": 2.6e10}, "gemm_flop_per_s": {"fp32": 9e10, "int8": 3e11},
    "gpu": None, "measured_at": "2026-12-01T09:00:00+00:00", "contended": False,
}  # fmt: skip


def ratio_frame(article: float = 2.31) -> pd.DataFrame:
    """Time ratios of both Flash variants in a task, and the row that the headline claim is judged by."""
    rows = [
        {
            "recipe": name,
            "element": "all",
            "phase": "task",
            "time_ratio": ratio,
            "low": 0.95 * ratio,
            "high": 1.05 * ratio,
        }
        | {"predicted_ratio": 0.9 * ratio, "contended": False, "input_tokens": 256, "output_tokens": 64}
        for name, ratio in (("ARTICLE_FLASH", article), ("BEST_FLASH", 0.62))
    ]
    claim = {"claim_id": "slowdown", "verdict_kind": "mechanism_here", "estimate": article, "contended": False}
    return pd.DataFrame([*rows, claim | {"low": 0.95 * article, "high": 1.05 * article, "config": "task"}])


def write_run(
    results: Path, name: str, result: pd.DataFrame, *, profile="quick", end="2026-12-01T10:00:00.000Z", status="done",
    reason="", draw=None, notebook=None, provenance=None,
) -> Path:  # fmt: skip
    """A run's folder as the runner leaves it, with a figure by `draw(plots, result)` and an executed notebook."""
    folder = results / name / f"{end[:10].replace('-', '')}T{end[11:19].replace(':', '')}Z-{profile}"
    folder.mkdir(parents=True)
    parameters = {"input_tokens": 256, "output_tokens": 64}
    origin = {
        "parameters": parameters,
        "machine": {"card": CARD},
        "n_threads": {"torch": 2},
        "commit": {"sha": "0123456789ab"},
    }
    folders.write_json(folder / folders.PROVENANCE, origin | {"versions": {"torch": "2.13.0"}} | (provenance or {}))
    result.to_parquet(folder / folders.RESULT)
    plots.set_style()
    for number, figure in enumerate(draw(plots, result) if draw else [], start=1):
        figure.savefig(folder / f"figure_{number}.svg", bbox_inches="tight", metadata={"Date": None})
    nbformat.write(notebook or executed_notebook(name), folder / folders.NOTEBOOK)
    ending = {"name": name, "profile": profile, "status": status, "reason": reason, "start": end, "end": end}
    folders.write_json(folder / folders.RUN_JSON, ending)
    return folder


def executed_notebook(name: str, outputs: dict[str, object] | None = None) -> nbformat.NotebookNode:
    """The committed notebook with `outputs`: a code cell that contains the key displays the value."""
    notebook = nbformat.read(checkout.notebooks_dir() / f"{name}.ipynb", as_version=4)
    for cell in notebook.cells:
        for text, value in (outputs or {}).items():
            if cell.cell_type == "code" and text in cell.source:
                data = value if isinstance(value, dict) else {"text/html": value._repr_html_(), "text/plain": "…"}
                cell.outputs = [nbformat.v4.new_output("display_data", data)]
    return notebook


def draw_ratios(plots, result):
    fig, ax = plots.axes()
    plots.ratios(result, ax)
    yield fig


@pytest.fixture(autouse=True)
def studies_without_torch(monkeypatch):
    stub_studies(monkeypatch)


def stub_studies(monkeypatch) -> None:
    """A headline needs no torch, which the studies import: five seconds a test run."""
    said = SimpleNamespace(headline=lambda result: f"A task takes {result.time_ratio.iloc[0]:.2f} times as long.")
    for name in READING_ORDER:
        monkeypatch.setitem(sys.modules, f"flashstudy.studies.{name}", said)


def build(tmp_path: Path, *results: Path) -> str:
    return site.build(list(results) or tmp_path / "results", tmp_path / "site").read_text()


def visible(text: str) -> str:
    """The text of a page without its tags."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))


@pytest.fixture
def results(tmp_path):
    root = tmp_path / "results"
    root.mkdir()
    return root


def test_without_a_result_the_site_says_so_and_lists_every_claim(tmp_path, results):
    text = build(tmp_path)
    assert "<h1>Nothing measured yet</h1>" in text
    assert text.count('class="claim" id="claim-') == 60
    assert "60 claims, two verdicts each" in text
    assert sorted(path.name for path in (tmp_path / "site").iterdir()) == ["index.html", "style.css"]


def test_without_a_results_folder_the_site_says_so_too(tmp_path):
    assert "Nothing measured yet" in build(tmp_path, tmp_path / "nowhere")


def test_the_first_screen_is_the_headline_with_its_picture(tmp_path, results):
    write_run(results, "slowdown_attribution", ratio_frame(), draw=draw_ratios)
    text = build(tmp_path)
    first_screen = text[text.index('class="hero"') : text.index('id="notebooks"')]
    assert "A task takes 2.31 times as long." in first_screen
    assert "<svg" in first_screen and "Article Flash" in first_screen
    assert 'aria-label="Time ratios by variant and phase. A task takes 2.31 times as long."' in first_screen
    assert "A task reads 256 tokens and writes 64" in first_screen
    assert "Example CPU 9000 · 2 threads · 1 Dec 2026" in first_screen
    assert first_screen.count(">measured<") == 1


def test_a_claim_shows_both_verdicts_its_margin_and_its_reason(tmp_path, results):
    write_run(results, "slowdown_attribution", ratio_frame())
    text = build(tmp_path)
    entry = visible(text[text.index('id="claim-slowdown"') : text.index('id="claim-targeted_gain"')])
    assert "supported" in entry and "no study yet" in entry
    assert "margin +1.1" in entry  # 0.95 · 2.31 - 1.05 = 1.14
    assert "task: 2.31× [2.19, 2.43] lies inside the band from 1.05× up" in entry
    assert "claimed 2× to 2.2×" in entry


def test_the_widest_profiles_newest_run_is_shown(tmp_path, results):
    for profile, ratio, end in (
        ("full", 3.0, "2026-12-01T10:00:00.000Z"),
        ("full", 4.0, "2026-12-01T11:00:00.000Z"),
        ("quick", 5.0, "2026-12-02T10:00:00.000Z"),
        ("smoke", 6.0, "2026-12-03T10:00:00.000Z"),
    ):
        write_run(results, "slowdown_attribution", ratio_frame(ratio), profile=profile, end=end)
    assert "A task takes 4.00 times as long." in build(tmp_path)
    assert gallery.best_run("slowdown_attribution", [results]).profile == "full"


def test_results_of_two_folders_are_merged(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    write_run(one, "slowdown_attribution", ratio_frame(3.0), end="2026-12-01T10:00:00.000Z")
    write_run(two, "slowdown_attribution", ratio_frame(4.0), end="2026-12-01T12:00:00.000Z")
    write_run(one, "quantization_error", ratio_frame())
    text = build(tmp_path, one, two)
    assert "A task takes 4.00 times as long." in text
    assert (tmp_path / "site" / "quantization_error.html").is_file()


def test_a_failed_run_is_told_with_its_reason(tmp_path, results):
    reason = "the kernel was killed (signal 9)"
    write_run(results, "quantization_error", ratio_frame(), status="killed", reason=reason)
    text = build(tmp_path)
    assert "The run ended as “killed”." in text and reason in text
    assert not (tmp_path / "site" / "quantization_error.html").exists()


def test_a_failure_older_than_the_good_run_is_past(tmp_path, results):
    write_run(results, "slowdown_attribution", ratio_frame(), status="failed", reason="early trouble")
    write_run(results, "slowdown_attribution", ratio_frame(), end="2026-12-02T10:00:00.000Z")
    assert "trouble" not in build(tmp_path)
    late = {"status": "timed_out", "reason": "late trouble", "end": "2026-12-03T10:00:00.000Z"}
    write_run(results, "slowdown_attribution", ratio_frame(), **late)
    text = build(tmp_path)
    assert "A later run ended as “timed out”." in text and "late trouble" in text and "early trouble" not in text


def test_a_study_that_cannot_speak_is_shown_without_a_sentence(tmp_path, results, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashstudy.studies.slowdown_attribution", SimpleNamespace())
    write_run(results, "slowdown_attribution", ratio_frame())
    assert "<h1>Why can the Flash model take twice as long?</h1>" in build(tmp_path)


def test_half_a_run_is_no_run(tmp_path, results):
    folder = write_run(results, "slowdown_attribution", ratio_frame())
    (folder / folders.RUN_JSON).unlink()
    assert "Nothing measured yet" in build(tmp_path)


def test_what_strangers_wrote_is_shown_as_text(tmp_path, results):
    card = CARD | {
        "cpu_model": HOSTILE,
        "simd": [HOSTILE],
        "standard_dtype": HOSTILE,
        "read_bytes_per_s": {HOSTILE: 1e10},
    }
    frame = ratio_frame()
    frame.loc[2, "config"] = HOSTILE
    write_run(
        results, "slowdown_attribution", frame, provenance={"machine": {"card": card}, "versions": {"torch": HOSTILE}}
    )
    write_run(results, "memory_bandwidth", ratio_frame(), status="failed", reason=HOSTILE)
    write_run(results, "length_crossover", ratio_frame(), profile=HOSTILE[:20].replace("/", ""))
    index, page = build(tmp_path), (tmp_path / "site" / "slowdown_attribution.html").read_text()
    for text in (index, page):
        assert "<script" not in text and "<img" not in text
        assert "&lt;script&gt;" in text


def test_hostile_folder_names_are_not_studies(tmp_path, results):
    write_run(results, "slowdown_attribution", ratio_frame())
    (results / "<b>x").mkdir()
    (results / "Not-a-study").mkdir()
    assert [entry.name for entry in gallery.entries([results]) if entry.run] == ["slowdown_attribution"]
    assert "Not-a-study" not in build(tmp_path)


def test_provenance_of_any_shape_is_survived(tmp_path, results):
    write_run(
        results,
        "slowdown_attribution",
        ratio_frame(),
        provenance={"machine": None, "versions": None, "commit": 3, "n_threads": []},
    )
    assert "unknown machine" in build(tmp_path)


def test_a_figure_that_is_a_link_or_too_large_is_not_shown(tmp_path, results):
    folder = write_run(results, "slowdown_attribution", ratio_frame(), draw=draw_ratios)
    (folder / "figure_1.svg").rename(tmp_path / "elsewhere.svg")
    (folder / "figure_1.svg").symlink_to(tmp_path / "elsewhere.svg")
    run = gallery.best_run("slowdown_attribution", [results])
    assert gallery.picture(run, "label") == ""
    (folder / "figure_1.svg").unlink()
    (folder / "figure_1.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'>" + " " * 1_000_001 + "</svg>")
    assert gallery.picture(run, "label") == ""


def test_no_page_tells_a_path_of_this_machine(tmp_path, results):
    notebook = executed_notebook(
        "slowdown_attribution", {"records.save": {"text/plain": f"PosixPath('{tmp_path}/results/x')"}}
    )
    write_run(results, "slowdown_attribution", ratio_frame(), notebook=notebook)
    write_run(results, "memory_bandwidth", ratio_frame(), status="failed", reason=f"cannot write {tmp_path}/results/x")
    build(tmp_path)
    for path in (tmp_path / "site").iterdir():
        text = path.read_text()
        assert str(tmp_path) not in text and str(checkout.root()) not in text and str(Path.home()) + "/" not in text


def test_every_link_leads_somewhere(tmp_path, results):
    for name in ("slowdown_attribution", "quantization_error"):
        write_run(results, name, ratio_frame())
    build(tmp_path)
    pages = {path.name: path.read_text() for path in (tmp_path / "site").glob("*.html")}
    links = [(name, link) for name, text in pages.items() for link in re.findall(r'href="([^"]+)"', text)]
    assert len(links) > 30
    for name, link in links:
        file, _, anchor = link.partition("#")
        target = pages.get(file or name, "" if file != "style.css" else "style")
        assert target, link
        assert not anchor or f'id="{anchor}"' in target, link


def test_ids_are_unique_and_figures_described(tmp_path, results):
    write_run(results, "slowdown_attribution", ratio_frame(), draw=draw_ratios)
    write_run(results, "quantization_error", ratio_frame(), draw=draw_ratios)
    text = build(tmp_path)
    ids = re.findall(r'\sid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert len(re.findall(r"<svg", text)) == len(re.findall(r'<svg[^>]*role="img"[^>]*aria-label="[^"]{10,}"', text))


def test_the_site_is_small_complete_and_without_leftovers(tmp_path, results):
    table = tables.show(ratio_frame())
    for name in ("slowdown_attribution", "quantization_error", "pruning_fragmentation"):
        write_run(
            results, name, ratio_frame(), draw=draw_ratios, notebook=executed_notebook(name, {"tables.show": table})
        )
    build(tmp_path)
    build(tmp_path)  # again, over itself
    files = list((tmp_path / "site").iterdir())
    assert sum(path.stat().st_size for path in files) < 400_000
    assert sorted(path.name for path in files) == [
        "index.html", "pruning_fragmentation.html", "quantization_error.html", "slowdown_attribution.html", "style.css",
    ]  # fmt: skip
    assert {oct(path.stat().st_mode)[-3:] for path in files} == {"644"}


def test_pages_whose_run_is_gone_are_removed_and_other_peoples_files_are_not(tmp_path, results):
    folder = write_run(results, "slowdown_attribution", ratio_frame())
    build(tmp_path)
    (tmp_path / "site" / "mine.html").write_text("mine")
    (tmp_path / "site" / "quantization_error.html").write_text("by hand, under a study's name")
    (folder / folders.RUN_JSON).unlink()
    build(tmp_path)
    assert sorted(path.name for path in (tmp_path / "site").glob("*.html")) == [
        "index.html",
        "mine.html",
        "quantization_error.html",
    ]


def test_the_tallies_count_every_claim(tmp_path, results):
    write_run(results, "slowdown_attribution", ratio_frame())
    text = build(tmp_path)
    for title in ("Mechanism here", "As stated"):
        label = re.search(rf'aria-label="{title}: ([^"]+)"', text)[1]
        assert sum(int(number) for number in re.findall(r"\d+", label)) == len(claims.load())


def theme(css: str, dark: bool) -> dict[str, str]:
    blocks = re.findall(r":root \{(.*?)\}", css, re.S)
    return dict(re.findall(r"(--[\w-]+):\s*(#[0-9a-f]{6})", blocks[0] + (blocks[1] if dark else "")))


@pytest.mark.parametrize("dark", [False, True])
def test_text_reaches_a_contrast_of_four_and_a_half_in_both_themes(dark):
    from test_plots import contrast

    colors = theme((Path(site.__file__).parent / "style.css").read_text(), dark)
    words = ["--ink", "--muted", "--link", "--good", "--bad", "--open", "--none", "--fig-ink", "--fig-muted"]
    words += [name for name in colors if name.endswith("-text") or name.startswith("--code-")]
    assert len(words) == 19
    for ground in ("--paper", "--raised"):
        assert {name for name in words if contrast(colors[name], colors[ground]) < 4.5} == set()
