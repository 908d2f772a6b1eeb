"""Small questions about a syntax tree, answered without knowing what a name means."""

import ast
import re
from collections.abc import Iterator
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
LOOPS = (ast.For, ast.AsyncFor, ast.While)

# -- names -----------------------------------------------------------------------------------------


def last_name(node: ast.AST) -> str:
    """`a.b.c` -> `c`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def dotted(node: ast.AST) -> str:
    """`a.b.c` as text, empty for anything else."""
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return node.id if isinstance(node, ast.Name) else ""


def names_in(node: ast.AST) -> set[str]:
    """Every name in a subtree, attributes not included."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def words_in(node: ast.AST) -> set[str]:
    """Names, attributes and their parts at underscores, in lower case."""
    found: set[str] = set()
    for part in ast.walk(node):
        name = last_name(part)
        if name:
            found |= {name.lower(), *re.split(r"_+", name.lower())}
    return found - {""}


def is_self_attribute(node: ast.AST, name: str) -> bool:
    """Is the node `self.<name>`."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def is_false(node: ast.AST | None) -> bool:
    """Is the node the constant False; an absent argument is not."""
    return isinstance(node, ast.Constant) and node.value is False


# -- calls -----------------------------------------------------------------------------------------


def keyword_of(call: ast.Call, name: str) -> ast.expr | None:
    """An argument given by keyword."""
    return next((k.value for k in call.keywords if k.arg == name), None)


def argument_of(call: ast.Call, name: str, index: int) -> ast.expr | None:
    """An argument given by keyword or, unless stars hide it, by position."""
    found = keyword_of(call, name)
    if found is None and index < len(call.args):
        if not any(isinstance(a, ast.Starred) for a in call.args[: index + 1]):
            return call.args[index]
    return found


def has_stars(call: ast.Call) -> bool:
    """Does a call pass `*args` or `**kwargs`, so that its arguments cannot be told."""
    return any(k.arg is None for k in call.keywords) or any(
        isinstance(a, ast.Starred) for a in call.args
    )


def argument_for(
    call: ast.Call, function: Any, argument: ast.arg, is_method: bool
) -> ast.expr | None:
    """The expression a call gives to a parameter of a definition, its default included."""
    for keyword in call.keywords:
        if keyword.arg == argument.arg:
            return keyword.value
    if any(k.arg is None for k in call.keywords):
        return None
    positional = positional_arguments(function)
    if argument in positional:
        index = positional.index(argument) - (1 if is_method else 0)
        before = call.args[: index + 1]
        if any(isinstance(a, ast.Starred) for a in before):
            return None
        if 0 <= index < len(call.args):
            return call.args[index]
    return default_of(function, argument)


# -- definitions -----------------------------------------------------------------------------------


def all_arguments(function: Any) -> list[ast.arg]:
    """The parameters of a function, those with stars not included."""
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def positional_arguments(function: Any) -> list[ast.arg]:
    """The parameters of a function that a position can fill."""
    return [*function.args.posonlyargs, *function.args.args]


def argument_named(function: Any, name: str) -> ast.arg | None:
    """The parameter of that name."""
    return next((a for a in all_arguments(function) if a.arg == name), None)


def defaults_of(function: Any) -> list[ast.expr]:
    """Every default of a function's parameters."""
    return [d for d in [*function.args.defaults, *function.args.kw_defaults] if d is not None]


def default_of(function: Any, argument: ast.arg) -> ast.expr | None:
    """The default of one parameter."""
    positional = positional_arguments(function)
    if argument in positional:
        offset = len(positional) - len(function.args.defaults)
        index = positional.index(argument) - offset
        return function.args.defaults[index] if index >= 0 else None
    return function.args.kw_defaults[function.args.kwonlyargs.index(argument)]


def annotations_of(function: Any) -> list[ast.expr]:
    """The annotations of a function's parameters and of its result."""
    every = [*all_arguments(function), function.args.vararg, function.args.kwarg]
    found = [a.annotation for a in every if a is not None and a.annotation is not None]
    return [*found, *([function.returns] if function.returns is not None else [])]


def decorators(function: Any) -> list[str]:
    """The last names of a definition's decorators."""
    return [last_name(d) for d in getattr(function, "decorator_list", [])]


def methods_of(owner: Any) -> list[Any]:
    """The functions defined in a class body."""
    return [n for n in owner.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


def fields_named(owner: Any, name: str) -> list[ast.AnnAssign]:
    """The annotated fields of that name in a class body."""
    return [
        child
        for child in owner.body
        if isinstance(child, ast.AnnAssign)
        and isinstance(child.target, ast.Name)
        and child.target.id == name
    ]


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """A node's subtree; definitions inside a loop or a module do not run where they stand."""
    body = node.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else None
    waiting: list[ast.AST] = list(body) if body is not None else [node]
    if isinstance(node, LOOPS):
        waiting = [*node.body, *([node.test] if isinstance(node, ast.While) else [])]
    while waiting:
        current = waiting.pop()
        yield current
        if not isinstance(current, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            waiting += ast.iter_child_nodes(current)
