"""A Python file as its syntax tree, and what its expressions may evaluate to.

Simple data flow, not execution: a name stands for everything it is bound to anywhere in its
scope. Where that cannot be told the answer holds UNKNOWN, and the rules stay silent.
"""

import ast
import inspect
import re
import types
import typing
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import Future as ThreadFuture
from dataclasses import dataclass, field, replace
from typing import Any

from lint import names

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
# Packages whose objects are never the SDK's: `rng.sample(...)` is not a rollout.
OTHER_PACKAGES = (
    "random", "numpy", "torch", "math", "re", "json", "os", "pathlib", "statistics", "collections",
    "datasets", "pandas", "transformers", "subprocess", "signal", "time", "httpx", "requests",
)  # fmt: skip
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class Hit:
    """What a rule found: where, what was seen, what to change; severity None is the rule's."""

    node: ast.AST
    message: str
    fix: str
    severity: str | None = None


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
NUMBER = Value("plain", "number")


def plain(kind: str) -> Values:
    return frozenset({Value("plain", kind)})


def listed(elements: Iterable[Value]) -> Values:
    return frozenset({Value("list", frozenset(elements))})


def is_known(values: Values) -> bool:
    return bool(values) and UNKNOWN not in values


@dataclass
class Binding:
    """One way a name gets its value; `path` are the indices of a tuple assignment."""

    how: str  # value, element, append, extend, param, def, class, module, member, opaque
    node: ast.AST
    path: tuple[int, ...] = ()
    text: str = ""


@dataclass
class Scope:
    node: ast.AST
    parent: "Scope | None"
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    outer: set[str] = field(default_factory=set)  # names declared global or nonlocal

    def add(self, name: str, binding: Binding) -> None:
        scope = self
        if name in self.outer and self.parent is not None:
            scope = self.find(name) or self.top()
        scope.bindings.setdefault(name, []).append(binding)

    def top(self) -> "Scope":
        return self if self.parent is None else self.parent.top()

    def find(self, name: str) -> "Scope | None":
        """The scope a name belongs to; a class body is skipped from inside its functions."""
        scope: Scope | None = self
        while scope is not None:
            visible = scope is self or not isinstance(scope.node, ast.ClassDef)
            if visible and name in scope.bindings and name not in scope.outer:
                return scope
            scope = scope.parent
        return None


class Code:
    """One source file. Raises SyntaxError when it does not parse."""

    def __init__(self, source: str, filename: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.tree = ast.parse(source, filename)
        self.parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
        self.nodes = list(ast.walk(self.tree))
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.attribute_stores: dict[str, list[ast.Attribute]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                self.attribute_stores.setdefault(node.attr, []).append(node)
        self.functions: list[Function] = [n for n in self.nodes if isinstance(n, FUNCTIONS)]
        self.scopes: dict[ast.AST, Scope] = {}
        self.cache: dict[ast.AST, Values] = {}
        self.active: set[object] = set()
        self.used_trio = any(self.imports("pytrio"))
        self.used_swanlab = any(self.imports("swanlab"))
        self.collect(self.tree, Scope(self.tree, None))
        self.collect_appends()
        self.rollouts: set[ast.Call] | None = None
        self.reached: dict[ast.AST, set[ast.AST]] = {}

    def imports(self, package: str) -> Iterator[ast.Import | ast.ImportFrom]:
        for node in self.nodes:
            if isinstance(node, ast.Import):
                if any(alias.name.split(".")[0] == package for alias in node.names):
                    yield node
            elif isinstance(node, ast.ImportFrom) and not node.level:
                if (node.module or "").split(".")[0] == package:
                    yield node

    # -- scopes --------------------------------------------------------------------------------

    def collect(self, node: ast.AST, scope: Scope) -> None:
        """Fill the scopes: every node gets the scope in which its names are looked up."""
        child: ast.AST
        self.scopes[node] = scope
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            scope.add(node.name, Binding("def", node))
            outside: list[ast.AST] = [
                *node.decorator_list,
                *defaults_of(node),
                *annotations_of(node),
            ]
            for part in outside:
                self.collect(part, scope)
            inner = Scope(node, scope)
            self.add_parameters(node, inner)
            for child in node.body:
                self.declare_outer(child, inner)
            for child in node.body:
                self.collect(child, inner)
            return
        if isinstance(node, ast.Lambda):
            for child in defaults_of(node):
                self.collect(child, scope)
            inner = Scope(node, scope)
            self.add_parameters(node, inner)
            self.collect(node.body, inner)
            return
        if isinstance(node, ast.ClassDef):
            scope.add(node.name, Binding("class", node))
            inner = Scope(node, scope)
            for child in [*node.decorator_list, *node.bases, *node.keywords]:
                self.collect(child, scope)
            for child in node.body:
                self.collect(child, inner)
            return
        if isinstance(node, COMPREHENSIONS):
            inner = Scope(node, scope)
            for generator in node.generators:
                self.scopes[generator] = inner
                self.bind(generator.target, Binding("element", generator.iter), inner)
                for child in ast.iter_child_nodes(generator):
                    self.collect(child, inner)
            parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
            for child in parts:
                self.collect(child, inner)
            return
        self.bind_statement(node, scope)
        for child in ast.iter_child_nodes(node):
            self.collect(child, scope)

    def declare_outer(self, node: ast.AST, scope: Scope) -> None:
        for child in ast.walk(node):
            if isinstance(child, (ast.Global, ast.Nonlocal)):
                scope.outer |= set(child.names)

    def add_parameters(self, function: Function, scope: Scope) -> None:
        arguments = function.args
        for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
            scope.bindings[argument.arg] = [Binding("param", function, text=argument.arg)]
        for starred in (arguments.vararg, arguments.kwarg):
            if starred:
                scope.bindings[starred.arg] = [Binding("opaque", function)]

    def bind_statement(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self.bind(target, Binding("value", node.value), scope)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if node.value is not None:
                scope.add(node.target.id, Binding("value", node.value))
            else:
                scope.add(node.target.id, Binding("annotated", node.annotation))
        elif isinstance(node, ast.NamedExpr):
            target_scope = scope
            while isinstance(target_scope.node, COMPREHENSIONS) and target_scope.parent:
                target_scope = target_scope.parent
            self.bind(node.target, Binding("value", node.value), target_scope)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            scope.add(node.target.id, Binding("extend", node.value))
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            self.bind(node.target, Binding("element", node.iter), scope)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                if item.optional_vars is not None:
                    self.bind(item.optional_vars, Binding("value", item.context_expr), scope)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            scope.add(node.name, Binding("opaque", node))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                module = alias.name if alias.asname else alias.name.split(".")[0]
                scope.add(name, Binding("module", node, text=module))
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                scope.add(
                    alias.asname or alias.name,
                    Binding("member", node, text=f"{module}:{alias.name}"),
                )
        elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
            scope.add(node.name, Binding("opaque", node))

    def bind(self, target: ast.AST, binding: Binding, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            scope.add(target.id, binding)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, Binding("opaque", binding.node), scope)
        elif isinstance(target, (ast.Tuple, ast.List)):
            starred = any(isinstance(element, ast.Starred) for element in target.elts)
            for index, element in enumerate(target.elts):
                if starred:
                    self.bind(element, Binding("opaque", binding.node), scope)
                else:
                    path = (*binding.path, index)
                    self.bind(element, replace_path(binding, path), scope)

    def collect_appends(self) -> None:
        """`rows.append(x)` and `rows.extend(xs)` say what the list `rows` holds."""
        for call in self.calls:
            function = call.func
            if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)):
                continue
            scope = self.scopes[call].find(function.value.id)
            if scope is None or len(call.args) != 1:
                continue
            how = {"append": "append", "add": "append", "extend": "extend"}.get(function.attr)
            if how:
                scope.bindings[function.value.id].append(Binding(how, call.args[0]))

    def bindings(self, name: ast.Name) -> list[Binding]:
        scope = self.scopes[name].find(name.id)
        return scope.bindings[name.id] if scope else []

    def loads(self, name: str, scope: Scope) -> list[ast.Name]:
        """Every place that reads a name of a scope."""
        return [
            node
            for node in self.nodes
            if isinstance(node, ast.Name)
            and node.id == name
            and not isinstance(node.ctx, ast.Store)
            and self.scopes[node].find(name) is scope
        ]

    # -- places --------------------------------------------------------------------------------

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self.parents:
            node = self.parents[node]
            yield node

    def function_of(self, node: ast.AST) -> ast.AST:
        """The function a node runs in (lambdas do not count), the module at the top."""
        for above in self.ancestors(node):
            if isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return above
        return self.tree

    def statement_of(self, node: ast.AST) -> ast.AST:
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def enclosing_loops(self, node: ast.AST) -> list[ast.AST]:
        """Loop statements around a node in its own function, innermost first."""
        loops: list[ast.AST] = []
        child = node
        for above in self.ancestors(node):
            if isinstance(above, FUNCTIONS):
                break
            if isinstance(above, LOOPS) and child not in (
                getattr(above, "iter", None),
                *above.orelse,
            ):
                loops.append(above)
            child = above
        return loops

    def reach(self, node: ast.AST) -> set[ast.AST]:
        """All nodes that run when this one does: its own, and those of local functions it calls."""
        if node in self.reached:
            return self.reached[node]
        seen: set[ast.AST] = set()
        waiting = [node]
        while waiting:
            for inner in self.own_nodes(waiting.pop()):
                if inner in seen:
                    continue
                seen.add(inner)
                if isinstance(inner, ast.Call):
                    waiting += [f for f in self.local_functions(inner.func) if f not in seen]
                elif isinstance(inner, FUNCTIONS):
                    waiting.append(inner)
        self.reached[node] = seen
        return seen

    def own_nodes(self, node: ast.AST) -> Iterator[ast.AST]:
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
                classes = [n for n in self.nodes if isinstance(n, ast.ClassDef)]
            return [f for c in classes for f in methods_of(c) if f.name == function.attr]
        return []

    def call_sites(self, function: ast.AST) -> tuple[list[ast.Call], bool]:
        """Calls of a local function, and whether it is also used in any other way."""
        name = getattr(function, "name", None)
        if name is None:
            return [], True
        owner = self.parents.get(function)
        calls, escapes = [], False
        for node in self.nodes:
            if isinstance(owner, ast.ClassDef):
                is_use = isinstance(node, ast.Attribute) and node.attr == name
            else:
                is_use = (
                    isinstance(node, ast.Name)
                    and node.id == name
                    and any(b.node is function for b in self.bindings(node))
                )
            if not is_use:
                continue
            parent = self.parents.get(node)
            if isinstance(parent, ast.Call) and parent.func is node:
                calls.append(parent)
            else:
                escapes = True
        return calls, escapes

    # -- values --------------------------------------------------------------------------------

    def values(self, node: ast.AST | None) -> Values:
        """What an expression may be; never empty."""
        if node is None:
            return NOTHING_KNOWN
        if node in self.cache:
            return self.cache[node]
        if node in self.active or len(self.active) > 200:
            return NOTHING_KNOWN
        self.active.add(node)
        try:
            found = self.compute(node) or NOTHING_KNOWN
        finally:
            self.active.discard(node)
        self.cache[node] = found
        return found

    def compute(self, node: ast.AST) -> Values:
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str):
                note = "chatml" if has_template_marks(node.value) else ""
                return frozenset({Value("plain", "str", None, note)})
            return plain("none" if node.value is None else "number")
        if isinstance(node, ast.Name):
            return self.name_values(node)
        if isinstance(node, ast.Attribute):
            return self.union(self.attribute(v, node) for v in self.values(node.value))
        if isinstance(node, ast.Call):
            return self.call_values(node)
        if isinstance(node, ast.Await):
            return self.union(awaited(v) for v in self.values(node.value))
        if isinstance(node, ast.Subscript):
            return self.union(self.subscript(v, node.slice) for v in self.values(node.value))
        if isinstance(node, (ast.List, ast.Set)):
            return listed(self.elements_of(node.elts))
        if isinstance(node, ast.Tuple):
            if any(isinstance(element, ast.Starred) for element in node.elts):
                return listed(self.elements_of(node.elts))
            return frozenset({Value("tuple", tuple(self.values(e) for e in node.elts))})
        if isinstance(node, ast.Dict):
            return frozenset({Value("dict", self.union(self.values(v) for v in node.values))})
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            return listed(self.values(node.elt))
        if isinstance(node, ast.DictComp):
            return frozenset({Value("dict", self.values(node.value))})
        if isinstance(node, ast.IfExp):
            return self.values(node.body) | self.values(node.orelse)
        if isinstance(node, ast.BoolOp):
            return self.union(self.values(v) for v in node.values)
        if isinstance(node, (ast.NamedExpr, ast.Starred)):
            return self.values(node.value)
        if isinstance(node, ast.BinOp):
            return self.binary(node)
        if isinstance(node, ast.JoinedStr):
            parts = [v.value if isinstance(v, ast.FormattedValue) else v for v in node.values]
            return joined_text(self.union(self.values(part) for part in parts))
        if isinstance(node, (ast.Compare, ast.UnaryOp)):
            return plain("number")
        if isinstance(node, ast.Lambda):
            return frozenset({Value("local", node)})
        return NOTHING_KNOWN

    def union(self, parts: Iterable[Values]) -> Values:
        found: set[Value] = set()
        for part in parts:
            found |= part
        return frozenset(found)

    def elements_of(self, nodes: list[ast.expr]) -> Values:
        found: set[Value] = set()
        for node in nodes:
            values = self.values(node)
            found |= elements(values) if isinstance(node, ast.Starred) else values
        return frozenset(found)

    def binary(self, node: ast.BinOp) -> Values:
        left, right = self.values(node.left), self.values(node.right)
        both = left | right
        if isinstance(node.op, ast.Add):
            if any(v.kind == "plain" and v.of == "str" for v in both):
                return joined_text(both)
            if any(v.kind == "list" for v in both):
                kept = frozenset(v for v in both if v.kind in ("list", "unknown"))
                return kept or NOTHING_KNOWN
            return both
        if isinstance(node.op, ast.Mult):
            return frozenset(v for v in both if v.kind == "list") or plain("number")
        if isinstance(node.op, ast.Mod) and any(v.of == "str" for v in left if v.kind == "plain"):
            return joined_text(both)
        return both if UNKNOWN in both else plain("number")

    def name_values(self, node: ast.Name) -> Values:
        scope = self.scopes[node].find(node.id)
        if scope is None:
            return frozenset({Value("builtin", node.id)})
        return self.bound_values(scope.bindings[node.id])

    def bound_values(self, bindings: list[Binding]) -> Values:
        found: set[Value] = set()
        added: set[Value] = set()
        for binding in bindings:
            if binding.how == "append":
                added |= self.values(binding.node)
            elif binding.how == "extend":
                values = self.values(binding.node)
                if any(v.kind in ("list", "tuple") for v in values):
                    added |= elements(values)
                else:
                    found |= values
            else:
                found |= self.binding_values(binding)
        if added and any(v.kind in ("list", "unknown") for v in found):
            # Emptiness at the start is not a content.
            found = {v for v in found if v != Value("list", frozenset())}
            found |= listed(added)
        return frozenset(found)

    def binding_values(self, binding: Binding) -> Values:
        node = binding.node
        if binding.how == "value":
            values = self.values(node)
        elif binding.how == "element":
            values = elements(self.values(node))
        elif binding.how == "param":
            values = self.parameter_values(node, binding.text)
        elif binding.how == "annotated":
            values = self.annotation_values(node)
        elif binding.how == "def":
            values = frozenset({Value("local", node)})
        elif binding.how == "class":
            values = frozenset({Value("localclass", node)})
        elif binding.how == "module":
            values = module_values(binding.text)
        elif binding.how == "member":
            module, _, name = binding.text.partition(":")
            values = self.union(member_values(v, name) for v in module_values(module))
        else:
            values = NOTHING_KNOWN
        for index in binding.path:
            values = self.union(item(v, index) for v in values)
        return values or NOTHING_KNOWN

    def parameter_values(self, function: ast.AST, name: str) -> Values:
        """By annotation, else by what the calls in this file pass."""
        argument = next((a for a in all_arguments(function) if a.arg == name), None)
        if argument is None:
            return NOTHING_KNOWN
        owner = self.parents.get(function)
        is_method = isinstance(owner, ast.ClassDef) and "staticmethod" not in decorators(function)
        positional = positional_arguments(function)
        if is_method and positional and positional[0] is argument:
            kind = "localclass" if "classmethod" in decorators(function) else "localinstance"
            return frozenset({Value(kind, owner)})
        annotated: Values = frozenset()
        if argument.annotation is not None:
            annotated = self.annotation_values(argument.annotation)
        key = (function, name)
        if key in self.active:
            return annotated or NOTHING_KNOWN
        self.active.add(key)
        try:
            passed = self.passed_values(function, argument, bool(is_method))
        finally:
            self.active.discard(key)
        if is_known(annotated):
            # The annotation is what the caller promises; the calls add where it came from.
            matching = frozenset(v for v in passed if v.kind in {a.kind for a in annotated})
            return matching if is_known(passed) and matching else annotated
        return passed

    def passed_values(self, function: ast.AST, argument: ast.arg, is_method: bool) -> Values:
        calls, escapes = self.call_sites(function)
        found: set[Value] = {UNKNOWN} if escapes or not calls else set()
        for call in calls:
            given = self.argument_for(call, function, argument, is_method)
            found |= NOTHING_KNOWN if given is None else self.values(given)
        return frozenset(found)

    def argument_for(
        self, call: ast.Call, function: ast.AST, argument: ast.arg, is_method: bool
    ) -> ast.expr | None:
        """The expression a call gives to a parameter, its default included."""
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

    def annotation_values(self, node: ast.AST) -> Values:
        """An annotation in the file, as far as it names SDK types or classes of the file."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                parsed = ast.parse(node.value, mode="eval").body
            except SyntaxError:
                return NOTHING_KNOWN
            for part in ast.walk(parsed):
                self.scopes[part] = self.scopes.get(node, self.scopes[self.tree])
            return self.annotation_values(parsed)
        if isinstance(node, ast.Constant):
            return plain("none")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            both = self.annotation_values(node.left) | self.annotation_values(node.right)
            return both - plain("none") or both
        if isinstance(node, ast.Subscript):
            base = ast.unparse(node.value).rpartition(".")[2].lower()
            if base == "optional":
                return self.annotation_values(node.slice)
            if base in ("list", "sequence", "iterable", "iterator", "set", "collection"):
                return listed(self.annotation_values(node.slice))
            if base in ("dict", "mapping") and isinstance(node.slice, ast.Tuple):
                return frozenset({Value("dict", self.annotation_values(node.slice.elts[1]))})
            if base == "tuple" and isinstance(node.slice, ast.Tuple):
                parts = node.slice.elts
                if any(isinstance(p, ast.Constant) and p.value is Ellipsis for p in parts):
                    return listed(self.annotation_values(parts[0]))
                return frozenset({Value("tuple", tuple(map(self.annotation_values, parts)))})
            if base == "apifuture":
                return frozenset({Value("future", self.annotation_values(node.slice))})
            return NOTHING_KNOWN
        found: set[Value] = set()
        if isinstance(node, ast.Name):
            bound = [b.node for b in self.bindings(node) if b.how == "value" and not b.path]
            if len(bound) == 1 and isinstance(bound[0], (ast.Subscript, ast.BinOp)):
                return self.annotation_values(bound[0])  # an alias of a type
        if isinstance(node, (ast.Name, ast.Attribute)):
            for value in self.values(node):
                if value.kind == "class" and names.is_sdk_class(value.of):
                    if value.of is names.future_class():
                        found.add(Value("future", NOTHING_KNOWN))
                    else:
                        found.add(Value("instance", value.of))
                elif value.kind == "localclass":
                    found.add(Value("localinstance", value.of))
                elif value.kind == "foreign" and value.of.split(".")[0] in OTHER_PACKAGES:
                    found.add(Value("foreign", f"{value.of}()"))
        return frozenset(found) or NOTHING_KNOWN

    def attribute(self, value: Value, node: ast.Attribute) -> Values:
        name = node.attr
        if value == NONE:
            return frozenset()  # `client: TrainingClient | None = None` is read once it is set
        if value.kind == "module":
            return member_values(value, name)
        if value.kind == "class":
            method = names.method_of(value.of, name)
            if method is not None:
                return frozenset({Value("method", (value.of, name))})
            return NOTHING_KNOWN
        if value.kind == "instance":
            return instance_attribute(value, name)
        if value.kind in ("future", "task") and name == "result":
            return frozenset({Value("resolver", value.of)})
        if value.kind == "localinstance":
            return self.local_attribute(value.of, name)
        if value.kind == "dict" and name in ("get", "values", "items", "pop", "setdefault"):
            return frozenset({Value("dictmethod", (name, value.of))})
        if value.kind == "plain" and value.of == "str":
            return frozenset({Value("textmethod", value)})
        if value.kind == "foreign":
            return frozenset({replace(value, of=f"{value.of}.{name}")})
        if value.kind in ("unknown", "localclass"):
            return known_by_name(name)
        return NOTHING_KNOWN

    def local_attribute(self, owner: ast.ClassDef, name: str) -> Values:
        """A method, a field annotated with an SDK type, or what `self.name` is assigned."""
        found: set[Value] = set()
        for child in owner.body:
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and child.name == name:
                if {"property", "cached_property"} & set(decorators(child)):
                    found |= self.returned(child)
                else:
                    found.add(Value("local", child))
            elif (
                isinstance(child, ast.AnnAssign)
                and isinstance(child.target, ast.Name)
                and child.target.id == name
            ):
                found |= self.annotation_values(child.annotation)
        for node in self.attribute_stores.get(name, ()):
            own = is_self_attribute(node, name) and owner in self.ancestors(node)
            if not own and not any(
                v.kind == "localinstance" and v.of is owner for v in self.values(node.value)
            ):
                continue
            parent = self.parents[node]
            if isinstance(parent, ast.Assign) or (
                isinstance(parent, ast.AnnAssign) and parent.value is not None
            ):
                found |= self.values(parent.value)
            elif isinstance(parent, ast.Tuple) and isinstance(self.parents[parent], ast.Assign):
                given = self.values(self.parents[parent].value)  # type: ignore[attr-defined]
                index = parent.elts.index(node)
                found |= self.union(item(v, index) for v in given)
            elif not isinstance(parent, ast.AnnAssign):
                found.add(UNKNOWN)
        return frozenset(found) or NOTHING_KNOWN

    def subscript(self, value: Value, index: ast.expr) -> Values:
        if value.kind == "list":
            if isinstance(index, ast.Slice):
                return frozenset({value})
            return value.of or NOTHING_KNOWN
        if value.kind == "tuple":
            if isinstance(index, ast.Constant) and isinstance(index.value, int):
                return item(value, index.value)
            return listed(self.union(value.of)) if isinstance(index, ast.Slice) else NOTHING_KNOWN
        if value.kind == "dict":
            return value.of or NOTHING_KNOWN
        if value.kind == "plain" and value.of == "str":
            return frozenset({value})
        return NOTHING_KNOWN

    def call_values(self, node: ast.Call) -> Values:
        by_name = self.call_by_name(node)
        if by_name is not None:
            return by_name
        return self.union(self.call_value(v, node) for v in self.values(node.func))

    def call_by_name(self, node: ast.Call) -> Values | None:
        """Calls that mean the same whoever is asked: tokenizers, asyncio, progress bars."""
        function = node.func
        name = last_name(function)
        first = node.args[0] if node.args else None
        if isinstance(function, ast.Attribute):
            if name == "apply_chat_template":
                if is_false(keyword_of(node, "tokenize")):
                    return frozenset({Value("plain", "str", node, "rendered")})
                return NOTHING_KNOWN
            if name in ("decode", "batch_decode") and first is not None:
                origins = {v.origin for v in self.values(first) if v.note == "tokens"}
                texts = {Value("plain", "str", origin, "text") for origin in origins}
                return frozenset(texts or {TEXT})
            if name == "encode" and first is not None:
                return listed(plain("number"))
            if name in ("create_task", "ensure_future") and first is not None:
                return frozenset(
                    Value("task", v.of) if v.kind == "coroutine" else v for v in self.values(first)
                )
            if name in ("wait_for", "shield") and first is not None:
                return self.values(first)
            if name in ("run", "run_until_complete") and first is not None:
                values = self.values(first)
                if all(v.kind == "coroutine" for v in values):
                    return self.union(awaited(v) for v in values)
            if name == "gather":
                return self.gathered(node)
        if name in ("tqdm", "track", "trange") and first is not None:
            return self.values(first)
        return None

    def gathered(self, node: ast.Call) -> Values:
        if any(k.arg == "return_exceptions" for k in node.keywords):
            return NOTHING_KNOWN
        if any(isinstance(a, ast.Starred) for a in node.args):
            given = self.elements_of(node.args)
            return frozenset({Value("coroutine", listed(self.union(awaited(v) for v in given)))})
        parts = tuple(self.union(awaited(v) for v in self.values(a)) for a in node.args)
        return frozenset({Value("coroutine", frozenset({Value("tuple", parts)}))})

    def call_value(self, value: Value, node: ast.Call) -> Values:
        if value.kind == "method":
            cls, name = value.of
            return method_result(names.method_of(cls, name), node)
        if value.kind == "function":
            return method_result(value.of, node)
        if value.kind == "class":
            if names.is_sdk_class(value.of):
                return frozenset({Value("instance", value.of, node)})
            return NOTHING_KNOWN
        if value.kind == "resolver":
            return value.of or NOTHING_KNOWN
        if value.kind == "local":
            return self.local_call(value.of, node)
        if value.kind == "localclass":
            return frozenset({Value("localinstance", value.of)})
        if value.kind == "dictmethod":
            name, contents = value.of
            if name == "values":
                return listed(contents)
            if name == "items":
                return listed({Value("tuple", (plain("str"), contents))})
            return contents or NOTHING_KNOWN
        if value.kind == "textmethod":
            inner = self.union(elements(self.values(a)) | self.values(a) for a in node.args)
            marked = {v for v in inner if v.kind == "plain" and v.note}
            name = last_name(node.func)
            if name in ("split", "splitlines", "rsplit"):
                return listed({value.of})
            if name in ("format", "join", "replace"):
                return joined_text(frozenset({value.of, *marked}))
            if name in ("strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "lower"):
                return frozenset({value.of})
            return NOTHING_KNOWN
        if value.kind == "builtin":
            return self.builtin_call(value.of, node)
        if value.kind == "foreign" and value.of.split(".")[0] in OTHER_PACKAGES:
            return frozenset({Value("foreign", f"{value.of}()")})
        return NOTHING_KNOWN

    def local_call(self, function: Function, node: ast.Call) -> Values:
        key = ("returns", function)
        if key in self.active:
            return NOTHING_KNOWN
        self.active.add(key)
        try:
            return self.returned(function)
        finally:
            self.active.discard(key)

    def returned(self, function: Function) -> Values:
        if isinstance(function, ast.Lambda):
            return self.values(function.body)
        own = list(self.own_nodes(function))
        yields = [n for n in own if isinstance(n, (ast.Yield, ast.YieldFrom))]
        if yields:
            return listed(self.union(self.values(y.value) for y in yields))
        returns = [n for n in own if isinstance(n, ast.Return)]
        values = self.union(self.values(r.value) if r.value else plain("none") for r in returns)
        values = values or plain("none")
        if isinstance(function, ast.AsyncFunctionDef):
            return frozenset({Value("coroutine", values)})
        return values

    def builtin_call(self, name: str, node: ast.Call) -> Values:
        first = self.values(node.args[0]) if node.args else NOTHING_KNOWN
        if name in ("list", "sorted", "tuple", "set", "reversed", "iter", "filter"):
            source = self.values(node.args[1]) if name == "filter" and node.args[1:] else first
            kept = frozenset(v for v in source if v.kind in ("list", "unknown"))
            return kept or listed(elements(source) if node.args else ())
        if name == "zip":
            parts = tuple(elements(self.values(a)) for a in node.args)
            if any(isinstance(a, ast.Starred) for a in node.args):
                return NOTHING_KNOWN
            return listed({Value("tuple", parts)})
        if name == "enumerate":
            return listed({Value("tuple", (plain("number"), elements(first)))})
        if name == "range":
            return listed(plain("number"))
        if name == "map" and len(node.args) == 2:
            results = [
                self.local_call(v.of, node) if v.kind == "local" else NOTHING_KNOWN for v in first
            ]
            return listed(self.union(results))
        if name == "next":
            return elements(first)
        if name == "str":
            return frozenset(v for v in first if v.kind == "plain" and v.of == "str") or plain(
                "str"
            )
        if name in ("len", "sum", "int", "float", "bool", "abs", "round"):
            return plain("number")
        if name == "input":
            return plain("str")
        return NOTHING_KNOWN

    # -- constants -----------------------------------------------------------------------------

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
            return both_or_none([self.constants(node.body), self.constants(node.orelse)])
        self.active.add(node)
        try:
            if isinstance(node, ast.Name):
                bindings = self.bindings(node)
                if not bindings:
                    return None
                return both_or_none([self.bound_constants(b) for b in bindings])
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
        if binding.how == "value" and not binding.path:
            return self.constants(binding.node)
        if binding.how != "param":
            return None
        function = binding.node
        argument = next((a for a in all_arguments(function) if a.arg == binding.text), None)
        calls, escapes = self.call_sites(function)
        if argument is None or escapes or not calls:
            return None
        is_method = isinstance(self.parents.get(function), ast.ClassDef)
        given = [self.argument_for(call, function, argument, is_method) for call in calls]
        return both_or_none([self.constants(g) for g in given])

    def setting_default(self, node: ast.Attribute) -> set[Any] | None:
        """`config.rank` -> the default of the dataclass field or of `--rank`."""
        values = self.values(node.value)
        if any(v.kind in ("instance", "module", "class", "future") for v in values):
            return None
        owners = [v.of for v in values if v.kind == "localinstance"]
        if not owners:
            owners = [n for n in self.nodes if isinstance(n, ast.ClassDef)]
        defaults: list[ast.expr] = []
        for owner in owners:
            for child in owner.body:
                if (
                    isinstance(child, ast.AnnAssign)
                    and isinstance(child.target, ast.Name)
                    and child.target.id == node.attr
                    and child.value is not None
                ):
                    defaults.append(child.value)
        for call in self.calls:
            if last_name(call.func) != "add_argument":
                continue
            flags = [a.value for a in call.args if isinstance(a, ast.Constant)]
            dests = [str(f).lstrip("-").replace("-", "_") for f in flags]
            default = keyword_of(call, "default")
            if node.attr in dests and default is not None:
                defaults.append(default)
        if len(defaults) != 1:
            return None
        return self.constants(defaults[0])

    # -- the SDK's calls -----------------------------------------------------------------------

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
        if UNKNOWN not in values:
            return ""
        if name in ("sample", "forward"):
            # Words of other libraries too: the arguments must be ours.
            given = [*call.args, *(k.value for k in call.keywords)]
            ours = {"num_samples", "sampling_params", "loss_fn"} & {k.arg for k in call.keywords}
            if not ours and not any(
                v.kind == "instance" and v.of.__module__.startswith("pytrio")
                for argument in given
                for v in self.values(argument)
            ):
                return ""
        return name

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


# -- helpers on values -----------------------------------------------------------------------------


def replace_path(binding: Binding, path: tuple[int, ...]) -> Binding:
    return Binding(binding.how, binding.node, path, binding.text)


def elements(values: Values) -> Values:
    """What iterating over a value gives."""
    found: set[Value] = set()
    for value in values:
        if value.kind == "list":
            found |= value.of
        elif value.kind == "tuple":
            for part in value.of:
                found |= part
        elif value.kind == "dict":
            found |= plain("str")
        elif value.kind == "instance" and value.of.__name__ == "TensorData":
            found.add(UNKNOWN)
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


def awaited(value: Value) -> Values:
    if value.kind in ("coroutine", "future", "task"):
        return value.of or NOTHING_KNOWN
    return frozenset({value})


def joined_text(values: Values) -> Values:
    """A text made of others: it keeps what its parts are marked with."""
    marked = frozenset(v for v in values if v.kind == "plain" and v.of == "str" and v.note)
    marked = frozenset(replace(v, note="built chatml") if v.note == "chatml" else v for v in marked)
    return marked or plain("str")


def has_template_marks(text: str) -> bool:
    return "<|im_start|>" in text or "<think>" in text


def from_annotation(annotation: Any, origin: ast.Call | None, note: str = "") -> Values:
    """A type of the SDK's own annotations as values."""
    base = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if base is typing.Annotated:
        return from_annotation(arguments[0], origin, note)
    if base in (typing.Union, types.UnionType):
        kept = [a for a in arguments if a is not type(None)]
        return frozenset().union(*(from_annotation(a, origin, note) for a in kept))
    if base is names.future_class() or base is ThreadFuture:
        return frozenset({Value("future", from_annotation(arguments[0], origin), origin)})
    if base in (list, set, frozenset) or (inspect.isclass(base) and issubclass(base, Iterable)):
        if base is dict or len(arguments) == 2:
            return frozenset({Value("dict", from_annotation(arguments[1], origin), origin, note)})
        if base is tuple:
            return NOTHING_KNOWN
        return frozenset({Value("list", from_annotation(arguments[0], origin), origin, note)})
    if names.is_sdk_class(annotation):
        return frozenset({Value("instance", annotation, origin)})
    if annotation is str:
        return frozenset({Value("plain", "str", origin, note)})
    if annotation in (int, float, bool):
        return plain("number")
    if annotation is None or annotation is type(None):
        return plain("none")
    return NOTHING_KNOWN


def instance_attribute(value: Value, name: str) -> Values:
    cls = value.of
    fields = getattr(cls, "model_fields", {})
    if name in fields:
        return from_annotation(fields[name].annotation, value.origin, name)
    if names.method_of(cls, name) is not None:
        return frozenset({Value("method", (cls, name), value.origin)})
    return NOTHING_KNOWN


def method_result(function: Any, node: ast.Call) -> Values:
    signature = names.signature_of(function)
    if signature is None:
        return NOTHING_KNOWN
    annotation = signature.return_annotation
    if annotation is inspect.Signature.empty or isinstance(annotation, str):
        return NOTHING_KNOWN
    values = from_annotation(annotation, node)
    if inspect.iscoroutinefunction(function):
        return frozenset({Value("coroutine", values, node)})
    return values


def module_values(name: str) -> Values:
    """A module of pytrio or swanlab; others are not looked into."""
    package = name.split(".")[0]
    if package == "pytrio":
        module: Any = names.sdk()
    elif package == "swanlab" and names.swanlab() is not None:
        module = names.swanlab()
    else:
        return frozenset({Value("foreign", name)})
    for part in name.split(".")[1:]:
        module = getattr(module, part, None)
    return frozenset({Value("module", module)}) if inspect.ismodule(module) else NOTHING_KNOWN


def member_values(value: Value, name: str) -> Values:
    if value.kind == "foreign":
        return frozenset({Value("foreign", f"{value.of}.{name}")})
    if value.kind != "module":
        return NOTHING_KNOWN
    member = getattr(value.of, name, None)
    if inspect.ismodule(member):
        return frozenset({Value("module", member)})
    if inspect.isclass(member):
        return frozenset({Value("class", member)})
    if callable(member):
        return frozenset({Value("function", member)})
    return NOTHING_KNOWN


def known_by_name(name: str) -> Values:
    """Fields whose name is the SDK's alone, read from a value we know nothing about."""
    tensor = frozenset({Value("instance", names.sdk().types.TensorData)})
    by_key = frozenset({Value("dict", tensor)})
    if name == "loss_fn_inputs":
        return by_key
    if name == "loss_fn_outputs":
        return listed(by_key)
    return NOTHING_KNOWN


def both_or_none(parts: list[set[Any] | None]) -> set[Any] | None:
    found: set[Any] = set()
    for part in parts:
        if part is None:
            return None
        found |= part
    return found


# -- helpers on syntax -----------------------------------------------------------------------------


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


def keyword_of(call: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg == name), None)


def argument_of(call: ast.Call, name: str, index: int) -> ast.expr | None:
    """An argument given by keyword or, unless stars hide it, by position."""
    found = keyword_of(call, name)
    if found is None and index < len(call.args):
        if not any(isinstance(a, ast.Starred) for a in call.args[: index + 1]):
            return call.args[index]
    return found


def has_stars(call: ast.Call) -> bool:
    return any(k.arg is None for k in call.keywords) or any(
        isinstance(a, ast.Starred) for a in call.args
    )


def is_false(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def is_number(node: ast.AST | None) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, (int, float))
        and not isinstance(node.value, bool)
    )


def is_self_attribute(node: ast.AST, name: str) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def all_arguments(function: Any) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def positional_arguments(function: Any) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args]


def defaults_of(function: Any) -> list[ast.expr]:
    return [d for d in [*function.args.defaults, *function.args.kw_defaults] if d is not None]


def annotations_of(function: Any) -> list[ast.expr]:
    every = [*all_arguments(function), function.args.vararg, function.args.kwarg]
    found = [a.annotation for a in every if a is not None and a.annotation is not None]
    return [*found, *([function.returns] if function.returns is not None else [])]


def default_of(function: Any, argument: ast.arg) -> ast.expr | None:
    positional = positional_arguments(function)
    if argument in positional:
        offset = len(positional) - len(function.args.defaults)
        index = positional.index(argument) - offset
        return function.args.defaults[index] if index >= 0 else None
    return function.args.kw_defaults[function.args.kwonlyargs.index(argument)]


def decorators(function: Any) -> list[str]:
    return [last_name(d) for d in getattr(function, "decorator_list", [])]


def methods_of(owner: Any) -> list[Any]:
    return [n for n in owner.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


def names_in(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def words_in(node: ast.AST) -> set[str]:
    """Names, attributes and their parts at underscores, in lower case."""
    found: set[str] = set()
    for part in ast.walk(node):
        name = last_name(part)
        if name:
            found |= {name.lower(), *re.split(r"_+", name.lower())}
    return found - {""}
