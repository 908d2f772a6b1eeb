"""Rules on the code around the SDK: answers by regex, sandboxes, signals, SwanLab."""

import ast
import inspect
import re
import typing
from collections.abc import Iterator

from lint import names
from lint.flow import Code, Hit
from lint.rules_sdk import dotted_origin
from lint.syntax import has_stars, keyword_of, last_name

# -- C11: boxed answers ----------------------------------------------------------------------------

SEARCHES = ("search", "findall", "finditer", "match", "fullmatch", "compile", "split", "sub")


def boxed_patterns(code: Code) -> Iterator[Hit]:
    """C11: a regex that stops at the first brace, or that takes the first box."""
    for call in code.calls:
        name = last_name(call.func)
        if name not in SEARCHES:
            continue
        pattern = pattern_of(code, call)
        if pattern is None or "box" not in pattern:
            continue
        yield from nested_box(call, pattern)
        takes_first = name == "search" or (
            name == "findall" and first_is_taken(code.parents.get(call))
        )
        if takes_first and not re.search(r"(\$|\\Z)$", pattern):
            yield Hit(
                call,
                "the first box is taken; the answer is the last one",
                "take the last match: re.findall(...)[-1]",
            )


def nested_box(call: ast.Call, pattern: str) -> Iterator[Hit]:
    """A pattern whose group ends at the first closing brace."""
    # A method of a compiled pattern: the compilation is reported.
    if not call.args or not isinstance(call.args[0], (ast.Constant, ast.Name, ast.Attribute)):
        return
    if last_name(call.func) != "compile" and pattern_argument(call) is None:
        return
    inside = pattern[pattern.index("box") :]
    group = re.search(r"\\?\{\s*(\(.*)", inside)
    if group is None:
        return
    body = group[1]
    stops_early = "[^}]" in body or "[^{}]" in body or ".*?" in body or ".+?" in body
    handles_nesting = body.count("\\{") > 0 or "(?R)" in body
    if stops_early and not handles_nesting:
        yield Hit(
            call,
            "the pattern ends at the first brace: \\boxed{\\frac{1}{2}} is cut or missed",
            "count braces from the last \\boxed{, or capture digits only",
        )


def pattern_argument(call: ast.Call) -> ast.expr | None:
    """The pattern of `re.search(pattern, text)`; None for a method of a compiled pattern."""
    if isinstance(call.func, ast.Attribute) and last_name(call.func.value) in ("re", "regex"):
        return call.args[0] if call.args else keyword_of(call, "pattern")
    return None


def pattern_of(code: Code, call: ast.Call) -> str | None:
    """Text of the pattern of a search, also when it was compiled before."""
    given = pattern_argument(call)
    if given is None and isinstance(call.func, ast.Attribute):
        base = call.func.value
        if isinstance(base, ast.Name):
            for binding in code.bindings(base):
                node = binding.node
                if binding.how == "value" and isinstance(node, ast.Call):
                    if last_name(node.func) == "compile":
                        given = pattern_argument(node)
    if isinstance(given, ast.Name):
        for binding in code.bindings(given):
            node = binding.node
            if isinstance(node, ast.Call) and last_name(node.func) == "compile":
                given = pattern_argument(node)
    constants = code.constants(given) or set()
    texts = [c for c in constants if isinstance(c, str)]
    return texts[0] if len(texts) == 1 else None


def first_is_taken(parent: ast.AST | None) -> bool:
    """Is the node `x[0]`."""
    return (
        isinstance(parent, ast.Subscript)
        and isinstance(parent.slice, ast.Constant)
        and parent.slice.value == 0
    )


# -- C17, C18: running what the model wrote --------------------------------------------------------

STARTERS = ("run", "Popen", "check_output", "check_call", "call")
ASYNC_STARTERS = ("create_subprocess_exec", "create_subprocess_shell")
INTERPRETERS = re.compile(r"^(.*/)?(python[\d.]*|pypy\d*|bash|sh|node|ruby|perl)$")


def open_sandboxes(code: Code) -> Iterator[Hit]:
    """C17: model-written code with our environment, without a time limit, in our process."""
    for call in code.calls:
        function = dotted_origin(code, call.func)
        if function in ("exec", "eval") and call.args and last_name(call.func) == function:
            is_builtin = any(v.kind == "builtin" for v in code.values(call.func))
            if is_builtin and code.constants(call.args[0]) is None:
                yield Hit(
                    call,
                    f"{function}(...) runs text in this process, with its keys and its memory",
                    "run it in a process of its own with an empty environment and a time limit"
                    if function == "exec"
                    else "parse it: ast.literal_eval for literals, a small evaluator for sums",
                )
        starts = function.split(".")[0] == "subprocess" and last_name(call.func) in STARTERS
        starts = starts or last_name(call.func) in ASYNC_STARTERS
        if starts and runs_foreign_code(code, call):
            yield from process_hits(code, call)
    for node in code.nodes:
        if isinstance(node, ast.Compare) and rewards_exit_code(code, node):
            yield Hit(
                node,
                "the exit code is the reward: sys.exit(0) in the tested code earns it",
                "let the harness print a secret marker after its checks, and look for that",
                "warning",
            )


def runs_foreign_code(code: Code, call: ast.Call) -> bool:
    """An interpreter started on something that is not a literal."""
    command: list[ast.expr] = list(call.args)
    if command and isinstance(command[0], ast.Name):
        bindings = code.bindings(command[0])
        if len(bindings) == 1 and isinstance(bindings[0].node, ast.List):
            command = [bindings[0].node, *command[1:]]
    if command and isinstance(command[0], ast.List):
        command = list(command[0].elts)
    if not command:
        return False
    first, rest = command[0], command[1:]
    is_interpreter = ast.unparse(first) == "sys.executable" or (
        isinstance(first, ast.Constant) and bool(INTERPRETERS.match(str(first.value)))
    )
    if not is_interpreter:
        return False
    source = keyword_of(call, "input")
    dynamic = [p for p in rest if not isinstance(p, ast.Constant)]
    if "Popen" in ast.unparse(call.func) or last_name(call.func) in ASYNC_STARTERS:
        stdin = keyword_of(call, "stdin")
        dynamic += [stdin] if stdin is not None and "PIPE" in ast.unparse(stdin) else []
    return source is not None or bool(dynamic)


def process_hits(code: Code, call: ast.Call) -> Iterator[Hit]:
    """A process that inherits the environment, or has no time limit."""
    if has_stars(call) and any(k.arg is None for k in call.keywords):
        return
    environment = keyword_of(call, "env")
    if inherits(code, environment):
        yield Hit(
            call,
            "the process that runs model-written code inherits this environment, keys included",
            'pass env={"PATH": os.defpath} or another short list, and -I to Python',
        )
    function = ast.unparse(code.function_of(call))
    limited = keyword_of(call, "timeout") is not None
    if last_name(call.func) not in STARTERS[:1] + STARTERS[2:]:
        limited = limited or "timeout" in function or "wait_for(" in function
    if not limited:
        yield Hit(
            call,
            "model-written code runs without a time limit",
            "pass timeout=... and kill the whole process group when it ends",
        )


def inherits(code: Code, environment: ast.expr | None) -> bool:
    """Does a process with this `env` get our environment."""
    if environment is None:
        return True
    if isinstance(environment, ast.Constant):
        return environment.value is None
    candidates: list[ast.AST] = [environment]
    if isinstance(environment, ast.Name):
        candidates = [b.node for b in code.bindings(environment) if b.how == "value"]
    for node in candidates:
        text = ast.unparse(node)
        if text in ("os.environ", "os.environ.copy()", "dict(os.environ)"):
            return True
        if isinstance(node, ast.Dict):
            spread = [v for k, v in zip(node.keys, node.values, strict=True) if k is None]
            if any(ast.unparse(v) == "os.environ" for v in spread):
                return True
        if isinstance(node, ast.BinOp) and "os.environ" in (
            ast.unparse(node.left),
            ast.unparse(node.right),
        ):
            return True
    return False


def rewards_exit_code(code: Code, node: ast.Compare) -> bool:
    """Does a comparison with an exit code alone become the reward."""
    if not (
        isinstance(node.left, ast.Attribute)
        and node.left.attr == "returncode"
        and len(node.ops) == 1
        and isinstance(node.ops[0], ast.Eq)
    ):
        return False
    child: ast.AST = node
    for above in code.ancestors(node):
        if isinstance(above, ast.BoolOp):
            return False
        if isinstance(above, ast.IfExp) and above.test is child:
            values = [above.body, above.orelse]
            if not all(isinstance(v, ast.Constant) and isinstance(v.value, float) for v in values):
                return False
        if isinstance(above, ast.Return):
            function = getattr(code.function_of(node), "name", "")
            as_number = child is not node
            return as_number or bool(re.search(r"reward|score", function))
        if isinstance(above, ast.Assign):
            return bool(re.search(r"reward|score", ast.unparse(above.targets[0])))
        if isinstance(above, ast.Call) and last_name(above.func) not in ("float", "int"):
            return False
        if isinstance(above, ast.stmt):
            return False
        child = above
    return False


def alarms(code: Code) -> Iterator[Hit]:
    """C18: time limits by signal, which work in the main thread only."""
    threads = any(
        isinstance(n, (ast.AsyncFunctionDef, ast.Await))
        or (isinstance(n, (ast.Name, ast.Attribute)) and last_name(n) in THREADS)
        for n in code.nodes
    )
    for call in code.calls:
        if dotted_origin(code, call.func) in ("signal.alarm", "signal.setitimer"):
            if call.args and isinstance(call.args[-1], ast.Constant) and call.args[-1].value == 0:
                continue  # switching it off
            yield Hit(
                call,
                f"{last_name(call.func)} works in the main thread only, and not on Windows",
                "run the check in a process of its own with a time limit",
                None if threads else "warning",
            )


THREADS = ("Thread", "ThreadPoolExecutor", "to_thread", "run_in_executor", "ThreadPool")


# -- C23: SwanLab ----------------------------------------------------------------------------------


def swanlab_calls(code: Code) -> Iterator[Hit]:
    """C23: names SwanLab ignores or refuses, steps it drops, a run that is not finished."""
    package = names.swanlab()
    if not code.used_swanlab or package is None:
        return
    inits, finishes = [], False
    for node in code.nodes:
        if isinstance(node, ast.Attribute) and any(
            v.kind == "module" and v.of is package for v in code.values(node.value)
        ):
            if not hasattr(package, node.attr):
                yield Hit(
                    node,
                    f"the installed swanlab has no {node.attr!r}",
                    names.hint(node.attr, dir(package)),
                )
    for call in code.calls:
        name = swanlab_function(code, call)
        if name == "init":
            inits.append(call)
            yield from init_hits(code, call)
        elif name == "log":
            step = keyword_of(call, "step") or (call.args[1] if len(call.args) > 1 else None)
            problem = step_problem(code, step)
            if step is not None and problem:
                yield Hit(
                    call,
                    f"step={ast.unparse(step)[:40]} is {problem}: SwanLab drops the whole call",
                    "pass step=int(step)",
                )
    finishes = any(
        isinstance(n, ast.Attribute) and n.attr == "finish" for n in code.nodes
    ) or "finish" in {n.id for n in code.nodes if isinstance(n, ast.Name)}
    entered = {
        item.context_expr
        for n in code.nodes
        if isinstance(n, (ast.With, ast.AsyncWith))
        for item in n.items
    }
    for call in inits:
        if not finishes and call not in entered:
            yield Hit(
                call,
                "the SwanLab run is never finished, so a crash leaves it open",
                "call swanlab.finish() in a finally block",
                "warning",
            )


def swanlab_function(code: Code, call: ast.Call) -> str:
    """`init` or `log` when the call is SwanLab's, by module, by import or on its run object."""
    package = names.swanlab()
    for value in code.values(call.func):
        for name in ("init", "log"):
            if value.kind == "function" and value.of is getattr(package, name, None):
                return name
        if value.kind == "method" and value.of[0].__module__.startswith("swanlab"):
            return value.of[1]
    return ""


def init_hits(code: Code, call: ast.Call) -> Iterator[Hit]:
    """Keywords that `swanlab.init` ignores, and a project name or mode that it refuses."""
    known = names.swanlab_init_keywords()
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in known:
            yield Hit(
                keyword.value,
                f"swanlab.init ignores the keyword {keyword.arg!r} without a word",
                names.hint(keyword.arg, known),
            )
    project, pattern = keyword_of(call, "project"), names.project_name()
    projects = code.texts(project)
    if projects and pattern and not any(map(pattern.fullmatch, projects)):
        yield Hit(
            call,
            f"SwanLab refuses the project name {projects[0]!r}",
            "use letters, digits and _ - + . only",
        )
    mode = keyword_of(call, "mode")
    package = names.swanlab()
    allowed = literal_values(package.init, "mode") if package else set()
    modes = code.texts(mode)
    if modes and allowed and not allowed & set(modes):
        yield Hit(
            call, f"SwanLab has no mode {modes[0]!r}", f"use one of {', '.join(sorted(allowed))}"
        )


def literal_values(function: typing.Any, parameter: str) -> set[str]:
    """The strings of a parameter annotated with a Literal."""
    signature = names.signature_of(function)
    found: set[str] = set()
    waiting = [signature.parameters[parameter].annotation] if signature else []
    while waiting:
        annotation = waiting.pop()
        if typing.get_origin(annotation) is typing.Literal:
            found |= {a for a in typing.get_args(annotation) if isinstance(a, str)}
        elif annotation is not inspect.Parameter.empty:
            waiting += [a for a in typing.get_args(annotation) if a is not annotation]
    return found


def step_problem(code: Code, step: ast.expr | None) -> str:
    """What a step is instead of a whole number of Python; empty when nothing is wrong."""
    if step is None:
        return ""
    if isinstance(step, ast.BinOp) and isinstance(step.op, ast.Div):
        return "a float"
    if isinstance(step, ast.Call):
        function = dotted_origin(code, step.func)
        if function == "float":
            return "a float"
        if re.match(r"(numpy|np)\.u?int\d*$", function):
            return "a numpy number"
        if re.match(r"(numpy|np)\.float\d*$", function):
            return "a float"
    for value in code.constants(step) or ():
        if isinstance(value, float):
            return "a float"
        if isinstance(value, str):
            return "a string"
        if isinstance(value, int) and value < 0:
            return "negative"
    return ""
