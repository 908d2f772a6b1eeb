"""What several tests share: clients of the real SDK, downloads, and an independent model."""

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel
from pytrio import AdamParams, Datum, ModelInput, ServiceClient, TrainingClient
from pytrio.config.config import configuration
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from conftest import SKILL, Backend

BASE_MODEL = "Qwen/Qwen3-4B-Instruct-2507"
LARGE_MODEL = "Qwen/Qwen3.6-27B"
STANDIN = SKILL / "scripts" / "trio_local" / "weights" / "standin"
RETRY_SECONDS = 20.0

ChatMessages = list[dict[str, str]]
Tensors = dict[str, torch.Tensor]


@contextmanager
def service_on(backend: Backend, **settings: object) -> Iterator[ServiceClient]:
    """A ServiceClient that gives up soon, leaves no trace in the user's home, and is closed
    while its backend still lives (left to the garbage collector it would wait for a dead one).

    `settings` go to `trio.configure` and hold for this client only.
    """
    defaults: dict[str, object] = {
        "home": str(backend.record / "sdk-home"),
        "training_retry_timeout_seconds": RETRY_SECONDS,
        "control_retry_timeout_seconds": RETRY_SECONDS,
        "sampling_retry_timeout_seconds": RETRY_SECONDS,
    }
    before = configuration.model_dump()
    service = backend.client(**(defaults | settings))
    for name, value in before.items():
        setattr(configuration, name, value)
    try:
        yield service
    finally:
        service._runtime.shutdown()


def chat_prompt(tokenizer: object, question: str) -> list[int]:
    """Token ids of one user turn with the generation prompt."""
    messages: ChatMessages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )


def supervised_datum(tokens: Sequence[int], weights: Sequence[float] | None = None) -> Datum:
    """Next-token prediction on a whole sequence, shifted by hand; weights are of the targets."""
    inputs, targets = list(tokens[:-1]), list(tokens[1:])
    chosen = [1.0] * len(targets) if weights is None else list(weights)
    assert len(chosen) == len(targets), (len(chosen), len(targets))
    return Datum(
        model_input=ModelInput.from_ints(inputs),
        loss_fn_inputs={"target_tokens": targets, "weights": chosen},
    )


def random_sequences(seed: int, lengths: Sequence[int], vocabulary: int = 2000) -> list[list[int]]:
    """Arbitrary token ids of the given lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def train_step(client: TrainingClient, data: list[Datum], **adam: float) -> dict[str, float]:
    """One cross-entropy step; returns the metrics of the forward pass."""
    forward = client.forward_backward(data)
    client.optim_step(AdamParams(**adam)).result()
    return forward.result().metrics


def run_id_of(path: str) -> str:
    """`trio://RUN/state/NAME` -> RUN."""
    return path.split("/")[2]


def checkpoint_id(service: ServiceClient, path: str) -> str:
    """The id under which RestClient knows the checkpoint at an address."""
    listed = service.create_rest_client().list_checkpoints(run_id_of(path)).result().checkpoints
    return next(c.checkpoint_id for c in listed if c.path == path)


def downloaded(service: ServiceClient, path: str, folder: Path) -> Path:
    """Download a checkpoint through the SDK and unpack it into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / "checkpoint.zip"
    rest = service.create_rest_client()
    rest.download_checkpoint(checkpoint_id(service, path), archive).result()
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder)
    archive.unlink()
    return folder


def adapter_tensors(folder: Path) -> Tensors:
    """The adapter in an unpacked checkpoint, under PEFT's names."""
    return load_file(folder / "adapter_model.safetensors")


def saved_adapter(
    service: ServiceClient, client: TrainingClient, name: str, folder: Path
) -> Tensors:
    """Save a run's weights under `name` and read them back through a download."""
    path = client.save_weights_for_sampler(name).result().path
    return adapter_tensors(downloaded(service, path, folder / name))


@cache
def standin_model() -> PreTrainedModel:
    """The base behind BASE_MODEL in float32, loaded once; never adapt this one."""
    return AutoModelForCausalLM.from_pretrained(STANDIN, dtype=torch.float32).eval()


def adapted_model(adapter: Path, is_trainable: bool = False) -> PeftModel:
    """A downloaded adapter on the base it names, put together by peft alone."""
    folder = PeftConfig.from_pretrained(str(adapter)).base_model_name_or_path
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return PeftModel.from_pretrained(base, str(adapter), is_trainable=is_trainable).eval()


def logprob_table(model: torch.nn.Module, tokens: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [positions, vocabulary]: row t is of the token after `tokens[t]`."""
    logits = model(input_ids=torch.tensor([list(tokens)])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def logprobs_of(
    model: torch.nn.Module, tokens: Sequence[int], targets: Sequence[int]
) -> torch.Tensor:
    """Log-probability of `targets[t]` after `tokens[: t + 1]`, for every t."""
    table = logprob_table(model, tokens)
    return table[torch.arange(len(tokens)), torch.tensor(list(targets))]
