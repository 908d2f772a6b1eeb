"""Links, anchors, file names, rule codes and metrics: each exists."""

import ast
import functools
import re
from dataclasses import dataclass

from audit.rules import RULES as AUDIT_RULES
from docs.commands import examples, examples_of
from docs.pages import FOREIGN_PAGES, ROOT, SKILL, USER_FILES, Page, Problem, existing, parsed
from lint import names
from lint.rules import RULES as LINT_RULES

# First segments of `word/word` that is a path of the user's and no metric.
PATH_HEADS = ("runs", "checkpoints", "outputs", "~", ".")
# Columns of paths that lie elsewhere.
PATH_COLUMNS = ("route",)
# What else has the shape of a metric.
OTHER_SLASHED = ("and/or", "input/output", "n/a")


def check_links(page: Page) -> list[Problem]:
    """Every relative link points at a file, every anchor at a heading."""
    found = []
    for line, target in page.links:
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.path.parent / name).resolve() if name else page.path
        if not path.exists():
            found.append(Problem(page.path, line, f"the link {target} leads nowhere"))
        elif anchor and path.suffix == ".md":
            aim = page if path == page.path else parsed(path)
            if anchor not in aim.anchors:
                found.append(Problem(page.path, line, f"{path.name} has no heading #{anchor}"))
    return found


FILE_MENTION = re.compile(
    r"(?<![\w/.*-])((?:\.\./)?(?:references|examples|scripts|tests|evals|skills|weights)/"
    r"[\w./*-]*\w\.[a-z]\w*)"
)


def check_files(page: Page) -> list[Problem]:
    """Every file that is named exists."""
    found = []
    for line, text in page.lines:
        for name in FILE_MENTION.findall(text):
            if existing(page, name) is None:
                found.append(Problem(page.path, line, f"there is no {name}"))
    known = {path.name for path in (*SKILL.rglob("*"), *ROOT.glob("*"), *ROOT.glob("scripts/*"))}
    for span in page.spans:
        is_file = re.fullmatch(r"[\w-]+\.(?:py|md)", span.text)
        if is_file and span.text not in known and span.text not in USER_FILES:
            found.append(Problem(page.path, span.line, f"there is no file {span.text}"))
    return found


RULE_CODE = re.compile(r"(?<![\w.-])([AC]\d\d(?:-[a-z]+(?:-[a-z]+)*)?)(?![\w])")


@functools.cache
def rule_names() -> frozenset[str]:
    """All codes and names of the rules of audit and check."""
    audit = set(AUDIT_RULES) | {name.split("-")[0] for name in AUDIT_RULES}
    return frozenset(audit | {rule.code for rule in LINT_RULES})


def check_rules(page: Page) -> list[Problem]:
    """Every rule code and rule name exists."""
    return [
        Problem(page.path, line, f"there is no rule {code}")
        for line, text in page.lines
        for code in RULE_CODE.findall(text)
        if code not in rule_names()
    ]


@dataclass(frozen=True)
class Metrics:
    """What examples log: exact names, and the shapes of those with a placeholder."""

    exact: frozenset[str]
    shapes: tuple[re.Pattern[str], ...]

    def have(self, name: str) -> bool:
        """Is a name logged; `...` or `*` at an end, or a `_` in front, stands for the rest."""
        stem = re.sub(r"\.\.\.|\*", "", name)
        if stem != name or name.startswith("_"):
            return any(stem in key for key in self.exact) or any(
                stem in shape.pattern or stem.rstrip("/") in re.split(r"[|:)]", shape.pattern)
                for shape in self.shapes
            )
        return name in self.exact or any(shape.fullmatch(name) for shape in self.shapes)


@functools.cache
def metrics_of(names_of_examples: tuple[str, ...]) -> Metrics:
    """The metrics of several examples together."""
    found = [example_metrics(name) for name in names_of_examples]
    return Metrics(
        frozenset().union(*(metrics.exact for metrics in found)),
        tuple({shape for metrics in found for shape in metrics.shapes}),
    )


@functools.cache
def example_metrics(example: str) -> Metrics:
    """What one example logs, from its source: keys of dictionaries and of subscripts.

    In an f-string a placeholder stands for any word that is a constant of the file.
    """
    tree = ast.parse((SKILL / "examples" / example).read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    keys: list[ast.expr] = [k for n in nodes if isinstance(n, ast.Dict) for k in n.keys if k]
    keys += [n.slice for n in nodes if isinstance(n, ast.Subscript)]
    texts = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    words = sorted(text for text in texts if re.fullmatch(r"[a-z_]+", text))
    exact = {k.value for k in keys if isinstance(k, ast.Constant) and isinstance(k.value, str)}
    # Keyword arguments become keys, too: dict(reward=...), fields of a row.
    exact |= {k.arg for n in nodes if isinstance(n, ast.Call) for k in n.keywords if k.arg}
    exact |= {text for text in texts if re.fullmatch(r"[a-z_]+/[a-z_]+", text)}
    anything = f"(?:{'|'.join(words)})"
    shapes = set()
    for key in (node for node in nodes if isinstance(node, ast.JoinedStr)):
        parts = [str(v.value) if isinstance(v, ast.Constant) else None for v in key.values]
        known = "".join(part for part in parts if part is not None)
        if not re.fullmatch(r"[a-z_]+/[a-z_]*|[a-z_]*/[a-z_]+|[a-z]+_|_[a-z]+", known):
            continue
        shapes.add("".join(anything if part is None else part for part in parts))
    return Metrics(frozenset(exact), tuple(map(re.compile, sorted(shapes))))


def check_metrics(page: Page) -> list[Problem]:
    """Every metric that is named is logged by an example of the page.

    A metric is `word/word` that is no path, and whatever stands in a column called Metric.
    """
    logged, everywhere = metrics_of(examples_of(page)), metrics_of(examples())
    found: list[Problem] = []
    if page.path.name in FOREIGN_PAGES:
        return found
    for span in page.spans:
        shaped = re.fullmatch(r"[a-z_]+/(?:[a-z_]+|[a-z_]*\.\.\.)", span.text)
        titled = span.column.startswith("metric") and span.first
        titled = titled and bool(re.fullmatch(r"[a-z_.*/]+", span.text))
        head = span.text.split("/")[0]
        if not (shaped or titled) or span.text in OTHER_SLASHED or head in PATH_HEADS:
            continue
        if span.column in PATH_COLUMNS:
            continue
        if existing(page, span.text) or span.text in names.metric_keys():
            continue
        if not logged.have(span.text):
            hint = "; an example that the page does not name logs it"
            hint = hint if everywhere.have(span.text) else ""
            found.append(Problem(page.path, span.line, f"no example logs {span.text}{hint}"))
    return found
