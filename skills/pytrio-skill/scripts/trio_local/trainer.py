"""One training run: a LoRA adapter, its gradients and its AdamW state."""

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from pytrio.protocol.actor.events.tensor import WireTensorData
from pytrio.protocol.actor.events.trainer.forward import (
    TrainerForwardBackwardPayload,
    TrainerForwardDatum,
)
from pytrio.protocol.actor.events.trainer.optimize_step import TrainerAdamParamsPayload

from trio_local.behaviour import Behaviour
from trio_local.loading import LoadedModel, LoraSpec, shared_copy
from trio_local.losses import (
    IGNORED_TARGET,
    LOSSES,
    Counts,
    TokenBatch,
    counted,
    divisor,
    divisors,
    loss_settings,
)
from trio_local.protocol import ApiError

if TYPE_CHECKING:
    from trio_local.vision import Picture

# A microbatch stops growing at this many logits (32 MB of float32; activations are about ten times
# as much). Larger ones were measured to be no faster.
MAX_LOGITS_PER_MICROBATCH = 8 * 1024 * 1024

OPTIMIZER_FIELDS = ("exp_avg", "exp_avg_sq", "step")
# Spread of the B matrices of a fresh adapter that is not to equal the base.
FRESH_LORA_STD = 0.003


@dataclass(frozen=True)
class Sample:
    """One datum as numbers; every list has the length of `tokens`, in which the pictures stand as
    placeholders."""

    tokens: list[int]
    pictures: list["Picture"]
    targets: list[int]
    fields: dict[str, list[float]]


class Trainer:
    """Forward, backward, AdamW, export and import of one LoRA adapter."""

    def __init__(
        self, loaded: LoadedModel, spec: LoraSpec, reduction: str, behaviour: Behaviour
    ) -> None:
        modules = loaded.linear_modules(spec)
        if not modules:
            raise ApiError(
                422,
                "invalid_lora_config",
                "train_mlp, train_attn and train_unembed are all False: nothing would be trained",
            )
        self.loaded = loaded
        self.spec = spec
        self.reduction = reduction
        self.behaviour = behaviour
        self.config = LoraConfig(
            r=spec.rank,
            lora_alpha=int(loaded.served.lora_alpha),
            target_modules=modules,
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
            base_model_name_or_path=str(loaded.served.folder),
        )
        torch.manual_seed(spec.seed)
        # peft would add its own name to the base path; the plain module tree is enough for us.
        self.model = get_peft_model(shared_copy(loaded.model), self.config)
        self.parameters = {
            name.replace(".default", ""): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=0.0)
        self.noise = torch.Generator().manual_seed(spec.seed)
        if behaviour.fresh_lora == "differs from base":
            for name, parameter in self.parameters.items():
                if ".lora_B." in name:
                    parameter.data.normal_(std=FRESH_LORA_STD)
        self.adapter_before_step = self.adapter() if behaviour.snapshot == "stale" else None

    # -- forward and backward ---------------------------------------------------------------

    def forward(self, payload: TrainerForwardBackwardPayload, backward: bool) -> dict[str, Any]:
        """Run one forward (and backward) event.

        Gradients are added to those already there. Returns the wire result: per sample the
        log-probability of each target [positions], and loss_sum, loss_mean, token_count.
        """
        loss_name = payload.loss.type
        settings = loss_settings(loss_name, payload.loss.config, self.behaviour)
        samples = [self._checked(i, d, loss_name) for i, d in enumerate(payload.data)]
        total_samples = payload.gradient_accumulation.total_samples
        if total_samples < len(samples):
            raise ApiError(
                422,
                "totals_mismatch",
                f"total_samples is {total_samples}, this event alone has {len(samples)}",
            )
        shares = self._divisors(loss_name, samples, payload)
        counting = self.behaviour.token_count.get(
            "cross_entropy" if loss_name == "cross_entropy" else "policy"
        )
        logprobs_by_sample: list[np.ndarray] = [np.empty(0, np.float32)] * len(samples)
        losses_by_sample = list(logprobs_by_sample)
        loss_sum, token_count = 0.0, 0
        self.model.train(False)
        with torch.set_grad_enabled(backward):
            for indices in self._microbatches(samples):
                chosen = [samples[i] for i in indices]
                batch = self._token_batch(chosen, payload.auto_shift)
                per_token = LOSSES[loss_name].per_token(batch, settings)
                # `where`, not a product: a masked position must not leak an inf or NaN.
                per_token = torch.where(batch.active, per_token, per_token.new_zeros(()))
                total = per_token.sum()
                if backward and len(set(shares)) == 1:
                    (total / shares[0]).backward()
                elif backward:
                    divisor_of_row = per_token.new_tensor([shares[i] for i in indices])
                    (per_token.sum(dim=1) / divisor_of_row).sum().backward()
                loss_sum += float(total.detach())
                token_count += int(counted(loss_name, batch, counting).sum())
                shown = self._shown(batch.logprobs)
                for row, index in enumerate(indices):
                    length = len(samples[index].tokens)
                    logprobs_by_sample[index] = shown[row, :length]
                    losses_by_sample[index] = per_token.detach().cpu().numpy()[row, :length]
        if not math.isfinite(loss_sum):
            self.optimizer.zero_grad()
            raise ApiError(
                422, "loss_not_finite", f"{loss_name} gave a loss of {loss_sum}; gradients dropped"
            )
        served = {"logprobs": logprobs_by_sample, "elementwise_loss": losses_by_sample}
        names = [name for name in served if name in self.behaviour.token_outputs]
        return {
            "loss_fn_outputs": [
                {n: WireTensorData.from_numpy(served[n][i]).to_wire_value() for n in names}
                for i in range(len(samples))
            ],
            "metrics": {
                "loss_sum": loss_sum,
                "loss_mean": loss_sum / token_count if token_count else 0.0,
                "token_count": token_count,
            },
        }

    def _divisors(
        self, loss: str, samples: list[Sample], payload: TrainerForwardBackwardPayload
    ) -> list[float]:
        """What the loss of each sample is divided by."""
        start = 1 if payload.auto_shift else 0
        counts = [counts_of(sample, start) for sample in samples]
        totals = payload.gradient_accumulation.model_dump()
        if self.behaviour.split_calls == "each chunk":
            totals = {
                "total_samples": len(samples),
                "total_active_tokens": sum(row.active for row in counts),
                "total_advantage_tokens": sum(row.advantages for row in counts),
            }
        named = self.behaviour.reduction.get(loss)
        if named is not None:
            return divisors(named, counts, totals)
        return [divisor(loss, self.reduction, totals)] * len(samples)

    def _shown(self, logprobs: torch.Tensor) -> np.ndarray:
        """Log-probabilities as they are returned, with this trainer's noise."""
        shown = logprobs.detach().cpu()
        if self.behaviour.trainer_noise:
            noise = torch.randn(shown.shape, generator=self.noise)
            shown = shown + self.behaviour.trainer_noise * noise
        return shown.numpy()

    def _checked(self, index: int, datum: TrainerForwardDatum, loss_name: str) -> Sample:
        """Read one wire datum. Raises ApiError 422 naming the sample and both numbers."""
        tokens, pictures = self.loaded.read_input(datum.model_input.chunks, f"sample {index}")
        length = len(tokens)
        if not 1 <= length <= self.loaded.context_length:
            raise ApiError(
                422,
                "sequence_length",
                f"sample {index} has {length} tokens, allowed are 1 to "
                f"{self.loaded.context_length}",
            )
        self._check_ids(index, "input", np.asarray(tokens))
        targets = np.asarray(datum.target_ids)
        self._check_ids(index, "target", np.where(targets == IGNORED_TARGET, 0, targets))
        fields: dict[str, list[float]] = {}
        for name in LOSSES[loss_name].reads:
            values = getattr(datum, name)
            if values is None and name == "weights":
                values = [1.0] * length
            if values is None:
                raise ApiError(
                    422, "missing_loss_input", f"sample {index}: {loss_name} needs {name}"
                )
            fields[name] = values
        for name, values in [("target_ids", datum.target_ids), *fields.items()]:
            if len(values) != length:
                raise ApiError(
                    422,
                    "length_mismatch",
                    f"sample {index}: {name} has {len(values)} entries for {length} tokens",
                )
        for name, values in fields.items():
            if not all(map(math.isfinite, values)):
                raise ApiError(422, "not_finite", f"sample {index}: {name} has a NaN or infinity")
        return Sample(tokens, pictures, datum.target_ids, fields)

    def _check_ids(self, index: int, what: str, ids: np.ndarray) -> None:
        outside = np.flatnonzero((ids < 0) | (ids >= self.loaded.vocabulary_size))
        if outside.size:
            position = int(outside[0])
            raise ApiError(
                422,
                "token_id_out_of_range",
                f"sample {index}: {what} token {ids[position]} at position {position} is outside "
                f"the vocabulary of {self.loaded.vocabulary_size}",
            )

    def _microbatches(self, samples: list[Sample]) -> list[list[int]]:
        """Sample indices grouped by length, so that little is spent on padding."""
        budget = max(1, MAX_LOGITS_PER_MICROBATCH // self.loaded.vocabulary_size)
        groups: list[list[int]] = []
        for index in sorted(range(len(samples)), key=lambda i: len(samples[i].tokens)):
            longest = len(samples[index].tokens)
            if groups and longest * (len(groups[-1]) + 1) <= budget:
                groups[-1].append(index)
            else:
                groups.append([index])
        return groups

    def _token_batch(self, samples: list[Sample], auto_shift: bool) -> TokenBatch:
        """Pad on the right and run the model: under a causal mask no real position sees padding.

        With `auto_shift` the target at t is predicted from the input before t, and position 0,
        which nothing predicts, is inactive.
        """
        device = self.loaded.device
        width = max(len(s.tokens) for s in samples)

        def padded(rows: list[list[Any]], fill: float, dtype: torch.dtype) -> torch.Tensor:
            filled = [row + [fill] * (width - len(row)) for row in rows]
            return torch.tensor(filled, dtype=dtype, device=device)

        tokens = padded([s.tokens for s in samples], 0, torch.long)
        targets = padded([s.targets for s in samples], IGNORED_TARGET, torch.long)
        if auto_shift:
            targets[:, 0] = IGNORED_TARGET
        active = targets != IGNORED_TARGET
        lengths = torch.tensor([len(s.tokens) for s in samples], device=device)
        pictures = [picture for sample in samples for picture in sample.pictures]
        given = self.loaded.decoder_input(tokens, pictures)
        logits = self.model(**given, use_cache=False).logits.float()
        if auto_shift:
            logits = torch.cat([logits[:, :1], logits[:, :-1]], dim=1)
        logprobs = -F.cross_entropy(
            logits.flatten(0, 1), targets.clamp_min(0).flatten(), reduction="none"
        ).view_as(targets)
        values = {
            name: padded([s.fields[name] for s in samples], 0.0, torch.float32)
            for name in samples[0].fields
        }
        absent = logprobs.new_zeros(())
        # `exp` of a large number at an ignored position would give NaN gradients although the loss
        # is masked later (0 * inf in its backward), so both log-probabilities are zero there.
        logprobs = torch.where(active, logprobs, absent)
        old_logprobs = torch.where(active, values.get("logprobs", absent), absent)
        return TokenBatch(
            logprobs=logprobs,
            real=torch.arange(width, device=device) < lengths[:, None],
            active=active,
            weights=values.get("weights", absent),
            old_logprobs=old_logprobs,
            advantages=values.get("advantages", absent),
        )

    # -- optimiser ---------------------------------------------------------------------------

    def optimize(self, params: TrainerAdamParamsPayload) -> dict[str, float]:
        """One AdamW step on the accumulated gradients, which are then cleared.

        `grad_clip_norm` > 0 clips the global norm first. Returns the norm before clipping.
        Raises ApiError 422 for parameters that AdamW is not defined for.
        """
        check_adam(params)
        if self.adapter_before_step is not None:
            self.adapter_before_step = self.adapter()
        with_gradient = [p for p in self.parameters.values() if p.grad is not None]
        if not with_gradient and self.behaviour.empty_step == "refused":
            raise ApiError(409, "no_gradient", "optim_step without a forward_backward before it")
        if not with_gradient and self.behaviour.empty_step == "moves on":
            for parameter in self.parameters.values():
                parameter.grad = torch.zeros_like(parameter)
        limit = params.grad_clip_norm if params.grad_clip_norm > 0 else math.inf
        norm = torch.nn.utils.clip_grad_norm_(with_gradient, limit) if with_gradient else 0.0
        for group in self.optimizer.param_groups:
            group.update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        served = {"grad_norm": float(norm), "learning_rate": params.learning_rate}
        return {name: served.get(name, 0.0) for name in self.behaviour.step_metrics}

    # -- state -------------------------------------------------------------------------------

    def adapter(self) -> dict[str, torch.Tensor]:
        """A copy of the adapter's tensors under PEFT's names."""
        return {name: p.detach().cpu().clone() for name, p in self.parameters.items()}

    def adapter_config(self) -> dict[str, Any]:
        """`adapter_config.json` as PEFT reads it."""
        config = {
            key: sorted(value) if isinstance(value, set) else value
            for key, value in self.config.to_dict().items()
        }
        return json.loads(json.dumps(config, default=str))

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Adam moments and step counts, named `<parameter>.<field>`; empty before any step."""
        return {
            f"{name}.{field}": self.optimizer.state[parameter][field].detach().cpu().clone()
            for name, parameter in self.parameters.items()
            if parameter in self.optimizer.state
            for field in OPTIMIZER_FIELDS
        }

    def load(
        self, adapter: dict[str, torch.Tensor], optimizer: dict[str, torch.Tensor] | None
    ) -> None:
        """Replace the adapter and, when given, the optimiser state.

        Raises ApiError 422 when the checkpoint has other tensors than this run.
        """
        if adapter.keys() != self.parameters.keys():
            raise ApiError(
                422, "checkpoint_mismatch", "the checkpoint adapts other layers than this run"
            )
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if adapter[name].shape != parameter.shape:
                    raise ApiError(
                        422,
                        "checkpoint_mismatch",
                        f"{name} is {list(adapter[name].shape)} in the checkpoint and "
                        f"{list(parameter.shape)} here",
                    )
                parameter.copy_(adapter[name])
        for name, parameter in self.parameters.items():
            if optimizer and f"{name}.step" in optimizer:
                self.optimizer.state[parameter] = {
                    field: optimizer[f"{name}.{field}"].to(
                        "cpu" if field == "step" else self.loaded.device
                    )
                    for field in OPTIMIZER_FIELDS
                }


def counts_of(sample: Sample, start: int) -> Counts:
    """What a divisor may count in a sample whose first `start` targets are ignored."""
    labels = [t != IGNORED_TARGET and i >= start for i, t in enumerate(sample.targets)]
    weights = sample.fields.get("weights", [1.0] * len(labels))
    advantages = sample.fields.get("advantages", [0.0] * len(labels))
    return Counts(
        positions=len(labels),
        labels=sum(labels),
        active=sum(is_label and w != 0 for is_label, w in zip(labels, weights, strict=True)),
        advantages=sum(is_label and a != 0 for is_label, a in zip(labels, advantages, strict=True)),
        weight_sum=sum(abs(w) for is_label, w in zip(labels, weights, strict=True) if is_label),
    )


def check_adam(params: TrainerAdamParamsPayload) -> None:
    """Raises ApiError 422 for a value that would turn the weights into NaN, or be ignored."""
    for name, value in params.model_dump().items():
        limit = 1.0 if name in ("beta1", "beta2") else math.inf
        if not 0 <= value < limit:
            raise ApiError(
                422, "invalid_adam_params", f"{name} must be from 0 to below {limit:g}, got {value}"
            )
