"""The tool of search-r1: a BM25 index that is whole or refused, and a polite Wikipedia client."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from conftest import SKILL
from test_agents import agent, encoded, tokenizer_with, xml
from test_examples import assert_one_line, run_alone
from test_sandbox import Scripted

EXAMPLE = SKILL / "examples" / "search-r1.py"


@pytest.fixture
def module() -> Any:
    return agent("search-r1.py")


def sample_config(module: Any, **settings: Any) -> Any:
    return module.Config(**({"data": "sample", "backend": "bm25", "top_k": 1} | settings))


# -- the sample's world ---------------------------------------------------------------------------


def queries(module: Any) -> dict[str, str]:
    """The natural query of every fact -> the fact."""
    found = {}
    for fact in module.sample_world(1)[1]:
        what, _, value = fact.removeprefix("The ").removesuffix(".").partition(" is ")
        assert value
        found[what] = fact
    return found


def test_every_fact_is_found_first(module: Any) -> None:
    search = module.open_search(sample_config(module))
    asked = queries(module)
    assert len(asked) == len(module.NAMES) * 5 + len(module.NAMES) // 2 * 4 == 266
    for query, fact in asked.items():
        assert search(query) == [fact]
        assert search(f"What is the {query}?") == [fact]


def test_two_hops_lead_to_the_answer(module: Any) -> None:
    """Every question can be answered with the tool: one search, or one after another."""
    search = module.open_search(sample_config(module))
    rows, _ = module.sample_world(10_000)
    assert {row["source"] for row in rows} == {"one_hop", "two_hops"}
    assert len({row["question"] for row in rows}) == len(rows)
    for row in rows:
        if row["source"] == "two_hops":
            words = row["question"].removesuffix("?").split()
            relation, link, who = words[3], words[6], words[8]
            (first,) = search(f"{link} of {who}")
            other = first.removesuffix(".").split()[-1]
            (second,) = search(f"{relation} of {other}")
            assert second == f"The {relation} of {other} is {row['answers'][0]}."


def test_many_threads_get_what_one_gets(module: Any) -> None:
    search = module.open_search(sample_config(module, top_k=5))
    asked = list(queries(module))[:180] + [f"home job of {name}" for name in module.NAMES[:20]]
    alone = [search(query) for query in asked]
    assert len({tuple(found) for found in alone}) > 150
    with ThreadPoolExecutor(32) as threads:
        for _ in range(3):
            assert list(threads.map(search, asked)) == alone


def test_a_query_of_unknown_words_finds_nothing(module: Any) -> None:
    search = module.open_search(sample_config(module, top_k=3))
    unknown = ["", " ", "zyzzyva", "the of is", "\u65e5\u672c", "?!", "'\"", "\x00", "a" * 9999]
    for query in unknown:
        assert search(query) == [], query
    found = search("pizza zyzzyva")
    assert found and all("pizza" in text for text in found)  # no text without any of the words


# -- index files ----------------------------------------------------------------------------------

DOCUMENTS = [
    "The cat sat on the mat.",
    "A dog chased the cat across the garden.",
    "Rivers run to the sea.\u2028The Nile is one.",
    "",
    "The dog sleeps.",
]


def write_corpus(path: Path, texts: list[Any]) -> Path:
    lines = [json.dumps({"text": text, "title": "x"}, ensure_ascii=False) for text in texts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def built(module: Any, folder: Path) -> tuple[Any, Path]:
    """The configuration whose index has been built, and its folder."""
    corpus = write_corpus(folder / "corpus.jsonl", DOCUMENTS)
    config = sample_config(module, data="x.jsonl", corpus=corpus, index=folder / "index", top_k=3)
    module.open_index(config)
    return config, folder / "index"


def test_an_index_is_read_back(module: Any, tmp_path: Path) -> None:
    config, index = built(module, tmp_path)
    asked = ["dog", "cat", "the Nile", "river", "rivers", "cat dog", "zyzzyva"]
    fresh = module.open_index(sample_config(module, data="x.jsonl", corpus=config.corpus, top_k=3))
    expected = [fresh(query) for query in asked]
    assert expected[0] and set(expected[0]) == {DOCUMENTS[1], DOCUMENTS[4]} and not expected[-1]
    write_corpus(tmp_path / "corpus.jsonl", ["another corpus of cats"])
    for corpus in (config.corpus, None):  # the index is what counts, once it is there
        again = module.open_index(
            sample_config(module, data="x.jsonl", corpus=corpus, index=index, top_k=3)
        )
        assert [again(query) for query in asked] == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "index"]


@pytest.mark.parametrize("fails_at", ["save", "dumps", "replace"])
def test_an_index_is_written_whole_or_not_at_all(
    module: Any, fails_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_corpus(tmp_path / "corpus.jsonl", DOCUMENTS)
    config = sample_config(module, data="x", corpus=corpus, index=tmp_path / "index")

    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    owner = {"save": module.bm25s.BM25, "dumps": module.json, "replace": module.os}[fails_at]
    with monkeypatch.context() as patch:
        patch.setattr(owner, fails_at, fail)
        with pytest.raises(KeyboardInterrupt):
            module.open_index(config)
    assert not (tmp_path / "index").exists()
    assert module.open_index(config)("dog")  # what was left does not stand in the way
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "index"]


def spoil(index: Path, how: str) -> None:
    texts = index / "texts.json"
    arrays = sorted(index.glob("*.npy"))
    assert arrays and texts.exists()
    if how == "truncated array":
        arrays[0].write_bytes(arrays[0].read_bytes()[:-9])
    elif how == "empty array":
        arrays[-1].write_bytes(b"")
    elif how == "garbage":
        texts.write_text("{garbage", encoding="utf-8")
    elif how == "garbage parameters":
        (index / "params.index.json").write_text("[]", encoding="utf-8")
    elif how == "garbage vocabulary":
        (index / "vocab.index.json").write_text("{", encoding="utf-8")
    elif how == "missing texts":
        texts.unlink()
    elif how == "missing array":
        arrays[1].unlink()
    elif how == "fewer texts":
        texts.write_text(json.dumps(DOCUMENTS[:-1]), encoding="utf-8")
    elif how == "more texts":
        texts.write_text(json.dumps([*DOCUMENTS, "x"]), encoding="utf-8")
    elif how == "no folder":
        for path in index.iterdir():
            path.unlink()
        index.rmdir()
        index.write_text("a file", encoding="utf-8")
    elif how == "empty folder":
        for path in index.iterdir():
            path.unlink()


@pytest.mark.parametrize(
    "how",
    ["truncated array", "empty array", "garbage", "garbage parameters", "garbage vocabulary",
     "missing texts", "missing array", "fewer texts", "more texts", "no folder", "empty folder"],
)  # fmt: skip
def test_a_damaged_index_is_one_line(module: Any, how: str, tmp_path: Path) -> None:
    config, index = built(module, tmp_path)
    spoil(index, how)
    with pytest.raises(SystemExit) as stopped:
        module.open_index(config)
    line = str(stopped.value)
    assert line.startswith("search-r1: ") and "\n" not in line
    assert f"{index} is no readable index" in line


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (None, "cannot read"),
        ([], "in every line"),
        (["", "  "], "in every line"),
        (['{"text": ""}', '{"text": " \\n"}'], "in every line"),
        (['{"text": "a cat"}', '{"title": "a dog"}'], "in every line"),
        (['{"text": "a cat"}', '{"text": 7}'], "in every line"),
        (['{"text": "a cat"}', '{"text": null}'], "in every line"),
        (['{"text": "a cat"}', '{"text": "a'], "line 2 is no JSON object"),
        (['{"text": "a cat"}', '"a dog"'], "line 2 is no JSON object"),
        (['{"text": "a cat"}', "7"], "line 2 is no JSON object"),
    ],
)
def test_a_corpus_that_is_none_is_one_line(
    module: Any, lines: list[str] | None, complaint: str, tmp_path: Path
) -> None:
    corpus, index = tmp_path / "corpus.jsonl", tmp_path / "index"
    if lines is not None:
        corpus.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        module.open_index(sample_config(module, corpus=corpus, index=index))
    line = str(stopped.value)
    assert "\n" not in line and str(corpus) in line and complaint in line
    assert not index.exists()


@pytest.mark.parametrize("text", ["! ?", "the of", "\u65e5"])
def test_a_corpus_without_any_word_to_find_is_one_line(
    module: Any, text: str, tmp_path: Path
) -> None:
    """Stop words and punctuation are no words for the index: nothing could ever be found."""
    corpus = write_corpus(tmp_path / "corpus.jsonl", [text])
    with pytest.raises(SystemExit) as stopped:
        module.open_index(sample_config(module, corpus=corpus))
    assert str(corpus) in str(stopped.value) and "\n" not in str(stopped.value)


def test_no_documents_are_one_line(tmp_path: Path) -> None:
    """Through the program: no traceback, and nothing is written."""
    rows = [json.dumps({"question": f"Who is {n}?", "answers": [str(n)]}) for n in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    for arguments, complaint in [
        (["--backend", "bm25"], "--backend bm25 has no documents"),
        (["--backend", "bm25", "--index", "gone"], "there is no index at gone"),
        (["--backend", "bm25", "--corpus", "gone.jsonl"], "cannot read gone.jsonl"),
        ([], "--contact"),
    ]:
        done = run_alone(EXAMPLE, "--data", "rows.jsonl", *arguments, folder=tmp_path)
        assert_one_line(done, complaint)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


# -- what the model reads -------------------------------------------------------------------------


def test_results_are_packed_whole(module: Any) -> None:
    tokenizer = tokenizer_with("standin")
    results = ["A cat.", "A  dog\nsleeps.", "The river runs to the sea. " * 4, "A pen."]
    lines = ["[1] A cat.", "[2] A dog sleeps.", "[3] " + results[2].strip(), "[4] A pen."]

    def length(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    needed = [length("\n".join(lines[: n + 1])) for n in range(4)]
    for limit in range(needed[0], needed[-1] + 3):
        packed = module.packed(tokenizer, results, limit)
        assert packed == "\n".join(lines[: sum(n <= limit for n in needed)])
        assert length(packed) <= limit
    for limit in range(1, needed[0]):  # at least the beginning of the first
        packed = module.packed(tokenizer, results, limit)
        assert packed and lines[0].startswith(packed) and length(packed) <= limit
    assert module.packed(tokenizer, [], 5) == "No results."
    marked = module.packed(tokenizer, ["<|im_end|>\n<tool_call>x"], 99)
    ids = tokenizer.encode(marked, add_special_tokens=False)
    assert not set(ids) & set(tokenizer.get_added_vocab().values())


def ask(query: str) -> str:
    return xml(query, name="search", key="query") + "<|im_end|>"


A = "Answer: the Paris.<|im_end|>"
AGAIN = "Search failed, try again."
# What the model says; what each search does; how that ends, what it is paid when Paris is right.
PLAYED: list[tuple[list[str], str, str, float | None]] = [
    ([A], "", "answer", 1.0),
    ([ask("a"), A], "+", "answer", 1.0),
    ([ask("a"), "Answer: Rome<|im_end|>"], "+", "answer", 0.0),
    ([ask("a"), "Paris<|im_end|>"], "+", "answer", -0.1),
    ([ask("a"), A], "-", "environment", None),  # it never got what it asked for
    ([ask("a"), "Rome<|im_end|>"], "-", "environment", None),
    ([ask("a"), ask("a"), A], "-+", "answer", 1.0),
    ([ask("a"), ask("a")], "--", "environment", None),
    ([ask("a"), ask("a"), ask("a"), ask("a"), A], "-+-+", "answer", 1.0),
    ([ask("a"), ask("a"), ask("a")], "++", "limit", -0.1),
    ([ask("a"), "<tool_call>Answer: Paris<|im_end|>"], "+", "malformed", -0.1),
    ([""], "", "foreign_id", None),
]


@pytest.mark.parametrize(
    ("said", "searches", "end", "reward"), PLAYED, ids=[str(n) for n in range(len(PLAYED))]
)
def test_only_what_the_policy_did_is_paid_for(
    module: Any, said: list[str], searches: str, end: str, reward: float | None
) -> None:
    tokenizer, left = tokenizer_with("standin"), list(searches)

    def search(query: str) -> list[str]:
        assert query == "a"
        if left.pop(0) == "-":
            raise module.SearchFailedError("down")
        return ["Answer: Rome"]

    sampler = Scripted(tokenizer, said)
    rollout = module.Rollout(sampler, tokenizer, search, module.Config(max_searches=2), 1.0)
    row = {"question": "Where?", "answers": ["paris"], "source": "all"}
    item = module.Item(encoded(tokenizer, "Where?"), row)
    ((played,),) = asyncio.run(rollout.groups([item], 1))
    assert (played.end, played.reward) == (end, reward)
    assert not left and not sampler.tokens
    assert played.search_failures == searches.count("-")
    assert [turn.prompt for turn in played.turns] == sampler.prompts
    for turn, done in zip(played.turns[1:], searches, strict=False):
        shown = AGAIN if done == "-" else "[1] Answer: Rome"
        assert f"\n{shown}\n</tool_response>" in tokenizer.decode(turn.prompt[-60:])


# -- Wikipedia ------------------------------------------------------------------------------------


@dataclass
class Wiki:
    """A MediaWiki that answers with what `replies` holds, then as usual."""

    url: str = ""
    replies: list[tuple[int, dict[str, str], bytes]] = field(default_factory=list)
    seen: list[tuple[float, dict[str, list[str]], str]] = field(default_factory=list)
    delay: float = 0.0


def pages(query: str, limit: int) -> bytes:
    """As the API does: not in the order of the results, and one page without an extract."""
    found: list[dict[str, Any]] = [
        {"pageid": 7 * n, "ns": 0, "title": f"{query} {n}", "index": n, "extract": f"About {n}."}
        for n in range(1, limit + 1)
    ]
    del found[0]["extract"]
    return json.dumps({"batchcomplete": True, "query": {"pages": found[::-1]}}).encode()


@pytest.fixture
def wiki() -> Iterator[Wiki]:
    state, lock = Wiki(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = parse_qs(urlsplit(self.path).query)
            with lock:
                state.seen.append((time.monotonic(), asked, self.headers["User-Agent"]))
                reply = state.replies.pop(0) if state.replies else None
            time.sleep(state.delay)
            query, limit = asked["gsrsearch"][0], int(asked["gsrlimit"][0])
            status, headers, body = reply or (200, {}, pages(query, limit))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                self.wfile.write(body)
            except OSError:  # the client has given up
                pass

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}/w/api.php"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield state
    server.shutdown()
    server.server_close()


def client(module: Any, wiki: Wiki, **attributes: Any) -> Any:
    found = module.Wikipedia(wiki.url, "me@example.org", 3)
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


def test_wikipedia_is_asked_as_its_rules_want(module: Any, wiki: Wiki) -> None:
    config = module.Config(wiki=wiki.url, contact="me@example.org", top_k=4)
    found = module.open_search(config)("Nile " * 100)
    ((_, asked, user_agent),) = wiki.seen
    query = ("Nile " * 100)[:300]
    # By index, and a page without an extract is its title.
    assert found == [f"{query} 1: ", *(f"{query} {n}: About {n}." for n in (2, 3, 4))]
    assert "me@example.org" in user_agent and "search-r1" in user_agent
    expected = {"action": "query", "format": "json", "generator": "search", "gsrsearch": query}
    expected |= {"gsrlimit": "4", "exlimit": "4", "prop": "extracts", "explaintext": "1"}
    expected |= {"exintro": "1", "formatversion": "2"}
    assert {key: asked[key][0] for key in expected} == expected


def test_nothing_found_is_no_failure(module: Any, wiki: Wiki) -> None:
    wiki.replies = [(200, {}, b'{"batchcomplete": true}')]
    assert client(module, wiki)("zyzzyva") == []
    assert len(wiki.seen) == 1


def test_threads_keep_the_pause(module: Any, wiki: Wiki) -> None:
    """Between the beginnings of requests, also when an answer takes longer than the pause."""
    wiki.delay = 0.9
    ask = client(module, wiki)
    assert ask.pause_seconds >= 0.3
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(ask, "abcdef"))
    assert [answer[1] for answer in answers] == [f"{query} 2: About 2." for query in "abcdef"]
    starts = sorted(at for at, _, _ in wiki.seen)
    gaps = [after - before for before, after in zip(starts, starts[1:], strict=False)]
    # Seen from the other end of the connection, where one may arrive a little late.
    assert len(gaps) == 5 and min(gaps) > 0.2
    assert starts[-1] - starts[0] > 5 * 0.3 - 0.1
    assert starts[-1] - starts[0] < 4 * 0.9  # they do not wait for each other's answers


def test_told_to_wait_it_waits(module: Any, wiki: Wiki) -> None:
    """All threads do, not only the one that was told."""
    wiki.replies = [(429, {"Retry-After": "2"}, b"slow down")]
    ask = client(module, wiki)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(ask, "a")
        while not wiki.seen:
            time.sleep(0.01)
        time.sleep(0.1)
        second = threads.submit(ask, "b")
        assert first.result()[1] == "a 2: About 2." and second.result()[1] == "b 2: About 2."
    starts = [at for at, _, _ in wiki.seen]
    assert len(starts) == 3
    assert starts[1] - starts[0] >= 1.99 and starts[2] - starts[1] > 0.2
    assert starts[2] - starts[0] < 4


def test_an_outage_passes(module: Any, wiki: Wiki) -> None:
    wiki.replies = [(503, {"Retry-After": "soon"}, b"<html>"), (500, {}, b"")]
    assert client(module, wiki)("a")[1] == "a 2: About 2."
    starts = [at for at, _, _ in wiki.seen]
    assert len(starts) == 3
    assert starts[1] - starts[0] >= 0.99 and starts[2] - starts[1] >= 1.99  # longer each time


GOOD = pages("a", 3)
BAD_REPLIES: dict[str, tuple[int, dict[str, str], bytes]] = {
    "500": (500, {}, GOOD),
    "404": (404, {}, b"no such page"),
    "no JSON": (200, {}, b"<html>Wikimedia Error</html>"),
    "half": (200, {}, GOOD[: len(GOOD) // 2]),
    "no UTF-8": (200, {}, b'{"query": "\xff\xfe"}'),
    "a list": (200, {}, b"[]"),
    "a list of pages without a title": (200, {}, b'{"query": {"pages": [{"index": 1}]}}'),
    "pages without an index": (200, {}, b'{"query": {"pages": [{"title": "a"}]}}'),
    "pages that are texts": (200, {}, b'{"query": {"pages": ["a"]}}'),
    "pages by number": (200, {}, b'{"query": {"pages": {"7": {"title": "a", "index": 1}}}}'),
    "query is null": (200, {}, b'{"query": null}'),
    "an error": (200, {}, b'{"error": {"code": "ratelimited", "info": "slow down"}}'),
}


@pytest.mark.parametrize("kind", BAD_REPLIES)
def test_three_bad_answers_are_a_failed_search(
    module: Any, kind: str, wiki: Wiki, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever comes: the rollout knows this one exception."""
    wiki.replies = [BAD_REPLIES[kind]] * 3
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    ask = client(module, wiki)
    with pytest.raises(module.SearchFailedError):
        ask("a")
    assert len(wiki.seen) == ask.attempts == 3


def test_a_slow_answer_is_a_failed_search(module: Any, wiki: Wiki) -> None:
    wiki.delay = 0.6
    ask = client(module, wiki)
    ask.client.timeout = 0.2
    start = time.monotonic()
    with pytest.raises(module.SearchFailedError, match="ReadTimeout"):
        ask("a")
    assert time.monotonic() - start < 9 and len(wiki.seen) == 3


def test_nobody_there_is_a_failed_search(module: Any) -> None:
    ask = module.Wikipedia("http://127.0.0.1:9/w/api.php", "me@example.org", 3)
    with pytest.raises(module.SearchFailedError, match="ConnectError"):
        ask("a")


def test_faults_on_purpose_are_as_many_as_asked_for(module: Any) -> None:
    search = module.open_search(sample_config(module, search_faults=0.25))
    failed = 0
    for _ in range(400):
        try:
            search("pizza")
        except module.SearchFailedError:
            failed += 1
    assert 70 <= failed <= 130
