"""Checkpoints on disk: PEFT folders that outlive the backend.

A checkpoint is a folder named by its id with `adapter_config.json`, `adapter_model.safetensors`,
`checkpoint.json` and, for a training state, `optimizer.safetensors`. It is written under a
temporary name and renamed when complete, and renamed back before it is removed, so a folder that
is listed is whole. Of two folders with the same address the newer one counts: that is what makes
overwriting atomic.
"""

import json
import os
import shutil
import threading
import time
import uuid
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trio_local.protocol import ApiError

PART_PREFIX = ".part-"
# A younger part may be what another backend on the same store is writing at this moment.
PART_LIFETIME_SECONDS = 3600.0
ARCHIVED = ("adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """What is known about one saved checkpoint; times are seconds since the epoch."""

    cuid: str
    uri: str
    name: str
    type: str  # TRAINING or SAMPLER
    training_run: str
    step: int
    base_model: str
    kind: str
    lora: dict[str, Any]
    visibility: str
    created: float
    expires: float | None
    size_bytes: int

    @property
    def is_expired(self) -> bool:
        return self.expires is not None and self.expires <= time.time()


class CheckpointStore:
    """All checkpoints below one directory. Safe to use from several threads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.RLock()
        self._known: dict[str, Checkpoint] = {}
        root.mkdir(parents=True, exist_ok=True)
        self._sweep()

    def _sweep(self) -> None:
        """Remove what a killed backend left half-written, what expired and what was replaced."""
        for folder in self.root.glob(f"{PART_PREFIX}*"):
            if age_seconds(folder) > PART_LIFETIME_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
        self._known = {checkpoint.cuid: checkpoint for checkpoint in self._read_all()}
        newest = {checkpoint.uri: checkpoint.cuid for checkpoint in self._known.values()}
        for checkpoint in list(self._known.values()):
            if checkpoint.is_expired or newest[checkpoint.uri] != checkpoint.cuid:
                self._remove(checkpoint.cuid)

    def _read_all(self) -> list[Checkpoint]:
        """Every complete checkpoint, oldest first."""
        found = []
        for path in self.root.glob("*/checkpoint.json"):
            if path.parent.name.startswith(PART_PREFIX):
                continue
            try:
                found.append(Checkpoint(**json.loads(path.read_text(encoding="utf-8"))))
            except (OSError, ValueError, TypeError):
                continue  # a folder somebody else put here, or one being deleted
        return sorted(found, key=lambda checkpoint: (checkpoint.created, checkpoint.cuid))

    def listed(self, training_run: str | None = None) -> list[Checkpoint]:
        """Live checkpoints of the workspace, newest first; temporary weights are not listed."""
        with self._lock:
            live = {c.uri: c for c in self._read_all() if not c.is_expired}
        chosen = [
            c
            for c in live.values()
            if c.visibility == "WORKSPACE" and training_run in (None, c.training_run)
        ]
        return chosen[::-1]

    def find(self, uri: str) -> Checkpoint:
        """The live checkpoint at an address. Raises ApiError 404."""
        return self._newest(lambda checkpoint: checkpoint.uri == uri, f"at {uri!r}")

    def find_id(self, cuid: str) -> Checkpoint:
        """The live checkpoint with an id. Raises ApiError 404."""
        return self._newest(lambda checkpoint: checkpoint.cuid == cuid, f"with id {cuid!r}")

    def _newest(self, matches: Callable[[Checkpoint], bool], where: str) -> Checkpoint:
        """Look in memory first; the disk is asked for what another backend may have saved."""
        with self._lock:
            found = [c for c in self._known.values() if matches(c)]
        found = [c for c in found if (self.root / c.cuid).is_dir()]
        found = found or [c for c in self._read_all() if matches(c)]
        if not found:
            raise ApiError(404, "checkpoint_not_found", f"no checkpoint {where}")
        if found[-1].is_expired:
            raise ApiError(404, "checkpoint_expired", f"the checkpoint {where} has expired")
        return found[-1]

    def save(
        self,
        *,
        training_run: str,
        name: str,
        type: str,
        step: int,
        base_model: str,
        kind: str,
        lora: dict[str, Any],
        visibility: str,
        ttl_seconds: int | None,
        overwrite: bool,
        adapter: dict[str, Any],
        adapter_config: dict[str, Any],
        optimizer: dict[str, Any] | None,
        history: list[list[int]] | None = None,
    ) -> Checkpoint:
        """Write one checkpoint. `history` is what the run was trained on, for a later audit.

        Raises ApiError 409 when the name is taken and not overwritten.
        """
        from safetensors.torch import save_file

        section = "state" if type == "TRAINING" else "sampler"
        uri = f"trio://{training_run}/{section}/{name}"
        with self._lock:
            previous = [c for c in self._known.values() if c.uri == uri]
            if any(not c.is_expired for c in previous) and not overwrite:
                raise ApiError(
                    409,
                    "checkpoint_exists",
                    f"checkpoint {name!r} exists in this training run; "
                    "choose another name, or overwrite=True for save_state",
                )
            cuid = f"ckpt{uuid.uuid4().hex[:20]}"
            part = self.root / f"{PART_PREFIX}{cuid}"
            part.mkdir()
            try:
                save_file(adapter, part / "adapter_model.safetensors")
                if optimizer is not None:
                    save_file(optimizer, part / "optimizer.safetensors")
                write_json(part / "adapter_config.json", adapter_config)
                if history is not None:
                    packed = json.dumps(history, separators=(",", ":"))
                    (part / "history.json").write_text(packed, encoding="utf-8")
                now = time.time()
                checkpoint = Checkpoint(
                    cuid=cuid,
                    uri=uri,
                    name=name,
                    type=type,
                    training_run=training_run,
                    step=step,
                    base_model=base_model,
                    kind=kind,
                    lora=lora,
                    visibility=visibility,
                    created=now,
                    expires=None if ttl_seconds is None else now + ttl_seconds,
                    size_bytes=sum(path.stat().st_size for path in part.iterdir()),
                )
                write_json(part / "checkpoint.json", asdict(checkpoint))
                os.replace(part, self.root / cuid)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
            self._known[cuid] = checkpoint
            for old in previous:
                self._remove(old.cuid)
        return checkpoint

    def history(self, checkpoint: Checkpoint) -> list[list[int]]:
        """Per optimiser step the marks of what was trained on; empty when that is not known."""
        try:
            text = (self.root / checkpoint.cuid / "history.json").read_text(encoding="utf-8")
            return [[int(mark) for mark in step] for step in json.loads(text)]
        except (OSError, ValueError, TypeError):
            return []

    def load(
        self, checkpoint: Checkpoint, with_optimizer: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Adapter tensors and, when asked for, the optimiser's. Raises ApiError 404 or 422."""
        from safetensors.torch import load_file

        folder = self.root / checkpoint.cuid
        if with_optimizer and not (folder / "optimizer.safetensors").is_file():
            raise ApiError(
                422,
                "optimizer_state_missing",
                f"{checkpoint.uri} holds sampler weights without optimiser state; resume from a "
                "save_state checkpoint",
            )
        try:
            adapter = load_file(folder / "adapter_model.safetensors")
            optimizer = load_file(folder / "optimizer.safetensors") if with_optimizer else None
        except FileNotFoundError:
            raise ApiError(
                404, "checkpoint_not_found", f"the checkpoint at {checkpoint.uri!r} was deleted"
            ) from None
        return adapter, optimizer

    def read(
        self, uri: str, with_optimizer: bool = False
    ) -> tuple[Checkpoint, dict[str, Any], dict[str, Any] | None]:
        """`find` and `load` with no overwriting in between. Raises ApiError 404 or 422."""
        with self._lock:
            checkpoint = self.find(uri)
            return checkpoint, *self.load(checkpoint, with_optimizer)

    def delete(self, cuid: str) -> None:
        """Remove one checkpoint. Raises ApiError 404."""
        with self._lock:
            self._remove(self.find_id(cuid).cuid)

    def delete_temporary(self, training_runs: set[str]) -> None:
        """Remove the temporary sampler weights of these runs."""
        with self._lock:
            for checkpoint in list(self._known.values()):
                if (
                    checkpoint.visibility == "TEMPORARY"
                    and checkpoint.training_run in training_runs
                ):
                    self._remove(checkpoint.cuid)

    def _remove(self, cuid: str) -> None:
        """Take a checkpoint out of sight at once, then delete its files, which may be cut short."""
        self._known.pop(cuid, None)
        folder, doomed = self.root / cuid, self.root / f"{PART_PREFIX}{cuid}"
        try:
            os.replace(folder, doomed)
        except OSError:
            doomed = folder  # another backend was faster, or Windows has a file of it open
        shutil.rmtree(doomed, ignore_errors=True)

    def archive(self, cuid: str) -> Path:
        """A zip of the PEFT folder beside its files, made once. Raises ApiError 404."""
        with self._lock:
            folder = self.root / self.find_id(cuid).cuid
            target = folder / "archive.zip"
            if not target.is_file():
                part = folder / "archive.zip.part"
                with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED) as archive:
                    for name in ARCHIVED:
                        if (folder / name).is_file():
                            archive.write(folder / name, name)
                os.replace(part, target)
        return target


def age_seconds(path: Path) -> float:
    """Seconds since the last change; 0 when the path is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
