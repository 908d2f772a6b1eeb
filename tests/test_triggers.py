"""The trigger queries: enough of them, both kinds in both parts, about what they claim."""

import json
import re
from collections import Counter
from typing import Any

import pytest

from conftest import ROOT, SKILL

QUERIES: list[dict[str, Any]] = json.loads(
    (ROOT / "evals" / "triggers.json").read_text(encoding="utf-8")
)
REQUIRED = {"id": str, "query": str, "should_trigger": bool, "why": str, "split": str}
SPLITS = {"train": 0.6, "validation": 0.4}
SHORTEST = {"en": 120, "zh": 50}  # characters; a one-liner says too little to be judged
# Words of the description that say nothing about the skill's subject.
PLAIN = set("and any are before even for goal not only prove the them use with write".split())
PLAIN |= set("async correct free local named paying plain task training library custom".split())
CHINESE = re.compile(r"[\u4e00-\u9fff]+")


def language_of(text: str) -> str:
    return "zh" if CHINESE.search(text) else "en"


def content_words(text: str) -> set[str]:
    """English words of three letters and more that carry content, names in code as one word, and
    Chinese pairs of characters."""
    english = set(re.findall(r"[a-z][a-z0-9_]{2,}", text.lower())) - PLAIN
    chinese = {run[i : i + 2] for run in CHINESE.findall(text) for i in range(len(run) - 1)}
    return english | chinese


def subject() -> set[str]:
    """The content words of the skill's name and of what its description says it is for."""
    frontmatter = (SKILL / "SKILL.md").read_text(encoding="utf-8").split("---")[1]
    name_and_description = frontmatter.partition("license:")[0]
    return content_words(name_and_description.partition("Not for")[0]) - {"name", "description"}


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: str(query.get("id")))
def test_a_query_is_well_formed(query: dict[str, Any]) -> None:
    assert {key: type(query[key]) for key in REQUIRED} == REQUIRED
    assert set(query) - set(REQUIRED) <= {"implicit"}
    assert query.get("implicit", True) is True  # only written down where it is so
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", query["id"])
    assert query["split"] in SPLITS
    assert query["query"] == query["query"].strip() and query["why"].strip()
    assert len(query["query"]) >= SHORTEST[language_of(query["query"])]


def test_there_are_enough_of_both_kinds() -> None:
    kinds = Counter(query["should_trigger"] for query in QUERIES)
    assert len(QUERIES) >= 24
    assert kinds[True] == kinds[False]


def test_no_query_is_there_twice() -> None:
    for key in ("id", "query"):
        assert len({query[key] for query in QUERIES}) == len(QUERIES)
    words = [content_words(query["query"]) for query in QUERIES]
    for number, one in enumerate(words):
        for other in words[:number]:
            assert len(one & other) < 0.6 * min(len(one), len(other)), (one, other)


@pytest.mark.parametrize("should_trigger", [True, False])
def test_the_split_is_stratified(should_trigger: bool) -> None:
    """60 to 40 within each kind, and both languages in each part."""
    chosen = [query for query in QUERIES if query["should_trigger"] is should_trigger]
    for split, share in SPLITS.items():
        part = [query for query in chosen if query["split"] == split]
        assert abs(len(part) - share * len(chosen)) <= 0.5
        languages = Counter(language_of(query["query"]) for query in part)
        assert min(languages["en"], languages["zh"]) >= 0.3 * len(part), languages


def test_what_should_trigger_has_words_of_the_description() -> None:
    known = subject()
    assert {"pytrio", "sft", "grpo", "dpo", "蒸馏"} <= known
    for query in QUERIES:
        if query["should_trigger"]:
            shared = content_words(query["query"]) & known
            assert bool(shared) != query.get("implicit", False), (query["id"], shared)


def test_the_near_misses_are_near() -> None:
    """Most share words with the description: else they are told apart by no reading at all."""
    known = subject()
    others = [query for query in QUERIES if not query["should_trigger"]]
    near = [query for query in others if content_words(query["query"]) & known]
    assert len(near) >= 0.7 * len(others)
    words = " ".join(query["query"] for query in others).lower()
    assert all(other in words for other in ("trl", "verl", "trio", "vllm"))
    assert not any(query.get("implicit") for query in others)
