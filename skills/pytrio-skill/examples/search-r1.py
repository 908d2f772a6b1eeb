"""Search-R1: the model asks a search tool, reads, asks again and answers; right answers reinforced.

Paper: Search-R1, arXiv:2503.09516; advantages without the division by the deviation as in Dr. GRPO,
arXiv:2503.20783. A trajectory i of G on one question is turns of sampled tokens with the tool's
answers between them. With the reward r_i of its final text (1 right, 0 wrong, -0.1 when it is no
answer at all):

    A_i  = r_i - mean(r_1 ... r_G)
    loss = -sum_i sum_t m_it * ratio_it * A_i,   m_it = 1 where token t was sampled, 0 for what the
                                                 tool or the template wrote

Dry run (free, offline):   python scripts/dryrun.py run examples/search-r1.py -- --data sample
On the cloud (billed):     PYTRIO_API_KEY=... python examples/search-r1.py
Expected in the dry run:   correct answers 0.52 to 0.96 (last five of 12 steps), valid calls 0.93
                           to 1.00, held-out exact match 0.56 to 0.89, about 60 s on one core;
                           seed 1 0.53 to 0.97, held out to 0.94
An interrupted run continues when the same command is given again.
"""

import asyncio
import hashlib
import importlib
import json
import math
import os
import random
import re
import shutil
import threading
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NoReturn

import bm25s
import httpx
import pytrio as trio
import tyro
from tqdm import tqdm

NAME = "search-r1"
SKILL = "pytrio-skill 0.1.0"
# A mirror of the paper's training questions (NQ and HotpotQA); no revision of it is known to us.
HUB_DATA, HUB_REVISION = "PeterJinGo/nq_hotpotqa_train", "main"
SYSTEM = (
    "Answer the question. Call the search tool once per turn. "
    "Finish with a single line 'Answer: ...'."
)
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
STOP = ["<|im_end|>"]
# Stands for an assistant's text in a rendering; one word that no template trims or splits.
PLACEHOLDER = "the-assistant-wrote-this"
NO_ANSWER = -0.1  # reward of a final text without exactly one `Answer:` line, as published


@dataclass(frozen=True)
class Config:
    data: str = "nq_hotpotqa"
    """`nq_hotpotqa` (Hugging Face hub), `sample` (questions on made-up facts and their index, no
    network, smaller defaults), or a .jsonl file of {"question": "...", "answers": ["..."]}."""
    backend: Literal["wikipedia", "bm25"] = "wikipedia"
    """What `search` asks: the API of --wiki, or a BM25 index of --corpus."""
    corpus: Path | None = None
    """.jsonl file of {"text": "..."}: the documents of the BM25 index."""
    index: Path | None = None
    """Folder of the BM25 index: made from --corpus when it is not there, read when it is."""
    wiki: str = "https://en.wikipedia.org/w/api.php"
    """API that `wikipedia` asks; any MediaWiki with the TextExtracts extension."""
    contact: str = ""
    """Your e-mail address or page, sent to Wikipedia in the user agent as its rules ask."""
    search_faults: float = 0.0
    """Share of searches that fail on purpose: see what the loop makes of an outage."""
    top_k: int = 3
    """Results a search returns; 3 in the paper and in public PyTRIO runs."""
    base_model: str = "Qwen/Qwen3.5-4B"
    """Model to adapt; the one of nearly all public PyTRIO runs."""
    steps: int = 100
    """Optimiser steps; public runs: 20 to 200, the best score at 50."""
    prompts_per_step: int = 8
    """Questions per step; 8 in public runs."""
    group_size: int = 8
    """Trajectories per question; 8 in public runs."""
    learning_rate: float = 4e-5
    """Learning rate of AdamW; 4e-5 in public runs."""
    rank: int = 32
    """LoRA rank, 4 to 64; 32 is the SDK's default."""
    max_searches: int = 4
    """Searches a trajectory may make; 4 in public runs. One more ends it without an answer."""
    max_tokens: int = 1024
    """Longest turn; 1024 in public runs."""
    max_result_tokens: int = 1024
    """Longest tool answer: whole results up to this; 1024 in public runs."""
    max_trajectory_tokens: int = 8192
    """Prompt, turns and tool answers together; 8192 in public runs."""
    max_prompt_tokens: int = 1024
    """Longer first prompts are reported and left out."""
    seed: int = 0
    """Order of data, initial weights. Sampling gets none: one seed repeats the same turns."""
    eval_rows: int = 70
    """Held-out questions; public runs take 70. The standard error is 6 points at worst."""
    eval_temperature: float = 0.0
    """0 as published; 1 shows the policy that is trained."""
    eval_base: bool = True
    """Evaluate the untrained model, too."""
    save_every: int = 10
    """Steps between checkpoints: what a killed run does again at most."""
    run_dir: Path = Path("runs/search-r1")
    """Folder of metrics.jsonl, run_state.json and SwanLab's files."""
    fresh: bool = False
    """Discard the run in --run-dir instead of resuming it."""
    swanlab: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto` is online when SWANLAB_API_KEY is set and offline otherwise."""
    check_reward: bool = False
    """Only score all gold answers and a table of tricky ones; needs no model."""


# What `--data sample` replaces; a flag on the command line still wins.
SAMPLE: dict[str, Any] = {"backend": "bm25", "top_k": 1, "steps": 12, "learning_rate": 3e-4}
SAMPLE |= {"max_tokens": 72, "eval_rows": 64, "eval_temperature": 1.0, "save_every": 4}
# What may differ when a run is resumed; any other change makes it another run.
FREE_TO_CHANGE = {"steps", "save_every", "run_dir", "fresh", "swanlab", "check_reward", "eval_base"}
FREE_TO_CHANGE |= {"contact"}


def stop(line: str) -> NoReturn:
    """End with one line that says what is wrong and what to do."""
    raise SystemExit(f"{NAME}: {line}")


def check_config(config: Config) -> None:
    lowest = {"group_size": 2, "rank": 4, "seed": 0}
    for name, value in asdict(config).items():
        if type(value) is int and value < lowest.get(name, 1):
            flag = "--" + name.replace("_", "-")
            stop(f"{flag} must be at least {lowest.get(name, 1)}, got {value}")
    if not 0 < config.learning_rate < 1:
        stop(f"--learning-rate must be between 0 and 1, got {config.learning_rate}")
    if not 0 <= config.search_faults <= 1:
        stop(f"--search-faults must be between 0 and 1, got {config.search_faults}")
    if not 0 <= config.eval_temperature <= 2:
        stop(f"--eval-temperature must be between 0 and 2, got {config.eval_temperature}")
    if config.swanlab == "online" and not os.environ.get("SWANLAB_API_KEY"):
        stop("--swanlab online needs SWANLAB_API_KEY in the environment; offline does not")


Row = dict[str, Any]  # question: str, answers: list[str]


NAMES = (
    "Ana Ben Carl Dora Emma Finn Gina Hugo Iris Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tina "
    "Vera Zoe Adam Beth Cora Dan Ella Fred Hana Ivan June Karl Lily Mark Nina Oscar Pia Ruth Tom"
).split()
# relation -> (another way to ask for it, what it may be)
RELATIONS = {
    "home": ("Where does {who} live?", "Paris London Rome Oslo Cairo Lima Delhi Tokyo Berlin"),
    "job": ("What work does {who} do?", "baker doctor farmer pilot teacher painter singer nurse"),
    "pet": ("Which animal does {who} own?", "cat dog fox rabbit horse parrot turtle mouse duck"),
    "colour": ("Which colour does {who} like best?", "red blue green yellow black white brown"),
    "dish": ("What does {who} like to eat most?", "pizza soup rice bread pasta salad cheese fish"),
}
LINKS = ["friend", "boss", "cousin", "coach"]


def sample_world(count: int) -> tuple[list[Row], list[str]]:
    """Questions about people who do not exist, four fifths in two hops, and all facts on them."""
    rng = random.Random(0)
    facts, rows = [], []
    # A link leads from the first half to the second: a search for "friend of Ana" cannot also find
    # whose friend Ana is.
    half = len(NAMES) // 2
    known = {}
    for who in NAMES:
        for relation, (asking, values) in RELATIONS.items():
            value = known[who, relation] = rng.choice(values.split())
            facts.append(f"The {relation} of {who} is {value}.")
            question = rng.choice([f"What is the {relation} of {who}?", asking.format(who=who)])
            rows.append({"question": question, "answers": [value], "source": "one_hop"})
    two_hops = []
    for who in NAMES[:half]:
        for link in LINKS:
            other = rng.choice(NAMES[half:])
            facts.append(f"The {link} of {who} is {other}.")
            for relation in RELATIONS:
                question = f"What is the {relation} of the {link} of {who}?"
                answers = [known[other, relation]]
                two_hops.append({"question": question, "answers": answers, "source": "two_hops"})
    rows = rng.sample(rows, len(two_hops) // 4) + two_hops
    rng.shuffle(facts)
    return rng.sample(rows, min(count, len(rows))), facts


def read_jsonl(path: Path, flag: str) -> dict[str, dict[str, Any]]:
    """The objects of a .jsonl file by their place; SystemExit names the line that is none."""
    try:
        # Not splitlines(): JSON strings may hold other line separators.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        stop(f"cannot read {path} ({error}); {flag} takes a .jsonl file")
    found = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = f"{path} line {number}"
            try:
                found[place] = dict(json.loads(line))
            except (ValueError, TypeError) as error:
                stop(f"{place} is no JSON object: {error}")
    return found


def to_row(raw: dict[str, Any], place: str) -> Row:
    """Our schema of a row of the hub's or of a file."""
    answers = raw.get("answers", raw.get("golden_answers"))
    answers = [answers] if isinstance(answers, str) else list(answers or [])
    texts = [raw.get("question"), *answers]
    if not answers or not all(isinstance(text, str) and text.strip() for text in texts):
        stop(f"{place} is no row of question and answers: {json.dumps(raw, default=str)[:120]}")
    source = str(raw.get("data_source", raw.get("source", "all")))
    return {"question": raw["question"].strip(), "answers": answers, "source": source}


def load_rows(config: Config) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows; no question is in both."""
    if config.data == "nq_hotpotqa":
        try:
            from datasets import load_dataset

            splits = load_dataset(HUB_DATA, revision=HUB_REVISION)
        except Exception as error:  # no package, no network, no such revision
            reason = (str(error) or repr(error)).splitlines()[0]
            stop(f"cannot load {HUB_DATA} ({reason}); --data sample needs no network")
        train = [to_row(row, HUB_DATA) for row in splits["train"]]
        held_out = [to_row(row, HUB_DATA) for row in splits["test"]]
        random.Random(0).shuffle(held_out)
        by_source = Counter[str]()
        sources = len({row["source"] for row in held_out})
        share = math.ceil(config.eval_rows / sources)  # as many of each, as published
        picked: list[Row] = []
        for row in held_out:
            if by_source[row["source"]] < share and len(picked) < config.eval_rows:
                by_source[row["source"]] += 1
                picked.append(row)
        held_out_questions = {row["question"] for row in picked}
        return [row for row in train if row["question"] not in held_out_questions], picked
    if config.data == "sample":
        rows = sample_world(256 + config.eval_rows)[0]
    else:
        raws = read_jsonl(Path(config.data), "--data, when it is not nq_hotpotqa or sample,")
        given = [to_row(raw, place) for place, raw in raws.items()]
        rows = list({row["question"]: row for row in given}.values())
    if len(rows) < 5:
        stop(f"{config.data} has {len(rows)} different questions; give at least 5")
    random.Random(0).shuffle(rows)
    border = min(config.eval_rows, max(1, len(rows) // 5))
    return rows[border:], rows[:border]


@lru_cache(maxsize=2)
def order_of_epoch(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def batch_of_step(items: Sequence[Any], step: int, size: int, seed: int) -> tuple[int, list[Any]]:
    """Epoch and items of a step: a function of its number, so that resuming needs nothing else."""
    places = [divmod(position, len(items)) for position in range(step * size, (step + 1) * size)]
    return places[0][0], [items[order_of_epoch(len(items), seed, e)[i]] for e, i in places]


class SearchFailedError(Exception):
    """The search tool did not answer; that is not the model's fault."""


Search = Callable[[str], list[str]]  # query -> results, best first; raises SearchFailedError


def open_index(config: Config) -> Search:
    """BM25 over --corpus, or over the made-up facts of `--data sample`."""
    path = config.index
    if path and path.exists():
        try:
            index = bm25s.BM25.load(path, show_progress=False)
            texts = json.loads((path / "texts.json").read_text(encoding="utf-8"))
            assert len(texts) == index.scores["num_docs"], "texts and index differ in number"
            search_index(index, texts, " ".join(list(index.vocab_dict)[:9]), 1)
        except Exception as error:  # whatever a damaged file makes of its readers
            reason = (str(error) or repr(error)).splitlines()[0]
            stop(f"{path} is no readable index ({reason}); delete it and give --corpus to build it")
    else:
        if config.corpus:
            documents = read_jsonl(config.corpus, "--corpus").values()
            texts = [text for d in documents if isinstance(text := d.get("text"), str)]
            if len(texts) < len(documents) or not any(text.split() for text in texts):
                stop(f'{config.corpus} must have a "text" in every line, and some words')
        elif config.data == "sample":
            texts = sample_world(1)[1]
        else:
            where = f"there is no index at {path}" if path else "--backend bm25 has no documents"
            stop(f"{where}; give --corpus FILE.jsonl, or --backend wikipedia")
        words = bm25s.tokenize(texts, show_progress=False)
        if not any(words.ids):
            stop(f"{config.corpus} has no words to search for")
        index = bm25s.BM25()
        index.index(words, show_progress=False)
        if path:  # whole or not at all
            unfinished = path.with_name(path.name + ".tmp")
            shutil.rmtree(unfinished, ignore_errors=True)
            index.save(unfinished, show_progress=False)
            (unfinished / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
            os.replace(unfinished, path)
    return lambda query: search_index(index, texts, query, config.top_k)


def search_index(index: bm25s.BM25, texts: list[str], query: str, top_k: int) -> list[str]:
    """The texts that share a word with the query, best first."""
    words = bm25s.tokenize([query], return_ids=False, show_progress=False)[0]
    words = [word for word in words if word in index.vocab_dict]
    if not words:
        return []
    k = min(top_k, len(texts))
    found, scores = index.retrieve([words], k=k, show_progress=False)
    return [texts[i] for i, score in zip(found[0], scores[0], strict=True) if score > 0]


class Wikipedia:
    """A MediaWiki's search, as its rules ask: it says who asks, leaves a pause between requests,
    whatever the number of threads, and waits when it is told to."""

    pause_seconds = 0.31
    attempts = 3

    def __init__(self, url: str, contact: str, top_k: int) -> None:
        self.url, self.top_k = url, top_k
        self.client = httpx.Client(
            timeout=15, headers={"User-Agent": f"{NAME} ({contact}) {SKILL.replace(' ', '/')}"}
        )
        self.lock, self.free_at = threading.Lock(), 0.0

    def __call__(self, query: str) -> list[str]:
        parameters: dict[str, str | int] = {
            "action": "query", "format": "json", "formatversion": 2, "generator": "search",
            "gsrsearch": query[:300], "gsrlimit": self.top_k, "prop": "extracts", "exintro": 1,
            "explaintext": 1, "exlimit": self.top_k, "exchars": 1200,
        }  # fmt: skip
        reason = ""
        for attempt in range(self.attempts):
            with self.lock:  # our place in the queue, taken before the wait
                start = max(time.monotonic(), self.free_at)
                self.free_at = start + self.pause_seconds
            time.sleep(max(0.0, start - time.monotonic()))
            try:
                answer = self.client.get(self.url, params=parameters)
                if answer.status_code == 429 or answer.status_code >= 500:
                    reason = f"HTTP {answer.status_code}"
                    asked = answer.headers.get("Retry-After", "")
                    wait = float(asked) if asked.isdigit() else 2.0**attempt
                    with self.lock:
                        self.free_at = max(self.free_at, time.monotonic() + min(wait, 60))
                    continue
                reply = answer.raise_for_status().json()
                if "error" in reply:  # with status 200, as MediaWiki says it is busy
                    raise ValueError(reply["error"])
                pages = reply.get("query", {}).get("pages", [])
                pages.sort(key=lambda page: page["index"])
                return [f"{page['title']}: {page.get('extract', '')}" for page in pages]
            except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
                reason = repr(error)
        raise SearchFailedError(reason)


def open_search(config: Config) -> Search:
    """The backend of the configuration, failing on purpose as often as --search-faults says."""
    if config.backend == "wikipedia":
        if not config.contact:
            stop("--backend wikipedia needs --contact, your e-mail address or page: its rules ask")
        search: Search = Wikipedia(config.wiki, config.contact, config.top_k)
    else:
        search = open_index(config)
    faults = random.Random(config.seed)

    def search_or_fail(query: str) -> list[str]:
        if faults.random() < config.search_faults:
            raise SearchFailedError("a fault on purpose")
        return search(query)

    return search_or_fail


ANSWER = re.compile(r"^\s*answer\s*:(.*)$", re.IGNORECASE | re.MULTILINE)


def normalise(text: str) -> str:
    """Lower case, without punctuation and articles, single spaces: SQuAD's rules, any script."""
    text = "".join(c for c in text.lower() if not unicodedata.category(c).startswith("P"))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def reward_of(text: str, answers: Sequence[str]) -> float:
    """1.0 right, 0.0 wrong, NO_ANSWER without exactly one `Answer: ...` line."""
    found = ANSWER.findall(text)
    if len(found) != 1 or not found[0].strip():
        return NO_ANSWER
    given = normalise(found[0])
    return float(bool(given) and given in {normalise(answer) for answer in answers})


# How final texts score when "the Nile" or "Nile River" is right.
TRICKY: dict[float, list[str]] = {
    1.0: ["Answer: Nile", "answer:  the nile.", "It flows north.\nAnswer: **Nile**",
          "Answer: \u201cNile River\u201d", "ANSWER: A Nile"],
    0.0: ["Answer: Amazon", "Answer: Nile or Amazon", "Answer: Ni le", "Answer: .", "Answer: N"],
    NO_ANSWER: ["Nile", "", "Answer:", "The answer: Nile", "Answer: Nile\nAnswer: Amazon",
                "Answer: Nile\nAnswer: Nile", "Answer\nNile"],
}  # fmt: skip


def check_reward(rows: Sequence[Row]) -> None:
    """Before anything is paid: every gold answer scores 1, another 0, the table as stated."""
    nile = ["the Nile", "Nile River"]
    cases = [(text, nile, expected) for expected, texts in TRICKY.items() for text in texts]
    for row in rows:
        cases.append((f"Answer: {row['answers'][0]}", row["answers"], 1.0))
        cases.append((f"Answer: {row['answers'][0]} or so", row["answers"], 0.0))
    for text, answers, expected in cases:
        if reward_of(text, answers) != expected:
            stop(f"{text[-80:]!r} for {answers} scores {reward_of(text, answers)}, not {expected}")


@dataclass(frozen=True)
class Item:
    prompt: list[int]
    row: Row


@dataclass(frozen=True)
class Turn:
    """One request: the ids the model was given, and what it wrote."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


@dataclass
class Trajectory:
    turns: list[Turn] = field(default_factory=list)
    search_failed: bool = False  # the last one
    search_seconds: list[float] = field(default_factory=list)  # of those that were answered
    search_failures: int = 0
    calls: int = 0
    malformed_calls: int = 0
    end: str = ""
    """answer; malformed, limit (searches), truncated, full (tokens): no answer; environment,
    foreign_id: not the policy's doing."""
    reward: float | None = None  # None is neither trained on nor part of a mean


def encode_prompts(tokenizer: Any, rows: Sequence[Row], limit: int) -> list[Item]:
    """Rows through the model's own chat template, thinking off, without those over the limit."""
    items, longest = [], 0
    for row in rows:
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": row["question"]},
        ]
        text = tokenizer.apply_chat_template(
            messages,
            tools=[TOOL],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        prompt = tokenizer.encode(text, add_special_tokens=False)
        longest = max(longest, len(prompt))
        if len(prompt) <= limit:
            items.append(Item(prompt, row))
    if len(items) < len(rows):
        dropped = f"{len(rows) - len(items)} of {len(rows)} prompts"
        line = f"{dropped} are longer than --max-prompt-tokens {limit}, the longest {longest}"
        if not items:
            stop(line)
        print(f"left out: {line}")
    return items


def parse_turn(text: str) -> tuple[Literal["call", "answer", "malformed"], str]:
    """What a turn is: one well-formed call of TOOL at its end and the argument, or an answer.

    Templates write calls as XML (Qwen3.5) or JSON (Qwen3); a model writes what its template shows.
    """
    name, (parameter,) = TOOL["function"]["name"], TOOL["function"]["parameters"]["properties"]
    text = text.rpartition("</think>")[2].strip()
    if not re.search(r"</?tool_call|<function=", text):
        return "answer", text
    before, _, rest = text.partition("<tool_call>")
    body, closed, after = rest.rpartition("</tool_call>")
    whole = closed and not after and not re.search(r"</tool_call|<function=|<think>", before)
    body = body.strip() if whole else ""
    xml = rf"<function={name}>\s*<parameter={parameter}>(.*)</parameter>\s*</function>"
    argument: Any = None
    if found := re.fullmatch(xml, body, re.DOTALL):
        argument = found[1]
    else:
        try:
            call = json.loads(body)
            argument = call["arguments"][parameter] if call["name"] == name else None
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
    if not isinstance(argument, str) or not argument.strip():
        return "malformed", text
    if re.search(r"<tool_call>|<function=|<parameter=", argument):  # another call
        return "malformed", text
    return "call", argument.strip("\n")


def without_marks(tokenizer: Any, text: str) -> str:
    """A tool's text in which nothing can be taken for one of the template's marks."""
    for mark in sorted(tokenizer.get_added_vocab(), key=len, reverse=True):
        text = text.replace(mark, f"{mark[0]} {mark[1:]}")
    return text


def after_turn(tokenizer: Any, observation: str) -> list[int]:
    """What the template writes behind an assistant's turn when the tool has answered: the turn's
    end, the answer, the header of the next turn with its empty think block.

    Rendered with a placeholder as the turn: a template may trim real text, or drop its thinking.
    """
    messages = [
        {"role": "user", "content": "-"},
        {"role": "assistant", "content": PLACEHOLDER},
        {"role": "tool", "content": observation},
    ]
    text = tokenizer.apply_chat_template(
        messages, tools=[TOOL], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    _, found, after = text.partition(PLACEHOLDER)
    if not found:
        stop("this model's chat template does not write an assistant's text before a tool's answer")
    return tokenizer.encode(after, add_special_tokens=False)


def next_prompt(turn: Turn, after: list[int]) -> list[int]:
    """All ids so far and what follows, less the part of it that the model has written itself: a
    turn that stopped by itself ends with the end token, one that was cut does not.

    Sampled ids are never decoded and encoded again: they would be other ids.
    """
    ends = range(min(len(turn.tokens), len(after)), 0, -1)
    written = next((n for n in ends if turn.tokens[-n:] == after[:n]), 0)
    return turn.prompt + turn.tokens + after[written:]


def joined_turns(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Turns in which each prompt begins with all ids before it share a datum; a turn whose prompt
    does not (history rendered again, or cut) begins another."""
    runs: list[list[Turn]] = []
    so_far: list[int] = []
    for turn in turns:
        if runs and turn.prompt[: len(so_far)] == so_far:
            runs[-1].append(turn)
        else:
            runs.append([turn])
        so_far = turn.prompt + turn.tokens
    return runs


def build_datum(turns: Sequence[Turn], advantage: float) -> trio.Datum:
    """Position t of the input predicts token t + 1: all lists lose their first, the input its last.

    Only what was sampled has log-probabilities and an advantage; prompts, tool answers and the
    template's own tokens have 0 and so no gradient.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    advantages: list[float] = []
    for turn in turns:
        given = len(turn.prompt) - len(tokens)
        assert turn.prompt[: len(tokens)] == tokens, "a prompt does not continue the turns before"
        tokens += turn.prompt[len(tokens) :] + turn.tokens
        logprobs += [0.0] * given + turn.logprobs
        advantages += [0.0] * given + [advantage] * len(turn.tokens)
    lengths = [len(tokens), len(logprobs), len(advantages)]
    assert len(set(lengths)) == 1, f"tokens, logprobs, advantages: {lengths}"
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": logprobs[1:],
            "advantages": advantages[1:],
        },
    )


def packed(tokenizer: Any, results: Sequence[str], limit: int) -> str:
    """Numbered results, whole ones up to the limit; at least the beginning of the first."""
    text = ""
    for number, result in enumerate(results, start=1):
        line = f"[{number}] " + without_marks(tokenizer, " ".join(result.split()))
        longer = f"{text}\n{line}" if text else line
        ids = tokenizer.encode(longer, add_special_tokens=False)
        if len(ids) > limit:
            return text or tokenizer.decode(ids[:limit])
        text = longer
    return text or "No results."


# Ends that say nothing about the policy.
NOT_ITS_DOING = {"environment", "foreign_id"}


@dataclass(frozen=True)
class Rollout:
    """What every trajectory of a round shares."""

    sampler: trio.SamplingClient
    tokenizer: Any
    search: Search
    config: Config
    temperature: float

    async def request(self, prompt: list[int], count: int) -> list[Any]:
        """`count` turns after the prompt, none longer than the trajectory has room for."""
        room = self.config.max_trajectory_tokens - len(prompt)
        # Only at temperature 1, without top-p and top-k, are the log-probabilities that come back
        # those of the distribution that was sampled from.
        params = trio.SamplingParams(
            max_tokens=min(self.config.max_tokens, room),
            temperature=self.temperature,
            top_p=1.0,
            top_k=-1,
            stop=STOP,
        )
        response = await self.sampler.sample_async(trio.ModelInput.from_ints(prompt), count, params)
        return response.sequences

    async def react(self, trajectory: Trajectory, sequence: Any) -> tuple[str, str]:
        """How the trajectory ends with its final text, or "" and what the tool answers."""
        if not sequence.tokens or max(sequence.tokens) >= len(self.tokenizer):
            return "foreign_id", ""  # the model's vocabulary is padded: these cannot be trained
        if sequence.stop_reason == "length":
            return "truncated", ""
        text = self.tokenizer.decode(sequence.tokens)
        kind, content = parse_turn(text.removesuffix(STOP[0]))
        if kind == "answer":
            # Without the evidence it asked for, an answer says nothing about the policy.
            return ("environment" if trajectory.search_failed else "answer"), content
        trajectory.calls += 1
        if kind == "malformed":
            trajectory.malformed_calls += 1
            return "malformed", ""
        if len(trajectory.search_seconds) >= self.config.max_searches:
            return "limit", ""
        start = time.monotonic()
        try:
            results = await asyncio.to_thread(self.search, content.strip())
        except SearchFailedError:
            trajectory.search_failures += 1
            if trajectory.search_failed:  # twice in a row
                return "environment", ""
            trajectory.search_failed = True
            return "", "Search failed, try again."
        trajectory.search_failed = False
        trajectory.search_seconds.append(time.monotonic() - start)
        return "", packed(self.tokenizer, results, self.config.max_result_tokens)

    async def play(self, item: Item, first: Any) -> Trajectory:
        """A trajectory from its first turn on: a turn waits for nothing but the one before."""
        trajectory, prompt, sequence = Trajectory(), item.prompt, first
        while True:
            tokens, logprobs = sequence.tokens, sequence.logprobs
            assert len(tokens) == len(logprobs), f"{len(tokens)} tokens, {len(logprobs)} logprobs"
            trajectory.turns.append(Turn(prompt, tokens, logprobs))
            trajectory.end, text = await self.react(trajectory, sequence)
            if not trajectory.end:
                prompt = next_prompt(trajectory.turns[-1], after_turn(self.tokenizer, text))
                if len(prompt) >= self.config.max_trajectory_tokens:
                    trajectory.end = "full"
            if trajectory.end:
                break
            (sequence,) = await self.request(prompt, 1)
        if trajectory.end == "answer":
            trajectory.reward = reward_of(text, item.row["answers"])
        elif trajectory.end not in NOT_ITS_DOING:
            trajectory.reward = NO_ANSWER
        return trajectory

    async def group(self, item: Item, count: int) -> list[Trajectory]:
        """The first turns come from one request, so that their prompt is computed once."""
        firsts = await self.request(item.prompt, count)
        return await asyncio.gather(*[self.play(item, first) for first in firsts])

    async def groups(self, items: Sequence[Item], count: int) -> list[list[Trajectory]]:
        return await asyncio.gather(*[self.group(item, count) for item in items])


def group_advantages(rewards: Sequence[float | None]) -> list[float]:
    """Reward minus the mean of those that count; all 0 for a group that teaches nothing."""
    scored = [reward for reward in rewards if reward is not None]
    if len(scored) < 2 or max(scored) - min(scored) < 1e-6:
        return [0.0] * len(rewards)
    mean = fmean(scored)
    return [0.0 if reward is None else reward - mean for reward in rewards]


def build_batch(
    groups: Sequence[Sequence[Trajectory]], group_size: int
) -> tuple[list[trio.Datum], dict[str, float]]:
    """Datums of the groups that differ within, and what the rollouts were like."""
    data, degenerate, trained = [], 0, 0
    for group in groups:
        advantages = group_advantages([trajectory.reward for trajectory in group])
        if len(group) < group_size:  # came back short: its mean is not the group's
            advantages = [0.0] * len(group)
        degenerate += not any(advantages)
        for trajectory, advantage in zip(group, advantages, strict=True):
            if advantage:
                trained += 1
                data += [build_datum(run, advantage) for run in joined_turns(trajectory.turns)]
    return data, {
        "frac_degenerate": degenerate / len(groups),
        "datums": len(data),
        "train/datums_per_trajectory": len(data) / max(1, trained),
        "tokens/train": sum(datum.model_input.length for datum in data),
        **describe([trajectory for group in groups for trajectory in group]),
    }


def describe(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What a set of trajectories was like; training and evaluation report the same."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    scored = [t.reward for t in trajectories if t.reward is not None]
    searches = [seconds for t in trajectories for seconds in t.search_seconds]
    failures = sum(t.search_failures for t in trajectories)
    calls = sum(t.calls for t in trajectories)
    count, ends = len(trajectories), Counter(t.end for t in trajectories)
    return {
        "reward/mean": fmean(scored) if scored else math.nan,
        "reward/correct": fmean(r == 1 for r in scored) if scored else math.nan,
        "reward/format": fmean(r != NO_ANSWER for r in scored) if scored else math.nan,
        "reward/scored": len(scored),
        "rollout/turns": len(turns) / count,
        "rollout/search_calls": len(searches) / count,
        "rollout/valid_tool_call_rate": (
            1 - sum(t.malformed_calls for t in trajectories) / calls if calls else math.nan
        ),
        "rollout/trajectory_tokens": fmean(
            len(t.turns[-1].prompt) + len(t.turns[-1].tokens) for t in trajectories
        ),
        "search/success_rate": len(searches) / (len(searches) + failures) if searches else math.nan,
        "search/error_rate": failures / max(1, len(searches) + failures),
        "search/latency": fmean(searches) if searches else math.nan,
        "tokens/prefill": sum(len(turn.prompt) for turn in turns),
        "tokens/sample": sum(len(turn.tokens) for turn in turns),
        **{f"rollout/end_{end}": number / count for end, number in ends.items()},
    }


def evaluate(rollout: Rollout, items: Sequence[Item]) -> dict[str, float]:
    """Exact match on held-out questions; base and trained weights go through this."""
    trajectories = [group[0] for group in asyncio.run(rollout.groups(items, 1))]
    about = describe(trajectories)
    sources = [item.row["source"] for item in items]
    rewards: dict[str, list[float]] = {source: [] for source in sources}
    for source, trajectory in zip(sources, trajectories, strict=True):
        if trajectory.reward is not None:
            rewards[source].append(trajectory.reward)
    by_source = {f"em/{k}": fmean(r == 1 for r in v) for k, v in sorted(rewards.items()) if v}
    return {
        "em": about["reward/correct"],
        "em/macro": fmean(by_source.values()) if by_source else math.nan,
        **by_source,
        "format": about["reward/format"],
        "items": about["reward/scored"],
        "unscored": len(items) - about["reward/scored"],
        "turns": about["rollout/turns"],
        "search_calls": about["rollout/search_calls"],
        "search_error_rate": about["search/error_rate"],
    }


def write_whole(path: Path, text: str) -> None:
    """All of it or nothing, whenever the process is killed."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8", newline="\n")
    os.replace(temporary, path)


def save_run_state(config: Config, state: dict[str, Any]) -> None:
    write_whole(config.run_dir / "run_state.json", json.dumps(state, indent=2) + "\n")


def open_run(config: Config, rows: list[Row]) -> dict[str, Any]:
    """The state to start from: a new run's, or that of the last checkpoint of the run in the
    folder. Raises SystemExit when that one had other settings."""
    path = config.run_dir / "run_state.json"
    settings = {k: v for k, v in asdict(config).items() if k not in FREE_TO_CHANGE}
    settings["rows"] = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12]
    config.run_dir.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {"step": 0, "checkpoint": None, "weights": None, "eval": {}}
    if path.exists() and not config.fresh:
        state = json.loads(path.read_text(encoding="utf-8"))
        old = state["config"]
        changes = [f"{k} was {old.get(k)}, is {v}" for k, v in settings.items() if old.get(k) != v]
        if changes and not state["checkpoint"]:  # nothing trained is lost
            state = {"step": 0, "checkpoint": None, "weights": None, "eval": {}}
        elif changes:
            line = f"{config.run_dir} holds another run ({'; '.join(changes)})"
            stop(f"{line}; choose another --run-dir, or --fresh to discard that run")
    state["config"] = settings
    save_run_state(config, state)
    return state


def swanlab_call(function: str, /, **arguments: Any) -> None:
    """`swanlab.FUNCTION(...)`: a chart that fails is reported, and never stops a paid run."""
    try:
        getattr(importlib.import_module("swanlab"), function)(**arguments)
    except Exception as error:
        print(f"SwanLab {function} failed, metrics.jsonl goes on: {error}")


def open_log(config: Config, last_step: int) -> None:
    """Start SwanLab, and drop the metrics of steps after the checkpoint: they are done again."""
    mode: str = config.swanlab
    if mode == "auto":
        mode = "online" if os.environ.get("SWANLAB_API_KEY") else "offline"
    # swanlab itself stops at a plain value in this variable.
    project = os.environ.pop("SWANLAB_PROJECT", f"pytrio-{NAME}")
    details = asdict(config) | {"sdk": version("pytrio"), "skill": SKILL}
    details = json.loads(json.dumps(details, default=str))
    swanlab_call("init", project=project, name=config.run_dir.name, mode=mode, config=details,
                 log_dir=str(config.run_dir / "swanlab"))  # fmt: skip
    path = config.run_dir / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    # A line that was being written when the run was killed has no closing brace.
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    rows = [row for row in rows if row["step"] <= last_step]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        chart(row)


def chart(row: dict[str, Any]) -> None:
    values = {key: float(value) for key, value in row.items() if value is not None}
    swanlab_call("log", data=values, step=row["step"])


def log(config: Config, row: dict[str, Any]) -> None:
    """metrics.jsonl is the record, SwanLab a copy."""
    with (config.run_dir / "metrics.jsonl").open("a", encoding="utf-8", newline="\n") as file:
        file.write(json.dumps(row) + "\n")
    chart(row)


def train(
    service: trio.ServiceClient,
    tokenizer: Any,
    search: Search,
    items: list[Item],
    config: Config,
    state: dict[str, Any],
) -> None:
    """From the state's step to the last; afterwards the state names durable sampler weights."""
    if state["checkpoint"]:
        print(f"resuming after step {state['step']} from {state['checkpoint']}")
        training = service.create_training_client_from_state_with_optimizer(state["checkpoint"])
    else:
        training = service.create_lora_training_client(
            config.base_model, rank=config.rank, seed=config.seed
        )
    adam = trio.AdamParams(learning_rate=config.learning_rate)
    first = state["step"]
    bar = tqdm(range(first + 1, config.steps + 1), initial=first, total=config.steps, disable=None)
    for step in bar:
        start = time.monotonic()
        epoch, batch = batch_of_step(items, step - 1, config.prompts_per_step, config.seed)
        # A sampling client keeps the weights it was made with: each step needs a new one.
        sampler = training.save_weights_and_get_sampling_client()
        rollout = Rollout(sampler, tokenizer, search, config, temperature=1.0)
        groups = asyncio.run(rollout.groups(batch, config.group_size))
        data, metrics = build_batch(groups, config.group_size)
        if data:
            # One call for the whole batch, and both submitted before either is waited for.
            backward = training.forward_backward(data, loss_fn="importance_sampling")
            update = training.optim_step(adam)
            metrics["loss"] = backward.result().metrics["loss_mean"]
            update.result()
        metrics |= {"epoch": epoch, "learning_rate": config.learning_rate}
        metrics["time/step_seconds"] = time.monotonic() - start
        row = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        log(config, {"step": step, **row})
        bar.write(
            f"step {step:3d}/{config.steps}  correct {metrics['reward/correct']:.3f}"
            f"  format {metrics['reward/format']:.3f}"
            f"  degenerate {metrics['frac_degenerate']:.2f}  datums {len(data)}"
            f"  turns {metrics['rollout/turns']:.1f}"
            f"  valid calls {metrics['rollout/valid_tool_call_rate']:.2f}"
            f"  search errors {metrics['search/error_rate']:.2f}"
        )
        if step % config.save_every == 0 or step == config.steps:
            # The state file is written last: it never names a step that is not saved.
            path = training.save_state(f"step-{step}", overwrite=True).result().path
            state |= {"step": step, "checkpoint": path, "weights": None}
            state |= {"epoch": epoch, "cursor": step * config.prompts_per_step}
            state["eval"].pop("trained", None)
            save_run_state(config, state)
    # The loop's sampler weights expire after hours; these do not.
    saved = training.save_weights_for_sampler(f"{NAME}-step-{state['step']}")
    state["weights"] = saved.result().path
    save_run_state(config, state)


def main(config: Config) -> None:
    check_config(config)
    train_rows, held_out_rows = load_rows(config)
    rows = train_rows + held_out_rows
    check_reward(rows)
    if config.check_reward:
        print(f"the reward scores {len(rows)} gold answers and the tricky ones as it must")
        return
    search = open_search(config)
    state = open_run(config, rows)
    results = state["eval"]
    # Behind its first turn every trajectory asks for itself; the SDK's default is 16 at once.
    trio.configure(sampling_request_max_in_flight=64)
    service = trio.ServiceClient()
    open_log(config, state["step"])
    try:
        base = service.create_sampling_client(config.base_model)
        tokenizer = base.get_tokenizer()
        items = encode_prompts(tokenizer, train_rows, config.max_prompt_tokens)
        held_out = encode_prompts(tokenizer, held_out_rows, config.max_prompt_tokens)
        if config.eval_base and "base" not in results:
            rollout = Rollout(base, tokenizer, search, config, config.eval_temperature)
            results["base"] = evaluate(rollout, held_out)
            save_run_state(config, state)
        if state["step"] < config.steps or not state["weights"]:
            train(service, tokenizer, search, items, config, state)
        if "trained" not in results:
            tuned = service.create_sampling_client(config.base_model, model_path=state["weights"])
            rollout = Rollout(tuned, tokenizer, search, config, config.eval_temperature)
            results["trained"] = evaluate(rollout, held_out)
            save_run_state(config, state)
    finally:
        swanlab_call("finish")
    for name, result in results.items():
        numbers = "  ".join(f"{key} {value:.3g}" for key, value in result.items())
        print(f"{name:<8} held out: {numbers}")
    print(f"weights  {state['weights']}")


if __name__ == "__main__":
    arguments = tyro.cli(Config)
    if arguments.data == "sample":
        arguments = tyro.cli(Config, default=replace(arguments, **SAMPLE))
    main(arguments)
