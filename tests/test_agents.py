"""The agentic examples: ids that go on from turn to turn, calls, rewards, what is trained.

They are copied one file at a time, so they cannot share code; the first test keeps it the same.
"""

import ast
import copy
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from conftest import SKILL, outcome
from helpers import STANDIN
from test_examples import (
    assert_one_line,
    dryrun_command,
    environment,
    load,
    metrics_of,
    run_alone,
)

AGENTS = ("search-r1.py", "retool.py", "alfworld.py")
EVERY = pytest.mark.parametrize("file", AGENTS)
END = "<|im_end|>"
HEADER = "<|im_start|>assistant\n<think>\n\n</think>\n\n"

loaded = cache(load)


def agent(file: str) -> Any:
    """The example as a module that does not stand in for the package of its name."""
    module = loaded(file)
    if getattr(sys.modules.get("alfworld"), "NAME", "") == "alfworld":
        del sys.modules["alfworld"]
    return module


# -- shared code ----------------------------------------------------------------------------------

SHARED = (
    "stop Turn parse_turn after_turn next_prompt joined_turns build_datum group_advantages "
    "order_of_epoch batch_of_step Rollout.request write_whole save_run_state open_run swanlab_call "
    "chart log"
).split()


def source_of(file: str, name: str) -> str:
    """Text of a function, class or method, its decorators and comments included."""
    text = (SKILL / "examples" / file).read_text(encoding="utf-8")
    node: Any = ast.parse(text)
    for part in name.split("."):
        node = next(child for child in node.body if getattr(child, "name", "") == part)
    first = min(part.lineno for part in [node, *node.decorator_list])
    found = "\n".join(text.split("\n")[first - 1 : node.end_lineno])
    # The rows of one example are the ids of another's: only the annotation says so.
    return re.sub(r"rows: list\[\w+\]", "rows: list", found)


@pytest.mark.parametrize("name", SHARED)
def test_shared_code_is_the_same(name: str) -> None:
    sources = {file: source_of(file, name) for file in AGENTS}
    assert sources["retool.py"] == sources["search-r1.py"]
    assert sources["alfworld.py"] == sources["search-r1.py"]


def test_marks_are_taken_out_in_the_same_way() -> None:
    """Only these two show the model text that is not the environment's own."""
    sources = [source_of(file, "without_marks") for file in AGENTS[:2]]
    assert sources[0] == sources[1]


# -- token continuity -----------------------------------------------------------------------------

HOSTILE = {
    # Trims what an assistant wrote.
    "trims": """
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' + ('<think>\n\n</think>\n\n' if enable_thinking is false else '') -}}
{%- endif -%}""",
    # Drops what an earlier turn thought, and writes the tool's turn as a user's.
    "forgets": """
{%- for m in messages -%}
{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' -}}
{{- (m.content.split('</think>') | last).lstrip('\n') + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n<think>\n' + ('\n</think>\n\n' if enable_thinking is false else '') -}}
{%- endif -%}""",
    # Has a think block in the last turn only, the tools before the last question, and counts turns.
    "moves": """
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{{- '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' -}}
{%- endif -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' and loop.last -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- if m.role == 'assistant' -%}
{{- (m.content.split('</think>') | last) | trim + '<|im_end|>\n' -}}
{%- else -%}
{{- '(' + m.role + ')\n' + m.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' + ('<think>\n\n</think>\n\n' if enable_thinking is false else '') -}}
{%- endif -%}""",
}
RESPONSE = "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n" + HEADER
# What follows the end token of an assistant's turn when the tool has answered `{}`.
FOLLOWS = {
    "standin": RESPONSE,
    "qwen3": RESPONSE,
    "trims": "\n<|im_start|>tool\n{}<|im_end|>\n" + HEADER,
    "forgets": "\n<|im_start|>user\n{}<|im_end|>\n" + HEADER,
    "moves": "\n<|im_start|>tool\n(tool)\n{}<|im_end|>\n" + HEADER,
}
OBSERVATIONS = ["[1] The home of Ana is Paris.", "1\n  2\n3 < 4", "No results."]
CALL = "<tool_call>\n<function=search>\n<parameter=query>\nhome of Ana\n</parameter>\n</function>\n"
CALL += "</tool_call>"


@cache
def tokenizer_with(template: str) -> Any:
    """The stand-in's tokenizer with its own template, that of Qwen3, or a hostile one."""
    folder = STANDIN.parent / "qwen3" if template == "qwen3" else STANDIN
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if template in HOSTILE:
        tokenizer.chat_template = HOSTILE[template]
    return tokenizer


def encoded(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def letter_by_letter(tokenizer: Any, text: str) -> list[int]:
    """Ids that no encoding of the text gives."""
    ids = [i for letter in text for i in encoded(tokenizer, letter)]
    assert tokenizer.decode(ids) == text and ids != encoded(tokenizer, text)
    return ids


def sampled_turns(tokenizer: Any, how: str) -> list[list[int]]:
    """Three turns as a model may write them; the server returns the end token, or not."""
    ended = encoded(tokenizer, END)
    texts = {
        "ended": ["I look.\n" + CALL + END, CALL + END, "Answer: Paris" + END],
        "not ended": [CALL, "Then this.\n" + CALL, "Answer: Paris"],
        "space around": ["\n\n  Well \n" + CALL + "  \n\n" + END, "\n" + CALL + "\n ", " \n" + END],
        "thinks": [
            "Hm.\n</think>\n\n" + CALL + END,
            "<think>\nno\n</think>\n\n" + CALL,
            "</think>",
        ],
        "only the end": [END, END, END],
        "past the end": [CALL + END + "\n", END + "\n", CALL + "<|im_start|>" + END + "\n"],
    }
    if how == "other ids":
        return [
            letter_by_letter(tokenizer, "I look it up.") + encoded(tokenizer, CALL) + ended,
            letter_by_letter(tokenizer, "Paris or London, that is it."),
            letter_by_letter(tokenizer, "Answer: Paris") + ended,
        ]
    return [encoded(tokenizer, text) for text in texts[how]]


def trajectory(module: Any, tokenizer: Any, turns_tokens: Sequence[list[int]]) -> list[Any]:
    """The turns as `Rollout.play` makes them; every sampled token has its own log-probability."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Where does Ana live?"}],
        tools=[module.TOOL],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    prompt, turns, number = encoded(tokenizer, text), [], 0
    for tokens, observation in zip(turns_tokens, OBSERVATIONS, strict=True):
        logprobs = [-(number + i + 1) / 64 for i in range(len(tokens))]  # exact in float32
        number += len(tokens)
        turns.append(module.Turn(prompt, tokens, logprobs))
        prompt = module.next_prompt(turns[-1], module.after_turn(tokenizer, observation))
    return [*turns, module.Turn(prompt, [], [])]


WRITTEN = (
    "ended", "not ended", "space around", "thinks", "only the end", "past the end", "other ids",
)  # fmt: skip


@pytest.mark.parametrize("how", WRITTEN)
@pytest.mark.parametrize("template", FOLLOWS)
def test_a_prompt_is_all_ids_so_far_and_what_the_template_adds(template: str, how: str) -> None:
    module, tokenizer = agent("search-r1.py"), tokenizer_with(template)
    end, start = (tokenizer.convert_tokens_to_ids(mark) for mark in (END, "<|im_start|>"))
    turns = trajectory(module, tokenizer, sampled_turns(tokenizer, how))
    for turn, later, observation in zip(turns, turns[1:], OBSERVATIONS, strict=False):
        so_far = turn.prompt + turn.tokens
        assert later.prompt[: len(so_far)] == so_far
        added = later.prompt[len(so_far) :]
        # A model that goes on behind the end token may have written the template's newline, too.
        said = re.search(r"(<\|im_end\|>\n?)?\Z", tokenizer.decode(turn.tokens))
        assert said
        rest = (END + FOLLOWS[template].format(observation)).removeprefix(said[0])
        assert tokenizer.decode(added) == rest
        assert added == encoded(tokenizer, tokenizer.decode(added))
        between = later.prompt[len(turn.prompt) :]
        behind = between[len(turn.tokens) :]
        assert (turn.tokens + behind[: behind.index(start)]).count(end) == 1


def values(datum: Any, name: str) -> list[float]:
    return list(datum.loss_fn_inputs[name].data)


def check_datum(datum: Any, turns: Sequence[Any], advantage: float) -> None:
    """Every position by itself, from the last turn's ids and where each turn's prompt ended."""
    ids = turns[-1].prompt + turns[-1].tokens
    sampled = {
        len(turn.prompt) + i: logprob for turn in turns for i, logprob in enumerate(turn.logprobs)
    }
    assert datum.model_input.to_ints() == ids[:-1]
    assert values(datum, "target_tokens") == ids[1:]
    for t, (logprob, given) in enumerate(
        zip(values(datum, "logprobs"), values(datum, "advantages"), strict=True)
    ):
        assert logprob == sampled.get(t + 1, 0.0), t
        assert given == (advantage if t + 1 in sampled else 0.0), t
    assert len(values(datum, "advantages")) == len(ids) - 1
    assert sum(v != 0 for v in values(datum, "logprobs")) == sum(len(t.tokens) for t in turns)


@pytest.mark.parametrize("how", WRITTEN)
@pytest.mark.parametrize("template", FOLLOWS)
def test_one_datum_trains_what_was_sampled_and_nothing_else(template: str, how: str) -> None:
    module, tokenizer = agent("search-r1.py"), tokenizer_with(template)
    turns = trajectory(module, tokenizer, sampled_turns(tokenizer, how))[:-1]
    (run,) = module.joined_turns(turns)
    assert run == turns
    check_datum(module.build_datum(run, -0.75), turns, -0.75)


def test_a_history_that_was_rendered_again_begins_another_datum() -> None:
    """One changed id in the second prompt, then one that goes on from it."""
    module, tokenizer = agent("search-r1.py"), tokenizer_with("standin")
    first, second, third, _ = trajectory(module, tokenizer, sampled_turns(tokenizer, "other ids"))
    again = encoded(tokenizer, tokenizer.decode(second.prompt))
    assert again != second.prompt  # the same text
    changed = module.Turn(again, second.tokens, second.logprobs)
    prompt = module.next_prompt(changed, module.after_turn(tokenizer, OBSERVATIONS[1]))
    last = module.Turn(prompt, third.tokens, third.logprobs)
    runs = module.joined_turns([first, changed, last])
    assert runs == [[first], [changed, last]]
    for run in runs:
        check_datum(module.build_datum(run, 0.5), run, 0.5)
    with pytest.raises(AssertionError, match="does not continue"):
        module.build_datum([first, changed], 0.5)


@pytest.mark.parametrize("cut", [1, 5])
def test_a_history_that_was_cut_begins_another_datum(cut: int) -> None:
    module, tokenizer = agent("search-r1.py"), tokenizer_with("standin")
    first, second, *_ = trajectory(module, tokenizer, sampled_turns(tokenizer, "ended"))
    shorter = module.Turn(second.prompt[cut:], second.tokens, second.logprobs)
    ended_before = module.Turn(second.prompt[: len(first.prompt)], second.tokens, second.logprobs)
    assert module.joined_turns([first, shorter]) == [[first], [shorter]]
    assert module.joined_turns([first, ended_before]) == [[first], [ended_before]]


@EVERY
def test_a_template_without_the_assistants_text_stops_with_one_line(file: str) -> None:
    tokenizer = copy.copy(tokenizer_with("standin"))
    tokenizer.chat_template = (
        "{%- for m in messages if m.role != 'assistant' -%}{{- m.content -}}{%- endfor -%}"
    )
    with pytest.raises(SystemExit, match="does not write an assistant's text") as stopped:
        agent(file).after_turn(tokenizer, "7")
    assert "\n" not in str(stopped.value)


# -- calls ----------------------------------------------------------------------------------------


def xml(argument: str, name: str = "NAME", key: str = "KEY") -> str:
    inside = f"<function={name}>\n<parameter={key}>\n{argument}\n</parameter>\n</function>"
    return f"<tool_call>\n{inside}\n</tool_call>"


def as_json(arguments: object, name: str = "NAME", **more: object) -> str:
    call = {"name": name, "arguments": arguments, **more}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


# NAME and KEY are the tool's. What is said when it is no call: the text itself, trimmed.
SAID: list[tuple[str, str, str | None]] = [
    ("Answer: Paris", "answer", None),
    ("", "answer", None),
    ("  \n Answer: Paris \n", "answer", None),
    ("I would call search(home of Ana).", "answer", None),
    ("3 < 4 and 4 > 3", "answer", None),
    ("<think>\nHm.\n</think>\n\nAnswer: Paris", "answer", "Answer: Paris"),
    ("Hm.\n</think>\n\nAnswer: Paris", "answer", "Answer: Paris"),
    (f"<think>{xml('x')}</think>\nAnswer: Paris", "answer", "Answer: Paris"),
    ("<tool_call>", "malformed", None),
    ("</tool_call>", "malformed", None),
    ("<tool_call></tool_call>", "malformed", None),
    ("<tool_call>\nhome of Ana\n</tool_call>", "malformed", None),
    ("<tool_call>" + "[" * 100_000 + "</tool_call>", "malformed", None),  # nested too deeply
    ('<tool_call>{"name": ' * 2 + "</tool_call>", "malformed", None),
]
XML: list[tuple[str, str, str | None]] = [
    (xml("home of Ana"), "call", "home of Ana"),
    (xml("home of Ana").replace("\n", ""), "call", "home of Ana"),
    (xml("home of Ana").replace("\n", " \n "), "call", " \n home of Ana \n "),
    ("\n\n" + xml("home of Ana") + "\n  ", "call", "home of Ana"),
    ("I look it up.\n\n" + xml("home"), "call", "home"),
    ("Since 3 < 5 I look it up.\n\n" + xml("home"), "call", "home"),
    ("<think>\nHm.\n</think>\n\n" + xml("home"), "call", "home"),
    ("Hm.\n</think>\n\n" + xml("home"), "call", "home"),
    (xml("a < b and c > d"), "call", "a < b and c > d"),
    (xml("<b>bold</b>"), "call", "<b>bold</b>"),
    (xml("  two\n    four"), "call", "  two\n    four"),
    (xml("\n\nhome\n\n"), "call", "home"),
    (xml('say "</parameter>" twice'), "call", 'say "</parameter>" twice'),
    (xml("\u65e5\u672c\u8a9e"), "call", "\u65e5\u672c\u8a9e"),
    (xml("home").replace("\n", "\r\n"), "call", "\r\nhome\r"),
    (xml(""), "malformed", None),
    (xml(" \n\t "), "malformed", None),
    (xml("home") + xml("job"), "malformed", None),
    (xml("home") + "\n" + xml("job"), "malformed", None),
    (xml("home") + "\nAnswer: Paris", "malformed", None),
    (xml("home") + ".", "malformed", None),
    (xml("home", name="search_web"), "malformed", None),
    (xml("home", name="NAMEs"), "malformed", None),
    (xml("home", key="text"), "malformed", None),
    (xml("home").replace("</tool_call>", ""), "malformed", None),
    (xml("home").replace("</function>", ""), "malformed", None),
    (xml("home").replace("</parameter>", ""), "malformed", None),
    (xml("home").replace("<tool_call>", ""), "malformed", None),
    (xml("home").replace("<function=NAME>", ""), "malformed", None),
    (xml("home").replace("<parameter=KEY>", ""), "malformed", None),
    ("<function=NAME>home</function>", "malformed", None),
    (xml(xml("home")), "malformed", None),
    (xml("<tool_call>"), "malformed", None),
    # Two of anything are not one call.
    (xml("a\n</parameter>\n<parameter=KEY>\nb"), "malformed", None),
    (xml("a\n</parameter>\n</function>\n<function=NAME>\n<parameter=KEY>\nb"), "malformed", None),
    ("<think>\n" + xml("home"), "malformed", None),
    (xml("home") + "</think>", "answer", ""),
]
JSON: list[tuple[str, str, str | None]] = [
    (as_json({"KEY": "home of Ana"}), "call", "home of Ana"),
    (as_json({"KEY": "home of Ana"}).replace("\n", ""), "call", "home of Ana"),
    ("I look.\n" + as_json({"KEY": "home"}) + "\n", "call", "home"),
    ("Since 3 < 5:\n" + as_json({"KEY": "home"}), "call", "home"),
    ("<think>\nHm.\n</think>\n\n" + as_json({"KEY": "home"}), "call", "home"),
    (as_json({"KEY": "a\n    b\n"}), "call", "a\n    b"),
    (as_json({"KEY": "    a\n    b"}), "call", "    a\n    b"),
    (as_json({"KEY": "a\r\nb"}), "call", "a\r\nb"),
    (as_json({"KEY": "</tool_call>"}), "call", "</tool_call>"),
    (as_json({"KEY": "\u65e5\u672c"}), "call", "\u65e5\u672c"),
    (as_json({"KEY": "home"}, id="7", type="function"), "call", "home"),
    (as_json({"KEY": "home", "limit": 3}), "call", "home"),
    (as_json({"KEY": "home"}).replace("{", "{\n ").replace("}", "\n}"), "call", "home"),
    (as_json({"KEY": ""}), "malformed", None),
    (as_json({"KEY": " \n"}), "malformed", None),
    (as_json({"KEY": 7}), "malformed", None),
    (as_json({"KEY": None}), "malformed", None),
    (as_json({"KEY": ["home"]}), "malformed", None),
    (as_json({"KEY": {"KEY": "home"}}), "malformed", None),
    (as_json({"text": "home"}), "malformed", None),
    (as_json({}), "malformed", None),
    (as_json("home"), "malformed", None),
    (as_json('{"KEY": "home"}'), "malformed", None),
    (as_json(["home"]), "malformed", None),
    (as_json(None), "malformed", None),
    (as_json(3), "malformed", None),
    (as_json({"KEY": "home"}, name="other"), "malformed", None),
    (as_json({"KEY": "home"}) + as_json({"KEY": "job"}), "malformed", None),
    (as_json({"KEY": "home"}) + "\nAnswer: Paris", "malformed", None),
    (as_json({"KEY": "home"}).replace("</tool_call>", ""), "malformed", None),
    (as_json({"KEY": "home"}).replace("}}", "}"), "malformed", None),
    (as_json({"KEY": as_json({"KEY": "home"})}), "malformed", None),
    ("<tool_call>[]</tool_call>", "malformed", None),
    ("<tool_call>null</tool_call>", "malformed", None),
    ('<tool_call>"home"</tool_call>', "malformed", None),
    ('<tool_call>{"name": "NAME"}</tool_call>', "malformed", None),
    ('<tool_call>{"arguments": {"KEY": "home"}}</tool_call>', "malformed", None),
    ("<tool_call>{'name': 'NAME', 'arguments': {'KEY': 'a'}}</tool_call>", "malformed", None),
    ('<tool_call>{"name": "NAME", "arguments": {"KEY": ' + "9" * 5000 + "}}</tool_call>",
     "malformed", None),
]  # fmt: skip


@EVERY
@pytest.mark.parametrize(
    ("text", "kind", "content"),
    [
        pytest.param(*case, id=f"{form}-{number}")
        for form, cases in (("said", SAID), ("xml", XML), ("json", JSON))
        for number, case in enumerate(cases)
    ],
)
def test_a_turn_is_a_call_an_answer_or_malformed(
    file: str, text: str, kind: str, content: str | None
) -> None:
    module = agent(file)
    function = module.TOOL["function"]
    name, (key,) = function["name"], function["parameters"]["required"]
    text = text.replace("NAME", name).replace("KEY", key)
    expected = content if content is not None else text.strip()
    if content is None and "</think>" in text:
        expected = text.rpartition("</think>")[2].strip()
    assert module.parse_turn(text) == (kind, expected.replace("NAME", name).replace("KEY", key))


def test_white_space_cannot_hold_up_the_loop() -> None:
    """The event loop waits for this; a turn of 1,024 tokens can hold 20,000 blanks."""
    module = agent("search-r1.py")
    code = (
        f"import re, json\nfrom typing import Any, Literal\nTOOL = {module.TOOL!r}\n"
        + source_of("search-r1.py", "parse_turn")
        + "\nfor many in (' ' * 20_000, '\\n' * 20_000):\n"
        " for text in ('<tool_call>' + many + 'x', 'a' + many + '<tool_call>'):\n"
        "  assert parse_turn(text)[0] == 'malformed'\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=20, check=True)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("form", [xml, lambda code: as_json({"KEY": code})])
def test_code_arrives_as_it_was_written(form: Callable[[str], str], newline: str) -> None:
    module = agent("retool.py")
    code = newline.join(["def f(n):", "    if n:", "        return '''a", "  b'''", "", "r = f(1)"])
    text = form(code).replace("NAME", "code_interpreter").replace("KEY", "code")
    kind, content = module.parse_turn(text)
    assert (kind, content) == ("call", code)
    space: dict[str, Any] = {}
    exec(compile(content, "code.py", "exec"), space)  # ours, from three lines above
    assert space["r"] == "a\n  b"
    indented = newline.join(["if n < 2:", "\treturn n"])
    text = form("    " + indented).replace("NAME", "code_interpreter").replace("KEY", "code")
    assert module.parse_turn(text) == ("call", "    " + indented)


@pytest.mark.parametrize("file", AGENTS[:2])
@pytest.mark.parametrize("template", ["standin", "qwen3"])
def test_marks_in_a_tools_text_are_only_text(file: str, template: str) -> None:
    module, tokenizer = agent(file), tokenizer_with(template)
    marks = tokenizer.get_added_vocab()
    assert len(marks) >= 9
    for mark in marks:
        made = module.without_marks(tokenizer, f"one {mark} two{mark}")
        assert not set(encoded(tokenizer, made)) & set(marks.values())
        assert made.replace(f"{mark[0]} {mark[1:]}", mark) == f"one {mark} two{mark}"
        assert tokenizer.decode(encoded(tokenizer, made)) == made
    rng = random.Random(0)
    pieces = [piece for mark in marks for piece in (mark, mark[:3], mark[3:], mark[0], mark[1:])]
    for _ in range(500):  # marks inside marks, and halves that meet
        made = module.without_marks(tokenizer, "".join(rng.choices(pieces, k=8)))
        assert not set(encoded(tokenizer, made)) & set(marks.values()), made
    plain = "3 < 4 > 2, a|b, <b>bold</b>\n\t\u65e5\u672c end"
    assert module.without_marks(tokenizer, plain) == plain


# -- rewards and batches --------------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0, 0.0, 0.0], [0.75, -0.25, -0.25, -0.25]),
        ([1.0, None, 0.0], [0.5, 0.0, -0.5]),
        ([None, 1.0, -0.5, -0.5, None], [0.0, 1.0, -0.5, -0.5, 0.0]),
        ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0]),
        ([1.0, 1.0 - 1e-9], [0.0, 0.0]),
        ([1.0, None, None], [0.0, 0.0, 0.0]),
        ([None, None], [0.0, 0.0]),
        ([], []),
    ],
)
def test_advantages_are_of_what_was_scored(
    file: str, rewards: list[float | None], expected: list[float]
) -> None:
    assert agent(file).group_advantages(rewards) == pytest.approx(expected)


def trajectories(module: Any, group: int, rewards: Sequence[float | None]) -> list[Any]:
    """Trajectories of two turns each, recognisable by their ids."""
    made = []
    for number, reward in enumerate(rewards):
        first = module.Turn([1, 2], [100 * group + number], [-1.0])
        second = module.Turn([*first.prompt, *first.tokens, 3], [4, 5], [-2.0, -3.0])
        end = "environment" if reward is None else "answer"
        settings: dict[str, Any] = {"turns": [first, second], "reward": reward, "end": end}
        if module.NAME == "alfworld":
            settings["game"] = module.sample_games(1)[0]
        made.append(module.Trajectory(**settings))
    return made


@EVERY
def test_a_batch_is_of_whole_groups_that_differ(file: str) -> None:
    module = agent(file)
    groups = [
        trajectories(module, 1, [1.0, 0.0, None, 0.0]),
        trajectories(module, 2, [1.0, 0.0, 1.0]),  # one did not come back
        trajectories(module, 3, [1.0, 1.0, 1.0, 1.0]),
        trajectories(module, 4, [None, 1.0, None, None]),
        trajectories(module, 5, [0.0, 0.0, 1.0, 1.0]),
    ]
    data, metrics = module.build_batch(groups, 4)
    advantages = {d.model_input.to_ints()[2]: max(values(d, "advantages"), key=abs) for d in data}
    expected = {100: 2 / 3, 101: -1 / 3, 103: -1 / 3, 500: -0.5, 501: -0.5, 502: 0.5, 503: 0.5}
    assert advantages == pytest.approx(expected, rel=1e-6)
    assert len(data) == metrics["datums"] == 7
    assert metrics["frac_degenerate"] == 3 / 5
    assert metrics["train/datums_per_trajectory"] == 1
    assert metrics["tokens/train"] == 7 * 5
    assert metrics["reward/scored"] == 19 - 4
    assert metrics["rollout/end_environment"] == 4 / 19


@EVERY
def test_a_trajectory_in_two_datums_is_counted(file: str) -> None:
    module = agent(file)
    (group,) = [trajectories(module, 1, [1.0, 0.0])]
    first, second = group[0].turns
    group[0].turns[1] = module.Turn([9, *second.prompt[1:]], second.tokens, second.logprobs)
    data, metrics = module.build_batch([group], 2)
    assert len(data) == 3 and metrics["train/datums_per_trajectory"] == 1.5
    assert [values(datum, "advantages") for datum in data[:2]] == [[0, 0.5], [0, 0, 0, 0.5, 0.5]]


# -- runs -----------------------------------------------------------------------------------------

SHORT = ("--steps", "1", "--no-eval-base", "--eval-rows", "4", "--swanlab", "disabled")
FOUR = ("--group-size", "4", "--prompts-per-step", "4")
# What people get wrong -> what stands in the file, and what they would write.
MISTAKES = {
    "trains the tool's answer": (
        "        advantages += [0.0] * given + [advantage] * len(turn.tokens)\n",
        "        advantages += [0.0] * given + [advantage] * len(turn.tokens)\n"
        "        if turn is not turns[0]:\n"
        "            advantages[-len(turn.tokens) - given] = advantage\n",
    ),
    "trains ids that were encoded again": (
        "            tokens, logprobs = sequence.tokens, sequence.logprobs\n",
        "            text = self.tokenizer.decode(sequence.tokens)\n"
        "            tokens = self.tokenizer.encode(text, add_special_tokens=False)\n"
        "            logprobs = sequence.logprobs[: len(tokens)]\n",
    ),
    "encodes the history again": (
        "                prompt = next_prompt(trajectory.turns[-1], "
        "after_turn(self.tokenizer, text))\n",
        "                prompt = next_prompt(trajectory.turns[-1], "
        "after_turn(self.tokenizer, text))\n"
        "                text = self.tokenizer.decode(prompt)\n"
        "                prompt = self.tokenizer.encode(text, add_special_tokens=False)\n",
    ),
}


def dry(path: Path, *arguments: str, folder: Path, options: Sequence[str] = ()) -> tuple[int, str]:
    """Exit code and output of a dry run."""
    command = dryrun_command(path, *SHORT, *arguments)
    command[3:3] = options
    done = outcome(command, folder, environment(), 200)
    return done.returncode, done.stdout + done.stderr


def with_mistake(mistake: str, folder: Path) -> Path:
    right, wrong = MISTAKES[mistake]
    text = (SKILL / "examples" / "search-r1.py").read_text(encoding="utf-8")
    assert text.count(right) == 1
    (folder / "search-r1.py").write_text(text.replace(right, wrong), encoding="utf-8")
    return folder / "search-r1.py"


@pytest.mark.slow
def test_the_audit_is_clean_whatever_ids_the_model_writes(tmp_path: Path) -> None:
    path = SKILL / "examples" / "search-r1.py"
    code, output = dry(path, *FOUR, folder=tmp_path, options=["--respell", "1"])
    assert code == 0, output
    assert "clean: 0 errors, 0 warnings" in output
    (row,) = metrics_of(tmp_path)
    assert row["datums"] >= 4 and row["rollout/turns"] > 1.5
    assert row["train/datums_per_trajectory"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("mistake", list(MISTAKES)[:2])
def test_the_audit_finds_what_must_not_be_trained(mistake: str, tmp_path: Path) -> None:
    path = with_mistake(mistake, tmp_path)
    code, output = dry(path, *FOUR, folder=tmp_path, options=["--respell", "1"])
    assert code == 2, output
    assert re.search(r"^error +A0[12]\b", output, re.MULTILINE), output


@pytest.mark.slow
def test_a_history_encoded_again_is_never_joined(tmp_path: Path) -> None:
    """Its datums are right, each after the prompt it was sampled from, but there are more."""
    path = with_mistake("encodes the history again", tmp_path)
    code, output = dry(path, *FOUR, folder=tmp_path, options=["--respell", "1"])
    assert code in (0, 2), output
    assert not re.search(r"^error +A0[12]\b", output, re.MULTILINE), output
    (row,) = metrics_of(tmp_path)
    assert row["train/datums_per_trajectory"] > 1.3


@pytest.mark.slow
def test_an_outage_of_the_search_is_not_the_policys_doing(tmp_path: Path) -> None:
    path = SKILL / "examples" / "search-r1.py"
    code, output = dry(path, "--search-faults", "0.5", folder=tmp_path)
    assert code == 0, output
    assert "clean: 0 errors, 0 warnings" in output
    (row,) = metrics_of(tmp_path)
    assert row["search/error_rate"] > 0.3 and row["rollout/end_environment"] > 0
    ended = row["rollout/end_environment"] + row.get("rollout/end_foreign_id", 0)
    assert row["reward/scored"] == round(64 * (1 - ended)) < 64
    assert row["datums"] <= row["reward/scored"]


@pytest.mark.parametrize("broken", ["textworld", "fast_downward"])
def test_a_missing_engine_is_one_line(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "path" / broken
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('no engine here')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    copied = shutil.copy(SKILL / "examples" / "alfworld.py", tmp_path)
    done = run_alone(Path(copied), "--data", "sample", folder=folder)
    assert_one_line(done, r"no engine here.*pip install alfworld==0\.4\.2")
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "--data alfworld needs --games"),
        (["--games", "nowhere"], f"no games in nowhere{re.escape(os.sep)}.*json_2.1.1"),
        (["--data", "other"], "other"),
    ],
)
def test_missing_games_are_one_line(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    done = run_alone(SKILL / "examples" / "alfworld.py", *arguments, folder=tmp_path)
    if arguments[:1] == ["--data"]:  # tyro's own complaint is a box
        assert done.returncode == 2 and "Traceback" not in done.stderr
        return
    assert_one_line(done, complaint)
    assert not list(tmp_path.iterdir())
