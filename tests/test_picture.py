"""The README's picture: it is what two dry runs really print."""

import re
from xml.etree import ElementTree

import pytest

import terminal_picture
from audit import rules

SVG = "{http://www.w3.org/2000/svg}"


def lines_of(svg: str) -> list[str]:
    """The picture's text, line by line."""
    by_height: dict[float, str] = {}
    for text in ElementTree.fromstring(svg).iter(f"{SVG}text"):
        height = float(text.attrib["y"])
        by_height[height] = by_height.get(height, "") + (text.text or "")
    return [line.replace("\xa0", " ").rstrip() for _, line in sorted(by_height.items())]


def without_numbers(lines: list[str]) -> list[str]:
    """Losses differ a little from machine to machine, run names always."""
    return [re.sub(r"\d+\.\d+|train[0-9a-f]{20}", "#", line) for line in lines if line]


def test_the_picture_shows_both_ends() -> None:
    """Well-formed, nothing loaded from elsewhere, a clean run and a finding with its fix."""
    svg = terminal_picture.PICTURE.read_text(encoding="utf-8")
    assert not re.findall(r"(?:href|src|url)\s*[=(]\s*[\"']?https?:", svg) and "<script" not in svg
    lines = lines_of(svg)
    assert "audit   clean: 0 errors, 0 warnings" in lines
    assert "audit   errors: 1 error, 0 warnings" in lines
    shown = " ".join(line.strip() for line in lines)
    assert "A04-first" in shown and rules.RULES["A04-first"].fix in shown


@pytest.mark.slow
def test_the_picture_is_what_the_runs_print() -> None:
    """If this fails, run scripts/terminal_picture.py and look at the picture."""
    svg = terminal_picture.PICTURE.read_text(encoding="utf-8")
    drawn = terminal_picture.picture(terminal_picture.both_runs())
    assert without_numbers(lines_of(drawn)) == without_numbers(lines_of(svg))
