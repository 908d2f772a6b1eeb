"""The text is true: its blocks run, and every check of check_docs finds what is wrong."""

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

import check_docs
from check_docs import ROOT, SKILL, Page, Problem, Worker
from docs import budgets, claims, commands, pages, running, sdk
from docs.pages import Block
from docs.running import Program

PAGES = {path.name: pages.parse_page(path) for path in pages.page_paths()}
RUN, READ = pages.EXECUTED, pages.FRAGMENT


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """A backend, and a process beside it that runs blocks."""
    with running.running_worker() as started:
        yield started


# -- the text as it is -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_blocks_run(name: str, worker: Worker) -> None:
    """Every Python block of a page runs by itself, with the real SDK against the backend."""
    blocks = running.python_blocks(PAGES[name])
    runs = worker.run([running.program_of(block) for block in blocks])
    found = [
        p for block, run in zip(blocks, runs, strict=True) for p in running.run_problem(block, run)
    ]
    assert not found, "\n".join(map(str, found))


@pytest.mark.parametrize("name", PAGES)
def test_page_is_true(name: str) -> None:
    """Links, files, commands, options, rules, metrics, names of the SDK, fragments, budgets."""
    found = check_docs.check_text([PAGES[name]])
    assert not found, "\n".join(map(str, found))


def test_cheap_commands_run() -> None:
    """What the shell blocks say and costs little is run as it is written."""
    count, found = commands.run_commands(list(PAGES.values()))
    assert count and not found, "\n".join(map(str, found))


def test_missing_names_are_missing(worker: Worker) -> None:
    """The rows of the table of missing names that need a run to be refuted."""
    programs = sdk.refutations([PAGES["SKILL.md"]])
    runs = worker.run(list(programs.values()))
    assert programs and all(run.status for run in runs), [run.output for run in runs]


def test_stamp_and_parity() -> None:
    """The API reference is of the installed SDK; both READMEs say the same."""
    found = check_docs.check_stamp() + check_docs.check_readmes(list(PAGES.values()))
    assert not found, "\n".join(map(str, found))


def test_there_is_something_to_check() -> None:
    """An extraction that finds nothing would pass everything."""
    blocks = [block for page in PAGES.values() for block in page.blocks]
    spans = [span for page in PAGES.values() for span in page.spans]
    assert len([block for block in blocks if block.info == RUN]) >= 20
    assert len([c for page in PAGES.values() for c in commands.shell_commands(page)]) >= 30
    assert len(spans) > 500 and len([s for s in spans if s.column == sdk.MISSING_COLUMN]) >= 5
    # Every fence of the text is one of the blocks.
    fences = sum(len(re.findall(r"^ *```\w", p.text, re.MULTILINE)) for p in PAGES.values())
    assert fences == len(blocks)


# -- the runner ------------------------------------------------------------------------------------


def test_failing_block_is_named_by_its_line(worker: Worker) -> None:
    """A failure names the page's own line and ends with the error."""
    page = PAGES["grpo.md"]
    block = running.python_blocks(page)[0]
    lines = block.body.splitlines()
    lines[4] = "raise RuntimeError('planted')"
    broken = replace(block, body="\n".join(lines))
    (found,) = running.run_problem(broken, worker.run([running.program_of(broken)])[0])
    assert str(found).startswith(f"skills/pytrio-skill/references/grpo.md:{block.line + 4}: ")
    assert found.text.endswith("RuntimeError: planted")


def test_blocks_are_apart(worker: Worker) -> None:
    """Own module, own folder, own home; exit statuses are those of Python; time is limited."""
    leave = "import os, pathlib, pytrio\npytrio.planted = 1\npathlib.Path('x').write_text('x')\n"
    look = (
        "import os, pathlib, pytrio\n"
        "assert not hasattr(pytrio, 'planted') and not pathlib.Path('x').exists()\n"
        "assert pathlib.Path.home() == pathlib.Path.cwd() and __name__ == '__main__'\n"
    )
    late = "import atexit, threading\natexit.register(print, 'exit')\n"
    late += "threading.Timer(0.3, print, ['thread']).start()\n"
    sources = [leave, look, "raise SystemExit(3)", "raise SystemExit('no')", late, "1 / 0"]
    runs = worker.run([Program("block", source) for source in sources])
    assert [run.status for run in runs] == [0, 0, 3, 1, 0, 1]
    assert runs[3].output == "no\n" and runs[4].output == "thread\nexit\n"
    worker.seconds = 1
    try:
        (run,) = worker.run([Program("block", "import time\ntime.sleep(60)")])
    finally:
        worker.seconds = running.BLOCK_SECONDS
    assert run.status in running.TOO_LONG


def test_blocks_run_without_fork(tmp_path) -> None:
    """Where there is no fork, a program runs in a fresh process."""
    program = {"source": "print('here')\nraise SystemExit(4)", "name": "b", "arguments": []}
    (tmp_path / "program.json").write_text(json.dumps({**program, "seconds": 60}), encoding="utf-8")
    assert running.run_apart(tmp_path) == 4
    assert (tmp_path / "output.txt").read_text(encoding="utf-8") == "here\n"


@pytest.mark.parametrize("example", ["grpo-gsm8k.py", "retool.py", "quickstart_sft.py"])
def test_options_of_examples_are_those_of_help(example: str, worker: Worker) -> None:
    """The options that are read from an example's source are those that its `--help` prints."""
    path = SKILL / "examples" / example
    program = Program(str(path), path.read_text(encoding="utf-8"), ("--help",))
    (run,) = worker.run([program])
    printed = re.findall(r"^. (?:-h, )?(--.*?)(?:  |$)", run.output, re.MULTILINE)
    assert set(commands.flags_in(printed)) == commands.example_flags(example), run.output


# -- one word changed in any block -----------------------------------------------------------------

# transformers ignores keywords that it does not know; `dict` makes a key of them.
TAKES_ANYTHING = ("apply_chat_template", "encode", "decode", "dict", "from_pretrained")


def changeable(block: Block, tree: ast.AST) -> Iterator[ast.Call]:
    """Calls that cannot swallow a wrong keyword.

    Left out: functions that take any keyword, and what runs under a condition only. A fragment is
    read and not run, so of it only calls of the SDK.
    """
    nodes = list(ast.walk(tree))
    conditional: set[ast.AST] = set()
    for node in nodes:
        parts = [*node.body, *node.orelse] if isinstance(node, ast.If) else []
        parts += [node] if isinstance(node, ast.ExceptHandler) else []
        conditional.update(inner for part in parts for inner in ast.walk(part))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    swallowing = {*TAKES_ANYTHING, *(f.name for f in functions if f.args.kwarg)}
    ours = {*sdk.sdk_callables(), *sdk.sdk_classes()}
    for node in nodes:
        if isinstance(node, ast.Call) and node not in conditional:
            name = sdk.last_part(node.func)
            if name not in swallowing and (block.info == RUN or name in ours):
                yield node


def words_of(block: Block) -> list[tuple[int, int, str]]:
    """Line, column in bytes and text of each word to misspell: the keyword arguments.

    Without a keyword the SDK's methods, without one all functions that are called.
    """
    calls = list(changeable(block, ast.parse(block.body)))
    words = [(k.lineno, k.col_offset, k.arg) for call in calls for k in call.keywords if k.arg]
    for functions in (sdk.sdk_callables(), None):
        words = words or [
            (call.func.end_lineno or 0, (call.func.end_col_offset or 0) - len(name), name)
            for call in calls
            if (name := sdk.last_part(call.func)) and (functions is None or name in functions)
        ]
    return sorted(words)


def misspelt(block: Block, word: tuple[int, int, str]) -> Block:
    """The block with the first letter of a word doubled."""
    line, column, text = word
    lines = block.body.splitlines(keepends=True)
    raw = lines[line - 1].encode()
    lines[line - 1] = (raw[:column] + text[:1].encode() + raw[column:]).decode()
    return replace(block, body="".join(lines))


def survivors(changes: list[tuple[Block, tuple[int, int, str]]], worker: Worker) -> list[str]:
    """The misspelt words that neither the static check nor running the block finds."""
    changed = [(misspelt(block, word), word) for block, word in changes]
    unseen = [(b, word) for b, word in changed if not check_docs.block_problems(b)]
    runs = worker.run([running.program_of(block) for block, _ in unseen if block.info == RUN])
    status = iter(run.status for run in runs)
    return [
        f"{block.page.name}:{block.line + line - 1}: {text}"
        for block, (line, _, text) in unseen
        if block.info == READ or next(status) == 0
    ]


def all_blocks() -> list[Block]:
    """All Python blocks of all pages."""
    return [b for page in PAGES.values() for b in page.blocks if b.info in (RUN, READ)]


def test_one_misspelt_word_fails(worker: Worker) -> None:
    """In each block the word that the block's hash chooses is misspelt, and that is found."""
    changes = []
    for block in all_blocks():
        digest = int(hashlib.sha256(block.body.encode()).hexdigest(), 16)
        words = words_of(block)
        changes.append((block, words[digest % len(words)]))
    assert changes and not survivors(changes, worker)


@pytest.mark.slow
def test_every_misspelt_word_fails(worker: Worker) -> None:
    """Every word of every block, one at a time."""
    changes = [(block, word) for block in all_blocks() for word in words_of(block)]
    assert len(changes) > 100 and not survivors(changes, worker)


# -- planted mistakes ------------------------------------------------------------------------------

# Page, what is replaced (nothing: appended) and by what, and words of the problem it must give.
PLANTED = {
    "link": ("grpo.md", "(dpo.md)", "(dpoo.md)", "the link dpoo.md leads nowhere"),
    "anchor": ("vision.md", "(data.md#", "(data.md#x", "data.md has no heading #x"),
    "own anchor": ("grpo.md", "", "[x](#no-such-heading)", "no heading #no-such-heading"),
    "file": ("grpo.md", "", "See references/nothing.md.", "there is no references/nothing.md"),
    "bare file": ("grpo.md", "", "`nothing.py`", "there is no file nothing.py"),
    "option": ("grpo.md", "`--check-reward`", "`--check-rewards`", "option --check-rewards"),
    "option of run": ("losses.md", "--reduction sum`", "--reductions sum`", "--reductions"),
    "option of an example": ("grpo.md", "-- --data sample", "-- --dato sample", "option --dato"),
    "value": ("losses.md", "", "`dryrun.py run --reduction no LOOP.py`", "invalid choice: 'no'"),
    "subcommand": ("dryrun.md", "dryrun.py models", "dryrun.py model", "invalid choice: 'model'"),
    "script": ("grpo.md", "run examples/grpo-gsm8k.py", "run examples/no.py", "no examples/no.py"),
    "target": ("README.md", "", "```bash\nmake nothing\n```", "no target nothing"),
    "pin": ("README.md", "", "```bash\npip install pytrio==0.1.0\n```", "pins pytrio=="),
    "command": ("README.md", "", "```bash\ndocker run x\n```", "no entry of COMMAND_KINDS"),
    "quote": ("README.md", "", "```bash\necho 'x\n```", "No closing quotation"),
    "language": ("README.md", "", "```sh\nls\n```", "'sh' is no kind of block"),
    "no end of a fence": ("README.md", "", "```text\nabc", "never closed"),
    "no fence": ("README.md", "", "    ls", "'indented' is no kind of block"),
    "rule": ("grpo.md", "(A09)", "(A99)", "there is no rule A99"),
    "rule's name": ("audit.md", "`A05-lag`", "`A05-lags`", "there is no rule A05-lags"),
    "metric": ("grpo.md", "`rollout/lag`", "`rollout/lags`", "no example logs rollout/lags"),
    "metric of a table": ("grpo.md", "| `datums` |", "| `datum` |", "no example logs datum"),
    "metric of another": ("grpo.md", "`rollout/lag`", "`dpo/loss`", "the page does not name"),
    "symbol": ("grpo.md", "", "`trio.SampleParams`", "pytrio has no SampleParams"),
    "field": ("grpo.md", "", "`SamplingParams.max_token`", "SamplingParams has no max_token"),
    "keyword": ("grpo.md", "", "`SamplingParams(max_new_tokens=8)`", "no field max_new_tokens"),
    "argument": ("grpo.md", "", "`sample(..., n=4)`", "sample has no argument n"),
    "too many": ("grpo.md", "", "`training.get_tokenizer(1)`", "takes 0 positional"),
    "method": ("grpo.md", "", "`service.create_client(x)`", "ServiceClient has no create_c"),
    "near miss": ("grpo.md", "", "`save_weight_for_sampler(name)`", "save_weights_for_sampler"),
    "server's metric": ("grpo.md", "", '`metrics["loss"]`', "metrics knows no 'loss'"),
    "wildcard": ("grpo.md", "", "`create_*_asyncs`", "the SDK has no create_*_asyncs"),
    "setting": ("grpo.md", "", '`loss_fn_config={"clip_low": 1}`', "loss_fn_config knows no"),
    "loss": ("grpo.md", "", '`forward_backward(data, loss_fn="grpo")`', "loss_fn knows no 'grpo'"),
    "left-out owner": ("grpo.md", "", "`.results()`", "nothing has a .results()"),
    "command line of the SDK": ("api.md", "", "`trio sign-in`", "trio has no command sign-in"),
    "its option": ("api.md", "", "`trio login --again`", "trio has no option --again"),
    "inline command": ("grpo.md", "", "`dryrun.py repeat ...`", "dryrun.py has no command repeat"),
    "existing name": ("SKILL.md", "`client.close()`", "`client.sample()`", "sample() exists"),
    "lines": ("grpo.md", "", "word\n\n" * 100, "lines, allowed are 250"),
    "router's tokens": ("SKILL.md", "", "word " * 3000, "tokens, allowed are 2500"),
    "router's gap": ("SKILL.md", "references/dapo.md", "DAPO", "does not name references/dapo.md"),
    "fragment": ("grpo.md", "", "```python fragment\nif\n```", "does not compile"),
    "fragment's name": (
        "grpo.md", "", "```python fragment\ntrio.SamplingParams(max_token=1)\n```", "C16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", PLANTED)
def test_planted_mistake_is_found(mistake: str) -> None:
    """Each kind of mistake, planted in a copy of a page, is the one new problem there."""
    name, old, new, expected = PLANTED[mistake]
    page = PAGES[name]
    assert old in page.text
    text = page.text.replace(old, new, 1) if old else f"{page.text}\n\n{new}\n"
    before = {problem.text for problem in page_problems(page)}
    found = page_problems(pages.parse_page(page.path, text))
    assert [p for p in found if expected in p.text and p.text not in before], list(map(str, found))


def page_problems(page: Page) -> list[Problem]:
    """All that reading one page finds."""
    return check_docs.check_text([page])


def test_note_and_router_have_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of router and note is bounded for every task, lookup pages excepted."""
    monkeypatch.setattr(budgets, "MAX_TASK_TOKENS", budgets.MAX_ROUTER_TOKENS)
    found = budgets.check_budget(PAGES["SKILL.md"])
    costs = budgets.reading_costs(PAGES["SKILL.md"])
    tasks = [c for c in costs if c.note and c.note.split("/")[1] not in budgets.UNBOUNDED_NOTES]
    assert len(tasks) >= 15
    assert len([p for p in found if p.text.startswith("SKILL.md and ")]) == len(tasks)


@pytest.mark.parametrize(
    "pattern, replacement, expected",
    [
        (r"^## ", "", "heading level missing: 2"),
        (r"^make demo\b", "make test", "command missing: make demo"),
        (r"\]\(LICENSE\)", "](CHANGELOG.md)", "link missing: LICENSE"),
    ],
)
def test_readmes_are_compared(pattern: str, replacement: str, expected: str) -> None:
    """A heading, a command or a link that only one README has is told."""
    english = PAGES["README.md"]
    path = ROOT / "README.zh-CN.md"
    assert not check_docs.check_parity(english, pages.parse_page(path, english.text))
    changed, count = re.subn(pattern, replacement, english.text, count=1, flags=re.MULTILINE)
    found = check_docs.check_parity(english, pages.parse_page(path, changed))
    assert count == 1 and expected in [problem.text for problem in found]


def test_tokens_are_counted_high() -> None:
    """Each Chinese character and each digit is a token; the rest are 3.2 characters each."""
    assert budgets.token_count("多轮对话") == 4
    assert budgets.token_count("2026") == 4
    assert budgets.token_count("a" * 32) == 10


def test_metrics_come_from_the_examples() -> None:
    """Placeholders of f-strings stand for words of the file, not for any text."""
    logged = claims.metrics_of(("alfworld.py",))
    assert logged.have("held_out/success_rate") and logged.have("rollout/end_...")
    assert not logged.have("held_outs/success_rate") and not logged.have("nonsense/...")
