"""The scopes of a file: which names each of them has, and what a name is bound to."""

import ast
from dataclasses import dataclass, field, replace

from lint.syntax import COMPREHENSIONS, Function, all_arguments, annotations_of, defaults_of

# Methods that put their one argument into a list or a set -> how they bind it.
ADDING = {"append": "append", "add": "append", "extend": "extend"}


@dataclass
class Binding:
    """One way a name gets its value.

    `how` is one of: value, element, append, extend, param, annotated, def, class, module, member,
    opaque. `path` are the indices of a tuple assignment; `text` is the parameter, or what is
    imported, as `module` or `module:member`.
    """

    how: str
    node: ast.AST
    path: tuple[int, ...] = ()
    text: str = ""


@dataclass
class Scope:
    """A module, class, function or comprehension and the names bound in it."""

    node: ast.AST
    parent: "Scope | None"
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    outer: set[str] = field(default_factory=set)  # names declared global or nonlocal

    def add(self, name: str, binding: Binding) -> None:
        """Bind a name here, or where it was declared global or nonlocal to be."""
        scope = self
        if name in self.outer and self.parent is not None:
            scope = self.find(name) or self.top()
        scope.bindings.setdefault(name, []).append(binding)

    def top(self) -> "Scope":
        """The module's scope."""
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


def scopes_of(tree: ast.Module) -> dict[ast.AST, Scope]:
    """Every node of a file -> the scope in which its names are looked up."""
    scopes: dict[ast.AST, Scope] = {}
    collect(tree, Scope(tree, None), scopes)
    bind_additions(scopes, tree)
    return scopes


def collect(node: ast.AST, scope: Scope, scopes: dict[ast.AST, Scope]) -> None:
    """Enter a subtree into `scopes`, and what it binds into its scopes."""
    scopes[node] = scope
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        collect_function(node, scope, scopes)
    elif isinstance(node, ast.Lambda):
        for default in defaults_of(node):
            collect(default, scope, scopes)
        collect(node.body, function_scope(node, scope), scopes)
    elif isinstance(node, ast.ClassDef):
        scope.add(node.name, Binding("class", node))
        inner = Scope(node, scope)
        for part in [*node.decorator_list, *node.bases, *node.keywords]:
            collect(part, scope, scopes)
        for child in node.body:
            collect(child, inner, scopes)
    elif isinstance(node, COMPREHENSIONS):
        collect_comprehension(node, Scope(node, scope), scopes)
    else:
        bind_statement(node, scope)
        for below in ast.iter_child_nodes(node):
            collect(below, scope, scopes)


def collect_function(
    node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope, scopes: dict[ast.AST, Scope]
) -> None:
    """Decorators, defaults and annotations belong outside, the body inside."""
    scope.add(node.name, Binding("def", node))
    for part in [*node.decorator_list, *defaults_of(node), *annotations_of(node)]:
        collect(part, scope, scopes)
    inner = function_scope(node, scope)
    for child in node.body:
        for below in ast.walk(child):
            if isinstance(below, (ast.Global, ast.Nonlocal)):
                inner.outer |= set(below.names)
    for child in node.body:
        collect(child, inner, scopes)


def collect_comprehension(
    node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp,
    inner: Scope,
    scopes: dict[ast.AST, Scope],
) -> None:
    """The targets are names of the comprehension alone."""
    for generator in node.generators:
        scopes[generator] = inner
        bind(generator.target, Binding("element", generator.iter), inner)
        for child in ast.iter_child_nodes(generator):
            collect(child, inner, scopes)
    for part in [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]:
        collect(part, inner, scopes)


def function_scope(function: Function, outside: Scope) -> Scope:
    """A new scope with the function's parameters."""
    scope = Scope(function, outside)
    for argument in all_arguments(function):
        scope.bindings[argument.arg] = [Binding("param", function, text=argument.arg)]
    for starred in (function.args.vararg, function.args.kwarg):
        if starred:
            scope.bindings[starred.arg] = [Binding("opaque", function)]
    return scope


def bind_statement(node: ast.AST, scope: Scope) -> None:
    """Bind the names that this node itself binds, not those of its parts."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            bind(target, Binding("value", node.value), scope)
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        if node.value is not None:
            scope.add(node.target.id, Binding("value", node.value))
        else:
            scope.add(node.target.id, Binding("annotated", node.annotation))
    elif isinstance(node, ast.NamedExpr):
        while isinstance(scope.node, COMPREHENSIONS) and scope.parent:
            scope = scope.parent
        bind(node.target, Binding("value", node.value), scope)
    elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        scope.add(node.target.id, Binding("extend", node.value))
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        bind(node.target, Binding("element", node.iter), scope)
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        for item in node.items:
            if item.optional_vars is not None:
                bind(item.optional_vars, Binding("value", item.context_expr), scope)
    elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
        scope.add(node.name, Binding("opaque", node))
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        bind_imports(node, scope)


def bind_imports(node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
    """`import a.b` binds `a`; `from a import b as c` binds `c` to `a:b`."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            binding = Binding("member", node, text=f"{module}:{alias.name}")
            scope.add(alias.asname or alias.name, binding)
        else:
            package = alias.name.split(".")[0]
            module = alias.name if alias.asname else package
            scope.add(alias.asname or package, Binding("module", node, text=module))


def bind(target: ast.AST, binding: Binding, scope: Scope) -> None:
    """Bind every name of an assignment's target."""
    if isinstance(target, ast.Name):
        scope.add(target.id, binding)
    elif isinstance(target, ast.Starred):
        bind(target.value, Binding("opaque", binding.node), scope)
    elif isinstance(target, (ast.Tuple, ast.List)):
        starred = any(isinstance(element, ast.Starred) for element in target.elts)
        for index, element in enumerate(target.elts):
            if starred:
                part = Binding("opaque", binding.node)
            else:
                part = replace(binding, path=(*binding.path, index))
            bind(element, part, scope)


def bind_additions(scopes: dict[ast.AST, Scope], tree: ast.Module) -> None:
    """`rows.append(x)` and `rows.extend(xs)` say what the list `rows` holds."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or len(call.args) != 1:
            continue
        function = call.func
        if not (isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)):
            continue
        scope = scopes[call].find(function.value.id)
        how = ADDING.get(function.attr)
        if scope is not None and how:
            scope.bindings[function.value.id].append(Binding(how, call.args[0]))
