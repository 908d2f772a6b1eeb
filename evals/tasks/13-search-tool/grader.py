"""Whole attempts rewarded by their end; results come from the given facts and are not trained."""

import re
from collections import Counter

from agents_grading import (
    CALL,
    attempts,
    first_prompts,
    rendered_turns,
    untrained_turns,
    wrong_orders,
)
from grading import Expectation, Run, approximately, expect

SYSTEM = "Answer the question. Call the search tool once per turn. Finish with a single line"
QUERY = re.compile(r"<parameter=query>\s*(.*?)\s*</parameter>", re.DOTALL)


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def grade(run: Run) -> list[Expectation]:
    gold = {row["question"]: row["answer"] for row in run.rows("questions.jsonl")}
    facts = [row["text"] for row in run.rows("facts.jsonl")]

    def task_of(prompt: str) -> str:
        return next((q for q in gold if f"{q}<|im_end|>" in prompt), "")

    def judge(prompt: str, text: str) -> float | None:
        task = task_of(prompt)
        lines = re.findall(r"^\s*answer:(.*)$", text, re.MULTILINE | re.IGNORECASE)
        if CALL.search(text) or len(lines) > 1 or not task:
            return None
        return float(bool(lines) and lines[0].strip().rstrip(".").lower() == gold[task].lower())

    foreign = []
    turns = rendered_turns(run)
    for completion, added in turns:
        queries = QUERY.findall(completion)
        shared = [len(words(queries[0]) & words(f)) for f in facts] if len(queries) == 1 else [0]
        found = facts[shared.index(max(shared))] if max(shared) else "No results."
        if len(queries) == 1 and found not in added:
            foreign.append(f"{queries[0]}: {added[:80]}")
    deepest = max((run.prompt(r).count("<tool_response>\n") for r in run.trace.requests), default=0)
    limits = Counter(s.request.params.get("max_tokens") for s in run.joined.rollouts)
    asked, sizes = attempts(run, task_of)
    wrong = wrong_orders(run, task_of, judge)
    idle = untrained_turns(run, task_of, judge)
    unsaid = [p for p in first_prompts(run) if SYSTEM not in p or '"name": "search"' not in p]
    given = [d for d in run.policy if (run.joined.match(d).owner[d.active] < 0).any()]
    return [
        expect("the prompts have the system message and the tool's schema", asked and not unsaid),
        expect(
            "six questions once, eight attempts each",
            asked == sorted(gold) and sizes == {8},
            (asked, sizes),
        ),
        expect("the tool answers with the best fact", turns and not foreign, foreign[:2]),
        expect(
            "some attempts search twice, none more than three times", 2 <= deepest <= 3, deepest
        ),
        expect(
            "advantages follow the reward of the last turn", run.policy and not wrong, wrong[:3]
        ),
        expect("every turn of an attempt carries its advantage", run.policy and not idle, idle[:2]),
        expect("what was not sampled is not trained", run.policy and not given, len(given)),
        expect("at most 72 tokens a turn", limits and max(limits) <= 72, limits),
        expect("one to three steps", 1 <= run.step_count <= 3, run.step_count),
        expect("learning rate 2e-4", approximately(run.learning_rates, 2e-4), run.learning_rates),
        expect("keeps searcher", run.saved_weights("searcher"), run.durable_saves),
    ]
