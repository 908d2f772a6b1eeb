"""Questions over made-up facts that only the `search` tool knows.

The facts are drawn anew for every row, so nothing can be memorised: the stand-in must search and
then copy the word that stands at a fixed place in the first result. Rows: {"id", "question",
"answers", "facts"}; `facts` is the document store of that row, for a local retriever. Two thirds
need one search, one third two.
"""

from __future__ import annotations

import random
from typing import Any

from standin.wordlists import CITIES, COLOURS, FOODS, JOBS, NAMES, PETS

# relation -> (the words it may be, another way to ask for it)
RELATIONS: dict[str, tuple[list[str], str]] = {
    "home": (CITIES, "Where does {who} live?"),
    "job": (JOBS, "What work does {who} do?"),
    "pet": (PETS, "Which animal does {who} own?"),
    "colour": (COLOURS, "Which colour does {who} like best?"),
    "dish": (FOODS, "What does {who} like to eat most?"),
}
LINKS = ("friend", "boss", "cousin", "coach")

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the facts.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}},
            "required": ["query"],
        },
    },
}

SYSTEMS = (
    "Use search, then end with one line: Answer: ...",
    "Answer the question. Call the search tool once per turn. "
    "Finish with a single line 'Answer: ...'.",
    "You can search. When you know the answer, write one line that starts with Answer:",
    "Search for facts before you answer. The last line must be Answer: followed by the answer.",
)
SYSTEM = SYSTEMS[0]


def row(rng: random.Random) -> dict[str, Any]:
    """One question with its own facts, right documents and distractors mixed."""
    who, other, *rest = rng.sample(NAMES, 5)
    relation = rng.choice(list(RELATIONS))
    values, asking = RELATIONS[relation]
    value = rng.choice(values)
    if rng.random() < 0.67:
        question = rng.choice([f"What is the {relation} of {who}?", asking.format(who=who)])
        hops = [f"The {relation} of {who} is {value}."]
    else:
        link = rng.choice(LINKS)
        question = f"What is the {relation} of the {link} of {who}?"
        hops = [f"The {link} of {who} is {other}.", f"The {relation} of {other} is {value}."]
    noise = [f"The {relation} of {name} is {rng.choice(values)}." for name in rest]
    facts = hops + noise
    rng.shuffle(facts)
    return {
        "id": f"fact-{rng.randrange(10**6):06d}",
        "question": question,
        "answers": [value],
        "facts": facts,
        "hops": hops,
    }


def retrieve(facts: list[str], query: str, top_k: int = 2) -> list[str]:
    """The facts that share most words with the query, best first; ties keep their order.

    A fact that shares no word is not listed.
    """
    wanted = set(query.lower().split())
    scored = [(len(wanted & set(fact.lower().rstrip(".").split())), fact) for fact in facts]
    ranked = sorted((pair for pair in scored if pair[0] > 0), key=lambda pair: -pair[0])
    return [fact for _, fact in ranked[:top_k]]


def render(results: list[str]) -> str:
    """What the tool returns: one numbered result a line."""
    return "\n".join(f"[{i}] {fact}" for i, fact in enumerate(results, 1)) or "No results."


def query_of(fact: str) -> str:
    """The query that finds a fact: 'The home of Ben is Oslo.' -> 'home of Ben'."""
    return fact.removeprefix("The ").split(" is ")[0]


def plain_prompt(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
