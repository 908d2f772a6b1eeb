"""One source file as its syntax tree, and where its nodes stand in it."""

import ast
import warnings
from collections.abc import Iterator

from lint.scopes import Binding, Scope, scopes_of
from lint.syntax import FUNCTIONS, LOOPS


class Source:
    """A parsed file. Raises SyntaxError when it does not parse."""

    def __init__(self, source: str, filename: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the script's own run will show them
            self.tree = ast.parse(source, filename)
        self.nodes = list(ast.walk(self.tree))
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.scopes = scopes_of(self.tree)
        self.used_trio = any(self.imports("pytrio"))
        self.used_swanlab = any(self.imports("swanlab"))

    def imports(self, package: str) -> Iterator[ast.Import | ast.ImportFrom]:
        """The import statements of a package or of its parts."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                if any(alias.name.split(".")[0] == package for alias in node.names):
                    yield node
            elif isinstance(node, ast.ImportFrom) and not node.level:
                if (node.module or "").split(".")[0] == package:
                    yield node

    # -- names -------------------------------------------------------------------------------------

    def bindings(self, name: ast.Name) -> list[Binding]:
        """Everything a name is bound to in its scope; nothing for builtins."""
        scope = self.scopes[name].find(name.id)
        return scope.bindings[name.id] if scope else []

    def only_value(self, name: ast.Name) -> ast.expr | None:
        """The expression a name stands for, when it is bound once and to the whole of it."""
        bindings = self.bindings(name)
        if len(bindings) != 1 or bindings[0].how != "value" or bindings[0].path:
            return None
        node = bindings[0].node
        return node if isinstance(node, ast.expr) else None

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

    # -- places ------------------------------------------------------------------------------------

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, innermost first, the module last."""
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
        """The innermost statement around a node, or the node itself."""
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
