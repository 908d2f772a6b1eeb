"""The table of rules. A new rule is an entry here, a function in a rules_ module and its test."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lint import rules_code, rules_data, rules_loop, rules_sdk
from lint.flow import Code, Hit

REFERENCE = "references/audit.md#static-check"


@dataclass(frozen=True)
class Rule:
    """One rule: `find` yields its hits in a file; hits may be milder than the rule."""

    code: str
    name: str
    severity: str
    meaning: str
    find: Callable[[Code], Iterator[Hit]]
    reference: str = REFERENCE


def suppressions_only(code: Code) -> Iterator[Hit]:
    """C00 is found by check.py itself, after all others."""
    return iter(())


ERROR, WARNING = "error", "warning"
RULES: tuple[Rule, ...] = (
    Rule("C00", "useless-suppression", WARNING,
         "a suppression has no reason or suppresses nothing", suppressions_only),
    Rule("C01", "policy-datum-keys", ERROR,
         "keys of a policy datum are not exactly those the loss reads",
         rules_data.policy_datum_keys),
    Rule("C02", "cross-entropy-keys", ERROR,
         "a key of a cross-entropy datum is not read", rules_data.cross_entropy_keys),
    Rule("C03", "result-not-taken", ERROR,
         "the future of a synchronous call is never resolved", rules_sdk.unread_result),
    Rule("C04", "await-count", ERROR,
         "an async method is awaited too rarely or too often", rules_sdk.wrong_awaits),
    Rule("C05", "no-such-name", ERROR,
         "an attribute, argument, metric, loss or module is not in the installed SDK",
         rules_sdk.missing_names),
    Rule("C06", "ids-from-text", ERROR,
         "ids are made from sampled text, or the mask's border from a text's length",
         rules_data.reencoded_text),
    Rule("C07", "rollout-law", ERROR,
         "training rollouts use a temperature, top_p or top_k that changes the distribution",
         rules_loop.tempered_rollouts),
    Rule("C08", "repeated-seed", ERROR,
         "training rollouts use the same seed at every step", rules_loop.repeated_seeds),
    Rule("C09", "stale-sampler", ERROR,
         "rollouts come from a client made before the optimiser steps", rules_loop.stale_samplers),
    Rule("C10", "unsafe-advantages", ERROR,
         "advantages divide by 0, are taken for a mask, or are filtered afterwards",
         rules_loop.unsafe_advantages),
    Rule("C11", "boxed-regex", WARNING,
         "a regex cuts nested braces or takes the first box", rules_code.boxed_patterns),
    Rule("C12", "literal-key", ERROR,
         "an API key is written into the file", rules_sdk.literal_keys),
    Rule("C13", "lost-state", ERROR,
         "a resume forgets the optimiser, or a run saves nothing", rules_loop.lost_state),
    Rule("C14", "template-result", ERROR,
         "a template gives a dict, or special tokens are added twice",
         rules_data.template_results),
    Rule("C15", "thinking-switch", WARNING,
         "enable_thinking differs between the places that render", rules_data.thinking_switches),
    Rule("C16", "unknown-setting", ERROR,
         "a field of parameters or a loss setting does not exist, or max_tokens is missing",
         rules_sdk.unknown_settings),
    Rule("C17", "open-sandbox", ERROR,
         "model-written code runs with our environment, without a limit or in our process",
         rules_code.open_sandboxes),
    Rule("C18", "signal-alarm", ERROR,
         "a time limit by signal works in the main thread only", rules_code.alarms),
    Rule("C19", "handwritten-template", WARNING,
         "chat markup is written by hand and encoded", rules_data.handwritten_templates),
    Rule("C20", "tensor-data", ERROR,
         "a TensorData is used as an array", rules_data.tensor_conversions),
    Rule("C21", "split-step", WARNING,
         "one optimiser step is cut into several calls, or waited for too early",
         rules_loop.split_steps),
    Rule("C22", "policy-ratio", ERROR,
         "a clipped ratio is used without the minimum, or a sequence's log-ratio is summed",
         rules_loop.wrong_ratios),
    Rule("C23", "swanlab-call", ERROR,
         "SwanLab ignores, refuses or drops what is passed", rules_code.swanlab_calls),
    Rule("C24", "checkpoint-name", ERROR,
         "a checkpoint name is refused, or used again", rules_sdk.checkpoint_names),
    Rule("C25", "tail-cut", ERROR,
         "the tail of prompt and answer is cut off", rules_data.tail_cuts),
    Rule("C26", "lost-rows", WARNING,
         "the last rows are never seen, or their order is lost", rules_data.lost_rows),
)  # fmt: skip
