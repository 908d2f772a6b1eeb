"""The table of audit rules, and the checks that look for them.

A new rule is an entry in RULES, a `Hit` with its name from a check, a mutant that it catches and
a correct loop on which it is silent.
"""

from collections.abc import Callable, Iterator

from audit import rules_loop, rules_pairs, rules_rollouts, rules_tokens
from audit.findings import SEVERITIES, Finding, Hit, Rule
from audit.joins import Joined

REFERENCE = "references/audit.md"


def _rule(name: str, severity: str, condition: str, fix: str) -> Rule:
    assert severity in SEVERITIES, severity
    anchor = name.partition("-")[0].lower()
    return Rule(name, severity, condition, fix, f"{REFERENCE}#{anchor}")


_SUPERVISED = (
    (
        "prompt",
        "error",
        "a token outside the assistant's turns has a weight",
        "Give weight 0 to every token up to and including the generation prompt, and to user, "
        "system and tool turns.",
    ),
    (
        "header",
        "error",
        "the tokens that open an assistant's turn have a weight",
        "Begin the trained region after the generation prompt, as the sampler will see it.",
    ),
    (
        "think",
        "error",
        "the empty think block of the generation prompt has a weight",
        "The generation prompt supplies the empty think block: give it weight 0.",
    ),
    (
        "end",
        "error",
        "a trained turn does not end with a trained end token",
        "Append the template's end token to the answer and train it; shorten the prompt or drop "
        "the row instead of cutting the end.",
    ),
    (
        "after",
        "warning",
        "what follows an end token has a weight",
        "Stop the trained region at the end token; the newline after it is never sampled.",
    ),
    (
        "open-think",
        "warning",
        "a trained answer stands inside a think block that is never closed",
        "Render with enable_thinking=False for data without thoughts, in every turn.",
    ),
    (
        "roles",
        "warning",
        "two turns of the same role follow each other",
        "Keep the earlier assistant turns in the history.",
    ),
    (
        "padding",
        "warning",
        "a sequence ends in a run of one id after its last turn",
        "Send every datum in its own length; the server pads.",
    ),
    (
        "first",
        "error",
        "of a turn all tokens but the first have a weight",
        "Shift weights together with targets: tokens[:-1], tokens[1:] and weights[1:].",
    ),
)

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        _rule(
            "A01-prompt",
            "error",
            "a prompt token has an advantage",
            "Set advantages to 0 for the first len(prompt) - 1 targets; `weights` are not read by "
            "policy losses.",
        ),
        _rule(
            "A01-observation",
            "error",
            "a token that came from the environment has an advantage",
            "Set advantages to 0 on tool results, observations and template tokens; only sampled "
            "ids carry signal.",
        ),
        _rule(
            "A01-appended",
            "error",
            "tokens added after the sampled ones have an advantage",
            "Train sequence.tokens as they are; the end token is among them when it was sampled.",
        ),
        _rule(
            "A01-first",
            "error",
            "of a sampled turn all tokens but the first have an advantage",
            "Target t is the token after input t: the first sampled token is target "
            "len(prompt) - 1.",
        ),
        _rule(
            "A02-reencoded",
            "error",
            "trained ids encode the same text as the sampled ones, and differ",
            "Train sequence.tokens; decoded text is for the reward only.",
        ),
        _rule(
            "A02-cut",
            "error",
            "a trained completion breaks off before its sampled end",
            "Never cut a completion or encode its text again, which loses the end token; drop "
            "what is too long before advantages are computed.",
        ),
        _rule(
            "A02-prompt-differs",
            "error",
            "a sampled completion is trained after another prompt",
            "Keep the prompt ids that were sent to the sampler and train on those.",
        ),
        _rule(
            "A02-ids",
            "error",
            "trained ids match no completion of this run",
            "Build data from the prompt ids that were sent and from sequence.tokens.",
        ),
        _rule(
            "A02-padding",
            "error",
            "a datum ends in padding",
            "Send every datum in its own length; the server pads.",
        ),
        _rule(
            "A02-logprobs",
            "error",
            "log-probabilities differ from the served ones",
            "Send sequence.logprobs unchanged.",
        ),
        _rule(
            "A02-logprobs-shifted",
            "error",
            "log-probabilities are the served ones, one position off",
            "sequence.logprobs[i] belongs to sequence.tokens[i]: put both from position "
            "len(prompt) - 1 on.",
        ),
        _rule(
            "A02-recomputed",
            "error",
            "log-probabilities were computed again instead of kept",
            "Keep sequence.logprobs from the request that sampled the tokens; they belong to the "
            "weights of that moment.",
        ),
        _rule(
            "A03-no-shift",
            "error",
            "targets equal inputs",
            "Pass tokens[:-1] as model_input and tokens[1:] as target_tokens.",
        ),
        _rule(
            "A03-double-shift",
            "error",
            "targets are two tokens ahead",
            "Shift once: by hand, or with auto_shift=True on unshifted lists, never both.",
        ),
        _rule(
            "A03-targets-differ",
            "error",
            "targets with signal are not the next input",
            "target_tokens[t] must be the token at t + 1 of the same sequence.",
        ),
        _rule(
            "A04-nothing",
            "error",
            "a datum has no active token",
            "Check the mask, or drop such rows before the call.",
        ),
        *(_rule(f"A04-{name}", *rest) for name, *rest in _SUPERVISED),
        _rule(
            "A04-first-turn",
            "warning",
            "all sampling prompts begin with a system turn that no datum has",
            "Render the same system message in training and in sampling.",
        ),
        _rule(
            "A04-no-template",
            "warning",
            "supervised data have no chat turns, sampling prompts have",
            "Render the data with the model's chat template, as the questions are.",
        ),
        _rule(
            "A05-stale",
            "error",
            "one sampling client serves several optimiser steps",
            "Make a new sampling client after every optim_step: "
            "training.save_weights_and_get_sampling_client().",
        ),
        _rule(
            "A05-foreign",
            "error",
            "training completions come from weights that are not the run's",
            "Sample from training.save_weights_and_get_sampling_client().",
        ),
        _rule(
            "A05-old-completions",
            "warning",
            "supervised data are completions of weights that are several steps old",
            "Sample from the present weights, or accept the rule when old completions are meant.",
        ),
        _rule(
            "A05-trained-again",
            "error",
            "completions of an earlier step are trained again beside new ones",
            "Empty the list of data at every step; accept the rule for a replay buffer.",
        ),
        _rule(
            "A05-lag",
            "warning",
            "completions are one optimiser step old",
            "If that is meant, log the lag and accept the rule; otherwise wait for optim_step "
            "before making the sampling client.",
        ),
        _rule(
            "A06-ratio",
            "error",
            "mean |log ratio| above 0.1 on data sampled by the present weights",
            "Compare the positions and the origin of `logprobs`; see A02 and A07.",
        ),
        _rule(
            "A06-ratio-drift",
            "warning",
            "mean |log ratio| above 0.02 on data sampled by the present weights",
            "Compare the positions and the origin of `logprobs`; see A02 and A07.",
        ),
        _rule(
            "A07-temperature",
            "error",
            "training completions were sampled at another temperature than 1",
            "Sample for training at temperature 1; evaluate with SamplingParams of their own.",
        ),
        _rule(
            "A07-filter",
            "error",
            "training completions were sampled with top_p or top_k",
            "Sample for training with top_p=1 and top_k=-1: a filter changes the distribution and "
            "not the log-probabilities.",
        ),
        _rule(
            "A08-seed",
            "warning",
            "one seed is used in several optimiser steps",
            "Leave seed out, or derive it from run, step and prompt.",
        ),
        _rule(
            "A08-duplicates",
            "warning",
            "completions of one group are identical beyond chance",
            "Sample a group with num_samples=G in one request, or give every request its own seed.",
        ),
        _rule(
            "A09-group-sum",
            "error",
            "advantages of a group do not add up to zero",
            "Subtract the mean of the completions of one prompt, all of them; filter before, not "
            "after.",
        ),
        _rule(
            "A09-order",
            "error",
            "advantages add up to zero over other sets than the sampled groups",
            "Keep rewards in nested lists, one per sample() call, instead of slicing a flat list.",
        ),
        _rule(
            "A09-batch-baseline",
            "warning",
            "advantages add up to zero over the batch and not over the group",
            "Subtract the group's mean; accept the rule when a batch baseline is meant.",
        ),
        _rule(
            "A09-no-baseline",
            "warning",
            "no advantage is negative",
            "Subtract the mean reward of the group; accept the rule when only good completions "
            "shall be trained.",
        ),
        _rule(
            "A09-singletons",
            "warning",
            "prompts have one completion each",
            "Sample several completions a prompt (num_samples=8).",
        ),
        _rule(
            "A09-degenerate",
            "warning",
            "nearly all groups have equal rewards",
            "Check the reward on a right and a wrong answer; take easier or harder prompts, or "
            "give demonstrations (--demo).",
        ),
        _rule(
            "A10-not-applied",
            "error",
            "gradients were accumulated and never applied",
            "Call optim_step after every forward_backward, and wait for its result.",
        ),
        _rule(
            "A10-empty-step",
            "error",
            "an optimiser step without a gradient",
            "Submit forward_backward before optim_step, and skip the step when there are no data.",
        ),
        _rule(
            "A10-zero-gradient",
            "warning",
            "an optimiser step whose gradient is exactly zero",
            "Skip the call when no datum carries signal.",
        ),
        _rule(
            "A10-nothing-trained",
            "error",
            "completions were sampled and nothing was trained",
            "Check that rewards differ within a group; for a task of your own give demonstrations "
            "(--demo), two right and two wrong answers.",
        ),
        _rule(
            "A10-not-saved",
            "error",
            "trained weights were never saved durably",
            "Call save_weights_for_sampler(name) (to use them) or save_state(name) (to go on) at "
            "the end; save_weights_and_get_sampling_client() is temporary.",
        ),
        _rule(
            "A10-last-steps-not-saved",
            "warning",
            "the last optimiser steps came after the last save",
            "Save once more after the loop.",
        ),
        _rule(
            "A10-save-expires",
            "warning",
            "the final save has a time to live",
            "Leave ttl_seconds out of the final save.",
        ),
        _rule(
            "A10-call-failed",
            "warning",
            "a training call failed",
            "Read its message; a failed chunk leaves the gradient incomplete.",
        ),
        _rule(
            "A11-truncated",
            "warning",
            "many training completions end at max_tokens",
            "Raise max_tokens (the stand-in needs two to three times as many tokens), or exclude "
            "cut completions from the group.",
        ),
        _rule(
            "A12-uneven-calls",
            "error",
            "several calls of unequal size are averaged apart before one step",
            "Send the whole batch in one forward_backward; the SDK splits it and keeps the "
            "divisor.",
        ),
        _rule(
            "A12-dro-prompt",
            "warning",
            "dro data have active targets that were not sampled",
            "Set the targets of prompt and observations to -100: dro pulls on `logprobs` there "
            "even with an advantage of 0.",
        ),
        _rule(
            "A12-placeholder",
            "info",
            "prompt targets count as active tokens",
            "Nothing to fix: Adam takes a constant factor out. With grad_clip_norm, -100 as "
            "placeholder keeps the prompt out of the count.",
        ),
        _rule(
            "A13-many-calls",
            "warning",
            "several forward_backward calls before one step",
            "Send the whole batch in one call.",
        ),
        _rule(
            "A13-waits-before-step",
            "warning",
            "optim_step is submitted after the result of forward_backward was waited for",
            "Submit forward_backward and optim_step, then wait for both.",
        ),
        _rule(
            "A13-one-at-a-time",
            "warning",
            "requests that do not depend on each other are sent one by one",
            "Submit all requests of a step, then wait for them.",
        ),
        _rule(
            "A14-optimizer-lost",
            "error",
            "a training state was resumed without its optimiser",
            "Use create_training_client_from_state_with_optimizer; accept the rule when a new "
            "stage begins.",
        ),
        _rule(
            "A14-data-repeated",
            "error",
            "the first batch after a resume was trained before",
            "Save the data position with the checkpoint's path and go on from it.",
        ),
        _rule(
            "A14-step-reset",
            "warning",
            "checkpoint names count from the beginning after a resume",
            "Save the step with the checkpoint's path and go on from it.",
        ),
        _rule(
            "A15-first-loss",
            "error",
            "the first DPO loss is not ln 2",
            "Score the reference with compute_logprobs on the same ids, from the base model, and "
            "sum over the same positions.",
        ),
        _rule(
            "A15-length-mean",
            "warning",
            "DPO averages log-probabilities over the answer",
            "Sum log-probabilities over the answer; accept the rule for SimPO or IPO.",
        ),
        _rule(
            "A15-prompts-differ",
            "error",
            "chosen and rejected do not share their prompt ids",
            "Encode the prompt once and append both answers to the same ids.",
        ),
        _rule(
            "A15-order",
            "warning",
            "the second sequence of every pair is pushed up",
            "Check which answer is the chosen one and the sign of the margin.",
        ),
        _rule(
            "A15-reference-trained",
            "error",
            "the reference was scored by trained weights",
            "Score the reference once, before the first step, from "
            "service.create_sampling_client(base_model).",
        ),
        _rule(
            "A15-reference-ids",
            "error",
            "the reference was scored on other ids",
            "Pass the very ids of the datum to compute_logprobs.",
        ),
        *(_rule(f"A16-{name}", *rest) for name, *rest in _SUPERVISED),
        _rule(
            "A16-group-sum",
            "warning",
            "gradients of a custom policy loss do not cancel over a group on fresh data",
            "On data sampled by the present weights every ratio is 1: check the order of old "
            "log-probabilities and advantages in the closure.",
        ),
        _rule(
            "A16-zero-gradient",
            "error",
            "a custom loss has no gradient",
            "Compute the loss from the tensors that are passed in, without detach or item.",
        ),
        _rule(
            "A16-scale",
            "warning",
            "a custom loss is scaled far up or down",
            "Divide by the number of active tokens or samples, nothing else.",
        ),
        _rule(
            "A17-prompt-differs",
            "error",
            "a teacher scored after another prompt than the student's",
            "Score the student's prompt ids followed by its sampled ids.",
        ),
        _rule(
            "A17-opening-differs",
            "error",
            "the teacher's prompt ends in another generation prompt",
            "Render both prompts with the same enable_thinking and add_generation_prompt=True.",
        ),
        _rule(
            "A17-scored-ids",
            "error",
            "a teacher scored other ids than were sampled",
            "Pass sequence.tokens to compute_logprobs; do not encode the text again.",
        ),
        _rule(
            "A17-shifted",
            "error",
            "advantages use the teacher's log-probability of a neighbouring token",
            "compute_logprobs(ids)[i] belongs to ids[i]: the completion begins at len(prompt).",
        ),
        _rule(
            "A17-unrelated",
            "error",
            "advantages have nothing to do with the teacher's scores at their positions",
            "Cut the scores at the length of the prompt that was scored, not of the student's.",
        ),
        _rule(
            "A17-sign",
            "error",
            "advantages are student minus teacher",
            "Reverse KL is minimised by advantages of teacher - student.",
        ),
        _rule(
            "A18-refused",
            "warning",
            "the server refused a request",
            "Read its message; the cloud refuses the same.",
        ),
        _rule(
            "A18-picture-size",
            "warning",
            "pictures are resized in another way where they are not trained on",
            "Make the picture once, with one function, for training and evaluation.",
        ),
        _rule(
            "A19-fault",
            "info",
            "an injected fault struck",
            "What follows shows how the loop takes it.",
        ),
        _rule(
            "A20-incomplete",
            "warning",
            "the recording does not hold the whole run",
            "Audit it when the run has ended, or run again: what is missing was not audited.",
        ),
        _rule(
            "A21-not-extended",
            "warning",
            "a later turn's prompt is no extension of the earlier ids",
            "Next prompt = previous prompt + sampled ids + what the environment adds; do not "
            "render the history again.",
        ),
        _rule(
            "A22-learning-rate",
            "error",
            "the learning rate is zero",
            "Set learning_rate in AdamParams.",
        ),
        _rule(
            "A22-learning-rate-gaps",
            "warning",
            "the learning rate is zero at steps between others",
            "Check the schedule; only the first and the last step may have a rate of 0.",
        ),
        _rule(
            "A22-learning-rate-high",
            "warning",
            "the learning rate is above 1e-2",
            "LoRA by API is trained with 1e-5 to 1e-3.",
        ),
    )
}

CHECKS: tuple[Callable[[Joined], Iterator[Hit]], ...] = (
    rules_tokens.check_alignment,
    rules_tokens.check_supervised,
    rules_tokens.check_template,
    rules_tokens.check_first_turn,
    rules_tokens.check_preference_tokens,
    rules_tokens.check_sampled,
    rules_tokens.check_dro_prompts,
    rules_tokens.check_placeholders,
    rules_rollouts.check_lag,
    rules_rollouts.check_trained_again,
    rules_rollouts.check_old_completions,
    rules_rollouts.check_ratio,
    rules_rollouts.check_parameters,
    rules_rollouts.check_seeds,
    rules_rollouts.check_groups,
    rules_rollouts.check_custom_groups,
    rules_rollouts.check_truncation,
    rules_rollouts.check_turns,
    rules_loop.check_gradients,
    rules_loop.check_nothing_trained,
    rules_loop.check_saves,
    rules_loop.check_failures,
    rules_loop.check_calls_per_step,
    rules_loop.check_waiting,
    rules_loop.check_sequential_sampling,
    rules_loop.check_resume,
    rules_pairs.check_custom,
    rules_pairs.check_pairs,
    rules_pairs.check_teacher,
)


def findings_of(joined: Joined) -> list[Finding]:
    """Everything the checks see, by severity and name, one finding a rule."""
    hits: dict[str, list[Hit]] = {}
    for check in CHECKS:
        for hit in check(joined):
            hits.setdefault(hit.rule, []).append(hit)
    findings = [
        Finding(
            rule=RULES[name],
            seen=found[0].seen,
            places=tuple(place for hit in found for place in hit.places),
            count=max(len(found), sum(len(hit.places) for hit in found)),
        )
        for name, found in hits.items()
    ]
    return sorted(findings, key=lambda f: (SEVERITIES.index(f.rule.severity), f.rule.name))
