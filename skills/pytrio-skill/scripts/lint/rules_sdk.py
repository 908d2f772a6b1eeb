"""Rules on how the SDK is called: futures, awaits, names, keys, settings, checkpoint names."""

import ast
import inspect
import re
from collections.abc import Iterator
from concurrent.futures import Future as ThreadFuture
from typing import Any

from lint import names
from lint.flow import Code, Hit
from lint.syntax import argument_of, dotted, has_stars, keyword_of, last_name, own_nodes
from lint.values import NONE, UNKNOWN, Value

SUBMITTING = ("forward", "forward_backward", "forward_backward_custom", "optim_step")


def method_name(origin: ast.Call | None) -> str:
    """Name of the method that a call runs."""
    return last_name(origin.func) if origin is not None else ""


def has_custom_loss(code: Code) -> bool:
    """Does the file bring a loss of its own."""
    return bool(code.method_calls("forward_backward_custom"))


# -- C03, C04: results and awaits ------------------------------------------------------------------


def unread_result(code: Code) -> Iterator[Hit]:
    """C03: a future of a synchronous method whose result nobody takes."""
    for node, call in unused_values(code):
        if isinstance(call, ast.Call) and returns_future(code, call):
            name = last_name(call.func)
            # load_state has finished when it returns; the others fail only when they are asked.
            severity = "warning" if name.startswith("load_state") else None
            yield Hit(
                node,
                f"the result of {name}(...) is never taken, so its failure is never seen",
                f"keep the future and call .result() on it, after later calls are submitted: "
                f"future = ...{name}(...); future.result()",
                severity,
            )
    for node, base in reads(code):
        values = code.values(base)
        if any(v.kind != "future" for v in values) or is_future_attribute(node):
            continue
        origins = [v.origin for v in values if v.origin is not None]
        if not any(method_name(o).endswith("_async") for o in origins):
            source = f"the future of {method_name(origins[0])}(...)" if origins else "a future"
            yield Hit(
                node,
                f"{ast.unparse(node)[:60]} reads from {source}",
                "call .result() on the future first",
            )


def wrong_awaits(code: Code) -> Iterator[Hit]:
    """C04: an async method awaited too rarely or too often."""
    twice = names.second_awaits()
    for node, value in unused_values(code):
        if isinstance(value, ast.Await):
            call = value.value
            name = sdk_async_name(code, call)
            if name and twice[name]:
                yield Hit(
                    node,
                    f"await {name}(...) gives a future that is never awaited",
                    f"await it again: await (await ...{name}(...))",
                )
            elif holds_only_futures(code, value):
                yield Hit(
                    node,
                    "awaiting these calls gives futures that are never awaited",
                    "await every future of the result again",
                )
        elif isinstance(value, ast.Call):
            name = sdk_async_name(code, value)
            if name:
                yield Hit(
                    node, f"{name}(...) is never awaited, so it never runs", "await it"
                )  # fmt: skip
    for node, base in reads(code):
        values = code.values(base)
        attribute = node.attr if isinstance(node, ast.Attribute) else ""
        if all(v.kind == "coroutine" and v.origin is not None for v in values):
            name = method_name(next(iter(values)).origin)
            yield Hit(
                node,
                f"{ast.unparse(node)[:60]} reads from {name}(...) before it is awaited",
                "await the call first" + (", twice" if twice.get(name) else ""),
            )
        elif all(v.kind == "future" for v in values) and not is_future_attribute(node):
            origins = [v.origin for v in values if v.origin is not None]
            if any(method_name(o).endswith("_async") for o in origins):
                yield Hit(
                    node,
                    f"{ast.unparse(node)[:60]} reads from a future: {method_name(origins[0])}(...) "
                    "was awaited once",
                    "await the future again before reading from it",
                )
        elif attribute == "result" and all(
            v.kind == "instance" and v.origin is not None and "result" not in attributes(v)
            for v in values
        ):
            name = method_name(next(iter(values)).origin)
            yield Hit(node, f"{name}(...) gives no future here", "delete .result()")
    for node in code.nodes:
        if not isinstance(node, ast.Await):
            continue
        values = code.values(node.value)
        if all(
            v.kind in ("instance", "list", "dict")
            and v.origin is not None
            and not (v.kind == "instance" and hasattr(v.of, "__await__"))
            for v in values
        ):
            name = method_name(next(iter(values)).origin)
            yield Hit(
                node,
                f"the result of {name}(...) is awaited, and it is not awaitable",
                "delete the additional await"
                if name.endswith("_async")
                else f"delete await, or call {name}_async(...)",
            )


def unused_values(code: Code) -> Iterator[tuple[ast.AST, ast.expr]]:
    """Expressions that stand alone, or go into a name that is never read."""
    for node in code.nodes:
        if isinstance(node, ast.Expr):
            yield node, node.value
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=False))
            for name, given in pairs:
                if not isinstance(name, ast.Name):
                    continue
                scope = code.scopes[name].find(name.id)
                if scope is not None and not code.loads(name.id, scope):
                    # A class body's or module's name may be read from elsewhere.
                    if not isinstance(scope.node, ast.ClassDef):
                        yield node, given


def reads(code: Code) -> Iterator[tuple[ast.Attribute | ast.Subscript, ast.expr]]:
    """Attribute reads and subscripts."""
    for node in code.nodes:
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Load):
            yield node, node.value


def holds_only_futures(code: Code, node: ast.AST) -> bool:
    """A list or tuple of futures, as `asyncio.gather` of submitting methods gives."""
    values = code.values(node)
    contents = [v for value in values if value.kind == "list" for v in value.of]
    contents += [v for value in values if value.kind == "tuple" for part in value.of for v in part]
    return (
        all(v.kind in ("list", "tuple") for v in values)
        and bool(contents)
        and all(v.kind == "future" for v in contents)
    )


def is_future_attribute(node: ast.AST) -> bool:
    """Is a future asked for what futures have."""
    return isinstance(node, ast.Attribute) and (
        hasattr(names.future_class(), node.attr) or hasattr(ThreadFuture, node.attr)
    )


def returns_future(code: Code, call: ast.Call) -> bool:
    """Does a call give a future to be resolved."""
    values = code.values(call)
    if all(v.kind == "future" and v.origin is call for v in values):
        return True
    name = last_name(call.func)
    return UNKNOWN in values and code.sdk_method(call) in SUBMITTING and not name.endswith("_async")


def sdk_async_name(code: Code, call: ast.AST) -> str:
    """Name of the SDK's async method that a call runs."""
    if not code.sdk_method(call):
        return ""
    name = last_name(call.func) if isinstance(call, ast.Call) else ""
    return name if name in names.second_awaits() else ""


# -- C05: names that do not exist ------------------------------------------------------------------


def attributes(value: Value) -> frozenset[str]:
    """Everything a value answers to."""
    return names.attributes_of(value.of)


def missing_names(code: Code) -> Iterator[Hit]:
    """C05: what the installed SDK does not have."""
    yield from missing_imports(code)
    yield from missing_attributes(code)
    yield from wrong_arguments(code)
    yield from missing_metrics(code)
    yield from hidden_metrics(code)
    for call in code.method_calls("forward", "forward_backward"):
        losses = code.texts(argument_of(call, "loss_fn", 1))
        if losses and not {loss.strip().lower() for loss in losses} & set(names.loss_keys()):
            yield Hit(
                call, f"the SDK has no loss {losses[0]!r}", names.hint(losses[0], names.loss_keys())
            )


def hidden_metrics(code: Code) -> Iterator[Hit]:
    """A custom loss returns a metric named like one of the server's."""
    for call in code.method_calls("forward_backward_custom"):
        for value in code.values(argument_of(call, "loss_fn", 1)):
            if value.kind != "local" or isinstance(value.of, ast.Lambda):
                continue
            for node in own_nodes(value.of):
                if not (isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple)):
                    continue
                for table in node.value.elts[1:]:
                    for key in table.keys if isinstance(table, ast.Dict) else ():
                        if isinstance(key, ast.Constant) and key.value in names.metric_keys():
                            yield Hit(
                                key,
                                f"the custom metric {key.value!r} hides the server's",
                                "give it a name of its own, such as my/loss",
                                "warning",
                            )


def missing_imports(code: Code) -> Iterator[Hit]:
    """Modules and names that pytrio does not have."""
    for node in code.imports("pytrio"):
        if isinstance(node, ast.Import):
            modules = [a.name for a in node.names if a.name.split(".")[0] == "pytrio"]
        else:
            modules = [node.module or ""]
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                if alias.name == "*" or not names.is_public_module(node.module or ""):
                    continue
                public = getattr(names.sdk(), "types", None) if node.module != "pytrio" else None
                owner = public or names.sdk()
                if not hasattr(owner, alias.name):
                    if names.module_exists(member):
                        modules.append(member)
                        continue
                    yield Hit(
                        node,
                        f"{node.module} has no {alias.name!r}",
                        names.hint(alias.name, set(dir(owner))),
                    )
        for module in modules:
            if names.is_public_module(module):
                continue
            if names.module_exists(module):
                yield Hit(
                    node,
                    f"{module} is an inner module of the SDK and may move in any release",
                    "import from pytrio or pytrio.types, or do without",
                    "warning",
                )
            else:
                yield Hit(
                    node,
                    f"the installed SDK has no module {module}",
                    "import from pytrio or pytrio.types",
                )


def missing_attributes(code: Code) -> Iterator[Hit]:
    """Attributes that an object, class or module of the SDK does not have."""
    guarded = {
        str(call.args[1].value)
        for call in code.calls
        if last_name(call.func) in ("hasattr", "getattr")
        and len(call.args) > 1
        and isinstance(call.args[1], ast.Constant)
    }
    for node in code.nodes:
        if not isinstance(node, ast.Attribute) or node.attr in guarded:
            continue
        if isinstance(node.ctx, ast.Store) or catches(code, node, "AttributeError"):
            continue
        values = code.values(node.value) - {NONE}
        if not values or not all(lacks(v, node.attr) for v in values):
            continue
        value = next(iter(values))
        if node.attr == "result" and value.kind == "instance" and value.origin is not None:
            continue  # C04 says it
        owner = value.of.__name__
        known = set(dir(value.of)) | set(attributes(value) if value.kind == "instance" else ())
        yield Hit(
            node,
            f"{owner} of the installed pytrio has no {node.attr!r}",
            names.hint(node.attr, known),
        )


def lacks(value: Value, name: str) -> bool:
    """Does a value of the SDK not have that attribute."""
    if name.startswith("__"):
        return False
    if value.kind == "instance":
        return value.of.__module__.startswith("pytrio") and name not in attributes(value)
    if value.kind in ("class", "module"):
        in_sdk = value.of.__name__.startswith("pytrio") or getattr(
            value.of, "__module__", ""
        ).startswith("pytrio")
        fields = getattr(value.of, "model_fields", {})
        return in_sdk and not hasattr(value.of, name) and name not in fields
    return False


def catches(code: Code, node: ast.AST, error: str) -> bool:
    """Is the node inside a `try` that handles this error by name."""
    return any(
        isinstance(above, ast.Try)
        and any(h.type is not None and error in ast.unparse(h.type) for h in above.handlers)
        for above in code.ancestors(node)
    )


def wrong_arguments(code: Code) -> Iterator[Hit]:
    """Arguments that a class or function of the SDK does not take."""
    for call in code.calls:
        for value in code.values(call.func):
            if value.kind == "class" and value.of.__module__.startswith("pytrio"):
                if names.is_model(value.of):
                    yield from wrong_fields(call, value.of)
                else:
                    yield from wrong_call(call, value.of.__init__, value.of.__name__, 1)
            elif value.kind == "function" and value.of.__module__.startswith("pytrio"):
                yield from wrong_call(call, value.of, value.of.__name__, 0)
            elif value.kind == "method" and value.of[0].__module__.startswith("pytrio"):
                cls, name = value.of
                static = isinstance(inspect.getattr_static(cls, name), staticmethod)
                # Called on the class itself, the instance is the first argument.
                on_class = any(v.kind == "class" for v in code.values(receiver(call)))
                bound = isinstance(inspect.getattr_static(cls, name), classmethod) or not on_class
                skip = 0 if static or not bound else 1
                yield from wrong_call(call, names.method_of(cls, name), name, skip)


def receiver(call: ast.Call) -> ast.expr | None:
    """`x` in `x.method(...)`."""
    return call.func.value if isinstance(call.func, ast.Attribute) else None


def wrong_fields(call: ast.Call, cls: Any) -> Iterator[Hit]:
    """A pydantic model of the SDK; the two parameter objects have a rule of their own (C16)."""
    if cls.__name__ not in ("AdamParams", "SamplingParams"):
        yield from unknown_fields(call, cls)
    if call.args and not any(isinstance(a, ast.Starred) for a in call.args):
        yield Hit(
            call,
            f"{cls.__name__}(...) takes keywords only",
            f"name the fields: {', '.join(cls.model_fields)}",
        )
        return
    given = {k.arg for k in call.keywords}
    missing = [n for n, f in cls.model_fields.items() if f.is_required() and n not in given]
    if missing and not has_stars(call):
        yield Hit(call, f"{cls.__name__}(...) lacks {', '.join(missing)}", f"pass {missing[0]}=")


def unknown_fields(call: ast.Call, cls: Any) -> Iterator[Hit]:
    """Keywords that are no fields of a model."""
    if cls.model_config.get("extra") != "forbid":
        return
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in cls.model_fields:
            yield Hit(
                keyword.value,
                f"{cls.__name__} has no field {keyword.arg!r}",
                names.hint(keyword.arg, cls.model_fields),
            )


def wrong_call(call: ast.Call, function: Any, name: str, skip: int) -> Iterator[Hit]:
    """Keywords and number of arguments against a signature; `skip` hides the bound first one."""
    signature = names.signature_of(function)
    if signature is None:
        return
    parameters = list(signature.parameters.values())[skip:]
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    # configure() swallows unknown options with a warning; nowhere does the SDK use such ones.
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in named:
            yield Hit(
                keyword.value,
                f"{name}() of the installed pytrio has no option {keyword.arg!r}",
                "it takes no arguments; delete it" if not named else names.hint(keyword.arg, named),
            )
    if has_stars(call):
        return
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(call.args) > len(positional) and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        yield Hit(
            call,
            f"{name}() takes {len(positional)} positional arguments, got {len(call.args)}",
            f"its parameters: {', '.join(p.name for p in parameters) or 'none'}",
        )
        return
    given = {p.name for p in positional[: len(call.args)]} | {k.arg for k in call.keywords}
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in kinds and p.name not in given
    ]
    if missing:
        yield Hit(call, f"{name}() lacks {', '.join(missing)}", f"pass {missing[0]}=")


def missing_metrics(code: Code) -> Iterator[Hit]:
    """Keys that the metrics of a result do not have, and reads of whatever comes first."""
    known = names.metric_keys()
    custom = has_custom_loss(code)
    for node in code.nodes:
        base, key = metric_read(node)
        if base is None:
            continue
        values = code.values(base)
        origins = {
            method_name(v.origin) for v in values if v.kind == "dict" and v.note == "metrics"
        }
        sure = bool(origins) and len(origins) == len({v.kind for v in values} | origins) - 1
        forward = {n.removesuffix("_async") for n in origins} <= {"forward", "forward_backward"}
        # A custom loss adds keys of its own, and unknown receivers may be anybody's.
        by_name = (
            UNKNOWN in values
            and last_name(base) == "metrics"
            and not custom
            and re.fullmatch(r"loss[:/]\w+", key)
        )
        if known and key not in known and ((sure and forward) or by_name):
            yield Hit(
                node, f"the SDK's metrics have no key {key!r}", names.hint(key, known)
            )  # fmt: skip
    for call in code.calls:
        text = ast.unparse(call)
        if re.fullmatch(r"(next\(iter|list)\((.*\.)?metrics\.values\(\)\)\)?", text):
            if last_name(call.func) == "list" and not isinstance(
                code.parents.get(call), ast.Subscript
            ):
                continue
            yield Hit(
                call,
                "the first value of metrics is whatever the server put first: a sum, not the loss",
                f"read metrics[{'loss_mean'!r}]",
            )


def metric_read(node: ast.AST) -> tuple[ast.expr | None, str]:
    """`x["key"]` or `x.get("key", ...)` as (x, key)."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            return node.value, node.slice.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        first = node.args[0]
        if node.func.attr == "get" and isinstance(first, ast.Constant):
            if isinstance(first.value, str):
                return node.func.value, first.value
    return None, ""


# -- C12: keys in the text -------------------------------------------------------------------------

LOCAL_HOST = re.compile(r"127\.0\.0\.1|localhost|\[::1\]")


def literal_keys(code: Code) -> Iterator[Hit]:
    """C12: an API key written into the file."""
    fix = "take it from the environment, PYTRIO_API_KEY or SWANLAB_API_KEY, and revoke this one"
    for call in code.calls:
        name = last_name(call.func)
        if name in ("configure", "ServiceClient", "login", "init", "Api"):
            key = keyword_of(call, "api_key")
            if key is None and name in ("ServiceClient", "login", "Api") and call.args:
                key = call.args[0]
            address = code.constants(keyword_of(call, "base_url")) or set()
            if any(LOCAL_HOST.search(str(a)) for a in address):
                continue
            if is_secret(code, key):
                yield Hit(call, f"an API key is written into {name}(...)", fix)
        elif name in ("setdefault", "putenv") and len(call.args) == 2:
            if is_key_name(call.args[0]) and is_secret(code, call.args[1]):
                yield Hit(call, "an API key is written into the environment from the text", fix)
    for node in code.nodes:
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            is_environment = (
                isinstance(target, ast.Subscript)
                and "environ" in ast.unparse(target.value)
                and is_key_name(target.slice)
            )
            is_constant = isinstance(target, ast.Name) and re.fullmatch(
                r"(\w*_)?api_?key", target.id, re.IGNORECASE
            )
            if (is_environment or is_constant) and is_secret(code, node.value):
                yield Hit(node, "an API key is written into the file", fix)


def is_key_name(node: ast.expr) -> bool:
    """Is the constant the name of a variable that holds an API key."""
    return isinstance(node, ast.Constant) and str(node.value).endswith("API_KEY")


def is_secret(code: Code, node: ast.expr | None) -> bool:
    """Is this a text that may be an API key."""
    if not (isinstance(node, (ast.Constant, ast.Name))):
        return False
    if isinstance(node, ast.Name) and re.fullmatch(r"(\w*_)?api_?key", node.id, re.IGNORECASE):
        return False  # its assignment is reported
    values = code.constants(node) or set()
    # All capitals is the name of a variable, not a key.
    return any(isinstance(v, str) and v and not re.fullmatch(r"[A-Z_]+", v) for v in values)


# -- C16: settings ---------------------------------------------------------------------------------


def unknown_settings(code: Code) -> Iterator[Hit]:
    """C16: fields of AdamParams and SamplingParams, keys of loss_fn_config, missing max_tokens."""
    for call in code.made("AdamParams", "SamplingParams"):
        for value in code.values(call.func):
            if value.kind == "class":
                yield from unknown_fields(call, value.of)
    changed = any(
        isinstance(n, ast.Attribute) and n.attr == "learning_rate" and isinstance(n.ctx, ast.Store)
        for n in code.nodes
    )
    for call in code.made("AdamParams"):
        rates = code.constants(keyword_of(call, "learning_rate"))
        if rates == {0} and not changed:
            yield Hit(call, "a learning rate of 0 trains nothing", "pass the rate of this step")
    yield from unlimited_samples(code)
    yield from unknown_loss_settings(code)


def unlimited_samples(code: Code) -> Iterator[Hit]:
    """Rollouts without `max_tokens`."""
    fix = "pass SamplingParams(max_tokens=...): without it the request is refused"
    seen = set()
    for call in code.method_calls("sample"):
        given = argument_of(call, "sampling_params", 2)
        if given is None:
            if not has_stars(call):
                yield Hit(call, "sample(...) without sampling_params has no max_tokens", fix)
            continue
        for value in code.values(given):
            made = value.origin
            if value.kind != "instance" or made is None or made in seen or has_stars(made):
                continue
            if value.of.__name__ != "SamplingParams" or max_tokens_is_set_later(code):
                continue
            limit = keyword_of(made, "max_tokens")
            if limit is None or (isinstance(limit, ast.Constant) and limit.value is None):
                seen.add(made)
                yield Hit(made, "these SamplingParams have no max_tokens", fix)


def max_tokens_is_set_later(code: Code) -> bool:
    """`params.max_tokens = n` somewhere: then the construction says nothing."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "max_tokens"
        and isinstance(node.ctx, ast.Store)
        for node in code.nodes
    )


def unknown_loss_settings(code: Code) -> Iterator[Hit]:
    """Keys of `loss_fn_config` that no loss used here reads, and a threshold that is no ratio."""
    calls = code.method_calls("forward", "forward_backward")
    if not any(argument_of(call, "loss_fn_config", 2) is not None for call in calls):
        return
    settings = names.loss_settings()
    for call in calls:
        config = argument_of(call, "loss_fn_config", 2)
        loss = argument_of(call, "loss_fn", 1)
        chosen = code.constants(loss) if loss is not None else {"cross_entropy"}
        for table in dict_literals(code, config):
            known = frozenset().union(
                *(settings.get(str(name), frozenset()) for name in chosen or settings)
            )
            for key, value in zip(table.keys, table.values, strict=True):
                if not (isinstance(key, ast.Constant) and isinstance(key.value, str) and settings):
                    continue
                numbers = code.constants(value) or set()
                if key.value not in known:
                    yield Hit(
                        key,
                        f"no loss used here reads the setting {key.value!r}",
                        names.hint(key.value, known),
                    )
                elif key.value == "clip_high_threshold" and any(
                    isinstance(n, (int, float)) and n < 1 for n in numbers
                ):
                    yield Hit(
                        key,
                        f"clip_high_threshold {ast.unparse(value)} is below 1: thresholds are "
                        "bounds of the ratio, not distances from one",
                        "write 1.2 for a distance of 0.2",
                    )


def dict_literals(code: Code, node: ast.expr | None) -> list[ast.Dict]:
    """The dict literals an expression may be; empty when it may be anything else."""
    if isinstance(node, ast.Dict):
        return [node]
    if isinstance(node, ast.Name):
        bindings = code.bindings(node)
        if bindings and all(b.how == "value" and isinstance(b.node, ast.Dict) for b in bindings):
            return [b.node for b in bindings if isinstance(b.node, ast.Dict)]
    if isinstance(node, ast.IfExp):
        return [*dict_literals(code, node.body), *dict_literals(code, node.orelse)]
    return []


# -- C24: checkpoint names -------------------------------------------------------------------------


def checkpoint_names(code: Code) -> Iterator[Hit]:
    """C24: names the SDK refuses, and one name saved again and again."""
    pattern = names.checkpoint_name()
    for call in code.method_calls("save_state", "save_weights_for_sampler"):
        name = argument_of(call, "name", 0)
        if name is None or pattern is None:
            continue
        known = code.constants(name)
        texts = code.texts(name)
        if texts and not any(pattern.fullmatch(text.replace(" ", "-")) for text in texts):
            yield Hit(
                name,
                f"the SDK refuses the checkpoint name {texts[0]!r}",
                "use letters, digits, '.', '_' and '-', beginning with a letter or digit",
            )
        bad = bad_part(name)
        if bad:
            yield Hit(
                name,
                f"the SDK refuses checkpoint names with {bad!r}",
                "use letters, digits, '.', '_' and '-'",
            )
        if known is not None and len(known) == 1 and repeats(code, call):
            overwrite = argument_of(call, "overwrite", 2)
            if overwrite is None or (isinstance(overwrite, ast.Constant) and not overwrite.value):
                method = last_name(call.func)
                takes = "overwrite" in str(code_signature(method))
                yield Hit(
                    call,
                    f"{method} saves {next(iter(known))!r} in a loop: the second is refused",
                    "put the step into the name" + (" or pass overwrite=True" if takes else ""),
                )


def code_signature(method: str) -> inspect.Signature | None:
    """The signature of a training client's method."""
    return names.signature_of(names.method_of(names.sdk().TrainingClient, method))


def bad_part(name: ast.expr) -> str:
    """A character in the fixed parts of an f-string that no checkpoint name may have."""
    if not isinstance(name, ast.JoinedStr):
        return ""
    for index, part in enumerate(name.values):
        if isinstance(part, ast.Constant):
            found = re.search(r"[^A-Za-z0-9._\- ]", str(part.value))
            if found is None and index == 0:
                found = re.match(r"[^A-Za-z0-9]", str(part.value))
            if found:
                return found[0]
    return ""


def repeats(code: Code, call: ast.Call) -> bool:
    """Does the call run more than once in a loop: not the last step only, not before a break."""
    loops = code.enclosing_loops(call)
    if not loops:
        return False
    child: ast.AST = call
    for above in code.ancestors(call):
        if above is loops[-1]:
            break
        body = getattr(above, "body", None)
        if isinstance(above, ast.If):
            text = ast.unparse(above.test)
            if "%" not in text and re.search(r"==|\bis\b|last|final|done|not ", text):
                return False
        if isinstance(body, list) and any(isinstance(n, (ast.Break, ast.Return)) for n in body):
            return False
        child = above
    body = getattr(loops[0], "body", [])
    return not any(isinstance(n, (ast.Break, ast.Return)) for n in body) and child is not None


def dotted_origin(code: Code, node: ast.AST) -> str:
    """`np.asarray` -> `numpy.asarray`, by the file's imports."""
    for value in code.values(node):
        if value.kind == "foreign":
            return value.of
    return dotted(node)
