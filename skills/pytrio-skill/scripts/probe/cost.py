"""What a probe may cost at most, before anything is sent."""

from collections.abc import Sequence

from probe.questions import Question

CLASSES = ("prefill", "sample", "train")
# A question that fails (a lost run, a refused call) is asked once more.
ATTEMPTS = 2


def bounds(questions: Sequence[Question]) -> dict[str, int]:
    """The most tokens by class that these questions send."""
    sums = [ATTEMPTS * sum(column) for column in zip(*(q.bound for q in questions), strict=True)]
    return dict(zip(CLASSES, sums, strict=True)) if sums else dict.fromkeys(CLASSES, 0)


def cost(tokens: dict[str, int], prices: tuple[float, float, float]) -> float:
    """Price of tokens at prices per million by class."""
    return sum(tokens[name] / 1e6 * price for name, price in zip(CLASSES, prices, strict=True))


def plan(
    questions: Sequence[Question], limit: int, prices: tuple[float, float, float] | None
) -> str:
    """The calls and the tokens of each question, and the upper bound of it all."""
    lines = [f"{'question':<30}{'prefill':>8}{'sample':>8}{'train':>8}  calls"]
    for question in questions:
        numbers = "".join(f"{number:>8}" for number in question.bound)
        lines.append(f"{question.name:<30}{numbers}  {question.calls}")
    most = bounds(questions)
    total = sum(most.values())
    lines.append(
        f"{f'at most, {ATTEMPTS} attempts each':<30}"
        + "".join(f"{most[name]:>8}" for name in CLASSES)
    )
    lines.append(f"together at most {min(total, limit)} tokens; it stops at {limit}")
    if prices is not None:
        shown = ", ".join(f"{price:g}" for price in prices)
        lines.append(f"upper bound of the cost at {shown} a million: {cost(most, prices):.4f}")
    return "\n".join(lines)
