"""What inline code says about the SDK, looked up in the installed SDK."""

import ast
import difflib
import functools
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docs.pages import FOREIGN_PAGES, QUOTING_COLUMNS, Block, Page, Problem
from docs.running import Program
from lint import names

# Variables as the notes name them -> the class of the SDK they hold.
VARIABLES = {
    "service": "ServiceClient",
    "training": "TrainingClient",
    "sampler": "SamplingClient",
    "rest": "RestClient",
    "sequence": "SampleSequence",
    "response": "SampleResponse",
    "datum": "Datum",
    "tensor_data": "TensorData",
}
# What the notes call on tensors and arrays.
TENSOR_METHODS = ("detach", "item", "backward", "mean", "sum", "numpy")
# The table whose first column must not exist, by its column's title.
MISSING_COLUMN = "written from memory"
# What introspection cannot refute -> a program that must fail for the row to be true.
REFUTATIONS = {
    "service.create_sampling_client(path)": (
        "import pytrio as trio\n"
        "service = trio.ServiceClient()\n"
        "training = service.create_lora_training_client('Qwen/Qwen3.5-4B', rank=8)\n"
        "path = training.save_weights_for_sampler('refuted').result().path\n"
        "service.create_sampling_client(path)\n"
    ),
    "np.asarray(tensor_data)": (
        "import numpy as np\n"
        "from pytrio.types import TensorData\n"
        "tensor_data = TensorData(data=[1.0, 2.0], dtype='float32')\n"
        "assert np.asarray(tensor_data).dtype != object\n"
    ),
}


@functools.cache
def sdk_classes() -> dict[str, Any]:
    """Public class of the SDK -> the class."""
    package = names.sdk()
    return {
        name: value
        for module in (package.types, package)
        for name, value in vars(module).items()
        if inspect.isclass(value) and names.is_sdk_class(value) and not name.startswith("_")
    }


@functools.cache
def sdk_callables() -> dict[str, tuple[Any, ...]]:
    """Name -> functions of the SDK called so: methods of public classes, module functions."""
    found: dict[str, list[Any]] = {}
    for cls in sdk_classes().values():
        for name in dir(cls):
            function = names.method_of(cls, name)
            # What pydantic and Exception bring is not the SDK's.
            if name.startswith("_") or not getattr(function, "__module__", "").startswith("pytrio"):
                continue
            found.setdefault(name, []).append(function)
    for name, value in vars(names.sdk()).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            found.setdefault(name, []).append(value)
    return {name: tuple(functions) for name, functions in found.items()}


@functools.cache
def sdk_keywords() -> frozenset[str]:
    """Every argument of a function and every field of a class of the SDK."""
    functions = {function for found in sdk_callables().values() for function in found}
    signatures = [s for s in map(names.signature_of, functions) if s]
    fields = {name for cls in sdk_classes().values() for name in getattr(cls, "model_fields", {})}
    return frozenset(fields.union(*(signature.parameters for signature in signatures)))


def has_attribute(cls: type, name: str) -> bool:
    """Does a class, an instance of it, or the future that stands for it answer to a name."""
    return name in names.attributes_of(cls) or hasattr(cls, name)


def accepts(function: Any, call: ast.Call) -> str:
    """Why a function does not take a call's arguments; empty when it does. `...` is anything."""
    fields = getattr(function, "model_fields", None)
    if fields is not None:
        known = set(fields)
        unknown = [k.arg for k in call.keywords if k.arg and k.arg not in known]
        return f"has no field {', '.join(unknown)}" if unknown else ""
    target = function.__init__ if inspect.isclass(function) else function
    signature = names.signature_of(target)
    if signature is None:
        return ""
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    unknown = [k.arg for k in call.keywords if k.arg and k.arg not in named]
    if unknown:
        return f"has no argument {', '.join(unknown)}"
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    given = [a for a in call.args if not is_ellipsis(a) and not isinstance(a, ast.Starred)]
    if len(given) > len(places) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return f"takes {len(places)} positional arguments"
    return ""


def is_ellipsis(node: ast.expr) -> bool:
    """`...` in the place of an expression."""
    return isinstance(node, ast.Constant) and node.value is ...


def parsed_span(text: str) -> ast.AST | None:
    """Inline code as Python, None where it is none.

    What the notes leave out is filled in: `.result()`, `f(x=)`, `f(x=1, ...)`, `except Error`.
    """
    text = re.sub(r"^\.(?=\w)", "_.", text.strip())
    text = re.sub(r"=(?=[,)])", "=...", text)
    text = re.sub(r", \.\.\.(?=\))", "", text)
    text = re.sub(r"^(?:except|raise) ", "", text)
    try:
        return ast.parse(f"async def span():\n    {text}\n")
    except (SyntaxError, ValueError):
        return None


def owner_of(node: ast.expr) -> Any:
    """The module or class of the SDK that an expression stands for, by its name; else None."""
    if isinstance(node, ast.Name):
        if node.id in ("trio", "pytrio"):
            return names.sdk()
        return sdk_classes().get(VARIABLES.get(node.id, node.id))
    if isinstance(node, ast.Attribute):
        above = owner_of(node.value)
        if inspect.ismodule(above):
            member = getattr(above, node.attr, None)
            return member if inspect.ismodule(member) or inspect.isclass(member) else None
    return None


@functools.cache
def sdk_source() -> str:
    """All of the SDK's source."""
    folder = Path(inspect.getfile(names.sdk())).parent
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py")))


@functools.cache
def sdk_words() -> frozenset[str]:
    """Every word of the SDK's source."""
    return frozenset(re.findall(r"\w+", sdk_source()))


def sdk_mistakes(text: str) -> list[str]:
    """What a piece of inline code says about the SDK that is not so."""
    if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", text) and f'"{text}"' in sdk_source():
        return []  # an error code
    tree = parsed_span(text)
    if tree is None or "*_" in text:  # `create_*_async` is a product to Python
        return shape_mistakes(text)
    return [mistake for _, mistake in tree_mistakes(tree)] + near_misses(text)


def tree_mistakes(tree: ast.AST) -> list[tuple[int, str]]:
    """Lines of a syntax tree and what they say about the SDK that is not so."""
    found = []
    for node in ast.walk(tree):
        mistakes: list[str] = []
        if isinstance(node, ast.Attribute):
            owner = owner_of(node.value)
            if owner is not None and not answers(owner, node.attr):
                mistakes = [f"{owner.__name__} has no {node.attr}"]
        elif isinstance(node, ast.Call):
            mistakes = call_mistakes(node)
            if isinstance(node.func, ast.Attribute) and is_left_out(node.func.value):
                name = node.func.attr
                mistakes += [] if is_common(name) else [f"nothing has a .{name}()"]
        elif isinstance(node, ast.Subscript):
            mistakes = key_mistakes(last_part(node.value), [node.slice])
        elif isinstance(node, (ast.keyword, ast.Assign)):
            target = node.arg if isinstance(node, ast.keyword) else last_part(node.targets[0])
            keys = node.value.keys if isinstance(node.value, ast.Dict) else [node.value]
            mistakes = key_mistakes(target or "", keys)
        found += [(getattr(node, "lineno", 1), mistake) for mistake in mistakes]
    return found


def key_mistakes(name: str, keys: Sequence[ast.expr | None]) -> list[str]:
    """Constants that are no key of what a name of the SDK's stands for."""
    settings = frozenset().union(*names.loss_settings().values())
    known = {
        "metrics": names.metric_keys(),
        "loss_fn_config": settings,
        "loss_fn": frozenset(names.loss_keys()),
        "loss_fn_inputs": frozenset().union(*names.loss_keys().values()),
    }.get(name)
    given = [key.value for key in keys if isinstance(key, ast.Constant)]
    # `custom/loss`: a metric of one's own.
    texts = [value for value in given if isinstance(value, str) and "/" not in value]
    return [f"{name} knows no {t!r}" for t in texts if known is not None and t not in known]


def is_left_out(node: ast.expr) -> bool:
    """The `_` that `parsed_span` puts in front of `.result()`."""
    return isinstance(node, ast.Name) and node.id == "_"


def is_common(name: str) -> bool:
    """Does any class of the SDK, of Python's containers or a tensor have an attribute."""
    classes = [*sdk_classes().values(), str, list, dict]
    return name in TENSOR_METHODS or any(has_attribute(cls, name) for cls in classes)


def answers(owner: Any, name: str) -> bool:
    """Does a module or class of the SDK have a name."""
    return has_attribute(owner, name) if inspect.isclass(owner) else hasattr(owner, name)


def last_part(node: ast.expr) -> str:
    """`c` of `a.b.c`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def call_mistakes(call: ast.Call) -> list[str]:
    """Arguments that no function of the SDK with that name takes."""
    name = last_part(call.func)
    owner: Any = owner_of(call.func.value) if isinstance(call.func, ast.Attribute) else None
    if inspect.isclass(owner):
        function = names.method_of(owner, name)  # type: ignore[arg-type]
        candidates: tuple[Any, ...] = (function,) if function else ()
    elif name in sdk_classes():
        candidates = (sdk_classes()[name],)
    elif isinstance(call.func, ast.Name) or inspect.ismodule(owner) or name.count("_"):
        candidates = sdk_callables().get(name, ())
    else:
        candidates = ()  # `text.encode()`, `random.sample()`: anybody's method
    reasons = [accepts(function, call) for function in candidates]
    return [f"{name} {reasons[0]}"] if reasons and all(reasons) else []


@functools.cache
def near_miss(name: str) -> tuple[str, ...]:
    """A name that the SDK's source does not have, and that is almost a public one of it."""
    if len(name) < 7 or name in sdk_words():
        return ()
    known = {*sdk_callables(), *sdk_classes(), *sdk_keywords()}
    near = difflib.get_close_matches(name, [k for k in known if len(k) > 6], 1, 0.92)
    return (f"there is no {name}; did you mean {near[0]}",) if near else ()


def shape_mistakes(text: str) -> list[str]:
    """`..._with_optimizer`, `load_state*`, `create_*_async`: a name of the SDK has that shape."""
    match = re.fullmatch(r"(\w*)(?:\.\.\.|\*)(\w*)(?:\(.*\))?", text)
    if not match or not re.search(r"client|async|optimizer|forward|backward|state", text):
        return []
    shape = re.compile(rf"{match[1]}\w*{match[2]}")
    return [] if any(map(shape.fullmatch, sdk_words())) else [f"the SDK has no {text}"]


def check_sdk(page: Page) -> list[Problem]:
    """What inline code says about the SDK is so; in the table of missing names it is not.

    Columns that quote mistakes, and pages about other engines, are read for near misses only.
    """
    found = []
    for span in page.spans:
        is_ours = page.path.name not in FOREIGN_PAGES or span.column == "pytrio"
        is_ours = is_ours or bool(re.match(r"(?:service|training|sampler|trio)\.\w+\(", span.text))
        if span.column == MISSING_COLUMN:
            texts = []
            if span.text not in REFUTATIONS and not is_missing(span.text):
                texts = [f"{span.text} exists, or REFUTATIONS lacks it"]
        elif is_ours and span.column not in QUOTING_COLUMNS:
            texts = sdk_mistakes(span.text)
        else:
            texts = near_misses(span.text)
        found += [Problem(page.path, span.line, text) for text in texts]
    return found


def near_misses(text: str) -> list[str]:
    """The names in a piece of inline code that are almost the SDK's."""
    tree = parsed_span(text)
    found: list[str] = []
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, (ast.Name, ast.Attribute)):
            found += near_miss(last_part(node))
        elif isinstance(node, ast.keyword) and node.arg:
            found += near_miss(node.arg)
    return found


def fragment_problems(block: Block) -> list[Problem]:
    """What a fragment says about the SDK that is not so; its variables are known by their names."""
    try:
        tree = ast.parse(block.source)
    except SyntaxError:
        return []  # static_problems says it
    return [Problem(block.page, line, text) for line, text in tree_mistakes(tree)]


def is_missing(text: str) -> bool:
    """Is a name of the table of missing names really missing: nothing of the SDK answers to it."""
    keyword = re.fullmatch(r"(\w+)=", text)
    if keyword:
        return keyword[1] not in sdk_keywords()
    if sdk_mistakes(text):
        return True
    tree = parsed_span(text)
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)] if tree else []
    name = last_part(calls[0].func) if calls else text.rpartition(".")[2]
    # `client.close()`: no class of the SDK has such a method.
    foreign = re.match(r"(?:np|numpy|torch|os|random)\.", text)
    known = [cls for cls in sdk_classes().values() if not issubclass(cls, BaseException)]
    is_name = re.fullmatch(r"\w+", name) is not None
    return is_name and not foreign and not any(has_attribute(cls, name) for cls in known)


def refutations(pages: Sequence[Page]) -> dict[str, Program]:
    """The programs that must fail for the tables of missing names to be true."""
    spans = {s.text for page in pages for s in page.spans if s.column == MISSING_COLUMN}
    return {text: Program(text, REFUTATIONS[text]) for text in REFUTATIONS if text in spans}
