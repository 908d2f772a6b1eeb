"""Base models in memory: loaded once per folder, their weights shared by trainers and samplers."""

import copy
import inspect
import logging
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from trio_local.catalogue import ServedModel, context_length
from trio_local.protocol import ApiError

if TYPE_CHECKING:
    from trio_local.vision import Picture

# transformers' models: their attributes depend on the architecture, so they are not typed.
Model: TypeAlias = Any


@dataclass(frozen=True)
class LoraSpec:
    """What `create_lora_training_client` asks for."""

    rank: int
    seed: int
    train_mlp: bool
    train_attn: bool
    train_unembed: bool


def shared_copy(model: Model) -> Model:
    """A second module tree over the same parameter tensors; changing one tree's modules or
    replacing its parameters leaves the other alone."""
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}
    memo.update({id(b): b for b in model.buffers()})
    return copy.deepcopy(model, memo)


class LoadedModel:
    """One folder's model in float32, frozen, with its tokenizer."""

    def __init__(self, served: ServedModel, device: str) -> None:
        # A backend in a terminal shows its own lines only.
        logging.getLogger("transformers").setLevel(logging.ERROR)
        disable_progress_bar()
        warnings.filterwarnings("ignore", module="peft|transformers")
        self.served = served
        self.device = torch.device(device)
        self.tokenizer = AutoTokenizer.from_pretrained(served.folder, local_files_only=True)
        # Only of our own: other vision models number pictures in their own way and mix them in
        # at several depths, so `hf:` serves their text.
        sees = served.kind == "vl"
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model: Model = kind.from_pretrained(
            served.folder, dtype=torch.float32, local_files_only=True
        )
        self.model: Model = model.to(self.device).eval().requires_grad_(False)
        self.eye: Any = None
        if sees:
            from trio_local.vision import Eye

            self.eye = Eye(served.folder, self.model)
        self.vocabulary_size = int(self.model.config.get_text_config().vocab_size)
        self.context_length = context_length(served)
        self.end_ids = self._end_ids()
        self.turn_end_id = self._turn_end_id()
        # Renamed in transformers 5; asking the signature keeps both generations working.
        parameters = inspect.signature(self.model.forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"

    def _end_ids(self) -> frozenset[int]:
        """Ids that end a turn: those of the generation config and the tokenizer's own."""
        configured = self.model.generation_config.eos_token_id
        ids = configured if isinstance(configured, list) else [configured]
        return frozenset(i for i in [*ids, self.tokenizer.eos_token_id] if i is not None)

    def _turn_end_id(self) -> int | None:
        """The id that ends an assistant's turn, None for a model that has none."""
        own = self.tokenizer.eos_token_id
        return own if own is not None else min(self.end_ids, default=None)

    def read_input(self, chunks: Sequence[Any], place: str) -> tuple[list[int], list["Picture"]]:
        """Token ids of a wire input, with a placeholder for each visual token, and its pictures.

        Raises ApiError 422 for a picture that is refused, and for any on a text model.
        """
        tokens: list[int] = []
        pictures: list[Picture] = []
        for index, chunk in enumerate(chunks):
            if chunk.type == "encoded_text":
                if self.eye is not None and self.eye.placeholder in chunk.tokens:
                    raise ApiError(
                        422,
                        "placeholder_without_image",
                        f"{place}: token {self.eye.placeholder} stands for a picture; send it as "
                        "an ImageChunk between the texts",
                    )
                tokens.extend(chunk.tokens)
                continue
            if self.eye is None:
                raise ApiError(
                    422,
                    "images_not_supported",
                    f"{place} has an image, {self.served.name} is served by the text model "
                    f"{self.served.kind}; `--model '*=vl'` serves one that sees",
                )
            pictures.append(self.eye.read(chunk, f"{place}, chunk {index}"))
            tokens.extend([self.eye.placeholder] * pictures[-1].tokens)
        return tokens, pictures

    def decoder_input(
        self, tokens: torch.Tensor, pictures: Sequence["Picture"]
    ) -> dict[str, torch.Tensor]:
        """What the model is called with for rows of ids [rows, positions] whose pictures, in order,
        stand in them as placeholders."""
        if self.eye is None:
            return {"input_ids": tokens}
        # Given, or the class would number pictures in its own way.
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        if not pictures:
            return {"input_ids": tokens, "position_ids": positions}
        return {"inputs_embeds": self.eye.embedded(tokens, pictures), "position_ids": positions}

    def linear_modules(self, spec: LoraSpec) -> list[str]:
        """Full names of the linear layers that the LoRA flags select."""
        head = self.model.get_output_embeddings()
        chosen = []
        for name, module in self.model.named_modules():
            if not isinstance(module, torch.nn.Linear):
                continue
            parts = name.split(".")
            if "visual" in parts:
                continue
            is_wanted = (
                (spec.train_unembed and module is head)
                or (spec.train_mlp and any("mlp" in part for part in parts))
                or (spec.train_attn and any("attn" in part for part in parts))
            )
            if is_wanted:
                chosen.append(name)
        return chosen

    def merged(self, adapter: dict[str, torch.Tensor], scale: float) -> Model:
        """A copy of the model with W + scale * B @ A in place of every adapted weight W.

        `adapter` uses PEFT's names. Unadapted weights stay shared with the base.
        """
        model = shared_copy(self.model)
        prefix, suffix = "base_model.model.", ".lora_A.weight"
        for name, lora_a in adapter.items():
            if not name.endswith(suffix):
                continue
            lora_b = adapter[name.replace(".lora_A.", ".lora_B.")]
            module = model.get_submodule(name[len(prefix) : -len(suffix)])
            delta = scale * (lora_b.to(self.device) @ lora_a.to(self.device))
            module.weight = torch.nn.Parameter(module.weight + delta, requires_grad=False)
        return model


def chat_layout(tokenizer_folder: str, end_ids: Collection[int]) -> dict[str, Any]:
    """How a template frames a turn, for the audit: ids of the generation prompts (thinking on and
    off), of what opens an earlier answer and what follows one, and all ids that end a turn.

    A tokenizer without a template gives empty lists.
    """
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder, local_files_only=True)
    question = {"role": "user", "content": "x"}
    answer = {"role": "assistant", "content": "yy"}

    def render(messages: list[dict[str, str]], generation: bool, thinking: bool) -> str:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation, enable_thinking=thinking
        )
        return str(text)

    def ids_of(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    prompts: list[list[int]] = []
    opening: list[int] = []
    closing: list[int] = []
    try:
        bare = render([question], False, False)
        for thinking in (True, False):
            opened = render([question], True, thinking)
            if opened.startswith(bare):
                ids = ids_of(opened[len(bare) :])
                prompts += [ids] if ids and ids not in prompts else []
        closing = ids_of(render([question, answer], False, False).rpartition("yy")[2])
        history = render([question, answer, question], False, False)
        if history.startswith(bare):
            opening = ids_of(history[len(bare) :].partition("yy")[0])
    except Exception:  # a template may raise anything; then it says nothing
        pass
    return {
        "generation_prompts": prompts,
        "opening": opening,
        "closing": closing,
        "end_ids": sorted({*end_ids, *closing[:1]}),
    }
