"""What every expression of a file may be, found by simple data flow and without execution.

A name stands for everything it is bound to anywhere in its scope. Where that cannot be told the
answer holds UNKNOWN, and the rules stay silent.
"""

import ast
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lint import names
from lint.scopes import Binding
from lint.source import Source
from lint.syntax import (
    Function,
    argument_for,
    argument_named,
    decorators,
    fields_named,
    is_false,
    is_self_attribute,
    keyword_of,
    last_name,
    methods_of,
    own_nodes,
    positional_arguments,
)
from lint.values import (
    NONE,
    NOTHING_KNOWN,
    UNKNOWN,
    Value,
    Values,
    awaited,
    elements,
    instance_attribute,
    is_known,
    item,
    joined_text,
    known_by_name,
    listed,
    member_values,
    method_result,
    module_values,
    one,
    plain,
    subscript,
    union,
)

# Expressions nested in each other, or calls that lead to each other, beyond which we do not look.
DEPTH = 200
# Packages whose objects are never the SDK's: `rng.sample(...)` is not a rollout.
OTHER_PACKAGES = (
    "random", "numpy", "torch", "math", "re", "json", "os", "pathlib", "statistics", "collections",
    "datasets", "pandas", "transformers", "subprocess", "signal", "time", "httpx", "requests",
)  # fmt: skip
LISTS = ("list", "sequence", "iterable", "iterator", "set", "collection")


class Inference(Source):
    """A file whose expressions can be asked for their values.

    Most methods call each other through `values`. Each expression is looked at once: `active`
    holds those being looked at, so that a name bound to itself ends, and `cache` the answers.
    """

    def __init__(self, source: str, filename: str) -> None:
        super().__init__(source, filename)
        self.cache: dict[ast.AST, Values] = {}
        self.active: set[object] = set()
        self.attribute_stores: dict[str, list[ast.Attribute]] = {}
        for node in self.nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                self.attribute_stores.setdefault(node.attr, []).append(node)
        # Tables and not branches: a chain of calls takes few frames of Python's stack.
        self.readers: dict[type[ast.AST], Callable[[Any], Values]] = {
            ast.Constant: constant_values,
            ast.Name: self.name_values,
            ast.Attribute: self.attribute_values,
            ast.Call: self.call_values,
            ast.Await: lambda node: union(awaited(v) for v in self.values(node.value)),
            ast.Subscript: self.subscript_values,
            ast.List: lambda node: listed(self.elements_of(node.elts)),
            ast.Set: lambda node: listed(self.elements_of(node.elts)),
            ast.Tuple: self.tuple_values,
            ast.Dict: lambda node: one("dict", union(self.values(v) for v in node.values)),
            ast.ListComp: lambda node: listed(self.values(node.elt)),
            ast.SetComp: lambda node: listed(self.values(node.elt)),
            ast.GeneratorExp: lambda node: listed(self.values(node.elt)),
            ast.DictComp: lambda node: one("dict", self.values(node.value)),
            ast.IfExp: lambda node: self.values(node.body) | self.values(node.orelse),
            ast.BoolOp: lambda node: union(self.values(v) for v in node.values),
            ast.NamedExpr: lambda node: self.values(node.value),
            ast.Starred: lambda node: self.values(node.value),
            ast.BinOp: self.operation_values,
            ast.JoinedStr: self.text_values,
            ast.Compare: lambda node: plain("number"),
            ast.UnaryOp: lambda node: plain("number"),
            ast.Lambda: lambda node: one("local", node),
        }
        self.callers: dict[str, Callable[[Any, ast.Call], Values]] = {
            "method": lambda of, call: method_result(names.method_of(*of), call),
            "function": method_result,
            "class": class_call,
            "resolver": lambda of, call: of or NOTHING_KNOWN,
            "local": lambda of, call: self.local_call(of),
            "localclass": lambda of, call: one("localinstance", of),
            "dictmethod": dict_method_call,
            "textmethod": self.text_method_call,
            "builtin": self.builtin_call,
            "foreign": foreign_call,
        }

    def values(self, node: ast.AST | None) -> Values:
        """What an expression may be; never empty."""
        if node is None:
            return NOTHING_KNOWN
        if node in self.cache:
            return self.cache[node]
        if node in self.active or len(self.active) > DEPTH:
            return NOTHING_KNOWN
        reader = self.readers.get(type(node), unread)
        self.active.add(node)
        try:
            found = reader(node) or NOTHING_KNOWN
        finally:
            self.active.discard(node)
        self.cache[node] = found
        return found

    # -- expressions -------------------------------------------------------------------------------

    def elements_of(self, nodes: list[ast.expr]) -> Values:
        """What a list written with these elements holds."""
        found: set[Value] = set()
        for node in nodes:
            values = self.values(node)
            found |= elements(values) if isinstance(node, ast.Starred) else values
        return frozenset(found)

    def tuple_values(self, node: ast.Tuple) -> Values:
        """A tuple by its parts, a list where stars hide their number."""
        if any(isinstance(element, ast.Starred) for element in node.elts):
            return listed(self.elements_of(node.elts))
        return one("tuple", tuple(self.values(e) for e in node.elts))

    def subscript_values(self, node: ast.Subscript) -> Values:
        """`x[i]`."""
        return union(subscript(v, node.slice) for v in self.values(node.value))

    def text_values(self, node: ast.JoinedStr) -> Values:
        """An f-string."""
        parts = [v.value if isinstance(v, ast.FormattedValue) else v for v in node.values]
        return joined_text(union(self.values(part) for part in parts))

    def operation_values(self, node: ast.BinOp) -> Values:
        """`x + y` and the like."""
        left, right = self.values(node.left), self.values(node.right)
        both = left | right
        if isinstance(node.op, ast.Add):
            if any(v.kind == "plain" and v.of == "str" for v in both):
                return joined_text(both)
            if any(v.kind == "list" for v in both):
                return frozenset(v for v in both if v.kind in ("list", "unknown"))
            return both
        if isinstance(node.op, ast.Mult):
            return frozenset(v for v in both if v.kind == "list") or plain("number")
        if isinstance(node.op, ast.Mod) and any(v.of == "str" for v in left if v.kind == "plain"):
            return joined_text(both)
        return both if UNKNOWN in both else plain("number")

    # -- names -------------------------------------------------------------------------------------

    def name_values(self, node: ast.Name) -> Values:
        """Everything a name is bound to, and what is added to the list it names."""
        bindings = self.bindings(node)
        if not bindings:
            return one("builtin", node.id)
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
        """What one binding gives its name."""
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
            values = one("local", node)
        elif binding.how == "class":
            values = one("localclass", node)
        elif binding.how == "module":
            values = module_values(binding.text)
        elif binding.how == "member":
            module, _, name = binding.text.partition(":")
            values = union(member_values(v, name) for v in module_values(module))
        else:
            values = NOTHING_KNOWN
        for index in binding.path:
            values = union(item(v, index) for v in values)
        return values or NOTHING_KNOWN

    def parameter_values(self, function: ast.AST, name: str) -> Values:
        """By annotation, else by what the calls in this file pass."""
        argument = argument_named(function, name)
        if argument is None:
            return NOTHING_KNOWN
        owner = self.parents.get(function)
        is_method = isinstance(owner, ast.ClassDef) and "staticmethod" not in decorators(function)
        positional = positional_arguments(function)
        if is_method and positional and positional[0] is argument:
            kind = "localclass" if "classmethod" in decorators(function) else "localinstance"
            return one(kind, owner)
        annotated: Values = frozenset()
        if argument.annotation is not None:
            annotated = self.annotation_values(argument.annotation)
        key = (function, name)
        if key in self.active:
            return annotated or NOTHING_KNOWN
        self.active.add(key)
        try:
            passed = self.passed_values(function, argument, is_method)
        finally:
            self.active.discard(key)
        if is_known(annotated):
            # The annotation is what the caller promises; the calls add where it came from.
            matching = frozenset(v for v in passed if v.kind in {a.kind for a in annotated})
            return matching if is_known(passed) and matching else annotated
        return passed

    def passed_values(self, function: ast.AST, argument: ast.arg, is_method: bool) -> Values:
        """What the calls in this file give to a parameter."""
        calls, escapes = self.call_sites(function)
        found: set[Value] = {UNKNOWN} if escapes or not calls else set()
        for call in calls:
            found |= self.values(argument_for(call, function, argument, is_method))
        return frozenset(found)

    # -- annotations -------------------------------------------------------------------------------

    def annotation_values(self, node: ast.AST) -> Values:
        """An annotation in the file, as far as it names SDK types or classes of the file."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self.quoted_annotation(node, node.value)
        if isinstance(node, ast.Constant):
            return plain("none")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            both = self.annotation_values(node.left) | self.annotation_values(node.right)
            return both - plain("none") or both
        if isinstance(node, ast.Subscript):
            return self.generic_annotation(node)
        if isinstance(node, ast.Name):
            bound = [b.node for b in self.bindings(node) if b.how == "value" and not b.path]
            if len(bound) == 1 and isinstance(bound[0], (ast.Subscript, ast.BinOp)):
                return self.annotation_values(bound[0])  # an alias of a type
        if isinstance(node, (ast.Name, ast.Attribute)):
            return union(instance_of(value) for value in self.values(node)) or NOTHING_KNOWN
        return NOTHING_KNOWN

    def quoted_annotation(self, node: ast.Constant, text: str) -> Values:
        """An annotation in quotes; its names are looked up where it stands."""
        try:
            parsed = ast.parse(text, mode="eval").body
        except SyntaxError:
            return NOTHING_KNOWN
        for part in ast.walk(parsed):
            self.scopes[part] = self.scopes.get(node, self.scopes[self.tree])
        return self.annotation_values(parsed)

    def generic_annotation(self, node: ast.Subscript) -> Values:
        """`list[X]`, `dict[str, X]`, `Optional[X]` and the like."""
        base = ast.unparse(node.value).rpartition(".")[2].lower()
        if base == "optional":
            return self.annotation_values(node.slice)
        if base in LISTS:
            return listed(self.annotation_values(node.slice))
        if base == "apifuture":
            return one("future", self.annotation_values(node.slice))
        if not isinstance(node.slice, ast.Tuple):
            return NOTHING_KNOWN
        parts = node.slice.elts
        if base in ("dict", "mapping") and len(parts) == 2:
            return one("dict", self.annotation_values(parts[1]))
        if base == "tuple":
            if any(isinstance(p, ast.Constant) and p.value is Ellipsis for p in parts):
                return listed(self.annotation_values(parts[0]))
            return one("tuple", tuple(map(self.annotation_values, parts)))
        return NOTHING_KNOWN

    # -- attributes --------------------------------------------------------------------------------

    def attribute_values(self, node: ast.Attribute) -> Values:
        """`x.name`."""
        found: set[Value] = set()
        for value in self.values(node.value):  # a plain loop, for fewer frames than union()
            found |= self.attribute(value, node.attr)
        return frozenset(found)

    def attribute(self, value: Value, name: str) -> Values:
        """An attribute of one thing."""
        if value == NONE:
            return frozenset()  # `client: TrainingClient | None = None` is read once it is set
        if value.kind == "module":
            return member_values(value, name)
        if value.kind == "class":
            known = names.method_of(value.of, name) is not None
            return one("method", (value.of, name)) if known else NOTHING_KNOWN
        if value.kind == "instance":
            return instance_attribute(value, name)
        if value.kind in ("future", "task") and name == "result":
            return one("resolver", value.of)
        if value.kind == "localinstance":
            return self.local_attribute(value.of, name)
        if value.kind == "dict" and name in ("get", "values", "items", "pop", "setdefault"):
            return one("dictmethod", (name, value.of))
        if value.kind == "plain" and value.of == "str":
            return one("textmethod", value)
        if value.kind == "foreign":
            return frozenset({replace(value, of=f"{value.of}.{name}")})
        if value.kind in ("unknown", "localclass"):
            return known_by_name(name)
        return NOTHING_KNOWN

    def local_attribute(self, owner: ast.ClassDef, name: str) -> Values:
        """A method, a field annotated with an SDK type, or what `self.name` is assigned."""
        found: set[Value] = set()
        for method in methods_of(owner):
            if method.name == name:
                is_property = {"property", "cached_property"} & set(decorators(method))
                found |= self.returned(method) if is_property else one("local", method)
        for annotated in fields_named(owner, name):
            found |= self.annotation_values(annotated.annotation)
        for node in self.attribute_stores.get(name, ()):
            own = is_self_attribute(node, name) and owner in self.ancestors(node)
            if own or any(
                v.kind == "localinstance" and v.of is owner for v in self.values(node.value)
            ):
                found |= self.stored_values(node)
        return frozenset(found) or NOTHING_KNOWN

    def stored_values(self, node: ast.Attribute) -> Values:
        """What a statement assigns to an attribute; a bare annotation assigns nothing."""
        parent = self.parents[node]
        above = self.parents[parent]
        if isinstance(parent, ast.Assign):
            return self.values(parent.value)
        if isinstance(parent, ast.AnnAssign):
            return self.values(parent.value) if parent.value is not None else frozenset()
        if isinstance(parent, ast.Tuple) and isinstance(above, ast.Assign):
            index = parent.elts.index(node)
            return union(item(v, index) for v in self.values(above.value))
        return NOTHING_KNOWN

    # -- calls -------------------------------------------------------------------------------------

    def call_values(self, node: ast.Call) -> Values:
        """What a call gives."""
        by_name = self.call_by_name(node)
        if by_name is not None:
            return by_name
        return union(
            self.callers.get(value.kind, unread)(value.of, node) for value in self.values(node.func)
        )

    def call_by_name(self, node: ast.Call) -> Values | None:
        """Calls that mean the same whoever is asked: tokenizers, asyncio, progress bars."""
        name = last_name(node.func)
        first = node.args[0] if node.args else None
        if isinstance(node.func, ast.Attribute):
            if name == "apply_chat_template":
                is_text = is_false(keyword_of(node, "tokenize"))
                return one("plain", "str", node, "rendered") if is_text else NOTHING_KNOWN
            if name == "gather":
                return self.gathered(node)
            if first is not None:
                found = self.method_by_name(name, first)
                if found is not None:
                    return found
        if name in ("tqdm", "track", "trange") and first is not None:
            return self.values(first)
        return None

    def method_by_name(self, name: str, first: ast.expr) -> Values | None:
        """Methods that are known by their name, given their first argument."""
        if name in ("decode", "batch_decode"):
            origins = {v.origin for v in self.values(first) if v.note == "tokens"}
            return frozenset(Value("plain", "str", o, "text") for o in origins) or plain("str")
        if name == "encode":
            return listed(plain("number"))
        if name in ("create_task", "ensure_future"):
            return frozenset(
                Value("task", v.of) if v.kind == "coroutine" else v for v in self.values(first)
            )
        if name in ("wait_for", "shield"):
            return self.values(first)
        if name in ("run", "run_until_complete"):
            values = self.values(first)
            if all(v.kind == "coroutine" for v in values):
                return union(awaited(v) for v in values)
        return None

    def gathered(self, node: ast.Call) -> Values:
        """`asyncio.gather(...)`."""
        if any(k.arg == "return_exceptions" for k in node.keywords):
            return NOTHING_KNOWN
        if any(isinstance(a, ast.Starred) for a in node.args):
            given = self.elements_of(node.args)
            return one("coroutine", listed(union(awaited(v) for v in given)))
        parts = tuple(union(awaited(v) for v in self.values(a)) for a in node.args)
        return one("coroutine", one("tuple", parts))

    def local_call(self, function: Function) -> Values:
        """What a call of a function of this file gives; unknown while it is being looked at."""
        key = ("returns", function)
        if key in self.active:
            return NOTHING_KNOWN
        self.active.add(key)
        try:
            return self.returned(function)
        finally:
            self.active.discard(key)

    def returned(self, function: Function) -> Values:
        """What a function of this file returns or yields."""
        if isinstance(function, ast.Lambda):
            return self.values(function.body)
        own = list(own_nodes(function))
        yields = [n for n in own if isinstance(n, (ast.Yield, ast.YieldFrom))]
        if yields:
            return listed(union(self.values(y.value) for y in yields))
        returns = [n for n in own if isinstance(n, ast.Return)]
        values = union(self.values(r.value) if r.value else plain("none") for r in returns)
        values = values or plain("none")
        if isinstance(function, ast.AsyncFunctionDef):
            return one("coroutine", values)
        return values

    def text_method_call(self, text: Value, node: ast.Call) -> Values:
        """A method of a text; the result keeps what the text is marked with."""
        inner = union(elements(self.values(a)) | self.values(a) for a in node.args)
        marked = {v for v in inner if v.kind == "plain" and v.note}
        name = last_name(node.func)
        if name in ("split", "splitlines", "rsplit"):
            return listed({text})
        if name in ("format", "join", "replace"):
            return joined_text(frozenset({text, *marked}))
        if name in ("strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "lower"):
            return frozenset({text})
        return NOTHING_KNOWN

    def builtin_call(self, name: str, node: ast.Call) -> Values:
        """A call of a builtin function."""
        first = self.values(node.args[0]) if node.args else NOTHING_KNOWN
        if name in ("list", "sorted", "tuple", "set", "reversed", "iter", "filter"):
            source = self.values(node.args[1]) if name == "filter" and node.args[1:] else first
            kept = frozenset(v for v in source if v.kind in ("list", "unknown"))
            return kept or listed(elements(source) if node.args else ())
        if name == "zip":
            parts = tuple(elements(self.values(a)) for a in node.args)
            if any(isinstance(a, ast.Starred) for a in node.args):
                return NOTHING_KNOWN
            return listed(one("tuple", parts))
        if name == "enumerate":
            return listed(one("tuple", (plain("number"), elements(first))))
        if name == "range":
            return listed(plain("number"))
        if name == "map" and len(node.args) == 2:
            return listed(
                union(self.local_call(v.of) if v.kind == "local" else NOTHING_KNOWN for v in first)
            )
        if name == "next":
            return elements(first)
        if name == "str":
            texts = frozenset(v for v in first if v.kind == "plain" and v.of == "str")
            return texts or plain("str")
        if name in ("len", "sum", "int", "float", "bool", "abs", "round"):
            return plain("number")
        if name == "input":
            return plain("str")
        return NOTHING_KNOWN


# -- expressions and calls that need no look at the rest of the file -------------------------------


def unread(*_: object) -> Values:
    """For expressions and calls of which we know nothing."""
    return NOTHING_KNOWN


def constant_values(node: ast.Constant) -> Values:
    """A constant; a text with the marks of a chat template says so."""
    if isinstance(node.value, str):
        is_markup = "<|im_start|>" in node.value or "<think>" in node.value
        return one("plain", "str", note="chatml" if is_markup else "")
    return plain("none" if node.value is None else "number")


def instance_of(value: Value) -> Values:
    """What a name annotated with this class holds; nothing for other values."""
    if value.kind == "class" and names.is_sdk_class(value.of):
        if value.of is names.future_class():
            return one("future", NOTHING_KNOWN)
        return one("instance", value.of)
    if value.kind == "localclass":
        return one("localinstance", value.of)
    if value.kind == "foreign" and value.of.split(".")[0] in OTHER_PACKAGES:
        return one("foreign", f"{value.of}()")
    return frozenset()


def class_call(cls: type, call: ast.Call) -> Values:
    """A construction of an SDK class."""
    return one("instance", cls, call) if names.is_sdk_class(cls) else NOTHING_KNOWN


def dict_method_call(method: tuple[str, Values], call: ast.Call) -> Values:
    """A method of a dict that gives its contents."""
    name, contents = method
    if name == "values":
        return listed(contents)
    if name == "items":
        return listed(one("tuple", (plain("str"), contents)))
    return contents or NOTHING_KNOWN


def foreign_call(name: str, call: ast.Call) -> Values:
    """A call into another package: `random.Random` -> `random.Random()`."""
    if name.split(".")[0] in OTHER_PACKAGES:
        return one("foreign", f"{name}()")
    return NOTHING_KNOWN
