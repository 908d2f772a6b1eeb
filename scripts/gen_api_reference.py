#!/usr/bin/env python3
"""Write references/api.md from the installed SDK and the table of facts below.

    python scripts/gen_api_reference.py            write the file
    python scripts/gen_api_reference.py --check    compare it, change nothing

Signatures, fields, bounds, options, commands and error codes are asked of the installed package.
What introspection cannot see stands in FACTS and CODES. An error code of the SDK without an entry
in CODES, or an entry without a code, stops the writing. Exit codes: 0 written or equal, 1 the file
differs or the tables do not fit the SDK.
"""

import argparse
import ast
import dataclasses
import difflib
import inspect
import itertools
import os
import re
import sys
import tempfile
import textwrap
import types
import typing
from collections.abc import Iterator
from concurrent.futures import Future
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import click
import pytrio as trio
from pydantic import BaseModel
from pytrio.client import rest as rest_module
from pytrio.client import training as training_module
from pytrio.config.config import Configuration
from pytrio.config.environment import EnvironmentVariable
from pytrio.errors import actor, auth, base, control, event, protocol
from pytrio.errors.diagnostics import _KNOWN_CODES, diagnose

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "skills" / "pytrio-skill" / "references" / "api.md"
WIDTH = 100

CLIENTS: tuple[type, ...] = (
    trio.ServiceClient,
    trio.TrainingClient,
    trio.SamplingClient,
    trio.RestClient,
)
FUNCTIONS = (trio.configure, trio.configure_observability, trio.shutdown_observability)
ERROR_MODULES = (base, auth, control, actor, event, protocol)

ALIASES: tuple[tuple[Any, str], ...] = (
    (training_module.CustomLossFn, "CustomLossFn"),
    (rest_module.AccessScope, "AccessScope"),
    (dict[str, object], "dict"),
)

# -- what introspection cannot see -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Fact:
    """One statement: `mark` is T (executed by a test), S (read in the SDK's source) or ?."""

    key: str
    section: str
    mark: str
    text: str


# A heading, then `key (mark): text`; lines of one fact that follow are indented.
FACTS_TEXT = r"""
## Start
no-network (T): `import pytrio` and `configure` send nothing. `ServiceClient()` sends three
    requests (key, version, session); without a key it raises `auth.missing_api_key` before any.
precedence (T): Saved profile < environment variable (read once, at import) < `configure` <
    `ServiceClient(api_key=)`. A client copies the options when made, so configure first.
reload (T): `configure(home=...)` or `(env=...)` loads the profile again and drops a key and address
    set earlier: give all in one call.
unknown-option (T): An unknown option only warns (`Unknown configuration option 'timeout' was
    ignored.`); a value out of bounds raises pydantic's `ValidationError`.
old-options (T): Ignored too: `timeout` (now `request_timeout_seconds`), `actor_event_wait_timeout`,
    `actor_event_request_timeout`, and the names of 0.2.8: without `_seconds` and `_ratio`
    (`sampling_timeout`, `retry_jitter`), `heartbeat_*` (now `actor_heartbeat_*`), `training_max_*`
    and the same for sampling (now as above), `*_worker_threads` (gone).
sdk-before (T): pytrio 0.2.8 has the same methods and arguments. Different there: those option names
    (an unknown one is a `TypeError`), `task_id` for `training_run_cuid` and `sampling_run_cuid`,
    `event.session_broken` for `training.run_broken`.
logging (T): Logger `pytrio`. `ServiceClient()` gives it a handler (`trio: ...`, INFO to **stdout**,
    WARNING and above to stderr) and stops propagation. Quiet: `log_level="ERROR"`. A line for every
    request on an INFO root logger is `httpx`'s: `logging.getLogger("httpx").setLevel("WARNING")`.
telemetry (T): `configure_observability(enabled=False)` before the client stops telemetry.
no-close (T): Nothing has `close()` or works in `with`. The session ends with the last client object
    or the process.

## ServiceClient
create-run (T): `create_*_client` sends one request and starts no trainer. `rank` is 4 to 64,
    checked here.
capacity (T): Server full (429 `actor_capacity_exceeded`): creating a training run waits, asking
    every 30 s for up to an hour.
from-state (T): `create_training_client_from_state*` takes model, rank and layer flags from the
    checkpoint; without `_with_optimizer` Adam starts from zero. It is a new run with a new
    `training_run_cuid`; step, data position and seeds are yours to keep.

## TrainingClient
first-call (T): The first `forward*`, `optim_step`, `save_*` or `load_state*` starts the trainer and
    waits for it, sync or async; later calls return when queued. The first `forward*` also loads the
    tokenizer, which may download it.
order (T): Calls execute in the order of submission: submit `optim_step` before waiting for
    `forward_backward`.
accumulate (T): Gradients add up over `forward_backward*` until `optim_step`. `forward` leaves none.
outputs (T): `metrics`: `loss_sum`, `loss_mean` (loss_sum / token_count), `token_count`.
    `loss_fn_outputs[i]["logprobs"]`: TensorData, one number a position of sample i.
optim-metrics (?): Keys of `optim_step` metrics; the dry run gives `grad_norm`, `learning_rate`. Use
    `.get`.
splitting (T): A call over `max_batch_size` or `max_tokens_per_request` is split by the SDK, with
    the totals of the whole call; one sample never is. A failed part breaks the client
    (`training.run_broken`).
loss-inputs (T): Checked before sending: required keys, shape `[len(model_input)]`, integer targets,
    finite floats, ids in `0..len(tokenizer)-1` (targets also -100), lengths. Other keys of
    `loss_fn_inputs` are dropped silently. [losses.md](losses.md), [data.md](data.md).
plain-errors (T): Unknown loss, missing key, wrong shape or dtype and NaN raise plain `ValueError`:
    `except PyTrioError` misses them.
custom-loss (T): `forward_backward_custom` calls `loss_fn(data, logprobs)`, with `loss_fn_config` as
    third argument if given and taken, on the SDK's own thread (a sync SDK call inside raises
    `RuntimeError`), and returns after it ran. [custom-loss.md](custom-loss.md).
adam-bounds (T): `AdamParams` checks no bounds (the dry run refuses NaN and negative rates). Each
    `optim_step` has its own: schedules are yours.
load-state (T): `load_state*` after the first operation: `validation.already_initialized`,
    `load_state cannot be called after training has started. Call load_state before the first
    training operation.` Another base model, rank or layer flag:
    `validation.checkpoint_config_mismatch`, `Checkpoint configuration is incompatible: lora_rank
    (target=16, source=8).`; the client stays usable.
names (T): Checkpoint names: ASCII letters, digits, `.`, `_`, `-`; the first a letter or digit, the
    last not `.`. Spaces become `-`; over 200 characters: first 180 + 20 hex digits of the whole
    name's sha256; both log a warning.
tokenizer (T): `get_tokenizer()`: ModelScope's AutoTokenizer (else transformers'), local cache
    first, then download. Loads anew each call: call it once.

## What each save keeps
ttl (T): "No end" is the dry run's (`expires_at` None); whether the cloud keeps them for good is
    unknown. Download what matters: [checkpoints.md](checkpoints.md).
save-addresses (T): A sampling client takes either address. Resume training from `save_state`
    addresses (the dry run also takes sampler weights where no optimiser is asked for).

## SamplingClient
sampling-checks (T): Checked before sending: prompt not empty, `max_tokens` > 0 (required),
    `num_samples` >= 1, `topk_prompt_logprobs` >= 0, no prompt log-probabilities with images. All
    else, length too, only by the server.
prompt-logprobs (T): `compute_logprobs`: one entry a prompt token, the first `None`; it samples one
    token, so leave room. `prompt_logprobs` and `topk_prompt_logprobs` are `[]` unless asked for.
sample-snapshot (T): It never sees later training steps: make a new one.

## RestClient
rest-futures (T): Sync methods return `concurrent.futures.Future`, not awaitable (except
    `get_sampler`): `.result()`, or the async twin.
rest-ids (T): `training_run_id` is `training.training_run_cuid`. `checkpoint_id` is not the address:
    find it in `list_checkpoints(run).result().checkpoints` by `.path`. That one fetches all pages,
    the other lists one.
rest-empty (T): `TrainingRun.last_checkpoint` and `.last_sampler_checkpoint` are always None,
    `Checkpoint.public` always False.
rest-download (T): `download_checkpoint` writes one file: in the dry run a zip of a PEFT folder; the
    cloud's format is unknown. It resumes a file that is there: [checkpoints.md](checkpoints.md).

## Types
forbid (T): Unknown fields are refused (`lr`, `max_new_tokens`, `n`). Lists, numpy and torch tensors
    in `loss_fn_inputs` become TensorData; `None` in a list is refused.
tensordata (T): TensorData is no array: `.tolist()`, `.to_numpy()`; `np.asarray(td)` is a 0-d
    object.
stop (T): `stop`: a string, strings, or token ids. `stop_reason` is the server's word; the dry run:
    `stop` or `length`. `text` is None with `return_text=False`.
image-length (T): `len(ModelInput)` with an image needs its `expected_tokens`; in training one image
    without is inferred from the targets. [vision.md](vision.md).

## Futures, threads, processes
await-depth (T): Depth 2: `future = await x_async(...)` submits, `await future` waits. An APIFuture
    can be awaited twice, gathered, or asked by `.result()` from any thread.
queues (S): A client has 16 calls in flight and 64 queued; then submitting waits.
timeout (T): `result(timeout=s)` raises `concurrent.futures.TimeoutError` and cancels nothing.
cancel (T): `cancel()` of a `forward_backward` (`asyncio.wait_for` does it too) only stops the
    waiting: its gradient is still added.
threads (T): Clients work from any thread and event loop; a sync call in a coroutine blocks its
    loop. Clients cannot be pickled (types can): one ServiceClient a process, made after the fork.

## Errors
error-fields (T): `.message`, `.code`, `.hint`, `.details`, `.status_code`,
    `.retryable` (advice to you), `.operation`, `.request_id`; `str(error)` has them.
retries (T): The SDK repeats HTTP 408, 429, 500, 502, 503, 504 and broken connections for 15 minutes
    (`*_retry_timeout_seconds`) and renews tokens. What reaches you outlived that: no quick retry
    loop around it.
event-failed (T): `EventFailedError` has the server's code; only that event failed and the client
    works on. After a failed part of a split call, or a failed submission (S), everything raises
    `training.run_broken`: resume from the last `save_state` in a new client.
"""

SAVES = """\
| call | keeps | lifetime | same name again |
|---|---|---|---|
| `save_state` | weights, optimiser | `ttl_seconds`, else no end | refused unless `overwrite=True` |
| `save_weights_for_sampler` | weights | `ttl_seconds`, else no end | refused |
| `save_weights_and_get_sampling_client` | weights, address not given | 6 hours | random name |
"""

# Codes the SDK knows or raises, then what they mean and what to do. A name with `*` is a pattern of
# the source.
CODES_TEXT = """
validation.empty_training_data validation.empty_training_sample: nothing to train on; skip the step
    when every group is degenerate
validation.empty_prompt validation.empty_rest_argument: an empty prompt or id
validation.token_id_out_of_range: id >= len(tokenizer), also a sampled one of the padded vocabulary:
    drop that completion before the mean of its group; `.details` says where
validation.training_sample_too_long validation.training_sample_too_large: one sample over the
    limits: filter
validation.invalid_sampling_request validation.image_logprobs_unsupported: see SamplingClient
validation.invalid_checkpoint_name validation.already_initialized
    validation.checkpoint_config_mismatch: see TrainingClient
validation.invalid_lora_rank: 4 to 64
validation.missing_custom_loss_gradient: every datum must reach the loss: add `0.0 * lp.sum()`
validation.missing_base_model validation.unknown_checkpoint_type validation.missing_logprobs
    validation.forward_output_count_mismatch validation.forward_response_count_mismatch
    actor.invalid_response actor.event_mismatch actor.invalid_renew_response
    control.invalid_response: the server's answer does not fit this SDK: upgrade, else report
validation.invalid_tokenizer_vocab_size dependency.missing_tokenizer_backend: reinstall modelscope
    or transformers
validation.invalid_event_queue_limit validation.invalid_sampling_queue_limit: must be positive
validation.unsupported_model model_not_found no_available_actor: pick from `get_supported_models()`;
    the last: no runner now
validation.failed validation_failed invalid_request_body invalid_path_params invalid_query_params:
    arguments refused: read `.details`
dependency.missing_torch dependency.missing: install torch for `forward_backward_custom`
auth.missing_api_key: set `PYTRIO_API_KEY` or `trio login`
unauthorized forbidden api_key_expired api_key_revoked api_key_disabled: another key, or the key of
    this `PYTRIO_BASE_URL`
auth.failed auth.login_failed auth.verify_failed auth.invalid_user_info: read the message
auth.invalid_config auth.read_config_failed auth.save_config_failed auth.delete_config_failed:
    `~/.pytrio` is damaged: `trio login --relogin`
configuration.invalid_environment configuration.env_not_found configuration.error: bad `PYTRIO_*`
    value or profile (`trio env list`)
sdk.compatibility_blocked: SDK too old for the server: upgrade
billing_insufficient_balance: top up
actor_capacity_exceeded: later, or raise `actor_capacity_wait_timeout_seconds`
too_many_requests service_unavailable auth_service_unavailable internal_error database_error unknown
    actor_disabled runner_disabled: service trouble after all retries: resume later
checkpoint_invalid_type: sampler weights where a `save_state` address is needed
control.request_failed actor.request_failed event.polling_failed: no answer: network, proxy, address
actor.sampling.*_timeout: total, first_chunk, chunk_idle: ask for fewer tokens, or raise the option
training.run_broken: new client from the last `save_state`
training.run_closed sampling.run_closed actor.client_closed actor.renew_unavailable
    actor.transport_unavailable: the session was shut down: new ServiceClient
training.run_loop_mismatch sampling.run_loop_mismatch: private objects on another event loop
download.failed download.request_failed download.invalid_content_range
    download.content_range_length_mismatch download.unexpected_partial_content
    download.invalid_tls_certificate: call again (it resumes), else delete the partial file
pytrio.error actor.error event.error: defaults
"""

VARIABLES = {
    "PYTRIO_API_KEY": "key",
    "PYTRIO_BASE_URL": "server address",
    "PYTRIO_ENV": "profile of `trio env`",
    "PYTRIO_LOG_LEVEL": "DEBUG ... CRITICAL",
}

HEAD = """\
# API reference, pytrio {version}

Read to look up a name, default, await or error; reading the SDK's source is not needed: this page
is generated from it. What is undocumented: [answers.md](answers.md).

Contents: Start | ServiceClient | TrainingClient | What each save keeps | SamplingClient |
RestClient | Types | Futures, threads, processes | Errors

**(T)** executed by a test against SDK and dry run, as all signatures are; **(S)** read in the SDK
source; **(?)** unknown on the cloud, the dry run's behaviour is given. `async N`: `NAME_async` has
the same arguments and needs N awaits until the result. A sync method that returns a future:
`.result()`. An argument or field without a type is a string.
"""

EXAMPLE = """\
```python
import asyncio

import pytrio as trio


async def main():
    service = trio.ServiceClient()
    training = await service.create_lora_training_client_async("Qwen/Qwen3.5-4B", rank=8)
    datum = trio.Datum(
        model_input=trio.ModelInput.from_ints([40, 41, 42]),
        loss_fn_inputs={"target_tokens": [41, 42, 43], "weights": [0.0, 1.0, 1.0]},
    )
    try:
        backward = await training.forward_backward_async([datum])  # submitted
        step = await training.optim_step_async(trio.AdamParams(learning_rate=1e-4))  # behind it
        print((await backward).metrics["loss_mean"], (await step).metrics)
        saved = await (await training.save_state_async("step-1"))
    except trio.PyTrioError as error:
        raise SystemExit(f"{error.code}: {error}") from error
    sampler = await training.create_sampling_client_async(saved.path)
    reply = await sampler.sample_async(datum.model_input, 2, trio.SamplingParams(max_tokens=8))
    print([(s.stop_reason, s.tokens, s.logprobs) for s in reply.sequences])


asyncio.run(main())
```
"""

# -- reading the tables ----------------------------------------------------------------------------


def entries(text: str) -> Iterator[str]:
    """Entries of a table above, each on one line: indented lines continue the one before."""
    yield from re.sub(r"\n +", " ", text.strip()).splitlines()


def read_facts(text: str) -> Iterator[Fact]:
    """The facts in order, each with the heading above it."""
    section = ""
    for entry in filter(None, entries(text)):
        if entry.startswith("## "):
            section = entry[3:]
            continue
        match = re.fullmatch(r"([a-z-]+) \(([TS?])\): (.+)", entry)
        if match is None:
            raise SystemExit(f"not a fact: {entry}")
        yield Fact(match[1], section, match[2], match[3])


FACTS = tuple(read_facts(FACTS_TEXT))
CODES = tuple(
    (codes.split(), text) for codes, _, text in (e.partition(": ") for e in entries(CODES_TEXT))
)

# -- introspection ---------------------------------------------------------------------------------


def type_name(annotation: Any) -> str:
    """An annotation as short text, the same in every version of Python."""
    alias = next((name for known, name in ALIASES if annotation == known), None)
    if alias is not None:
        return alias
    if annotation is None or annotation is types.NoneType:
        return "None"
    if isinstance(annotation, str):
        return annotation.strip("'\"")
    if isinstance(annotation, typing.TypeVar | typing.ForwardRef):
        return getattr(annotation, "__forward_arg__", "") or str(annotation).lstrip("~")
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(type_name, arguments))
    if origin is typing.Literal:
        return " | ".join(map(repr, arguments))
    if origin is not None:
        inner = ", ".join("..." if a is Ellipsis else type_name(a) for a in arguments)
        return f"{origin.__name__}[{inner}]" if inner and inner[0] != "[" else origin.__name__
    return getattr(annotation, "__name__", str(annotation))


def named_text(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> str:
    """`rank=32` where the default tells the type, else `seed: int | None = None`; a bare name is
    a required string."""
    kind = type_name(annotation)
    if default is inspect.Parameter.empty:
        return name if kind == "str" else f"{name}: {kind}"
    shown = f"{type(default).__name__}()" if isinstance(default, BaseModel) else repr(default)
    return f"{name}={shown}" if type(default).__name__ == kind else f"{name}: {kind} = {shown}"


def signature_text(function: Any) -> str:
    """`(data: list[Datum], loss_fn='cross_entropy')`, without self, cls and the return."""
    shown, keyword_only = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            shown.append("*")
        shown.append(named_text(parameter.name, parameter.annotation, parameter.default))
    return f"({', '.join(shown)})"


def return_type(function: Any) -> Any:
    """The return annotation as the SDK wrote it."""
    return inspect.signature(function).return_annotation


def await_depth(function: Any) -> int:
    """Awaits until the result: a coroutine that returns a future needs a second one."""
    origin = typing.get_origin(return_type(function)) or return_type(function)
    futures = (trio.types.APIFuture, Future)
    return 1 + (inspect.isclass(origin) and issubclass(origin, futures))


def methods_of(cls: type) -> dict[str, Any]:
    """Public methods, in the order of the source; pydantic's own are not the SDK's."""
    found = {}
    for name, member in vars(cls).items():
        function = getattr(member, "__func__", member)
        if inspect.isfunction(function) and not name.startswith("_"):
            found[name] = function
    return found


def is_validator(cls: type, name: str) -> bool:
    """Methods that pydantic calls, not people."""
    decorators = getattr(cls, "__pydantic_decorators__", None)
    tables = dataclasses.fields(decorators) if decorators else ()
    return any(name in getattr(decorators, table.name) for table in tables)


def attributes_of(cls: type) -> list[str]:
    """Public attributes that `__init__` sets."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(vars(cls)["__init__"])))
    return [
        node.target.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Attribute)
        and not node.target.attr.startswith("_")
    ]


def public_types() -> dict[str, Any]:
    """Everything `pytrio.types` exports."""
    return {
        name: value
        for name, value in vars(trio.types).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }


def bounds_text(metadata: list[Any]) -> str:
    """` (>= 1)` from the constraints of a field."""
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "min_length": "length >="}
    shown = [
        f"{sign} {getattr(rule, name)}"
        for rule in metadata
        for name, sign in signs.items()
        if getattr(rule, name, None) is not None
    ]
    return f" ({', '.join(shown)})" if shown else ""


def field_text(name: str, field: Any) -> str:
    """`max_tokens: int | None = None` with bounds."""
    default = inspect.Parameter.empty if field.is_required() else field.get_default()
    if field.default_factory is not None:
        default = field.default_factory()
    return named_text(name, field.annotation, default) + bounds_text(field.metadata)


def type_lines(name: str, value: Any) -> list[str]:
    """One type: its fields on the first line, its methods and properties on the second."""
    if not inspect.isclass(value):
        return [f"{name} = {type_name(value)}"]
    first = name
    if issubclass(value, BaseModel):
        fields = [field_text(n, f) for n, f in value.model_fields.items() if n != "type"]
        first = f"{name}({', '.join(fields)})"
    members = []
    for member, function in methods_of(value).items():
        if is_validator(value, member):
            continue
        owner = name if isinstance(vars(value)[member], staticmethod | classmethod) else ""
        result = type_name(return_type(function))
        members.append(f"{owner}.{member}{signature_text(function)} -> {result}")
    members += [
        f".{member}"
        for member, found in vars(value).items()
        if isinstance(found, property) and not member.startswith(("_", "model_"))
    ]
    members += ["len()"] * ("__len__" in vars(value))
    return [first, *(["    " + "; ".join(members)] if members else [])]


def code_pattern(node: ast.expr) -> str:
    """A literal code, or a pattern for one put together at run time; empty for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "*" for v in node.values)
    return ""


def codes_of_sdk() -> set[str]:
    """Every error code the installed SDK raises, defaults to or explains."""
    found = set(_KNOWN_CODES)
    for path in Path(trio.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "code":
                found.add(code_pattern(node.value))
            if isinstance(node, ast.arguments):
                pairs = zip(node.kwonlyargs, node.kw_defaults, strict=True)
                found |= {code_pattern(d) for a, d in pairs if d is not None and a.arg == "code"}
    return found - {""}


def error_classes() -> Iterator[tuple[str, type]]:
    """(module, class) of every error the SDK defines, parents first."""
    for module in ERROR_MODULES:
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == module.__name__:
                yield module.__name__, value


# -- sections --------------------------------------------------------------------------------------


def wrapped(text: str, first: str = "", rest: str = "") -> str:
    """Prose within the line limit; long words and codes stay whole."""
    wrapper = textwrap.TextWrapper(
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapper.fill(text)


def facts(section: str) -> list[str]:
    """The bullets of a section."""
    return [
        wrapped(f"{fact.text} ({fact.mark})", "- ", "  ")
        for fact in FACTS
        if fact.section == section
    ]


def listing(lines: list[str]) -> list[str]:
    return ["```text", *lines, "```"]


def client_section(cls: type) -> list[str]:
    """Attributes and methods of a client, an async twin as a note behind its sync method."""
    methods = methods_of(cls)
    lines = []
    for name, function in methods.items():
        if name.removesuffix("_async") in methods and name.endswith("_async"):
            continue
        line = f"{name}{signature_text(function)} -> {type_name(return_type(function))}"
        twin = methods.get(f"{name}_async")
        if twin is not None:
            if signature_text(twin) != signature_text(function):
                raise SystemExit(f"{cls.__name__}.{name} and its async twin differ in arguments")
            line += f"  async {await_depth(twin)}"
        lines.append(line)
    if attributes := attributes_of(cls):
        lines.insert(0, f"attributes: {', '.join(attributes)}")
    return [f"## {cls.__name__}", "", *listing(lines), "", *facts(cls.__name__)]


def option_texts() -> list[str]:
    """The keyword arguments of `configure` with their defaults."""
    texts = []
    for name, parameter in inspect.signature(trio.configure).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        # `home` defaults to this machine's home; the other two stand outside the options' model.
        if name in ("home", "env", "api_key"):
            texts.append(f"{name}: {type_name(parameter.annotation).removesuffix(' | None')}")
        else:
            texts.append(f"{name}={Configuration.model_fields[name].default!r}")
    return texts


def command_lines(command: click.Command, path: str) -> Iterator[str]:
    """One line a command, with its options."""
    if isinstance(command, click.Group):
        for name, child in sorted(command.commands.items()):
            yield from command_lines(child, f"{path} {name}")
        return
    shown = []
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            shown.append(
                parameter.human_readable_name if parameter.required else f"[{parameter.name}]"
            )
        else:
            name = max(parameter.opts, key=len)
            flag = getattr(parameter, "is_flag", False)
            shown.append(f"[{name}{'' if flag else ' ...'}]")
    yield " ".join([path, *shown])


def commands() -> list[str]:
    """The commands the package installs."""
    scripts = entry_points(group="console_scripts")
    return [
        line
        for script in scripts
        if script.value.startswith("pytrio.")
        for line in command_lines(script.load(), script.name)
    ]


def start_section() -> list[str]:
    names = [variable.value for variable in EnvironmentVariable]
    variables = "; ".join(f"`{name}` ({VARIABLES[name]})" for name in names)
    others = [f"{f.__name__}{signature_text(f)}" for f in FUNCTIONS[1:]]
    return [
        "## Start",
        "",
        *listing(
            [
                wrapped(f"trio.configure(*, {', '.join(option_texts())})", "", "    "),
                *(f"trio.{text}" for text in others),
                *commands(),
            ]
        ),
        "",
        wrapped(f"Environment variables: {variables}. (T)", "- ", "  "),
        *facts("Start"),
        "",
        EXAMPLE.rstrip(),
    ]


def saves_section() -> list[str]:
    section = "What each save keeps"
    return [f"## {section}", "", SAVES.rstrip(), "", *facts(section)]


def types_section() -> list[str]:
    """Inputs and outputs: first what the package exports at its top level."""
    blocks: dict[str, list[str]] = {"trio": [], "trio.types": []}
    for name, value in public_types().items():
        blocks["trio" if hasattr(trio, name) else "trio.types"] += type_lines(name, value)
    metrics = type_name(typing.get_args(training_module.CustomLossResult)[1])
    blocks["aliases"] = [
        f"CustomLossFn = callable (data, logprobs: list[Tensor][, config]) -> (Tensor, {metrics})",
        "AccessScope = " + " | ".join(map(repr, typing.get_args(rest_module.AccessScope))),
    ]
    lines = [line for title, block in blocks.items() for line in (f"# {title}", *block)]
    return ["## Types", "", *listing(lines), "", *facts("Types")]


def shown_codes(codes: list[str], known: set[str]) -> str:
    """Codes of one row, + behind those worth another try; `download.*` stands for a row that has
    all codes of its prefix."""
    prefix = codes[0].partition(".")[0] + "."
    if len(codes) > 1 and set(codes) == {code for code in known if code.startswith(prefix)}:
        return f"`{prefix}*`"
    return ", ".join(f"`{code}`{'+' if diagnose(code=code).retryable else ''}" for code in codes)


def errors_section() -> list[str]:
    """Classes, then every code with meaning and fix; raises SystemExit for a gap in the table."""
    known = codes_of_sdk()
    listed = [code for codes, _ in CODES for code in codes]
    if missing := known - set(listed):
        raise SystemExit(f"no entry in CODES for: {', '.join(sorted(missing))}")
    if stale := set(listed) - known:
        raise SystemExit(f"CODES names what the SDK does not have: {', '.join(sorted(stale))}")
    modules = itertools.groupby(error_classes(), key=lambda pair: pair[0])
    classes = "; ".join(
        f"{module.rpartition('.')[2]}: {', '.join(cls.__name__ for _, cls in group)}"
        for module, group in modules
    )
    rows = [wrapped(f"{shown_codes(codes, known)}: {text}", "- ", "  ") for codes, text in CODES]
    return [
        "## Errors",
        "",
        wrapped(f"Classes in `pytrio.errors`: {classes}. All derive from PyTrioError."),
        "",
        *facts("Errors"),
        "",
        "Codes (+: `.retryable`). Server codes pass unchanged.",
        "",
        *rows,
    ]


def futures_section() -> list[str]:
    section = "Futures, threads, processes"
    return [f"## {section}", "", *facts(section)]


def generate() -> str:
    """The whole file. Raises SystemExit when the tables do not fit the installed SDK."""
    service, training, sampling, rest = map(client_section, CLIENTS)
    sections = [
        HEAD.format(version=version("pytrio")).rstrip().splitlines(),
        start_section(),
        service,
        training,
        saves_section(),
        sampling,
        rest,
        types_section(),
        futures_section(),
        errors_section(),
    ]
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


# -- the file --------------------------------------------------------------------------------------


def difference(text: str, path: Path) -> list[str]:
    """Unified diff from the file to what it should be; empty when equal."""
    present = path.read_text(encoding="utf-8") if path.exists() else ""
    return list(
        difflib.unified_diff(
            present.splitlines(), text.splitlines(), path.name, "generated", lineterm="", n=1
        )
    )


def write(text: str, path: Path) -> None:
    """Replace the file in one step: a reader sees the old text or the new."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".api-", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--file", type=Path, default=TARGET, help="another file than api.md")
    arguments = parser.parse_args()
    text = generate()
    try:
        return write_or_compare(text, arguments.file, arguments.check)
    except (OSError, UnicodeDecodeError) as error:
        print(f"--file {arguments.file}: {error}", file=sys.stderr)
        return 1


def write_or_compare(text: str, path: Path, is_check: bool) -> int:
    """Write the file, or print how it differs; the exit code."""
    if not is_check:
        write(text, path)
        print(f"{path.name}: {len(text)} characters, {len(text) / 3.2:.0f} tokens")
        return 0
    changed = difference(text, path)
    if changed:
        print("\n".join(changed[:200]))
        print(
            f"{path.name} is not what pytrio {version('pytrio')} gives: "
            "run scripts/gen_api_reference.py",
            file=sys.stderr,
        )
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
