"""The site in a real browser: no request leaves, no error, no overflow on a phone, usable by keyboard."""

import shutil
from pathlib import Path

import pytest
from test_site import HOSTILE, draw_ratios, executed_notebook, ratio_frame, stub_studies, write_run

from flashstudy.share import site, tables

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH")


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> list[str]:
    """Addresses of the index and of a page with every kind of output."""
    root = tmp_path_factory.mktemp("a site")  # with a space in its path
    frame = ratio_frame()
    frame.loc[2, "config"] = "a_configuration_without_any_break_" * 8
    wide = frame.assign(
        time_s=0.01, stored_bytes=6e7, compression=2.0, kernel=[f"a_kernel_with_a_long_name_{n}" for n in range(3)]
    )
    outputs = {
        "tables.show": tables.show(wide, ["recipe", "kernel", "time_ratio", "time_s", "stored_bytes", "compression"]),
        "plots.axes": {"text/html": HOSTILE + "<p onclick=alert(1) style='color:red'>kept</p>", "text/plain": "…"},
        "claims.select": {"text/plain": "a_name_without_any_break_" * 12},
    }
    notebook = executed_notebook("slowdown_attribution", outputs)
    write_run(root / "results", "slowdown_attribution", frame, draw=draw_ratios, notebook=notebook)
    write_run(root / "results", "memory_bandwidth", ratio_frame(), status="failed", reason=f"{HOSTILE} {'x' * 300}")
    with pytest.MonkeyPatch.context() as monkeypatch:
        stub_studies(monkeypatch)
        index = site.build(root / "results", root / "site")
    return [path.as_uri() for path in (index, index.with_name("slowdown_attribution.html"))]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser):
    """Opens a page; anything it says, asks or fetches beyond itself is in `noise`."""
    contexts = []

    def go(address: str, viewport: dict, **settings):
        context = browser.new_context(viewport=viewport, **settings)
        contexts.append(context)
        tab, noise = context.new_page(), []
        tab.on("console", lambda message: noise.append(f"console: {message.text}"))
        tab.on("pageerror", lambda error: noise.append(f"error: {error}"))
        tab.on("dialog", lambda dialog: (noise.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        tab.on("requestfailed", lambda request: noise.append(f"failed: {request.url}"))
        tab.on(
            "request",
            lambda request: request.url.startswith(("file:", "data:")) or noise.append(f"request: {request.url}"),
        )
        tab.goto(address)
        return tab, noise

    yield go
    for context in contexts:
        context.close()


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_a_page_is_quiet_and_fits(pages, opened, which, scheme, viewport):
    tab, noise = opened(pages[which], viewport, color_scheme=scheme)
    width = tab.evaluate("document.documentElement.scrollWidth")
    tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert tab.evaluate("document.documentElement.scrollWidth") == width == viewport["width"]
    assert noise == []


def test_the_stylesheet_is_in_force_in_both_themes(pages, opened):
    grounds = []
    for scheme in ("light", "dark"):
        tab, _ = opened(pages[0], DESKTOP, color_scheme=scheme)
        grounds.append(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
        line = tab.locator(".hero svg path[stroke='var(--fig-vermilion)']").first
        grounds.append(line.evaluate("e => getComputedStyle(e).stroke"))
    assert grounds == ["rgb(255, 255, 255)", "rgb(213, 94, 0)", "rgb(20, 23, 26)", "rgb(240, 127, 60)"]


def test_the_policy_stops_what_a_sanitizer_might_miss(pages, opened):
    tab, noise = opened(pages[1], DESKTOP)
    tab.evaluate(
        "document.body.insertAdjacentHTML('beforeend', '<img src=\"http://evil.example/x.png\" onerror=\"alert(1)\">')"
    )
    tab.wait_for_timeout(200)
    assert "failed: http://evil.example/x.png" in noise  # asked for by the picture, refused by the policy
    assert any("Content Security Policy" in text for text in noise)
    assert not [text for text in noise if text.startswith("dialog")]


def test_the_keyboard_finds_the_way_and_shows_where_it_is(pages, opened):
    tab, _ = opened(pages[0], DESKTOP)
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "skip"
    assert tab.evaluate("document.activeElement.getBoundingClientRect().left") >= 0  # hidden until it is reached
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    tab.keyboard.press("Enter")
    assert tab.url.endswith("#main")


def test_headings_go_down_one_level_at_a_time(pages, opened):
    for address in pages:
        tab, _ = opened(address, DESKTOP)
        levels = tab.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])")
        assert levels[0] == 1 and levels.count(1) == 1
        assert all(after - before <= 1 for before, after in zip(levels, levels[1:], strict=False))


def test_the_headline_and_its_picture_stand_on_the_first_screen(pages, opened):
    tab, _ = opened(pages[0], DESKTOP)
    for selector in ("h1", ".hero svg"):
        box = tab.locator(selector).first.bounding_box()
        assert box["y"] + box["height"] <= DESKTOP["height"]
    tab, _ = opened(pages[0], PHONE)
    assert tab.locator("h1").bounding_box()["y"] < 200


def test_a_claim_that_is_linked_to_is_unfolded_and_seen(pages, opened):
    tab, _ = opened(pages[0] + "#claim-slowdown", DESKTOP)
    assert tab.locator("#claim-slowdown").is_visible()


def test_print_hides_the_bar_and_is_black_on_white(pages, opened, tmp_path):
    tab, _ = opened(pages[0], DESKTOP, color_scheme="dark")
    tab.emulate_media(media="print", color_scheme="dark")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not tab.locator(".bar").is_visible()
    tab.pdf(path=tmp_path / "site.pdf")
    assert Path(tmp_path / "site.pdf").stat().st_size > 20_000
