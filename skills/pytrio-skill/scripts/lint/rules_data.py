"""Rules on what goes into a datum: keys, ids, templates, truncation, batches."""

import ast
import re
from collections.abc import Iterator

from lint import names
from lint.flow import Code, Hit
from lint.rules_loop import training_samples
from lint.rules_sdk import dict_literals, dotted_origin, has_custom_loss
from lint.syntax import (
    COMPREHENSIONS,
    argument_of,
    dotted,
    is_false,
    keyword_of,
    last_name,
    names_in,
    words_in,
)
from lint.values import UNKNOWN, Values

# -- C01, C02: keys of loss_fn_inputs --------------------------------------------------------------


def datum_keys(code: Code) -> Iterator[tuple[ast.Call, ast.expr, dict[str, ast.expr]]]:
    """Every Datum whose keys can be told: the call, its dict expression, key -> where it stands."""
    for call in code.calls:
        if not is_datum(code, call):
            continue
        given = keyword_of(call, "loss_fn_inputs")
        if isinstance(given, ast.Call) and dotted(given.func) == "dict" and not given.args:
            if all(k.arg for k in given.keywords):
                yield call, given, {str(k.arg): k.value for k in given.keywords}
            continue
        tables = dict_literals(code, given)
        if given is None or len(tables) != 1:
            continue
        keys: dict[str, ast.expr] = {}
        closed = True
        for key in tables[0].keys:
            constant = code.constants(key)
            if key is None or not constant or len(constant) != 1:
                closed = False
            else:
                keys[str(next(iter(constant)))] = key
        if isinstance(given, ast.Name):
            closed = closed and add_later_keys(code, given, keys)
        if closed:
            yield call, given, keys


def add_later_keys(code: Code, name: ast.Name, keys: dict[str, ast.expr]) -> bool:
    """`inputs["weights"] = ...` adds a key; False when we cannot follow the dict."""
    scope = code.scopes[name].find(name.id)
    if scope is None:
        return False
    for load in code.loads(name.id, scope):
        parent = code.parents.get(load)
        if isinstance(parent, ast.Subscript) and parent.value is load:
            constant = code.constants(parent.slice)
            if not isinstance(parent.ctx, ast.Load):
                if not constant or len(constant) != 1 or isinstance(parent.ctx, ast.Del):
                    return False
                keys[str(next(iter(constant)))] = parent.slice
        elif isinstance(parent, ast.Attribute) and parent.attr in (
            "values",
            "items",
            "keys",
            "get",
        ):
            continue
        elif load is not name and isinstance(parent, (ast.Attribute, ast.Call)):
            if not isinstance(parent, ast.Call) or dotted(parent.func) not in ("len", "print"):
                return False  # .update(), .pop() or handed to somebody
    return True


def is_datum(code: Code, call: ast.Call) -> bool:
    """Does the call make a Datum."""
    values = code.values(call.func)
    return any(v.kind == "class" and v.of.__name__ == "Datum" for v in values)


def policy_datum_keys(code: Code) -> Iterator[Hit]:
    """C01: a key that no policy loss reads, or one that it needs and does not get."""
    if has_custom_loss(code):
        yield from unread_keys(code)
        return
    chosen = losses_used(code)
    for _, given, keys in datum_keys(code):
        is_policy = bool(names.policy_keys() & set(keys))
        if not is_policy and not (chosen and chosen <= names.policy_losses()):
            continue
        candidates = chosen or names.policy_losses()
        candidates = candidates & names.policy_losses() or candidates
        read = frozenset().union(*(names.loss_keys()[name] for name in candidates))
        losses = " and ".join(sorted(candidates))
        for key in sorted(set(keys) - read):
            yield Hit(
                keys[key],
                f"{losses} read {', '.join(sorted(read))}; {key!r} is dropped without a word",
                "delete it; set advantages to 0 where nothing is trained"
                if key in ("weights", "mask", "loss_mask", "attention_mask")
                else names.hint(key, read),
            )
        needed = frozenset.intersection(*(names.required_loss_keys()[n] for n in candidates))
        missing = sorted(needed - set(keys))
        if missing:
            yield Hit(
                given, f"the policy loss needs the key {missing[0]!r}", f"add {', '.join(missing)}"
            )


def unread_keys(code: Code) -> Iterator[Hit]:
    """Keys of datums for a loss of one's own that this loss never looks at."""
    if code.method_calls("forward", "forward_backward"):
        return
    losses = [
        value
        for call in code.method_calls("forward_backward_custom")
        for value in code.values(argument_of(call, "loss_fn", 1))
    ]
    if not losses or any(value.kind != "local" for value in losses):
        return
    read = {
        node.slice.value
        for node in code.nodes
        if isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Load)
        and isinstance(node.slice, ast.Constant)
    }
    read |= {a.value for call in code.calls for a in call.args if isinstance(a, ast.Constant)}
    needed = names.required_loss_keys()["cross_entropy"]
    for _, _, keys in datum_keys(code):
        for key in sorted(set(keys) - needed - read):
            yield Hit(
                keys[key],
                f"nothing reads the key {key!r}: forward_backward_custom needs "
                f"{', '.join(sorted(needed))} only",
                "keep masks and old values in the closure of the loss",
            )


def cross_entropy_keys(code: Code) -> Iterator[Hit]:
    """C02: a misspelt key of cross-entropy, which then trains every token."""
    if has_custom_loss(code):
        return
    chosen = losses_used(code)
    if chosen and "cross_entropy" not in chosen:
        return
    read = names.loss_keys()["cross_entropy"]
    for _, given, keys in datum_keys(code):
        if names.policy_keys() & set(keys):
            continue
        for key in sorted(set(keys) - read):
            yield Hit(
                keys[key],
                f"cross_entropy does not read {key!r}; without weights every token is trained",
                names.hint(key, read),
            )
        missing = sorted(names.required_loss_keys()["cross_entropy"] - set(keys))
        if missing and set(keys) <= read:
            yield Hit(given, f"cross_entropy needs the key {missing[0]!r}", f"add {missing[0]!r}")


def losses_used(code: Code) -> frozenset[str] | None:
    """Names of all built-in losses the file trains with; None when one cannot be told."""
    found: set[str] = set()
    for call in code.method_calls("forward", "forward_backward"):
        loss = argument_of(call, "loss_fn", 1)
        if loss is None:
            found.add("cross_entropy")
            continue
        constants = code.constants(loss)
        if constants is None or isinstance(loss, ast.Attribute):
            return None  # a setting: its default is not the only choice
        found |= {str(c).strip().lower() for c in constants}
    return frozenset(found & set(names.loss_keys())) or None


# -- C06: ids made from text -----------------------------------------------------------------------


def reencoded_text(code: Code) -> Iterator[Hit]:
    """C06: sampled text encoded again, ids appended to it, a border from a text's length."""
    sampled = training_samples(code)
    for call in encodings(code):
        text = call.args[0]
        values = code.values(text)
        if is_len(code.parents.get(call)):
            continue
        if any(v.note == "text" and v.origin in sampled for v in values):
            yield Hit(
                call,
                "sampled text is encoded again: the ids need not be those whose log-probabilities "
                "were returned",
                "train on sequence.tokens with sequence.logprobs; text is for the reward only",
            )
    for node in code.nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            base, extra = node.left, node.right
            if not (isinstance(extra, ast.List) and len(extra.elts) == 1):
                continue
        elif isinstance(node, ast.Call) and last_name(node.func) == "append" and node.args:
            if not isinstance(node.func, ast.Attribute):
                continue
            base, extra = node.func.value, node.args[0]
        else:
            continue
        values = code.values(base)
        own = [v for v in values if v.note == "tokens" and v.origin in sampled]
        if own and is_end_token(extra):
            yield Hit(
                node,
                "an end token is appended to sampled tokens; nobody sampled it and it has no "
                "log-probability",
                "train on sequence.tokens as they are: a finished answer already ends with it",
            )
    yield from text_borders(code)


def is_end_token(node: ast.AST) -> bool:
    """Does the expression speak of the token that ends a turn."""
    text = ast.unparse(node).lower()
    return bool(
        re.search(r"\bend\b|eos|im_end|end_of_turn|end_token|stop_id|end_id|stop_token", text)
    )


def encodings(code: Code) -> Iterator[ast.Call]:
    """`x.encode(text)` and `tokenizer(text)`."""
    for call in code.calls:
        if not call.args or any(v.kind == "local" for v in code.values(call.func)):
            continue
        if isinstance(call.func, ast.Attribute) and call.func.attr == "encode":
            yield call
        elif re.search(r"tokenizer$|^tok$", last_name(call.func), re.IGNORECASE):
            if all(v.kind in ("unknown", "foreign") for v in code.values(call.func)):
                yield call


def text_borders(code: Code) -> Iterator[Hit]:
    """`len(encode(prompt))` beside `encode(prompt + answer)`."""
    by_function: dict[ast.AST, list[ast.Call]] = {}
    for call in encodings(code):
        by_function.setdefault(code.function_of(call), []).append(call)
    for function, calls in by_function.items():
        text = ast.unparse(function)
        if re.search(r"assert .*\[:\s*len\(", text):
            continue  # the prefix is checked
        for short in calls:
            if not isinstance(short.args[0], ast.Name) or not length_is_used(code, short):
                continue
            for long in calls:
                if long is not short and starts_with(code, long.args[0], short.args[0].id):
                    yield Hit(
                        short,
                        f"the border is the length of {short.args[0].id} encoded alone, but "
                        "encoding the joined text may merge across it",
                        "encode prompt and answer apart and join the ids",
                    )
                    break


def length_is_used(code: Code, call: ast.Call) -> bool:
    """Is the length of a call's result taken."""
    parent: ast.AST | None = code.parents.get(call)
    while isinstance(parent, (ast.Attribute, ast.Subscript)):
        parent = code.parents.get(parent)
    if isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Name):
        name = parent.targets[0]
        scope = code.scopes[name].find(name.id)
        loads = code.loads(name.id, scope) if scope else []
        return any(is_len(code.parents.get(load)) for load in loads)
    return is_len(parent)


def is_len(node: ast.AST | None) -> bool:
    """Is this a call of `len`."""
    return isinstance(node, ast.Call) and last_name(node.func) == "len"


def starts_with(code: Code, text: ast.expr, name: str) -> bool:
    """Is this text a concatenation that begins with the named one."""
    if isinstance(text, ast.Name) and text.id != name:
        value = code.only_value(text)
        return (
            value is not None and not isinstance(value, ast.Name) and starts_with(code, value, name)
        )
    if isinstance(text, ast.BinOp) and isinstance(text.op, ast.Add):
        left = text.left
        while isinstance(left, ast.BinOp) and isinstance(left.op, ast.Add):
            left = left.left
        return isinstance(left, ast.Name) and left.id == name
    if isinstance(text, ast.JoinedStr) and len(text.values) > 1:
        first = text.values[0]
        return isinstance(first, ast.FormattedValue) and dotted(first.value) == name
    return False


# -- C14, C15, C19: templates ----------------------------------------------------------------------


def template_calls(code: Code) -> list[ast.Call]:
    """Every call of `apply_chat_template`."""
    return [
        call
        for call in code.calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "apply_chat_template"
    ]


def template_results(code: Code) -> Iterator[Hit]:
    """C14: a template that returns a dict, special tokens added twice."""
    for call in template_calls(code):
        if any(k.arg is None for k in call.keywords):
            continue
        if is_false(keyword_of(call, "tokenize")) or keyword_of(call, "return_dict") is not None:
            continue
        tokenize = keyword_of(call, "tokenize")
        if tokenize is not None and not isinstance(tokenize, ast.Constant):
            continue
        if reads_input_ids(code, call):
            continue
        yield Hit(
            call,
            "apply_chat_template(...) with tokenize on returns a dict from transformers 5 on, "
            "not ids",
            "pass tokenize=False and encode(text, add_special_tokens=False), or return_dict=False",
        )
    for call in encodings(code):
        text = call.args[0]
        values = code.values(text)
        contents = frozenset(i for v in values if v.kind == "list" for i in v.of)
        rendered = any(v.note == "rendered" for v in values | contents)
        if not rendered or any(k.arg is None for k in call.keywords):
            continue
        if not is_false(keyword_of(call, "add_special_tokens")):
            yield Hit(
                call,
                "a rendered template is encoded with special tokens, which the template has "
                "already written",
                "pass add_special_tokens=False",
            )


def reads_input_ids(code: Code, call: ast.Call) -> bool:
    """Are the ids taken out of the dict that a call gives, or the dict passed on as keywords."""
    parent = code.parents.get(call)
    uses: list[ast.AST | None] = [parent]
    if isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Name):
        name = parent.targets[0]
        scope = code.scopes[name].find(name.id)
        uses = [code.parents.get(n) for n in (code.loads(name.id, scope) if scope else [])]
    for use in uses:
        if isinstance(use, ast.Attribute) and use.attr in ("input_ids", "to"):
            return True
        if isinstance(use, ast.Subscript) and isinstance(use.slice, ast.Constant):
            if use.slice.value == "input_ids":
                return True
        if isinstance(use, ast.keyword) and use.arg is None:
            return True
    return False


def thinking_switches(code: Code) -> Iterator[Hit]:
    """C15: one file renders with different thinking switches, or only sometimes with one."""
    calls = [c for c in template_calls(code) if not any(k.arg is None for k in c.keywords)]
    given = [(c, keyword_of(c, "enable_thinking")) for c in calls]
    present = [(c, k) for c, k in given if k is not None]
    if not present:
        return
    for call, switch in given:
        if switch is None:
            yield Hit(
                call,
                "this template is rendered without enable_thinking, another one with it",
                f"pass enable_thinking={ast.unparse(present[0][1])} everywhere",
            )
    first = present[0][1]
    for call, switch in present[1:]:
        if (
            isinstance(first, ast.Constant)
            and isinstance(switch, ast.Constant)
            and first.value != switch.value
        ):
            yield Hit(
                call,
                f"enable_thinking is {ast.unparse(switch)} here and {ast.unparse(first)} in line "
                f"{first.lineno}",
                "use one value in rollout, training and evaluation",
            )


def handwritten_templates(code: Code) -> Iterator[Hit]:
    """C19: chat markup written by hand and encoded."""
    for call in encodings(code):
        text = call.args[0]
        for value in code.values(text):
            whole = value.note == "chatml" and is_whole_turn(code, text)
            if value.note == "built chatml" or whole:
                yield Hit(
                    call,
                    "chat markup written by hand is encoded; it drifts from the template",
                    "build messages and render them with apply_chat_template",
                )
                break


def is_whole_turn(code: Code, text: ast.expr) -> bool:
    """A constant with content between the marks, not only a mark to search for."""
    return any(
        isinstance(c, str) and "<|im_start|>" in c and "<|im_end|>" in c
        for c in code.constants(text) or ()
    )


# -- C20: TensorData -------------------------------------------------------------------------------

CONVERSIONS = re.compile(
    r"(numpy|torch)\.(as_?array|array|as_tensor|tensor|concatenate|concat|cat|stack|hstack|vstack|"
    r"mean|sum|FloatTensor|Tensor|from_numpy)$"
)
ITERATING = ("list", "tuple", "sum", "zip", "enumerate", "map", "max", "min", "sorted", "float")


def tensor_conversions(code: Code) -> Iterator[Hit]:
    """C20: numpy, torch or a loop over TensorData, which is no array and iterates its fields."""
    fix = "convert it first: .tolist(), or .to_numpy() for an array"
    for call in code.calls:
        function = dotted_origin(code, call.func)
        by_library = CONVERSIONS.search(re.sub(r"^np\.", "numpy.", function))
        by_builtin = function in ITERATING and any(
            v.kind == "builtin" for v in code.values(call.func)
        )
        if not (by_library or by_builtin):
            continue
        for argument in call.args:
            values = code.values(argument)
            contents = frozenset(i for v in values if v.kind == "list" for i in v.of)
            if is_tensor_data(values) or (by_library and is_tensor_data(contents)):
                yield Hit(
                    argument,
                    f"{dotted(call.func) or function}(...) gets a TensorData, which is no array",
                    fix,
                )
    for node in code.nodes:
        source: ast.AST | None = None
        if isinstance(node, (ast.For, ast.comprehension)):
            source = node.iter
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            source = node.value
        if source is not None and is_tensor_data(code.values(source)):
            yield Hit(
                source, f"{ast.unparse(source)[:50]} is a TensorData and gives no numbers", fix
            )  # fmt: skip


def is_tensor_data(values: Values) -> bool:
    """Is this a TensorData for sure."""
    return bool(values) and all(
        v.kind == "instance" and v.of.__name__ == "TensorData" for v in values
    )


# -- C25, C26: rows that get lost ------------------------------------------------------------------

LIMIT = re.compile(r"max|limit|cutoff|context|ctx|block_size|seq_len|budget")
WHOLE = re.compile(r"(^|_)(tokens|input_ids|ids|full|sequence|all)(_|$)")


def tail_cuts(code: Code) -> Iterator[Hit]:
    """C25: the end of prompt + answer cut off, and with it the end token."""
    builders = {code.function_of(c) for c in code.calls if is_datum(code, c)}
    for node in code.nodes:
        if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Slice):
            continue
        cut = node.slice
        if cut.lower is not None or cut.step is not None or not isinstance(node.ctx, ast.Load):
            continue
        if not is_limit(cut.upper) or code.function_of(node) not in builders:
            continue
        parent = code.parents.get(node)
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Add):
            continue  # something is put behind it
        if is_whole_sequence(code, node.value):
            yield Hit(
                node,
                f"{ast.unparse(node)[:60]} cuts the tail of prompt and answer, and with it the end "
                "token",
                "drop the row, or cut the prompt and keep the answer whole",
            )
    for call in encodings(code):
        cuts = keyword_of(call, "truncation")
        if isinstance(cuts, ast.Constant) and cuts.value is True:
            if code.function_of(call) in builders and "prompt" not in ast.unparse(call.args[0]):
                yield Hit(
                    call,
                    "truncation=True cuts the tail of the text, and with it the end token",
                    "drop the row, or cut the prompt and keep the answer whole",
                )


def is_limit(node: ast.AST | None) -> bool:
    """A name of a limit, or a number that can only be one."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        return bool(LIMIT.search(last_name(node).lower()))
    return isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value >= 64


def is_whole_sequence(code: Code, node: ast.expr) -> bool:
    """Does the expression hold the answer too, not the prompt alone."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return True
    if not isinstance(node, ast.Name):
        return isinstance(node, ast.Attribute) and node.attr == "tokens"
    if "prompt" in node.id.lower() or "query" in node.id.lower():
        return False
    bindings = code.bindings(node)
    joined = any(
        isinstance(b.node, ast.BinOp) and isinstance(b.node.op, ast.Add) and not b.path
        for b in bindings
        if b.how == "value"
    )
    return joined or bool(WHOLE.search(node.id.lower()))


def lost_rows(code: Code) -> Iterator[Hit]:
    """C26: a last batch that is never seen, an order that cannot be restored."""
    for call in code.calls:
        if dotted(call.func) != "range":
            continue
        if len(call.args) == 3 and drops_remainder(call.args[1], call.args[2]):
            yield Hit(
                call,
                "this range leaves out the last rows when they do not fill a batch",
                "range(0, len(rows), batch_size) keeps them in a smaller last batch",
            )
        if len(call.args) == 1 and floor_of_length(code, call.args[0]):
            loop = code.parents.get(call)
            while loop is not None and not isinstance(loop, (ast.For, *COMPREHENSIONS, ast.stmt)):
                loop = code.parents.get(loop)
            if isinstance(loop, ast.For) and slices_by_index(loop):
                yield Hit(
                    call,
                    "the number of batches is rounded down, so the last rows are never seen",
                    "round up: range((len(rows) + batch_size - 1) // batch_size)",
                )
    yield from unseeded_shuffles(code)


def drops_remainder(stop: ast.expr, step: ast.expr) -> bool:
    """`len(x) - b + 1` or `len(x) - b` with step `b`."""
    if isinstance(stop, ast.BinOp) and isinstance(stop.op, ast.Add):
        if not (isinstance(stop.right, ast.Constant) and stop.right.value == 1):
            return False
        stop = stop.left
    return (
        isinstance(stop, ast.BinOp)
        and isinstance(stop.op, ast.Sub)
        and ast.unparse(stop.right) == ast.unparse(step)
        and not isinstance(stop.left, ast.Constant)
    )


def floor_of_length(code: Code, node: ast.expr) -> bool:
    """`len(x) // b`, directly or through a name."""
    if isinstance(node, ast.Name):
        value = code.only_value(node)
        return (
            value is not None and not isinstance(value, ast.Name) and floor_of_length(code, value)
        )
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.FloorDiv)
        and isinstance(node.left, ast.Call)
        and dotted(node.left.func) == "len"
    )


def slices_by_index(loop: ast.For) -> bool:
    """Does the loop's body take `rows[i * b : ...]`, and nothing modulo the length."""
    index = dotted(loop.target)
    for node in ast.walk(loop):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            if index in names_in(node):
                return False
    return any(
        isinstance(node, ast.Slice)
        and isinstance(node.lower, ast.BinOp)
        and isinstance(node.lower.op, ast.Mult)
        and index in names_in(node.lower)
        for node in ast.walk(loop)
    )


def unseeded_shuffles(code: Code) -> Iterator[Hit]:
    """A global shuffle inside a loop, without a seed."""
    for call in code.calls:
        function = dotted_origin(code, call.func)
        if function not in ("random.shuffle", "numpy.random.shuffle") or not call.args:
            continue
        if not isinstance(call.args[0], ast.Name) or not code.enclosing_loops(call):
            continue
        module = function.removesuffix(".shuffle")
        seeds = {f"{module}.seed", "transformers.set_seed"}
        if any(
            dotted_origin(code, c.func) in seeds or "seed" in words_in(c.func) for c in code.calls
        ):
            continue
        values = code.values(call.args[0])
        fresh = any(
            code.enclosing_loops(b.node) and b.how == "value" for b in code.bindings(call.args[0])
        )
        if not fresh or UNKNOWN not in values:
            yield Hit(
                call,
                "the rows are shuffled in place, each epoch from where the last one ended and "
                "without a seed: no resumed run can restore the order",
                "order = random.Random(seed + epoch).sample(range(len(rows)), len(rows))",
            )
