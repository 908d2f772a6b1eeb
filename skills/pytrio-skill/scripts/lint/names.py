"""What the installed SDK and SwanLab offer, asked of the packages themselves.

Nothing here is a list of what exists. The tables of renames only make a hint better: a name is
wrong because the installed package does not have it.
"""

import ast
import difflib
import functools
import importlib.util
import inspect
import re
import textwrap
import typing
from pathlib import Path
from types import ModuleType
from typing import Any

# Names written from memory -> the name here; a hint only where that name exists.
RENAMED = {
    "loss:sum": "loss_sum",
    "loss/sum": "loss_sum",
    "loss:mean": "loss_mean",
    "loss/mean": "loss_mean",
    "loss": "loss_mean",
    "num_tokens": "token_count",
    "tokens": "token_count",
    "timeout": "request_timeout_seconds",
    "sampling_timeout": "sampling_timeout_seconds",
    "actor_event_wait_timeout": "actor_event_polling_timeout_seconds",
    "actor_event_request_timeout": "actor_event_submit_timeout_seconds",
    "lr": "learning_rate",
    "max_grad_norm": "grad_clip_norm",
    "grad_clip": "grad_clip_norm",
    "betas": "beta1",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "stop_sequences": "stop",
    "stop_token_ids": "stop",
    "finish_reason": "stop_reason",
    "token_ids": "tokens",
    "lora_rank": "rank",
    "model_name": "base_model",
    "model": "base_model",
    "lora_path": "model_path",
    "path": "model_path",
    "mask": "weights",
    "loss_mask": "weights",
    "labels": "target_tokens",
    "targets": "target_tokens",
    "old_logprobs": "logprobs",
    "epsilon": "clip_high_threshold",
    "clip_low": "clip_low_threshold",
    "clip_high": "clip_high_threshold",
    "clip_range": "clip_high_threshold",
    "define_scalar": "define_metric",
    "experiment_name": "name",
    "run_name": "name",
    "logdir": "log_dir",
    "dir": "log_dir",
    "sft": "cross_entropy",
    "ce": "cross_entropy",
    "dapo": "ppo",
}
ADVICE = {
    "close": "nothing needs closing; delete the call",
    "close_async": "nothing needs closing; delete the call",
    "aclose": "nothing needs closing; delete the call",
    "shutdown": "nothing needs closing; delete the call",
    "n": "the number of samples goes to sample(..., num_samples=...)",
    "num_samples": "the number of samples goes to sample(..., num_samples=...)",
    "grpo": "compute the group's advantages and use 'importance_sampling' or 'ppo'",
    "gspo": "use forward_backward_custom with a sequence-level ratio",
    "dpo": "use forward_backward_custom with a preference loss",
}


@functools.cache
def sdk() -> ModuleType:
    """The installed pytrio."""
    import pytrio

    return pytrio


@functools.cache
def swanlab() -> ModuleType | None:
    """The installed SwanLab, None where it is missing."""
    try:
        import swanlab as package
    except ImportError:
        return None
    return package


def is_sdk_class(value: object) -> bool:
    """A class of pytrio or of SwanLab."""
    return inspect.isclass(value) and value.__module__.split(".")[0] in ("pytrio", "swanlab")


def is_model(cls: type) -> bool:
    """A pydantic model, whose fields are its keywords."""
    return hasattr(cls, "model_fields")


@functools.cache
def attributes_of(cls: type) -> frozenset[str]:
    """Everything an instance answers to: class attributes, fields, and `self.x` of the source."""
    names = set(dir(cls)) | set(getattr(cls, "model_fields", {}))
    for base in cls.__mro__:
        names |= set(getattr(base, "__annotations__", {}))
        if not is_sdk_class(base):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        names |= {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        }
    return frozenset(names)


@functools.cache
def future_class() -> type:
    """The class of what synchronous methods give."""
    return sdk().types.APIFuture


@functools.cache
def method_of(cls: type, name: str) -> Any:
    """The function behind a method name, None for fields and unknown names."""
    found = inspect.getattr_static(cls, name, None)
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    return found if callable(found) and not inspect.isclass(found) else None


@functools.cache
def signature_of(function: Any) -> inspect.Signature | None:
    """The signature of a function, None where Python cannot tell."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


@functools.cache
def client_methods() -> frozenset[str]:
    """Public methods of the three clients, without the `_async` suffix."""
    package = sdk()
    clients = (package.ServiceClient, package.TrainingClient, package.SamplingClient)
    return frozenset(
        name.removesuffix("_async")
        for cls in clients
        for name in dir(cls)
        if not name.startswith("_") and method_of(cls, name) is not None
    )


@functools.cache
def second_awaits() -> dict[str, bool]:
    """Async method of the SDK's clients -> does one await give a future to be awaited again."""
    package = sdk()
    found = {}
    for cls in (package.ServiceClient, package.TrainingClient, package.SamplingClient):
        for name in dir(cls):
            function = method_of(cls, name)
            if name.startswith("_") or not inspect.iscoroutinefunction(function):
                continue
            signature = signature_of(function)
            result = signature.return_annotation if signature else None
            found[name] = (typing.get_origin(result) or result) is future_class()
    return found


@functools.cache
def loss_keys() -> dict[str, frozenset[str]]:
    """Loss -> every key it reads from `loss_fn_inputs`, as the SDK's batch planner has it."""
    from pytrio.client import training_batch

    keys = {name: set(required) for name, required in training_batch.LOSS_INPUT_SCHEMAS.items()}
    optional = set(training_batch.CrossEntropyTrainingSample.__dataclass_fields__)
    keys["cross_entropy"] |= optional - {"model_input"}
    return {name: frozenset(read) for name, read in keys.items()}


@functools.cache
def required_loss_keys() -> dict[str, frozenset[str]]:
    """Loss -> the keys of `loss_fn_inputs` that it cannot do without."""
    from pytrio.client import training_batch

    return {str(k): frozenset(v) for k, v in training_batch.LOSS_INPUT_SCHEMAS.items()}


def policy_losses() -> frozenset[str]:
    """The losses that read more than cross-entropy needs: those of policy gradients."""
    return frozenset(name for name, keys in loss_keys().items() if "advantages" in keys)


def policy_keys() -> frozenset[str]:
    """Keys that only a policy loss reads."""
    read = frozenset().union(*(loss_keys()[name] for name in policy_losses()))
    return read - loss_keys()["cross_entropy"]


@functools.cache
def metric_keys() -> frozenset[str]:
    """Keys of a forward(-backward) result's `metrics`; empty when the SDK does not say."""
    try:
        from pytrio.protocol.actor.events.trainer import forward
    except ImportError:
        return frozenset()
    models: list[Any] = [m for m in vars(forward).values() if inspect.isclass(m) and is_model(m)]
    return frozenset(
        key for model in models if "loss_mean" in model.model_fields for key in model.model_fields
    )


@functools.cache
def loss_settings() -> dict[str, frozenset[str]]:
    """Loss -> keys of `loss_fn_config`, as the dry run's table LOSSES has them.

    The table is read as text: importing it would import torch, which takes seconds.
    """
    path = Path(__file__).resolve().parent.parent / "trio_local" / "losses.py"
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "LOSSES":
            table = node.value
            if isinstance(table, ast.Dict):
                return {
                    str(ast.literal_eval(key)): settings_in(entry)
                    for key, entry in zip(table.keys, table.values, strict=True)
                    if key is not None
                }
    return {}


def settings_in(entry: ast.expr) -> frozenset[str]:
    """The keys of the defaults in one entry of LOSSES."""
    tables = [node for node in ast.walk(entry) if isinstance(node, ast.Dict)]
    return frozenset(str(ast.literal_eval(k)) for table in tables for k in table.keys if k)


@functools.cache
def checkpoint_name() -> re.Pattern[str] | None:
    """The SDK's own pattern of a checkpoint name, None when this release has none."""
    try:
        from pytrio.client.builders.training import CHECKPOINT_NAME_PATTERN
    except ImportError:
        return None
    return CHECKPOINT_NAME_PATTERN


@functools.cache
def project_name() -> re.Pattern[str] | None:
    """SwanLab's own pattern of a project name, None when this release has none."""
    try:
        from swanlab.sdk.internal.pkg.constraints import ProjectName
    except ImportError:
        return None
    for constraint in getattr(ProjectName, "__metadata__", ()):
        for part in [constraint, *getattr(constraint, "metadata", [])]:
            if isinstance(getattr(part, "pattern", None), str):
                return re.compile(part.pattern)
    return None


@functools.cache
def swanlab_init_keywords() -> frozenset[str]:
    """Keywords `swanlab.init` takes: its signature, and old ones its source still reads."""
    package = swanlab()
    signature = signature_of(package.init) if package else None
    if package is None or signature is None:
        return frozenset()
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = {p.name for p in signature.parameters.values() if p.kind not in kinds}
    try:
        module = inspect.getmodule(inspect.unwrap(package.init))
        text = inspect.getsource(module) if module else ""
    except (OSError, TypeError):
        text = ""
    return frozenset(named | set(re.findall(r"kwargs\.(?:pop|get)\(\s*[\"'](\w+)[\"']", text)))


def module_exists(name: str) -> bool:
    """Can a module of that name be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, AttributeError, ValueError):
        return False


def is_public_module(name: str) -> bool:
    """A module whose names the SDK documents."""
    return name in ("pytrio", "pytrio.types")


def hint(name: str, known: typing.Iterable[str]) -> str:
    """What to write instead of a name that does not exist."""
    public = sorted(k for k in known if not k.startswith("_"))
    if RENAMED.get(name) in public:
        return f"use {RENAMED[name]!r}"
    if name in ADVICE:
        return ADVICE[name]
    near = difflib.get_close_matches(name, public, 1, 0.6)
    if near:
        return f"did you mean {near[0]!r}"
    listed = ", ".join(public[:12])
    return f"known here: {listed}" if listed else "delete it; nothing of the kind exists"
