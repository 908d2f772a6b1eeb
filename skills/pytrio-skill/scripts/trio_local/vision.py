"""Pictures of a request: read, limited, counted, and turned into embeddings in a row of tokens.

A picture stands in a row as its placeholder token, once for each visual token, and takes ordinary
sequential positions; its features replace the placeholders' embeddings. So everything behind the
embeddings (training, prefill, decoding) is as for text.
"""

import hashlib
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor

from trio_local.protocol import ApiError

# Local choices, unverified against the cloud.
MAX_BYTES = 20 * 1024**2
MAX_PIXELS = 16 * 1024**2
SMALLEST_SIDE, LARGEST_SIDE = 4, 8192
PICTURES_KEPT = 4096
MODES = ("RGB", "RGBA", "L", "LA", "P", "1")


@dataclass(frozen=True)
class Picture:
    """A picture as the vision tower reads it: patches [patches, values], grid (time, rows,
    columns), and how many tokens it becomes."""

    patches: torch.Tensor
    grid: torch.Tensor
    tokens: int
    digest: str


class Eye:
    """The image processor and vision tower of a loaded model."""

    def __init__(self, folder: Path, model: Any) -> None:
        self.processor = AutoImageProcessor.from_pretrained(
            folder, local_files_only=True, backend="pil"
        )
        self.model = model
        self.placeholder = int(model.config.image_token_id)
        self.merge = int(model.config.vision_config.spatial_merge_size) ** 2
        self.seen: dict[str, torch.Tensor] = {}

    def read(self, chunk: Any, place: str) -> Picture:
        """Decode an image chunk. Raises ApiError 422 that names what is wrong with it."""
        image = opened(chunk.data, chunk.format, place)
        try:
            read = self.processor(images=[image], return_tensors="pt")
        except ValueError as error:  # sides that the processor cannot resize
            raise refuse("invalid_image", place, str(error)) from None
        grid = read["image_grid_thw"]
        tokens = int(grid.prod()) // self.merge
        if chunk.expected_tokens is not None and chunk.expected_tokens != tokens:
            raise refuse(
                "image_token_mismatch",
                place,
                f"expected_tokens is {chunk.expected_tokens}, this picture of "
                f"{image.width} x {image.height} has {tokens}",
            )
        digest = hashlib.sha256(chunk.data).hexdigest()[:16]
        return Picture(read["pixel_values"], grid, tokens, digest)

    def embedded(self, tokens: torch.Tensor, pictures: Sequence[Picture]) -> torch.Tensor:
        """Embeddings [rows, positions, width] of token rows in which the pictures, in order, stand
        as placeholders."""
        embeddings = self.model.get_input_embeddings()(tokens)
        features = torch.cat([self.features(picture) for picture in pictures])
        places = (tokens == self.placeholder)[..., None].expand_as(embeddings)
        return embeddings.masked_scatter(places, features)

    @torch.no_grad()
    def features(self, picture: Picture) -> torch.Tensor:
        """What the frozen tower sees [tokens, width]. One picture at a time: its numbers do not
        depend on what else is in the batch, and are computed once."""
        if picture.digest not in self.seen:
            if len(self.seen) >= PICTURES_KEPT:
                self.seen.pop(next(iter(self.seen)))
            device = self.model.device
            output = self.model.get_image_features(
                picture.patches.to(device), picture.grid.to(device)
            )
            self.seen[picture.digest] = torch.cat(tuple(output.pooler_output))
        return self.seen[picture.digest]


def refuse(code: str, place: str, message: str) -> ApiError:
    return ApiError(422, code, f"{place}: {message}")


def opened(data: bytes, label: str, place: str) -> Image.Image:
    """The one RGB picture in the bytes. Raises ApiError 422."""
    if len(data) > MAX_BYTES:
        raise refuse("image_too_large", place, f"{len(data):,} bytes, allowed are {MAX_BYTES:,}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image: Image.Image = Image.open(io.BytesIO(data))
        found, (width, height) = (image.format or "").lower(), image.size
        if found != label:
            raise refuse("invalid_image", place, f"format is {label!r}, the data are {found!r}")
        sides = sorted(image.size)
        if sides[0] < SMALLEST_SIDE or sides[1] > LARGEST_SIDE or width * height > MAX_PIXELS:
            raise refuse(
                "invalid_image",
                place,
                f"{width} x {height} pixels; sides from {SMALLEST_SIDE} to {LARGEST_SIDE} and at "
                f"most {MAX_PIXELS:,} pixels are allowed",
            )
        if getattr(image, "n_frames", 1) > 1:
            raise refuse("invalid_image", place, "an animated picture; send one frame")
        if image.mode not in MODES:
            raise refuse("invalid_image", place, f"colour mode {image.mode}; convert it to RGB")
        image.load()
    except ApiError:
        raise
    except Exception as error:  # Pillow's readers raise many unrelated types
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise refuse("invalid_image", place, f"no readable {label} ({reason})") from None
    if image.mode in ("RGBA", "LA", "P"):
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert("RGB")
