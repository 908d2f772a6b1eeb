"""Rules on the loop: sampling, snapshots, seeds, advantages, saves, order of calls, clipping."""

import ast
import re
from collections.abc import Iterator

from lint import names
from lint.flow import Code, Hit
from lint.scopes import Binding
from lint.syntax import (
    COMPREHENSIONS,
    FUNCTIONS,
    LOOPS,
    argument_for,
    argument_of,
    dotted,
    keyword_of,
    last_name,
    names_in,
    words_in,
)
from lint.values import UNKNOWN, Value

EVALUATION = re.compile(r"eval|valid|test|bench|greedy|demo|probe|ask|chat", re.IGNORECASE)


def is_policy_file(code: Code) -> bool:
    """Does the file train with a policy gradient: its keys or its losses are in the text."""
    wanted = names.policy_keys() - {"logprobs"}
    keys = [k for n in code.nodes if isinstance(n, ast.Dict) for k in n.keys]
    keys += [n.slice for n in code.nodes if isinstance(n, ast.Subscript)]
    if any(isinstance(k, ast.Constant) and k.value in wanted for k in keys):
        return True
    for call in code.method_calls("forward_backward"):
        losses = code.constants(argument_of(call, "loss_fn", 1)) or set()
        if losses & names.policy_losses():
            return True
    return any(
        dotted(c.func) == "dict" and wanted & {k.arg for k in c.keywords} for c in code.calls
    )


def training_samples(code: Code) -> set[ast.Call]:
    """Calls of `sample` whose log-probabilities go into a policy gradient: the rollouts.

    Evaluation reads texts; only training reads a sequence's `logprobs`.
    """
    if code.rollouts is not None:
        return code.rollouts
    found: set[ast.Call] = set()
    if is_policy_file(code):
        calls = code.method_calls("sample")
        unresolved = False
        for node in code.nodes:
            if not isinstance(node, ast.Attribute) or node.attr != "logprobs":
                continue
            values = code.values(node.value)
            origins = {v.origin for v in values if v.kind == "instance" and v.origin is not None}
            found |= {o for o in origins if code.sdk_method(o) == "sample"}
            unresolved = unresolved or UNKNOWN in values
        if not found and unresolved and len(calls) == 1:
            function = getattr(code.function_of(calls[0]), "name", "")
            if not EVALUATION.search(function):
                found = set(calls)
    code.rollouts = found
    return found


def training_loops(code: Code, sample: ast.Call) -> list[ast.AST]:
    """Loops that run both this sampling call and an optimiser step, innermost first."""
    steps = code.method_calls("optim_step")
    loops = [
        loop
        for loop in code.nodes
        if isinstance(loop, LOOPS)
        and sample in code.reach(loop)
        and any(step in code.reach(loop) for step in steps)
    ]
    return sorted(loops, key=lambda loop: len(code.reach(loop)))


def sampling_params(code: Code, sample: ast.Call) -> list[ast.Call]:
    """The SamplingParams(...) that a sampling call may be given; empty when that cannot be told."""
    values = code.values(argument_of(sample, "sampling_params", 2))
    made = [v.origin for v in values if v.kind == "instance" and v.of.__name__ == "SamplingParams"]
    if len(made) != len(values) or any(origin is None for origin in made):
        return []
    return [origin for origin in made if origin is not None]


# -- C07, C08, C09: rollouts -----------------------------------------------------------------------


def tempered_rollouts(code: Code) -> Iterator[Hit]:
    """C07: training rollouts drawn from another law than the one their log-probabilities are of."""
    reported: set[ast.Call] = set()
    for sample in training_samples(code):
        made = sampling_params(code, sample)
        problems = [law_problem(code, call) for call in made]
        if not made or not all(problems):
            continue
        for call, problem in zip(made, problems, strict=True):
            if call not in reported:
                reported.add(call)
                yield Hit(
                    call,
                    f"training rollouts are drawn with {problem}, but their log-probabilities are "
                    "of the full distribution",
                    "sample with temperature=1, top_p=1 and top_k=-1 for training; use another "
                    "params object for evaluation",
                )


def law_problem(code: Code, made: ast.Call) -> str:
    """A setting that changes the distribution; empty when there is none."""
    checks = {
        "temperature": lambda v: v != 1,
        "top_p": lambda v: v < 1,
        "top_k": lambda v: v > 0,
    }
    for name, is_wrong in checks.items():
        given = keyword_of(made, name)
        constants = code.constants(given) if given is not None else None
        numbers = [v for v in constants or () if isinstance(v, (int, float))]
        if numbers and len(numbers) == len(constants or ()) and all(map(is_wrong, numbers)):
            default = "" if isinstance(given, ast.Constant) else " by default"
            return f"{name}={numbers[0]}{default}"
    return ""


def repeated_seeds(code: Code) -> Iterator[Hit]:
    """C08: the same seed at every step."""
    reported: set[ast.Call] = set()
    for sample in training_samples(code):
        yield from one_seed_per_group(code, sample)
        loops = training_loops(code, sample)
        if not loops:
            continue
        loop = loops[0]
        for made in sampling_params(code, sample):
            seed = keyword_of(made, "seed")
            if seed is None or made in reported:
                continue
            constants = code.constants(seed)
            if constants is not None and None in constants:
                continue
            outside = made not in code.reach(loop)
            if (outside and constants) or (not outside and not varies(code, seed, loop, 0)):
                reported.add(made)
                yield Hit(
                    made,
                    f"seed={ast.unparse(seed)[:40]} is the same at every step, so a repeated "
                    "prompt gives the same answers",
                    "leave seed out, or build the params in the loop with a seed of run, step and "
                    "sample",
                )


def one_seed_per_group(code: Code, sample: ast.Call) -> Iterator[Hit]:
    """`[sampler.sample(prompt, 1, params) for _ in range(group)]` with one seed for all."""
    loop = innermost_loop(code, sample)
    iterated = loop.generators[-1].iter if isinstance(loop, COMPREHENSIONS) else None
    iterated = loop.iter if isinstance(loop, (ast.For, ast.AsyncFor)) else iterated
    if loop is None or not (isinstance(iterated, ast.Call) and dotted(iterated.func) == "range"):
        return
    if isinstance(loop, COMPREHENSIONS):
        targets = names_in(loop.generators[-1].target)
    else:
        targets = loop_targets(loop)
    prompt = argument_of(sample, "prompt", 0)
    if prompt is None or targets & names_in(prompt):
        return
    for made in sampling_params(code, sample):
        seed = keyword_of(made, "seed")
        fixed = seed is not None and not (isinstance(seed, ast.Constant) and seed.value is None)
        if fixed and made not in set(ast.walk(loop)):
            yield Hit(
                sample,
                "every request of a group has the same seed, so the group is one answer repeated",
                "ask for the group in one request with num_samples, or give each its own seed",
            )


def varies(code: Code, node: ast.AST, loop: ast.AST, depth: int) -> bool:
    """May an expression differ between two turns of a loop. Unsure means yes."""
    if depth > 8:
        return True
    if isinstance(node, ast.Constant):
        return False
    if isinstance(node, (ast.BinOp, ast.UnaryOp)):
        parts = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.operand]
        return any(varies(code, part, loop, depth + 1) for part in parts)
    if isinstance(node, ast.Attribute):
        return code.constants(node) is None
    if isinstance(node, ast.Name):
        bindings = code.bindings(node)
        if len(bindings) != 1:
            return True
        return binding_varies(code, bindings[0], loop, depth)
    return True


def binding_varies(code: Code, binding: Binding, loop: ast.AST, depth: int) -> bool:
    """Does a binding give its name another value on each turn of a loop."""
    node = binding.node
    if binding.how == "value" and not binding.path:
        return varies(code, node, loop, depth + 1)
    if binding.how == "element":
        # The position inside one step: the same numbers again in the next.
        counts = isinstance(node, ast.Call) and (
            dotted(node.func) == "range"
            or (dotted(node.func) == "enumerate" and binding.path == (0,))
        )
        return not counts or getattr(loop, "iter", None) is node or node not in code.reach(loop)
    if binding.how == "param" and isinstance(node, FUNCTIONS):
        calls, escapes = code.call_sites(node)
        argument = next((a for a in node.args.args if a.arg == binding.text), None)
        if escapes or not calls or argument is None:
            return True
        is_method = isinstance(code.parents.get(node), ast.ClassDef)
        given = [argument_for(call, node, argument, is_method) for call in calls]
        return any(g is None or varies(code, g, loop, depth + 1) for g in given)
    return True


def stale_samplers(code: Code) -> Iterator[Hit]:
    """C09: rollouts from a sampling client that was made before the optimiser steps."""
    reported = set()
    for sample in training_samples(code):
        if not isinstance(sample.func, ast.Attribute):
            continue
        values = code.values(sample.func.value)
        origins = [v.origin for v in values if v.kind == "instance"]
        if len(origins) != len(values) or not all(origins):
            continue
        first = min((o for o in origins if o is not None), key=lambda o: o.lineno)
        if training_loops(code, sample) and all(is_base_client(code, o) for o in origins):
            if first not in reported:
                reported.add(first)
                yield Hit(
                    first,
                    "rollouts come from the base model, whatever was trained",
                    "call training.save_weights_and_get_sampling_client() before sampling",
                )
            continue
        stale = [
            loop
            for loop in training_loops(code, sample)
            if not any(origin in code.reach(loop) for origin in origins)
        ]
        if not stale:
            continue
        every = len(stale) == len(training_loops(code, sample))
        origin = first
        if origin in reported:
            continue
        reported.add(origin)
        yield Hit(
            sample,
            f"rollouts come from the sampling client made in line {origin.lineno}, which keeps the "
            f"weights it was made with, while optim_step runs in the loop",
            "call training.save_weights_and_get_sampling_client() in the loop before sampling",
            None if every else "warning",
        )


def is_base_client(code: Code, origin: ast.Call | None) -> bool:
    """`service.create_sampling_client(base_model)` without a model_path."""
    if origin is None or not isinstance(origin.func, ast.Attribute):
        return False
    if code.sdk_method(origin) != "create_sampling_client" or any(
        k.arg is None for k in origin.keywords
    ):
        return False
    on_service = all(
        v.kind == "instance" and v.of.__name__ == "ServiceClient"
        for v in code.values(origin.func.value)
    )
    return on_service and argument_of(origin, "model_path", 1) is None


# -- C10: advantages -------------------------------------------------------------------------------

DEVIATION = re.compile(r"(^|_)(std|stdev|stddev|sigma|pstdev|deviation)(_|$)")
DEVIATION_CALLS = ("std", "stdev", "pstdev", "nanstd")
GUARDS = ("max", "clip", "clamp", "maximum", "where", "clamp_min", "nan_to_num")


def unsafe_advantages(code: Code) -> Iterator[Hit]:
    """C10: division by a deviation that may be 0, masks from advantages, filters after them."""
    if not is_policy_file(code):
        return
    for node in code.nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            if is_bare_deviation(code, node.right) and not is_guarded(code, node):
                yield Hit(
                    node,
                    f"division by {ast.unparse(node.right)[:40]}, which is 0 when all rewards of a "
                    "group are equal",
                    "skip such groups, or add a small constant to the deviation",
                )
        elif isinstance(node, ast.Compare) and compares_advantage_with_zero(node):
            if becomes_mask(code, node):
                yield Hit(
                    node,
                    "the mask is made from advantages that are not 0, so whole groups of equal "
                    "rewards vanish from it",
                    "keep a mask of the answer's positions apart from the advantages",
                )
        elif isinstance(node, COMPREHENSIONS):
            yield from filtered_data(code, node)
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            yield from skipped_after_advantages(node)


def is_bare_deviation(code: Code, node: ast.expr) -> bool:
    """A standard deviation to which nothing is added and that nothing guards."""
    if isinstance(node, ast.Call):
        return last_name(node.func) in DEVIATION_CALLS
    if not isinstance(node, ast.Name):
        return False
    sources = deviation_sources(code, node)
    for source in sources:
        text = ast.unparse(source)
        calls = {last_name(n.func) for n in ast.walk(source) if isinstance(n, ast.Call)}
        if calls & set(GUARDS) or isinstance(source, (ast.IfExp, ast.BoolOp)):
            return False
        if re.search(r"eps|\b1e-|\+ 1e|\+ 0\.0", text):
            return False
        if not calls & set(DEVIATION_CALLS) and not DEVIATION.search(node.id.lower()):
            return False
    return bool(sources)


def deviation_sources(code: Code, name: ast.Name) -> list[ast.AST]:
    """What a name is computed by; empty when that cannot be told."""
    sources: list[ast.AST] = []
    for binding in code.bindings(name):
        source: ast.AST = binding.node
        if binding.how != "value":
            return []
        for index in binding.path:
            if not isinstance(source, ast.Tuple):
                return []
            source = source.elts[index]
        sources.append(source)
    return sources


def is_guarded(code: Code, node: ast.BinOp) -> bool:
    """Is equality of the rewards tested in this function or where it is called."""
    function = code.function_of(node)
    involved = names_in(node.right)
    for name in [n for n in ast.walk(node.right) if isinstance(n, ast.Name)]:
        for source in deviation_sources(code, name):
            involved |= names_in(source)
    if tests_mention(function, involved):
        return True
    if isinstance(function, ast.Module):
        return False
    calls, _ = code.call_sites(function)
    return any(
        tests_mention(code.function_of(call), set().union(*(names_in(a) for a in call.args)))
        for call in calls
    )


def tests_mention(function: ast.AST, involved: set[str]) -> bool:
    """Some condition in the function looks at one of these names."""
    involved = involved - {"len", "sum", "np", "torch", "statistics", "math"}
    for node in ast.walk(function):
        tests: list[ast.expr] = []
        if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Assert)):
            tests = [node.test]
        elif isinstance(node, ast.comprehension):
            tests = list(node.ifs)
        if any(involved & names_in(test) for test in tests):
            return True
    return False


def compares_advantage_with_zero(node: ast.Compare) -> bool:
    """Is the node `advantage != 0`."""
    return (
        len(node.ops) == 1
        and isinstance(node.ops[0], ast.NotEq)
        and isinstance(node.comparators[0], ast.Constant)
        and node.comparators[0].value == 0
        and any(word.startswith("adv") or word == "a" for word in words_in(node.left))
    )


def becomes_mask(code: Code, node: ast.AST) -> bool:
    """Does a comparison end in a mask or in weights, not only in a condition."""
    child: ast.AST = node
    for above in code.ancestors(node):
        if isinstance(above, (ast.If, ast.While, ast.Assert)) and above.test is child:
            return False
        if isinstance(above, ast.Call) and last_name(above.func) in ("sum", "any", "all"):
            return False
        if isinstance(above, ast.comprehension):
            return False  # a filter
        if isinstance(above, (ast.Assign, ast.AnnAssign)):
            targets = above.targets if isinstance(above, ast.Assign) else [above.target]
            return any({"mask", "masks", "weights"} & words_in(t) for t in targets)
        if isinstance(above, ast.keyword):
            return bool(above.arg and re.search(r"mask|weights", above.arg))
        if isinstance(above, ast.Dict) and child in above.values:
            key = above.keys[above.values.index(child)]
            return isinstance(key, ast.Constant) and bool(re.search("mask|weights", str(key.value)))
        if isinstance(above, ast.stmt):
            return False
        child = above
    return False


def filtered_data(code: Code, node: ast.AST) -> Iterator[Hit]:
    """`[d for d in data if len(d...) <= limit]` over finished datums."""
    for generator in getattr(node, "generators", ()):
        values = code.values(generator.iter)
        is_data = any(v.kind == "list" and v.of and all(map(is_datum_value, v.of)) for v in values)
        for test in generator.ifs:
            text = ast.unparse(test)
            if is_data and re.search(r"\blen\(|\.length\b", text) and re.search("[<>]", text):
                yield Hit(
                    node,
                    "datums are filtered by length after their advantages were computed, so a "
                    "group's advantages no longer add up to 0",
                    "drop long samples before the group's mean is taken",
                    "warning",
                )


def is_datum_value(value: Value) -> bool:
    """Is this a Datum."""
    return value.kind == "instance" and value.of.__name__ == "Datum"


def skipped_after_advantages(loop: ast.For | ast.AsyncFor) -> Iterator[Hit]:
    """`for sequence, advantage in ...: if len(...) > limit: continue`, or with `reward - mean`."""
    computed = any(re.match(r"adv", name) for name in names_in(loop.target))
    stored = {
        n.id for n in ast.walk(loop) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    for node in ast.walk(loop):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            base = dotted(node.right)
            if re.fullmatch(r"(group_)?(mean|baseline|avg|average)(_\w+)?", base):
                computed = computed or base not in stored
    for statement in loop.body:
        if not computed or not isinstance(statement, ast.If):
            continue
        text = ast.unparse(statement.test)
        skips = isinstance(statement.body[-1], ast.Continue)
        if skips and re.search(
            r"len\(.*\)\s*>=?\s*.*([Mm][Aa][Xx]|limit|LIMIT|budget|\d{2,})", text
        ):
            yield Hit(
                statement,
                "samples are dropped by length after their advantages were computed, so a group's "
                "advantages no longer add up to 0",
                "drop long samples before the group's mean is taken",
                "warning",
            )


# -- C13: saves and resumes ------------------------------------------------------------------------

RESUMING = re.compile(r"resum|latest|last_|continue_|restart|recover|exists\(|is_file\(")
DAY_SECONDS = 24 * 60 * 60
SAVES = ("save_state", "save_weights_for_sampler")


def lost_state(code: Code) -> Iterator[Hit]:
    """C13: a resume without the optimiser, a run that leaves nothing behind."""
    steps = code.method_calls("optim_step")
    if not steps:
        return
    for call in code.method_calls("create_training_client_from_state", "load_state"):
        around = [ast.unparse(call)]
        around += [
            ast.unparse(a.test) for a in code.ancestors(call) if isinstance(a, (ast.If, ast.IfExp))
        ]
        around.append(getattr(code.function_of(call), "name", ""))
        statement = code.statement_of(call)
        if isinstance(statement, ast.Assign):
            around.append(ast.unparse(statement.targets[0]))
        if any(RESUMING.search(text.lower()) for text in around):
            name = code.sdk_method(call)
            yield Hit(
                call,
                f"{name}(...) resumes with the weights only: Adam starts anew",
                f"call {name}_with_optimizer"
                + ", and store step and data position beside the path",
            )
    saves = code.method_calls(*SAVES)
    resumes = code.method_calls(
        "create_training_client_from_state_with_optimizer", "load_state_with_optimizer"
    )
    if resumes and saves and not code.method_calls("save_state") and not leaves_the_file(code):
        yield Hit(
            resumes[0],
            "the file resumes with the optimiser, but saves sampler weights only, which have none",
            "save with training.save_state(name) what is to be resumed",
        )
    lifetimes = [code.constants(argument_of(call, "ttl_seconds", 1)) for call in saves]
    if saves and all(
        lifetime and all(isinstance(t, int) and t < DAY_SECONDS for t in lifetime)
        for lifetime in lifetimes
    ):
        yield Hit(
            saves[0],
            "every save of this file expires within a day",
            "leave ttl_seconds out of the last save",
        )
    creates = code.method_calls(
        "create_lora_training_client",
        "create_training_client_from_state",
        "create_training_client_from_state_with_optimizer",
    )
    if not creates or saves or leaves_the_file(code):
        return
    looped = [
        s for s in steps if any(s in code.reach(n) for n in code.nodes if isinstance(n, LOOPS))
    ]
    if looped:
        yield Hit(
            looped[0],
            "the file trains in a loop and never saves: temporary sampler weights expire",
            "call training.save_weights_for_sampler(name) at the end, and save_state(name) to "
            "resume from",
        )


def leaves_the_file(code: Code) -> bool:
    """The training client is handed to code that we do not see, which may save it."""
    for call in code.calls:
        arguments = [*call.args, *(k.value for k in call.keywords)]
        given = [v for a in arguments for v in code.values(a)]
        if not any(v.kind == "instance" and v.of.__name__ == "TrainingClient" for v in given):
            continue
        if any(v.kind in ("unknown", "foreign") for v in code.values(call.func)):
            return not code.local_functions(call.func)
    return any(
        isinstance(node, ast.Call)
        and last_name(node.func) == "getattr"
        and any("save" in str(getattr(a, "value", "")) for a in node.args)
        for node in code.nodes
    )


# -- C21: one call, one step -----------------------------------------------------------------------


def split_steps(code: Code) -> Iterator[Hit]:
    """C21: many forward_backward calls for one step, waiting before the step is submitted."""
    steps = code.method_calls("optim_step")
    backwards = code.method_calls("forward_backward", "forward_backward_custom")
    for call in backwards:
        loop = innermost_loop(code, call)
        if loop is None or any(step in code.reach(loop) for step in steps):
            continue
        if any(step in set(ast.walk(loop)) for step in steps):
            continue
        loss = argument_of(call, "loss_fn", 1)
        targets = loop_targets(loop)
        if loss is not None and not isinstance(loss, ast.Lambda) and targets & names_in(loss):
            continue  # one call a loss
        around = code.enclosing_loops(loop)
        later = [
            step
            for step in steps
            if code.function_of(step) is code.function_of(loop)
            and code.enclosing_loops(step) == around
            and step.lineno > (getattr(loop, "end_lineno", 0) or 0)
        ]
        if later:
            yield Hit(
                call,
                f"{last_name(call.func)} is called in a loop before one optim_step, so the share "
                "of a token depends on how the batch is cut",
                "send the whole batch in one call; the SDK splits it itself",
            )
    yield from accumulated_steps(code, steps, backwards)
    yield from early_waits(code, steps)


def accumulated_steps(
    code: Code, steps: list[ast.Call], backwards: list[ast.Call]
) -> Iterator[Hit]:
    """`if (i + 1) % k == 0: optim_step(...)` beside an unconditional forward_backward."""
    for step in steps:
        loop = innermost_loop(code, step)
        if not isinstance(loop, (ast.For, ast.AsyncFor)):
            continue
        for above in code.ancestors(step):
            if above is loop:
                break
            if not isinstance(above, ast.If):
                continue
            text = ast.unparse(above.test)
            inside = set(ast.walk(above))
            beside = [b for b in backwards if innermost_loop(code, b) is loop and b not in inside]
            counted = names_in(loop.target) & names_in(above.test) or " % " in text
            if beside and counted and not re.search(r"finite|nan|None", text):
                yield Hit(
                    step,
                    "forward_backward runs in every turn and optim_step only in some: gradients "
                    "add up over calls",
                    "send the whole batch of a step in one call; the SDK splits it itself",
                )


def innermost_loop(code: Code, node: ast.AST) -> ast.AST | None:
    """The loop or comprehension around a node in its own function."""
    for above in code.ancestors(node):
        if isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return None
        if isinstance(above, (*LOOPS, *COMPREHENSIONS)):
            return above
    return None


def loop_targets(loop: ast.AST) -> set[str]:
    """The names that a loop binds."""
    if isinstance(loop, COMPREHENSIONS):
        return set().union(*(names_in(g.target) for g in loop.generators))
    return names_in(loop.target) if isinstance(loop, (ast.For, ast.AsyncFor)) else set()


def early_waits(code: Code, steps: list[ast.Call]) -> Iterator[Hit]:
    """A forward_backward is waited for, and only then is the step submitted."""
    reported: set[ast.Call] = set()
    for node in code.nodes:
        if isinstance(node, ast.Call) and last_name(node.func) == "result":
            waited = node.func.value if isinstance(node.func, ast.Attribute) else None
        elif isinstance(node, ast.Await):
            waited = node.value
        else:
            continue
        values = code.values(waited)
        if not all(v.kind == "future" and v.origin is not None for v in values):
            continue
        origin = next(iter(values)).origin
        if origin is None or code.sdk_method(origin) not in (
            "forward_backward",
            "forward_backward_custom",
        ):
            continue
        function, loops = code.function_of(node), code.enclosing_loops(node)
        if code.function_of(origin) is not function or origin in reported:
            continue
        near = [
            step
            for step in steps
            if code.function_of(step) is function and code.enclosing_loops(step) == loops
        ]
        before = [s for s in near if position(origin) < position(s) < position(node)]
        after = [s for s in near if position(s) > position(node)]
        if before or not after or code.enclosing_loops(origin) != loops:
            continue
        step = min(after, key=position)
        if not decides_between(code, node, step):
            reported.add(origin)
            yield Hit(
                node,
                "the result of forward_backward is waited for before optim_step is submitted, so "
                "the server idles",
                "submit optim_step first, then take both results",
            )


def position(node: ast.AST) -> tuple[int, int]:
    """Where a node begins, to order nodes."""
    return (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))


def decides_between(code: Code, wait: ast.AST, step: ast.Call) -> bool:
    """Does something between the two look at the result and may not take the step."""
    for above in code.ancestors(step):
        if isinstance(above, ast.If) and position(above) > position(wait):
            return True
    for node in ast.walk(code.function_of(step)):
        if isinstance(node, (ast.If, ast.Assert)) and position(wait) < position(node):
            if position(node) < position(step):
                leaves = (ast.Continue, ast.Break, ast.Raise, ast.Return)
                if isinstance(node, ast.Assert):
                    return True
                if any(isinstance(inner, leaves) for inner in ast.walk(node)):
                    return True
    return False


# Words in names of log-probabilities.
LOGPROB_WORDS = {"lp", "logp", "logprob", "logprobs", "old", "q", "answer", "log", "ratio"}


# -- C22: clipping ---------------------------------------------------------------------------------


def wrong_ratios(code: Code) -> Iterator[Hit]:
    """C22: ratios of hand-written losses."""
    yield from one_sided_clips(code)
    yield from summed_ratios(code)


def one_sided_clips(code: Code) -> Iterator[Hit]:
    """C22: clip(ratio) * advantage without the minimum of both."""
    for node in code.nodes:
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
            continue
        for clipped, other in ((node.left, node.right), (node.right, node.left)):
            if not is_clipped_ratio(code, clipped):
                continue
            if not any(word.startswith("adv") for word in words_in(other)):
                continue
            function = code.function_of(node)
            used = {last_name(n.func) for n in ast.walk(function) if isinstance(n, ast.Call)}
            # A detached ratio is CISPO's weight, which needs no minimum.
            if used & {"min", "minimum", "where", "fmin", "amin"} or is_detached(code, clipped, 0):
                continue
            yield Hit(
                node,
                "the clipped ratio alone is multiplied by the advantage: tokens that moved the "
                "wrong way beyond the clip get no gradient back",
                "take torch.minimum(ratio * advantage, clipped * advantage), or the built-in ppo",
            )


def summed_ratios(code: Code) -> Iterator[Hit]:
    """C22: a sequence ratio as the exponential of a sum of log-ratios."""
    for node in code.nodes:
        if not (isinstance(node, ast.Call) and last_name(node.func) == "exp" and node.args):
            continue
        summed = sum_of_difference(code, node.args[0], 0)
        if summed is not None:
            yield Hit(
                summed,
                "a sequence's log-ratio is summed over its tokens: the ratio explodes with length",
                "take the mean over the tokens (GSPO's geometric mean)",
                "warning",
            )


def sum_of_difference(code: Code, node: ast.expr, depth: int) -> ast.Call | None:
    """The `(a - b).sum()` that a value is, looked up through names."""
    if isinstance(node, ast.Name) and depth < 3:
        value = code.only_value(node)
        return None if value is None else sum_of_difference(code, value, depth + 1)
    if not isinstance(node, ast.Call) or last_name(node.func) != "sum":
        return None
    inner = node.func.value if isinstance(node.func, ast.Attribute) else None
    is_function = inner is not None and last_name(inner) in ("torch", "np")
    operand = node.args[0] if node.args and is_function else inner
    if isinstance(operand, ast.Name):
        operand = code.only_value(operand)
    is_difference = isinstance(operand, ast.BinOp) and isinstance(operand.op, ast.Sub)
    names = words_in(operand) if operand is not None else set()
    return node if is_difference and names & LOGPROB_WORDS else None


def is_clipped_ratio(code: Code, node: ast.expr) -> bool:
    """A clamp around 1, or a name for one."""
    if isinstance(node, ast.Name):
        value = code.only_value(node)
        return isinstance(value, ast.Call) and is_clipped_ratio(code, value)
    if not isinstance(node, ast.Call) or last_name(node.func) not in ("clamp", "clip"):
        return False
    return bool({"ratio", "ratios"} & words_in(node)) or any(
        isinstance(n, ast.Call) and last_name(n.func) == "exp" for n in ast.walk(node)
    )


def is_detached(code: Code, node: ast.AST, depth: int) -> bool:
    """Is a value, or one it is computed from, cut off from the gradient."""
    if any(
        isinstance(a, ast.With) and "no_grad" in ast.unparse(a.items[0])
        for a in code.ancestors(node)
    ):
        return True
    for part in ast.walk(node):
        if last_name(part) in ("detach", "stop_gradient", "no_grad", "item"):
            return True
        if isinstance(part, ast.Name) and depth < 3:
            values = [b.node for b in code.bindings(part) if b.how == "value"]
            if any(is_detached(code, value, depth + 1) for value in values):
                return True
    return False
