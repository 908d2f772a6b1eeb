"""What a page says, taken apart: blocks, inline code, links, headings, tables."""

import functools
import re
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt  # comes with rich
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent.parent
SKILL = ROOT / "skills" / "pytrio-skill"

EXECUTED, FRAGMENT, SHELL = "python", "python fragment", "bash"
# Languages of blocks that nothing can run; any other info string is a mistake.
UNREAD_BLOCKS = ("text", "json", "jsonl", "yaml", "toml", "diff", "jinja")
# Files of the user's that the text speaks about; everything else must exist.
USER_FILES = ("LOOP.py", "your_script.py", "loop.py", "train.py", "my_loop.py", "SCRIPT.py")
# Pages about other engines: options, metrics and names there are mostly not ours.
FOREIGN_PAGES = ("scale-out.md",)
# Columns of tables that quote mistakes on purpose.
QUOTING_COLUMNS = ("symptom", "cause", "line", "message", "seen", "exact message or symptom")


COMMAND_SECONDS = 120
SHOWN_LINES = 12


def last_lines(output: str) -> list[str]:
    """The end of what a failed program printed."""
    return output.rstrip().splitlines()[-SHOWN_LINES:]


@dataclass(frozen=True)
class Problem:
    """Something that is not true, at a line of a page."""

    page: Path
    line: int
    text: str

    def __str__(self) -> str:
        page = self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page
        return f"{page}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is that of its first line of content, counted from 1."""

    page: Path
    line: int
    info: str
    body: str

    @property
    def source(self) -> str:
        """The body on the lines it has in the page, so that every message names the page's line."""
        return "\n" * (self.line - 1) + self.body


@dataclass(frozen=True)
class Span:
    """Inline code; `column` is the title of its column in a table, else empty."""

    line: int
    text: str
    column: str = ""
    first: bool = False  # in the first column


@dataclass
class Page:
    """What a page says, taken apart once."""

    path: Path
    text: str
    blocks: list[Block] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    links: list[tuple[int, str]] = field(default_factory=list)
    headings: list[tuple[int, int, str]] = field(default_factory=list)  # line, level, text
    rows: list[tuple[int, dict[str, str]]] = field(default_factory=list)  # line, title -> cell

    @property
    def anchors(self) -> set[str]:
        """Anchors of the headings as GitHub makes them."""
        found: dict[str, int] = {}
        anchors = set()
        for _, _, text in self.headings:
            anchor = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            count = found.get(anchor, 0)
            found[anchor] = count + 1
            anchors.add(f"{anchor}-{count}" if count else anchor)
        return anchors

    @property
    def lines(self) -> list[tuple[int, str]]:
        """All lines of the text with their numbers."""
        return list(enumerate(self.text.splitlines(), 1))


def parse_page(path: Path, text: str | None = None) -> Page:
    """A page of the project; `text` stands in for the file's own."""
    if text is None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SystemExit(f"{path}:1: cannot be read: {error}") from None
    page = Page(path, text)
    front = re.match(r"---\n.*?\n---\n", text, re.DOTALL)
    # Blank lines keep the numbers of the lines that follow.
    body = "\n" * front[0].count("\n") + text[front.end() :] if front else text
    line = 1
    titles: list[str] = []
    cells: list[str] = []
    in_head, heading = False, 0
    for token in MarkdownIt("commonmark").enable("table").parse(body):
        if token.map:
            line = token.map[0] + 1
        if token.type == "fence":
            is_closed = token.map is None or token.content.count("\n") == (
                token.map[1] - token.map[0] - 2
            )
            # The rest of the page would be in it, unread.
            info = token.info.strip() if is_closed else f"{token.info.strip()} (never closed)"
            page.blocks.append(Block(path, line + 1, info, token.content))
        elif token.type == "code_block":
            page.blocks.append(Block(path, line, "indented", token.content))
        elif token.type == "heading_open":
            heading = int(token.tag[1:])
        elif token.type in ("thead_open", "thead_close"):
            in_head = token.type == "thead_open"
            titles = [] if in_head else titles
        elif token.type == "tr_open":
            cells = []
        elif token.type == "tr_close" and not in_head:
            page.rows.append((line, dict(zip(titles, cells, strict=False))))
        elif token.type == "table_close":
            titles, cells = [], []
        elif token.type == "inline":
            content = plain_text(token)
            if in_head:
                titles.append(content)
            elif titles:
                cells.append(content)
            if heading:
                page.headings.append((line, heading, content))
                heading = 0
            column = titles[len(cells) - 1].lower() if titles and not in_head else ""
            read_inline(page, token, line, column, first=len(cells) == 1)
    return page


def plain_text(token: Token) -> str:
    """The words of an inline token without its marks."""
    return "".join(
        " " if child.type in ("softbreak", "hardbreak") else child.content
        for child in token.children or ()
    )


def read_inline(page: Page, token: Token, line: int, column: str, first: bool) -> None:
    """Collect the code, the links and the pictures of one paragraph or cell."""
    for child in token.children or ():
        if child.type in ("softbreak", "hardbreak"):
            line += 1
        elif child.type == "code_inline":
            page.spans.append(Span(line, child.content, column, first))
        elif child.type in ("link_open", "image"):
            page.links.append((line, str(child.attrs.get("href") or child.attrs["src"])))


def page_paths() -> list[Path]:
    """Every page that exists: the router, the notes and both READMEs."""
    readmes = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
    paths = [SKILL / "SKILL.md", *sorted((SKILL / "references").glob("*.md")), *readmes]
    return [path for path in paths if path.exists()]


def base_of(page: Page) -> Path:
    """The folder that commands and paths of a page start from."""
    return SKILL if page.path.is_relative_to(SKILL) else ROOT


def existing(page: Page, name: str) -> Path | None:
    """The file or folder that a path in the text means, None when there is none."""
    inside = re.sub(r"^.*?pytrio-skill/", "", name) if "pytrio-skill/" in name else name
    for folder in (page.path.parent, base_of(page), SKILL, ROOT):
        for spelling in (name, inside):
            if "*" in spelling and any(folder.glob(spelling)):
                return folder
            if "*" not in spelling and (folder / spelling).exists():
                return folder / spelling
    return None


@functools.cache
def parsed(path: Path) -> Page:
    """A page as it is on disk."""
    return parse_page(path)
