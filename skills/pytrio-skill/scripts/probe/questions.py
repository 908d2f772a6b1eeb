"""What is asked, in this order: a table.

A question is an entry here and a function that asks it and, where the backend can imitate the
answer, a setting of the same name in trio_local/behaviour.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from probe import ask_sampling, ask_state, ask_training
from probe.decide import Verdict
from probe.measure import Lab


@dataclass(frozen=True)
class Question:
    """One question. `bound` is the most (prefill, sample, train) tokens that one attempt sends."""

    name: str
    asks: str
    calls: str
    bound: tuple[int, int, int]
    settles: str
    ask: Callable[[Lab], Verdict]


STEPS = "forward, forward_backward, optim_step"
CUSTOM_STEPS = "forward, forward_backward_custom, optim_step"
SAVES = f"{STEPS}, save_weights_for_sampler, compute_logprobs"
# Where the notes call it unknown or assumed.
DIVISOR = "losses.md: The divisor; answers.md: What does the server divide a loss by?"
COUNT = "answers.md: Is loss_mean what is optimised?"
CLIP = "losses.md: Defaults"
END = "answers.md: Do sampled tokens contain the end token?"
RAW = "answers.md: Are log-probabilities before or after temperature?"
SEED = "answers.md: What does the same seed give twice?"

QUESTIONS: tuple[Question, ...] = (
    Question(
        "limits", "What may one training call hold?", "get_server_capabilities", (0, 0, 0),
        "answers.md: Which models, how long?", ask_state.limits,
    ),
    Question(
        "token_outputs", "Which values come back for each token?", "forward", (10, 0, 0),
        "api.md: loss_fn_outputs", ask_training.token_outputs,
    ),
    Question(
        "mismatch", "How far is the sampler from the trainer (nats, root mean square)?",
        "save_weights_for_sampler, compute_logprobs, forward", (330, 1, 0),
        "answers.md: Do sampler and trainer give the same log-probabilities?",
        ask_sampling.mismatch,
    ),
    Question(
        "fresh_lora", "Does a fresh adapter equal the base model?",
        "save_weights_for_sampler, compute_logprobs", (130, 3, 0),
        "answers.md: Does a fresh LoRA equal the base model?",
        ask_sampling.fresh_lora,
    ),
    Question(
        "temperature", "Are log-probabilities of before or after temperature?", "sample, forward",
        (200, 50, 0), RAW, partial(ask_sampling.distribution, temperature=2.0),
    ),
    Question(
        "top_k", "... of before or after top-k?", "sample, forward", (200, 50, 0), RAW,
        partial(ask_sampling.distribution, top_k=1),
    ),
    Question(
        "top_p", "... of before or after top-p?", "sample, forward", (200, 50, 0), RAW,
        partial(ask_sampling.distribution, top_p=0.001),
    ),
    Question(
        "token_stop", "Is a stop token part of the tokens?", "sample", (60, 200, 0), END,
        ask_sampling.token_stop,
    ),
    Question(
        "string_stop", "Are a stop string's tokens part of the tokens?", "sample", (60, 200, 0),
        END, ask_sampling.string_stop,
    ),
    Question(
        "end_of_turn", "Is the end token part of the tokens?", "sample", (200, 150, 0), END,
        ask_sampling.end_of_turn,
    ),
    Question(
        "same_seed", "Does a seed repeat its answer?", "sample", (64, 96, 0),
        SEED, ask_sampling.same_seed,
    ),
    Question(
        "group_samples", "Do the samples of a seeded request differ?", "sample", (128, 192, 0),
        SEED, ask_sampling.group_samples,
    ),
    Question(
        "prompt_logprobs", "What shape have prompt log-probabilities?", "compute_logprobs",
        (20, 1, 0),
        "answers.md: What shape have prompt log-probabilities?", ask_sampling.prompt_logprobs,
    ),
    Question(
        "step_metrics", "Which metrics does a step return?", "forward_backward, optim_step",
        (10, 0, 10),
        "api.md: Keys of optim_step metrics", ask_training.step_metrics,
    ),
    Question(
        "event_order", "Do queued events run in order?", STEPS, (500, 0, 300),
        "dryrun.md: Events run in order",
        ask_training.event_order,
    ),
    Question(
        "two_calls", "Do two calls before a step add up?", STEPS, (500, 0, 350),
        "answers.md: Do gradients add up over calls?",
        ask_training.two_calls,
    ),
    *(
        Question(
            f"reduction.{loss}", f"What is {loss} divided by?",
            CUSTOM_STEPS if loss == "custom" else STEPS,
            (1050, 0, 1250 if loss == "custom" else 650), DIVISOR,
            partial(ask_training.reduction, loss=loss),
        )
        for loss in ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "custom")
    ),
    Question(
        "split_calls", "Is a split call divided by its whole totals?", STEPS, (500, 0, 1400),
        "answers.md: How many calls per optimiser step?", ask_training.split_calls,
    ),
    Question(
        "token_count.cross_entropy", "What does token_count count (cross_entropy)?", "forward",
        (10, 0, 0), COUNT, partial(ask_training.token_count, group="cross_entropy"),
    ),
    Question(
        "token_count.policy", "What does token_count count (policy losses)?", "forward",
        (20, 0, 0), COUNT, partial(ask_training.token_count, group="policy"),
    ),
    *(
        Question(
            f"clip.{loss}", f"What are the default bounds of {loss}?", STEPS, (1100, 0, 500), CLIP,
            partial(ask_training.clip_bounds, loss=loss),
        )
        for loss in ("ppo", "cispo")
    ),
    Question(
        "beta.dro", "What is the default beta of dro?", STEPS, (700, 0, 400),
        "answers.md: What is the setting of dro?",
        ask_training.dro_beta,
    ),
    Question(
        "clip_keys", "Which names of clip settings have an effect?", "forward", (700, 0, 0),
        "answers.md: What are the clip settings of ppo and cispo called?", ask_training.clip_keys,
    ),
    Question(
        "unknown_keys", "Is an unknown setting refused?", "forward", (80, 0, 0),
        "answers.md: Are unknown loss_fn_config keys refused?", ask_training.unknown_keys,
    ),
    Question(
        "snapshot", "Does a sampler keep its weights?", SAVES, (600, 3, 300),
        "answers.md: Does a sampling client see later steps?",
        ask_sampling.snapshot,
    ),
    Question(
        "save_ttl", "Does what is saved without a TTL expire?",
        "save_state, save_weights_for_sampler, list_checkpoints, delete_checkpoint", (0, 0, 0),
        "answers.md: Are saves without a TTL kept for good?", ask_state.save_ttl,
    ),
    Question(
        "same_name", "Is a second save under one name refused?",
        "save_state, save_weights_for_sampler", (20, 0, 0),
        "checkpoints.md: A name is taken once per run and kind", ask_state.same_name,
    ),
    Question(
        "empty_step", "Does a step without a gradient change anything?", STEPS, (500, 0, 300),
        "answers.md: Does optim_step without a gradient change anything?", ask_state.empty_step,
    ),
    Question(
        "resume", "Does Adam's state come back with the optimiser?",
        f"{STEPS}, save_state, create_training_client_from_state", (500, 0, 300),
        "checkpoints.md: With the optimiser, three steps", ask_state.resume,
    ),
)  # fmt: skip
