"""The recording of one dry run: everything sent and served, enough to audit without re-running.

`trace.msgpack` is a sequence of MessagePack maps. The first has kind `header`, the last kind
`end`; a file without the last one was cut short. Lists of token ids are packed as little-endian
int32 bytes and lists of floats as float32 bytes: a trained token takes 12 bytes (SFT) or 20
(policy losses), a sampled one 8, a prompt token 4; a picture is a hash. Beyond `MAX_BYTES` only
small records are kept.
"""

import hashlib
import json
import threading
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

FORMAT = "pytrio-skill-trace"
VERSION = 2
# What follows a full recording is counted and not audited.
MAX_BYTES = 2 * 1024**3
SMALL_RECORD_BYTES = 4096


def packed_ids(values: list[int]) -> bytes:
    """Token ids as little-endian int32."""
    return np.asarray(values, dtype="<i4").tobytes()


def packed_picture(data: bytes, tokens: int) -> dict[str, Any]:
    """A picture by what tells it from others; its bytes are not kept."""
    return {"image": hashlib.sha256(data).hexdigest()[:16], "bytes": len(data), "tokens": tokens}


def picture_id(digest: str) -> int:
    """The negative number that stands for each token of a picture in a row of ids."""
    return -2 - int(digest[:7], 16)


def packed_floats(values: list[float]) -> bytes:
    """Numbers as little-endian float32."""
    return np.asarray(values, dtype="<f4").tobytes()


def prompt_mark(tokens: Sequence[int] | np.ndarray, signal: Sequence[float] | np.ndarray) -> int:
    """A 32-bit hash of a sample's tokens up to the first target with a signal: its prompt.

    A prompt of one token is none: the whole sample then stands for itself.
    """
    first = next((i for i, value in enumerate(signal) if value), 0)
    ids = np.asarray(tokens[: first + 1] if first else tokens, dtype="<i4")
    return zlib.crc32(ids.tobytes())


class Recorder:
    """Appends records from any thread; keeps the few totals the summary needs."""

    def __init__(self, folder: Path, header: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.started = time.time()
        self.tokens: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.losses: list[float] = []
        self.notes: list[str] = []
        self.bytes_written = 0
        self.dropped_records = 0
        self._models: set[str] = set()
        self._lock = threading.Lock()
        # Of an earlier run in the same folder: it must not speak for this one.
        (folder / "summary.json").unlink(missing_ok=True)
        self._file = (folder / "trace.msgpack").open("wb")
        self.write("header", format=FORMAT, version=VERSION, **header)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record; times are seconds since the recording began."""
        record = {"kind": kind, "time": round(time.time() - self.started, 6), **fields}
        packed = msgpack.packb(record, use_bin_type=True)
        with self._lock:
            if self._file.closed:
                return
            self.counts[kind] += 1
            if self.bytes_written > MAX_BYTES and len(packed) > SMALL_RECORD_BYTES:
                self.dropped_records += 1
                return
            self.bytes_written += len(packed)
            self._file.write(packed)
            self._file.flush()

    def model(self, folder: str, chat: dict[str, Any]) -> None:
        """Describe a base model before the first record that needs it; written once a folder."""
        if folder not in self._models:
            self._models.add(folder)
            self.write("model", folder=folder, **chat)

    def add_tokens(self, prefill: int = 0, sample: int = 0, train: int = 0) -> None:
        """Count tokens by the class they are billed in."""
        with self._lock:
            self.tokens.update(prefill=prefill, sample=sample, train=train)

    def summary(self) -> dict[str, Any]:
        """Totals of the run so far."""
        with self._lock:
            return {
                "seconds": round(time.time() - self.started, 3),
                "sessions": self.counts["session"],
                "training_runs": self.counts["training_run"],
                "sampling_runs": self.counts["sampling_run"],
                "optimizer_steps": self.counts["optimizer_step"],
                "samples": self.counts["sample"],
                "checkpoints": self.counts["checkpoint"],
                "refused_requests": self.counts["refused"],
                "loss_first": self.losses[0] if self.losses else None,
                "loss_last": self.losses[-1] if self.losses else None,
                "tokens": {name: self.tokens[name] for name in ("prefill", "sample", "train")},
                "dropped_records": self.dropped_records,
                "notes": list(self.notes),
            }

    def note(self, text: str) -> None:
        """One line the user should see at the end of the run; a repeated one is kept once."""
        with self._lock:
            if text not in self.notes:
                self.notes.append(text)

    def close(self) -> None:
        """Write the closing record and `summary.json`; safe to call twice."""
        if self._file.closed:
            return
        summary = self.summary()
        self.write("end", **summary)
        with self._lock:
            self._file.close()
        temporary = self.folder / "summary.json.part"
        temporary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        temporary.replace(self.folder / "summary.json")
