"""A source file as the rules see it: what runs when, constants, and the calls of the SDK."""

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lint import names
from lint.inference import Inference
from lint.scopes import Binding
from lint.syntax import (
    FUNCTIONS,
    argument_for,
    argument_named,
    fields_named,
    keyword_of,
    last_name,
    methods_of,
    own_nodes,
)
from lint.values import UNKNOWN


@dataclass(frozen=True)
class Hit:
    """What a rule found: where, what was seen, what to change; severity None is the rule's."""

    node: ast.AST
    message: str
    fix: str
    severity: str | None = None


class Code(Inference):
    """One source file. Raises SyntaxError when it does not parse."""

    def __init__(self, source: str, filename: str) -> None:
        super().__init__(source, filename)
        self.reached: dict[ast.AST, set[ast.AST]] = {}
        self.rollouts: set[ast.Call] | None = None  # kept by rules_loop.training_samples

    # -- what runs ---------------------------------------------------------------------------------

    def reach(self, node: ast.AST) -> set[ast.AST]:
        """All nodes that run when this one does: its own, and those of local functions it calls."""
        if node in self.reached:
            return self.reached[node]
        seen: set[ast.AST] = set()
        waiting = [node]
        while waiting:
            for inner in own_nodes(waiting.pop()):
                if inner in seen:
                    continue
                seen.add(inner)
                if isinstance(inner, ast.Call):
                    waiting += [f for f in self.local_functions(inner.func) if f not in seen]
                elif isinstance(inner, FUNCTIONS):
                    waiting.append(inner)
        self.reached[node] = seen
        return seen

    def local_functions(self, function: ast.expr) -> list[ast.AST]:
        """The definitions in this file that a call may run."""
        if isinstance(function, ast.Name):
            found = [b.node for b in self.bindings(function) if b.how == "def"]
            for binding in self.bindings(function):
                if binding.how == "class":
                    found += [f for f in methods_of(binding.node) if f.name == "__init__"]
            return found
        if isinstance(function, ast.Attribute):
            values = self.values(function.value)
            classes = [v.of for v in values if v.kind == "localinstance"]
            if UNKNOWN in values:
                classes = self.classes()
            return [f for c in classes for f in methods_of(c) if f.name == function.attr]
        return []

    def classes(self) -> list[ast.ClassDef]:
        """The classes that the file defines."""
        return [n for n in self.nodes if isinstance(n, ast.ClassDef)]

    # -- constants ---------------------------------------------------------------------------------

    def constants(self, node: ast.AST | None) -> set[Any] | None:
        """Every constant an expression may be by default; None when that cannot be told.

        Follows names, fields of dataclasses in the file (their defaults) and argparse defaults.
        """
        if node is None or node in self.active:
            return None
        if isinstance(node, ast.Constant):
            return {node.value}
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self.constants(node.operand)
            if inner and all(isinstance(v, (int, float)) for v in inner):
                return {-v for v in inner}
            return None
        if isinstance(node, ast.IfExp):
            return all_or_none([self.constants(node.body), self.constants(node.orelse)])
        self.active.add(node)
        try:
            if isinstance(node, ast.Name):
                bindings = self.bindings(node)
                return (
                    all_or_none([self.bound_constants(b) for b in bindings]) if bindings else None
                )
            if isinstance(node, ast.Attribute):
                return self.setting_default(node)
        finally:
            self.active.discard(node)
        return None

    def texts(self, node: ast.AST | None) -> list[str]:
        """The strings among an expression's constants, if all are strings, in order."""
        found = self.constants(node) or set()
        return sorted(found) if all(isinstance(v, str) for v in found) else []

    def bound_constants(self, binding: Binding) -> set[Any] | None:
        """The constants that one binding may give its name."""
        if binding.how == "value" and not binding.path:
            return self.constants(binding.node)
        if binding.how != "param":
            return None
        function = binding.node
        argument = argument_named(function, binding.text)
        calls, escapes = self.call_sites(function)
        if argument is None or escapes or not calls:
            return None
        is_method = isinstance(self.parents.get(function), ast.ClassDef)
        given = [argument_for(call, function, argument, is_method) for call in calls]
        return all_or_none([self.constants(g) for g in given])

    def setting_default(self, node: ast.Attribute) -> set[Any] | None:
        """`config.rank` -> the default of the dataclass field or of `--rank`."""
        values = self.values(node.value)
        if any(v.kind in ("instance", "module", "class", "future") for v in values):
            return None
        owners = [v.of for v in values if v.kind == "localinstance"] or self.classes()
        fields = [field for owner in owners for field in fields_named(owner, node.attr)]
        defaults = [field.value for field in fields if field.value is not None]
        defaults += self.option_defaults(node.attr)
        return self.constants(defaults[0]) if len(defaults) == 1 else None

    def option_defaults(self, name: str) -> list[ast.expr]:
        """The defaults that `add_argument` gives to an option of that name."""
        defaults = []
        for call in self.calls:
            if last_name(call.func) != "add_argument":
                continue
            flags = [str(a.value) for a in call.args if isinstance(a, ast.Constant)]
            default = keyword_of(call, "default")
            if default is not None and name in [f.lstrip("-").replace("-", "_") for f in flags]:
                defaults.append(default)
        return defaults

    # -- the SDK's calls ---------------------------------------------------------------------------

    def method_calls(self, *wanted: str) -> list[ast.Call]:
        """Calls of SDK methods by name, with or without `_async`, unless known to be another's."""
        return [call for call in self.calls if self.sdk_method(call) in wanted]

    def sdk_method(self, call: ast.AST) -> str:
        """Name of the SDK method a call runs, without `_async`; empty for any other call."""
        if not isinstance(call, ast.Call):
            return ""
        if isinstance(call.func, ast.Name):  # a bound method kept in a name
            methods = [v.of[1] for v in self.values(call.func) if v.kind == "method"]
            name = methods[0].removesuffix("_async") if methods else ""
            return name if name in names.client_methods() else ""
        if not isinstance(call.func, ast.Attribute):
            return ""
        name = call.func.attr.removesuffix("_async")
        if name not in names.client_methods():
            return ""
        values = self.values(call.func.value)
        if any(v.kind == "instance" for v in values):
            return name
        # `sample` and `forward` are words of other libraries too: the arguments must be ours.
        is_shared = name in ("sample", "forward")
        if UNKNOWN not in values or (is_shared and not self.has_sdk_arguments(call)):
            return ""
        return name

    def has_sdk_arguments(self, call: ast.Call) -> bool:
        """Does a call use a keyword, or pass an object, that only the SDK knows."""
        if {"num_samples", "sampling_params", "loss_fn"} & {k.arg for k in call.keywords}:
            return True
        return any(
            v.kind == "instance" and v.of.__module__.startswith("pytrio")
            for argument in [*call.args, *(k.value for k in call.keywords)]
            for v in self.values(argument)
        )

    def made(self, *wanted: str) -> list[ast.Call]:
        """Constructions of SDK classes such as `SamplingParams`."""
        return [
            call
            for call in self.calls
            if any(
                v.kind == "class" and names.is_sdk_class(v.of) and v.of.__name__ in wanted
                for v in self.values(call.func)
            )
        ]


def all_or_none(parts: Iterable[set[Any] | None]) -> set[Any] | None:
    """Everything that the parts hold; None when one of them cannot be told."""
    found: set[Any] = set()
    for part in parts:
        if part is None:
            return None
        found |= part
    return found
