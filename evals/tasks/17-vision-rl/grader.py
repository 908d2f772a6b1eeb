"""Questions about their own pictures; the reward is the right letter and nothing else."""

import hashlib

from grading import Expectation, Run, approximately, expect, final_answer

from audit.trace import picture_id


def grade(run: Run) -> list[Expectation]:
    def number_of(path: str) -> int:
        content = (run.files / path).read_bytes()
        return picture_id(hashlib.sha256(content).hexdigest()[:16])

    def text_of(row: dict) -> str:
        lines = [f"{letter}. {text}" for letter, text in zip("ABCD", row["choices"], strict=True)]
        return "\n".join([row["question"], *lines, "Answer with the letter in \\boxed{}."])

    rows = {number_of(row["image"]): row for row in run.rows("quiz.jsonl")}
    sequences = run.joined.sequences
    requests = {g.members[0]: sequences[g.members[0]].request for g in run.groups}
    pictures = [sorted({int(i) for i in r.prompt if i < 0}) for r in requests.values()]
    elsewhere = []
    for request, found in zip(requests.values(), pictures, strict=True):
        row = rows.get(found[0]) if len(found) == 1 else None
        form = f"user\n<|vision_start|><|vision_end|>{text_of(row)}<|im_end|>" if row else "?"
        if form not in run.prompt(request):
            elsewhere.append(run.prompt(request)[:200])
    wrong = []
    for group in run.groups:
        found = sorted({int(i) for i in sequences[group.members[0]].request.prompt if i < 0})
        letter = "ABCD"[rows[found[0]]["answer"]] if found and found[0] in rows else ""
        boxes = {m: final_answer(run.completion(m)) for m in group.members}
        # `(B)` and `b` may fairly be read either way.
        rewards = {m: float(b == letter) for m, b in boxes.items() if b in ("", *"ABCD")}
        if len(set(rewards.values())) > 1 and not group.advantages:
            wrong.append("a group with different rewards is not trained")
        trained = sorted((rewards[m], a) for m, a in group.advantages.items() if m in rewards)
        for (low, a), (high, b) in zip(trained, trained[1:], strict=False):
            if not (abs(a - b) < 1e-4 if low == high else b > a):
                wrong.append(f"rewards {low:g}, {high:g} have advantages {a:.3g}, {b:.3g}")
    sizes = {len(group.members) for group in run.groups}
    losses = {loss.name for loss in run.losses}
    limits = {r.params.get("max_tokens") for r in requests.values()}
    return [
        expect(
            "samples the six pictures once, eight times each",
            sorted(sum(pictures, [])) == sorted(rows) and sizes == {8},
            sizes,
        ),
        expect(
            "each picture before its own question and choices",
            requests and not elsewhere,
            elsewhere[:1],
        ),
        expect("advantages follow the right letter alone", run.policy and not wrong, wrong[:3]),
        expect("48 tokens", limits == {48}, limits),
        expect("importance_sampling", losses == {"importance_sampling"}, losses),
        expect("one to three steps", 1 <= run.step_count <= 3, run.step_count),
        expect("learning rate 3e-4", approximately(run.learning_rates, 3e-4), run.learning_rates),
        expect("rank 16", run.ranks == {16}, run.ranks),
        expect("keeps quiz-vl", run.saved_weights("quiz-vl"), run.durable_saves),
    ]
