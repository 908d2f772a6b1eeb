"""What an expression may be: the Value type, and the values that the SDK's own types give."""

import ast
import inspect
import types
import typing
from collections.abc import Iterable
from concurrent.futures import Future as ThreadFuture
from dataclasses import dataclass, replace
from typing import Any

from lint import names


@dataclass(frozen=True)
class Value:
    """One thing an expression may be.

    `of` is the class of an instance, the possible contents of a container, future or coroutine,
    the node of a local function or class. `origin` is the SDK call it came from; `note` what it is
    in the SDK's terms, such as the field it was read from.
    """

    kind: str
    of: Any = None
    origin: ast.Call | None = None
    note: str = ""


Values = frozenset[Value]
UNKNOWN = Value("unknown")
NOTHING_KNOWN: Values = frozenset({UNKNOWN})
TEXT = Value("plain", "str")
NONE = Value("plain", "none")


def one(kind: str, of: Any, origin: ast.Call | None = None, note: str = "") -> Values:
    """Exactly one thing."""
    return frozenset({Value(kind, of, origin, note)})


def plain(kind: str) -> Values:
    """A text, number or None: `str`, `number`, `none`."""
    return one("plain", kind)


def listed(elements: Iterable[Value]) -> Values:
    """A list, or anything else to iterate over, of these elements."""
    return one("list", frozenset(elements))


def union(parts: Iterable[Values]) -> Values:
    """Everything that any of the parts may be."""
    found: set[Value] = set()
    for part in parts:
        found |= part
    return frozenset(found)


def is_known(values: Values) -> bool:
    """Are these all the things an expression may be."""
    return bool(values) and UNKNOWN not in values


# -- parts of values -------------------------------------------------------------------------------


def elements(values: Values) -> Values:
    """What iterating over a value gives."""
    found: set[Value] = set()
    for value in values:
        if value.kind == "list":
            found |= value.of
        elif value.kind == "tuple":
            found |= union(value.of)
        elif value.kind == "dict":
            found.add(TEXT)
        else:
            found.add(UNKNOWN)
    return frozenset(found)


def item(value: Value, index: int) -> Values:
    """One element of an unpacked value."""
    if value.kind == "tuple":
        if -len(value.of) <= index < len(value.of):
            return value.of[index]
        return NOTHING_KNOWN
    if value.kind == "list":
        return value.of or NOTHING_KNOWN
    return NOTHING_KNOWN


def subscript(value: Value, index: ast.expr) -> Values:
    """`value[index]`."""
    if value.kind == "list":
        if isinstance(index, ast.Slice):
            return frozenset({value})
        return value.of or NOTHING_KNOWN
    if value.kind == "tuple":
        if isinstance(index, ast.Constant) and isinstance(index.value, int):
            return item(value, index.value)
        return listed(union(value.of)) if isinstance(index, ast.Slice) else NOTHING_KNOWN
    if value.kind == "dict":
        return value.of or NOTHING_KNOWN
    if value.kind == "plain" and value.of == "str":
        return frozenset({value})
    return NOTHING_KNOWN


def awaited(value: Value) -> Values:
    """`await value`."""
    if value.kind in ("coroutine", "future", "task"):
        return value.of or NOTHING_KNOWN
    return frozenset({value})


def joined_text(values: Values) -> Values:
    """A text made of others: it keeps what its parts are marked with."""
    marked = frozenset(v for v in values if v.kind == "plain" and v.of == "str" and v.note)
    marked = frozenset(replace(v, note="built chatml") if v.note == "chatml" else v for v in marked)
    return marked or plain("str")


# -- the SDK and other packages --------------------------------------------------------------------


def from_annotation(annotation: Any, origin: ast.Call | None, note: str = "") -> Values:
    """A type of the SDK's own annotations as values."""
    base = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if base is typing.Annotated:
        return from_annotation(arguments[0], origin, note)
    if base in (typing.Union, types.UnionType):
        kept = [a for a in arguments if a is not type(None)]
        return union(from_annotation(a, origin, note) for a in kept)
    if base is names.future_class() or base is ThreadFuture:
        return one("future", from_annotation(arguments[0], origin), origin)
    if inspect.isclass(base) and issubclass(base, Iterable):
        if base is dict or len(arguments) == 2:
            return one("dict", from_annotation(arguments[1], origin), origin, note)
        if base is tuple:
            return NOTHING_KNOWN
        return one("list", from_annotation(arguments[0], origin), origin, note)
    if names.is_sdk_class(annotation):
        return one("instance", annotation, origin)
    if annotation is str:
        return one("plain", "str", origin, note)
    if annotation in (int, float, bool):
        return plain("number")
    if annotation is None or annotation is type(None):
        return plain("none")
    return NOTHING_KNOWN


def instance_attribute(value: Value, name: str) -> Values:
    """A field or a method of an instance of an SDK class."""
    cls = value.of
    fields = getattr(cls, "model_fields", {})
    if name in fields:
        return from_annotation(fields[name].annotation, value.origin, name)
    if names.method_of(cls, name) is not None:
        return one("method", (cls, name), value.origin)
    return NOTHING_KNOWN


def method_result(function: Any, node: ast.Call) -> Values:
    """What a call of an SDK function gives, by the function's annotation."""
    signature = names.signature_of(function)
    if signature is None:
        return NOTHING_KNOWN
    annotation = signature.return_annotation
    if annotation is inspect.Signature.empty or isinstance(annotation, str):
        return NOTHING_KNOWN
    values = from_annotation(annotation, node)
    if inspect.iscoroutinefunction(function):
        return one("coroutine", values, node)
    return values


def module_values(name: str) -> Values:
    """A module of pytrio or swanlab; others are not looked into."""
    package = name.split(".")[0]
    if package == "pytrio":
        module: Any = names.sdk()
    elif package == "swanlab" and names.swanlab() is not None:
        module = names.swanlab()
    else:
        return one("foreign", name)
    for part in name.split(".")[1:]:
        module = getattr(module, part, None)
    return one("module", module) if inspect.ismodule(module) else NOTHING_KNOWN


def member_values(value: Value, name: str) -> Values:
    """A name in a module."""
    if value.kind == "foreign":
        return one("foreign", f"{value.of}.{name}")
    if value.kind != "module":
        return NOTHING_KNOWN
    member = getattr(value.of, name, None)
    if inspect.ismodule(member):
        return one("module", member)
    if inspect.isclass(member):
        return one("class", member)
    if callable(member):
        return one("function", member)
    return NOTHING_KNOWN


def known_by_name(name: str) -> Values:
    """Fields whose name is the SDK's alone, read from a value we know nothing about."""
    by_key = one("dict", one("instance", names.sdk().types.TensorData))
    if name == "loss_fn_inputs":
        return by_key
    if name == "loss_fn_outputs":
        return listed(by_key)
    return NOTHING_KNOWN
