"""The report in a headless browser: nothing fetched, nothing cut off, legible on a phone and in the
dark."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import selection
from PIL import Image  # comes with matplotlib

sys.path.insert(0, str(Path(__file__).parent))

import browser
import report_samples as samples

WIDTHS = {"desktop": 1100, "phone": 390}
SCRIPTS = Path(__file__).with_name("browser_checks.js").read_text(encoding="utf-8")

pytestmark = pytest.mark.skipif(
    browser.find() is None,
    reason="no headless browser: tools/setup --strict installs chromium where it can be root",
)


@pytest.fixture(scope="module")
def page():
    with browser.browser(browser.find()) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """Reports of every kind, extreme ones among them. INGOT_REPORT_SHOTS keeps their pictures."""
    folder = tmp_path_factory.mktemp("reports")
    tiny = samples.report_of("linear_gelu")
    return {
        "usual": samples.optimize_page(folder, name="usual.html"),
        "tiny": samples.optimize_page(folder, tiny, name="tiny.html"),
        "many": samples.optimize_page(folder, samples.many_passes(), name="many.html"),
        "long": samples.optimize_page(folder, rename=samples.LONG, name="long.html"),
        "bench": samples.bench_page(folder),
    }


KINDS = ("usual", "tiny", "many", "long", "bench")


def opened(page, path: Path, width: str = "desktop", scheme: str = "light") -> None:
    page.open(path, WIDTHS[width], scheme=scheme)
    page.evaluate(SCRIPTS)
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", selection.every(2, KINDS))
def test_nothing_is_fetched_or_sticks_out(page, pages, kind, width):
    opened(page, pages[kind], width)
    assert page.requests == [pages[kind].resolve().as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") == WIDTHS[width]
    assert page.evaluate("stickingOut()") == []


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_drawings_do_not_overlap(page, pages, kind):
    opened(page, pages[kind])
    assert page.evaluate("overlappingTexts()") == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["usual", "bench"])
def test_contrast_is_enough(page, pages, kind, scheme):
    """WCAG 2.1 AA: 4.5 to 1 for every text."""
    opened(page, pages[kind], scheme=scheme)
    assert page.evaluate("lowContrast(4.5)") == []


@pytest.mark.parametrize("kind", KINDS)
def test_figures_have_names_and_headings_nest(page, pages, kind):
    opened(page, pages[kind])
    assert page.evaluate("unnamedFigures()") == []
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(h => +h.tagName[1])")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(levels, levels[1:]))


def test_text_on_a_phone_is_large_enough(page, pages):
    opened(page, pages["usual"], "phone")
    assert page.evaluate("smallestText()") >= 8.0


@pytest.mark.parametrize(
    ("width", "scheme"), [("desktop", "light"), ("desktop", "dark"), ("phone", "light")]
)
@pytest.mark.parametrize("kind", ["usual", "bench"])
def test_pictures(page, pages, kind, width, scheme, tmp_path):
    """A screenshot is not blank, and light where light was asked for."""
    page.open(pages[kind], WIDTHS[width], scheme=scheme)
    shot = Path(os.environ.get("INGOT_REPORT_SHOTS", tmp_path)) / f"{kind}-{width}-{scheme}.png"
    page.screenshot(shot)
    with Image.open(shot) as picture:
        assert picture.width == WIDTHS[width] and picture.height > 2000
        small = picture.convert("RGB").resize((picture.width // 3, picture.height // 3), 0)
    colours = {colour: count for count, colour in small.getcolors(1 << 24)}
    assert len(colours) > 100
    usual = max(colours, key=colours.__getitem__)
    assert colours[usual] < 0.9 * sum(colours.values())
    assert (sum(usual) / 3 > 128) == (scheme == "light")
