"""A report is one file that needs nothing else, and shows texts as texts."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvire.core.errors import ConfigError
from kvire.report.charts import Labels, Series, bars, draw_bars, lines, save
from kvire.report.page import Page

LABELS = Labels("Time to first token", "TTFT over context.", "context, tokens", "TTFT, s")
FETCHING = {"src", "href", "xlink:href", "srcset", "data", "poster", "action"}


class Parsed(HTMLParser):
    """What a browser would fetch or run, and whether tags match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.scripts = 0
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script" or any(name.startswith("on") for name, _ in attrs)
        self.fetched += [value for name, value in attrs if name in FETCHING and not (value or "").startswith("#")]
        if tag not in {"meta", "br", "link", "img"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def full_page() -> Page:
    series = [
        Series("E", [1.0, None, 3.0], [1, 2, 3], [0.9, None, 2.0], [1.1, None, 4.0]),
        Series("D", [1, 2, 3], [1, 2, 3]),
    ]
    page = Page("A <script>alert(1)</script> & more", "One < two.")
    page.heading("Head").text("first <3\n\nsecond").note("<b>careful</b>").facts({"CPU": "x", "cores": 2, "none": None})
    page.table(["name", "value"], [["<i>", 1234.5], ["10 ms (9 ms to 12 ms)", None]], "caption")
    page.figure(lines(series, LABELS, log_y=True, levels=[("limit", 2.0)]), "lines")
    return page.figure(
        bars(["a", "b"], [Series("s", [1.0, 2.0], low=[0.5, 1.5], high=[1.5, 2.5])], LABELS, stacked=True)
    )


def test_a_page_fetches_nothing_and_runs_nothing():
    html = full_page().html()
    parsed = Parsed(html)
    assert parsed.fetched == [] and parsed.scripts == 0 and parsed.open == []
    assert not re.search(r"url\((?!#)|@import", html)
    assert "prefers-color-scheme: dark" in html and "@media print" in html and 'name="viewport"' in html


def test_texts_are_shown_as_they_are():
    html = full_page().html()
    for text in (
        "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more",
        "One &lt; two.",
        "&lt;b&gt;careful",
        "&lt;i&gt;",
        "<p>first &lt;3</p>",
    ):
        assert text in html
    assert '<td class="number">1,234</td>' in html or '<td class="number">1,235</td>' in html
    assert '<td class="number">10 ms (9 ms to 12 ms)</td>' in html and "\N{EN DASH}" in html
    assert html.count("<p>") == 2


def test_a_chart_is_text_in_the_colour_of_the_page_and_says_what_it_shows():
    svg = lines([Series("E", [1.0], [1])], LABELS)
    assert svg.startswith("<svg") and 'role="img"' in svg
    assert f"<title>{LABELS.title}</title><desc>{LABELS.description}</desc>" in svg
    assert re.search(r"<text[^>]*fill: currentColor[^>]*>[^<]*context, tokens", svg)
    assert "DejaVu" not in svg and "<style" not in svg
    assert lines([Series("E", [1.0], [1])], LABELS) == svg  # the same figures make the same file


def test_dollars_and_underscores_are_shown_as_they_are():
    labels = Labels("$5 or $6", "What it costs.", "$x_1$", "_y")
    line = lines([Series("_kv", [1, 2], [1, 2]), Series("$a_1$", [2, 1], [1, 2])], labels, levels=[("_top", 3)])
    bar = bars(["$b_1$", "$b_2$"], [Series("n", [1, 2])], labels)
    drawn = re.findall(r"<text[^>]*>([^<]*)</text>", line + bar)
    assert {"$5 or $6", "$x_1$", "_y", "_kv", "$a_1$", "_top", "$b_1$", "$b_2$"} <= {t.strip("\u200b") for t in drawn}


def test_two_charts_of_a_page_share_no_ids():
    other = Labels("Another", "Something else.", "x", "y")
    charts = [lines([Series("E", [1.0], [1])], labels) for labels in (LABELS, other)]
    ids = [set(re.findall(r'id="([mp]\w{8,})"', chart)) for chart in charts]
    assert ids[0] and not ids[0] & ids[1]


def test_gaps_and_intervals_are_drawn():
    def drawn(**ends):
        return bars(["a", "b"], [Series("s", [1.0, 2.0], **ends)], LABELS).count("LineCollection")

    assert drawn() == 0
    assert drawn(low=[0.5, 1.5], high=[1.5, 2.5]) == 2
    assert drawn(low=[0.5, None], high=[1.5, None]) == 1
    assert "nan" not in lines([Series("E", [1.0, None, 3.0], [1, 2, 3])], LABELS).lower()


def test_pictures_are_svg_or_png(tmp_path: Path):
    figure = draw_bars(["a"], [Series("s", [1.0])], LABELS)
    save(figure, LABELS, tmp_path / "a.svg")
    save(figure, LABELS, tmp_path / "a.png")
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"\.svg or a \.png"):
        save(figure, LABELS, tmp_path / "a.pdf")
    for write in (lambda path: save(figure, LABELS, path / "a.png"), lambda path: Page("t").write(path / "a.html")):
        with pytest.raises(ConfigError, match="cannot write"):
            write(tmp_path / "missing")
