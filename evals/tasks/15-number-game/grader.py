"""Every conversation is a game of the file as the row says; won games are reinforced, whole."""

import importlib.util
import json
import re

from agents_grading import attempts, untrained_turns, wrong_orders
from grading import Expectation, Run, approximately, expect

TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
THINK = re.compile(r"^<think>\s*</think>\s*")


def grade(run: Run) -> list[Expectation]:
    spec = importlib.util.spec_from_file_location("number_game", run.files / "game.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows = json.loads((run.files / "games.json").read_text(encoding="utf-8"))
    openings = {module.Game(r["level"], r["seed"]).reset(): r for r in rows}

    def task_of(prompt: str) -> str:
        return next((o for o in openings if f"<|im_start|>user\n{o}<|im_end|>" in prompt), "")

    def replay(prompt: str):
        """(the game after all replies of a prompt, the first observation that it does not give)."""
        opening = task_of(prompt)
        if not opening:
            return None, prompt[:100]
        game = module.Game(openings[opening]["level"], openings[opening]["seed"])
        expected, is_over = game.reset(), False
        for role, content in TURN.findall(prompt):
            if role == "assistant" and not is_over:
                expected, is_over = game.step(THINK.sub("", content))
            elif role != "user" or content != expected:
                return game, f"{content!r} instead of {expected!r}"
        return game, "" if not is_over else "goes on after the end"

    def judge(prompt: str, text: str) -> float | None:
        game, problem = replay(prompt)
        if problem:
            return None
        return float(game.won) if game.step(text)[1] else None

    prompts = {run.prompt(s.request) for s in run.joined.rollouts}
    foreign = [problem for p in sorted(prompts) if (problem := replay(p)[1])]
    times, sizes = attempts(run, task_of)
    wrong = wrong_orders(run, task_of, judge)
    idle = untrained_turns(run, task_of, judge)
    given = [d for d in run.policy if (run.joined.match(d).owner[d.active] < 0).any()]
    limits = {s.request.params.get("max_tokens") for s in run.joined.rollouts}
    losses = {loss.name for loss in run.losses}
    return [
        expect(
            "every observation is what the row's game answers", prompts and not foreign, foreign[:3]
        ),
        expect(
            "four games twice, eight attempts each",
            times == sorted([*openings, *openings]) and sizes == {8},
            (len(times), sizes),
        ),
        expect("won games have the higher advantage", run.policy and not wrong, wrong[:3]),
        expect("every reply of a game carries its advantage", run.policy and not idle, idle[:2]),
        expect("observations are not trained", run.policy and not given, len(given)),
        expect("24 tokens a reply", limits == {24}, limits),
        expect("importance_sampling", losses == {"importance_sampling"}, losses),
        expect("one to four steps", 1 <= run.step_count <= 4, run.step_count),
        expect("learning rate 2e-4", approximately(run.learning_rates, 2e-4), run.learning_rates),
        expect("rank 16", run.ranks == {16}, run.ranks),
        expect("keeps guesser", run.saved_weights("guesser"), run.durable_saves),
    ]
