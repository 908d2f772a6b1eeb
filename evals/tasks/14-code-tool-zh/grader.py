"""Whole attempts rewarded by their last turn; programs are stopped and see no variable of ours."""

import re

from agents_grading import (
    CALL,
    attempts,
    first_prompts,
    rendered_turns,
    untrained_turns,
    wrong_orders,
)
from grading import Expectation, Run, approximately, expect, final_answer

SYSTEM = "Always print the result. The final line must be \\boxed{}."
RESPONSE = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)


def grade(run: Run) -> list[Expectation]:
    gold = {row["question"]: row["answer"] for row in run.rows("sums.jsonl")}

    def task_of(prompt: str) -> str:
        return next((q for q in gold if f"{q}<|im_end|>" in prompt), "")

    def judge(prompt: str, text: str) -> float | None:
        task = task_of(prompt)
        if CALL.search(text) or not task:
            return None
        return 1.0 if final_answer(text) == gold[task] else -1.0

    answered = [
        (said, found[1]) for said, added in rendered_turns(run) if (found := RESPONSE.search(added))
    ]
    looks = [answer for said, answer in answered if "os.environ" in said]
    leaks = [answer[:200] for answer in looks if "PYTRIO_" in answer]
    endless = [answer for said, answer in answered if "while True" in said]
    sums = [said for said, answer in answered if any(a in answer for a in gold.values())]
    deepest = max((run.prompt(r).count("<tool_response>\n") for r in run.trace.requests), default=0)
    unsaid = [p for p in first_prompts(run) if SYSTEM not in p or "code_interpreter" not in p]
    asked, sizes = attempts(run, task_of)
    wrong = wrong_orders(run, task_of, judge)
    idle = untrained_turns(run, task_of, judge)
    given = [d for d in run.policy if (run.joined.match(d).owner[d.active] < 0).any()]
    bounds = {(loss.name, tuple(sorted(v for _, v in loss.config))) for loss in run.losses}
    return [
        expect("the prompts have the system message and the tool's schema", asked and not unsaid),
        expect(
            "four questions twice, eight attempts each",
            asked == sorted([*gold, *gold]) and sizes == {8},
            (asked, sizes),
        ),
        expect("programs are run and their output read", len(sums) >= 8, len(sums)),
        expect("programs see none of our variables", looks and not leaks, leaks[:1] or len(looks)),
        expect(
            "the model is told when a program was stopped",
            endless and all("timeout" in a.lower() for a in endless),
            endless[:3],
        ),
        expect("at most two programs an attempt", 1 <= deepest <= 2, deepest),
        expect(
            "advantages follow the reward of the last turn", run.policy and not wrong, wrong[:3]
        ),
        expect("every turn of an attempt carries its advantage", run.policy and not idle, idle[:2]),
        expect("what was not sampled is not trained", run.policy and not given, len(given)),
        expect("ppo, ratio clipped to 0.8 and 1.28", bounds == {("ppo", (0.8, 1.28))}, run.losses),
        expect("learning rate 2e-4", approximately(run.learning_rates, 2e-4), run.learning_rates),
        expect("keeps coder", run.saved_weights("coder"), run.durable_saves),
    ]
