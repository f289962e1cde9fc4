"""A report as one HTML file: no network, no script; for phone and paper, light and dark."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Self

from kvire.core.errors import ConfigError
from kvire.report.style import CSS

TableCell = str | int | float | None


class Page:
    """Sections from top to bottom, in the order they are added; each call returns the page.

    title: of the file and the first heading.
    lead: one or two sentences with the finding.

    All texts are plain: HTML in them is shown as it is.

        page = Page("KV cache", "Warm answers start 9.1 times sooner.")
        page.table(["state", "TTFT s"], [["E", 3.1]])
        page.write(Path("report.html"))
    """

    def __init__(self, title: str, lead: str = "") -> None:
        self.title = title
        self.lead = lead
        self._sections: list[str] = []

    def heading(self, text: str) -> Self:
        """Begin a section."""
        return self._add(f"<h2>{escape(text)}</h2>")

    def text(self, text: str) -> Self:
        """One paragraph; blank lines begin another."""
        for paragraph in text.split("\n\n"):
            self._add(f"<p>{escape(paragraph.strip())}</p>")
        return self

    def note(self, text: str) -> Self:
        """A paragraph that must not be overlooked: a doubt, a refusal, a limit."""
        return self._add(f'<p class="note">{escape(text)}</p>')

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[TableCell]], caption: str = "") -> Self:
        """Numbers stand right, in figures of one width; None is shown as a dash.

        Wide tables scroll in their box.

        Floats are shown as they are by format `g` with four digits; pass text for anything else.
        """
        assert all(len(row) == len(headers) for row in rows), "a cell for each header"
        head = "".join(f'<th scope="col">{escape(header)}</th>' for header in headers)
        body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
        about = f"<caption>{escape(caption)}</caption>" if caption else ""
        table = f"<table>{about}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return self._add(f'<div class="scroll" tabindex="0">{table}</div>')

    def facts(self, facts: Mapping[str, TableCell]) -> Self:
        """Names and values: machine, model, seeds."""
        pairs = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(_shown(v))}</dd></div>" for k, v in facts.items())
        return self._add(f"<dl>{pairs}</dl>")

    def figure(self, svg: str, caption: str = "") -> Self:
        """A chart, from `charts.lines` or `charts.bars`: the only markup that is not escaped."""
        assert svg.startswith("<svg"), "an SVG element"
        about = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        return self._add(f"<figure>{svg}{about}</figure>")

    def html(self) -> str:
        """The whole file."""
        title = escape(self.title)
        lead = f'<p class="lead">{escape(self.lead)}</p>\n' if self.lead else ""
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">\n'
            f"<title>{title}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n{lead}"
            + "\n".join(self._sections)
            + "\n</main>\n</body>\n</html>\n"
        )

    def write(self, path: Path) -> None:
        """Write the file, UTF-8. Raises ConfigError if that fails."""
        try:
            path.write_bytes(self.html().encode(errors="replace"))  # half a surrogate pair, as in logs, is no UTF-8
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; name a file in a folder that exists") from error

    def _add(self, section: str) -> Self:
        self._sections.append(section)
        return self


def _cell(value: TableCell) -> str:
    """Text that begins with a digit is a number with its unit."""
    text = _shown(value)
    number = not isinstance(value, str) or text[:1].isdigit() or text[:2] in {f"-{digit}" for digit in range(10)}
    return f'<td class="number">{escape(text)}</td>' if number else f"<td>{escape(text)}</td>"


def _shown(value: TableCell) -> str:
    if value is None:
        return "\N{EN DASH}"
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
