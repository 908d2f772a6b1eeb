"""The compute thread: the only place that touches torch.

Trainer jobs run in the order they are submitted. Between two of them every running sampling
batch advances by one token, so neither kind of work starves the other.
"""

import gc
import importlib
import os
import queue
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from trio_local.behaviour import Behaviour
from trio_local.catalogue import ServedModel
from trio_local.demos import Demos
from trio_local.protocol import DEFECT_STATUS, ApiError
from trio_local.spelling import Spelling

if TYPE_CHECKING:
    from trio_local.loading import LoadedModel
    from trio_local.sampler import Batch, SampleJob

# Requests sent together arrive over some milliseconds; an idle engine waits for the line to be
# quiet this long, and no longer than the second number, before it prefills.
GATHER_QUIET_SECONDS = 0.002
GATHER_LIMIT_SECONDS = 0.02
# Merged snapshots kept in memory; an older one is merged again from its checkpoint when used.
SNAPSHOTS_KEPT = 4


class Engine:
    """Owns the models and runs every computation on one thread."""

    def __init__(
        self,
        device: str,
        reduction: str,
        seed: int,
        threads: int,
        demos: Demos,
        spelling: Spelling,
        behaviour: Behaviour,
    ) -> None:
        self.demos = demos
        self.spelling = spelling
        self.behaviour = behaviour
        self.device = device
        self.reduction = reduction
        self.seed = seed
        self.threads = threads
        self._inbox: queue.SimpleQueue[Callable[[], bool] | None] = queue.SimpleQueue()
        self._models: dict[str, LoadedModel] = {}
        self._chats: dict[str, dict[str, Any]] = {}
        self._batches: OrderedDict[str, Batch] = OrderedDict()
        self._waiting: dict[str, list[SampleJob]] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Finish the job at hand and end the thread."""
        self._stopping = True
        self._inbox.put(None)
        self._thread.join(timeout=30)

    def submit(self, work: Callable[[], Any]) -> Future:
        """Run `work` on the compute thread; its result or exception is in the future."""
        future: Future = Future()

        def run() -> bool:
            try:
                future.set_result(work())
            except BaseException as error:  # the future carries it to the caller
                future.set_exception(error)
            return True

        self._inbox.put(run)
        return future

    def model(self, served: ServedModel) -> "LoadedModel":
        """The loaded model of a folder; only call on the compute thread."""
        from trio_local.loading import LoadedModel, chat_layout

        key = str(served.folder)
        if key not in self._models:
            self._models[key] = LoadedModel(served, self.device)
        if served.model_id not in self._chats:
            self._chats[served.model_id] = chat_layout(served.model_id, self._models[key].end_ids)
        return self._models[key]

    def chat(self, served: ServedModel) -> dict[str, Any]:
        """How the template of a model that has been loaded frames a turn; from any thread."""
        return self._chats[served.model_id]

    def sample(
        self,
        served: ServedModel,
        snapshot: str,
        adapter: tuple[dict[str, Any], float] | None,
        make_job: Callable[["LoadedModel", Future], "SampleJob"],
    ) -> Future:
        """Queue one sampling request.

        `snapshot` names the weights; `adapter` is their (tensors, scale), merged when they are
        not in memory, None for the base model. The future gets a SampleResult.
        """
        future: Future = Future()

        def enqueue() -> bool:
            try:
                self._batch(served, snapshot, adapter)
                job = make_job(self.model(served), future)
                self._waiting.setdefault(snapshot, []).append(job)
            except BaseException as error:  # the future carries it to the caller
                future.set_exception(error)
            return False

        self._inbox.put(enqueue)
        return future

    def _batch(
        self,
        served: ServedModel,
        snapshot: str,
        adapter: tuple[dict[str, Any], float] | None,
    ) -> "Batch":
        from trio_local.sampler import Batch

        if snapshot not in self._batches:
            loaded = self.model(served)
            model = loaded.model if adapter is None else loaded.merged(*adapter)
            self._batches[snapshot] = Batch(
                loaded, model, self.demos, self.spelling, self.behaviour
            )
            idle = [
                name
                for name, batch in self._batches.items()
                if not batch.sequences and name != snapshot and name not in self._waiting
            ]
            for name in idle[: max(0, len(self._batches) - SNAPSHOTS_KEPT)]:
                del self._batches[name]
        self._batches.move_to_end(snapshot)
        return self._batches[snapshot]

    # -- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._work()
        except BaseException:  # printed, and the process ends with it
            # Without this thread every request would wait for ever.
            traceback.print_exc()
            os._exit(1)

    def _work(self) -> None:
        # Import here what the first request needs, while the client is still starting; a script
        # that has failed by then does not wait for the rest. Nothing of it is garbage, and looking
        # for some takes a sixth of the time.
        gc.disable()
        for module in ("torch", "trio_local.loading", "trio_local.sampler", "trio_local.trainer"):
            if self._stopping:
                return
            importlib.import_module(module)
        gc.freeze()
        gc.enable()
        sys.modules["torch"].set_num_threads(self.threads)
        while True:
            is_idle = not self._waiting and not any(b.sequences for b in self._batches.values())
            if not self._take_work(is_idle):
                return
            for snapshot in list(self._waiting):
                self._guarded(self._batches[snapshot], self._waiting.pop(snapshot))
            for batch in list(self._batches.values()):
                if batch.sequences:
                    self._guarded(batch, [])

    def _take_work(self, is_idle: bool) -> bool:
        """Take in queued requests, up to and including one trainer job; when idle, wait for them.

        False when the engine shall stop.
        """
        deadline = None
        while True:
            try:
                if is_idle and deadline is None:
                    work = self._inbox.get()
                elif deadline is not None and self._waiting:
                    left = deadline - time.monotonic()
                    work = self._inbox.get(timeout=max(0.0, min(GATHER_QUIET_SECONDS, left)))
                else:
                    work = self._inbox.get_nowait()
            except queue.Empty:
                return True
            if work is None:
                return False
            if work():
                return True
            if is_idle and deadline is None:
                deadline = time.monotonic() + GATHER_LIMIT_SECONDS

    def _guarded(self, batch: "Batch", jobs: list["SampleJob"]) -> None:
        """Admit jobs or advance a batch; a failure reaches its requests, not the thread."""
        try:
            if jobs:
                batch.admit(jobs)
            else:
                batch.step()
        except Exception as error:  # every request of the batch gets it
            traceback.print_exc()
            wrapped = ApiError(DEFECT_STATUS, "sampling_failed", f"sampling failed: {error}")
            batch.cancel(wrapped)
            for job in jobs:
                job.finish(wrapped)
