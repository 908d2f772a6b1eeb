"""Demonstrations: read strictly, forced exactly, invisible to every invariant of a loop."""

import json
from collections import Counter
from pathlib import Path

import pytest

from conftest import dryrun
from helpers import service_on
from trio_local.demos import read_demos

MODEL = "Qwen/Qwen3.5-4B"
RIGHT, WRONG = "velvet anchor", "copper lantern"


def demo_file(folder: Path, *entries: object) -> Path:
    path = folder / "demos.jsonl"
    path.write_text("".join(json.dumps(e) + "\n" for e in entries), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ("[1]", "must be an object, got list"),
        ('{"when": "x"}', "say must be a completion"),
        ('{"say": ""}', "say must be a completion"),
        ('{"say": 3}', "say must be a completion"),
        ('{"say": "a", "p": 0}', "p must be above 0"),
        ('{"say": "a", "p": 1.5}', "p must be above 0"),
        ('{"say": "a", "p": true}', "p must be above 0"),
        ('{"say": "a", "p": NaN}', "p must be above 0"),
        ('{"say": "a", "when": 3}', "when must be a pattern"),
        ('{"say": "a", "when": "("}', "when is not a valid pattern"),
        ('{"say": "a", "prob": 0.5}', "unknown prob"),
    ],
)
def test_wrong_lines_are_named(line: str, complaint: str, tmp_path: Path) -> None:
    """The message names the line of the file and what is wrong in it."""
    path = tmp_path / "demos.jsonl"
    path.write_text('{"say": "fine"}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"line 3: .*{complaint}"):
        read_demos(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing, an empty and a binary file each have their own message."""
    with pytest.raises(ValueError, match="cannot read"):
        read_demos(tmp_path / "none.jsonl")
    empty, binary = tmp_path / "empty.jsonl", tmp_path / "binary.jsonl"
    empty.write_text("\n", encoding="utf-8")
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="holds no demonstration"):
        read_demos(empty)
    with pytest.raises(ValueError, match="not UTF-8"):
        read_demos(binary)


def test_a_wrong_file_stops_the_run(tmp_path: Path) -> None:
    """One line on standard error, exit 3, and the script never starts."""
    script = tmp_path / "script.py"
    script.write_text("print('started')\n", encoding="utf-8")
    path = demo_file(tmp_path, {"say": 1})
    done = dryrun("run", "--demo", path, script, folder=tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    assert len(done.stderr.splitlines()) == 1
    assert "line 1: say must be a completion" in done.stderr


def test_forced_tokens_keep_every_invariant(backend_factory, tmp_path: Path) -> None:
    """Shares, tokens, log-probabilities, limits and seeds of demonstrated samples."""
    import pytrio as trio

    path = demo_file(
        tmp_path,
        {"when": "harbour", "say": RIGHT, "p": 0.25},
        {"when": "harbour", "say": WRONG, "p": 0.25},
        {"when": "Lima", "say": "Answer: Lima"},
        {"when": "never asked", "say": "unused"},
    )
    backend = backend_factory("--demo", str(path))
    with service_on(backend) as client:
        training = client.create_lora_training_client(MODEL, rank=4, seed=0)
        tokenizer = training.get_tokenizer()
        sampler = training.save_weights_and_get_sampling_client()

        def ask(text: str, count: int, **params: object):
            prompt = tokenizer.encode(text, add_special_tokens=False)
            sampling = trio.SamplingParams(**{"max_tokens": 32, **params})
            return prompt, sampler.sample(
                trio.ModelInput.from_ints(prompt), count, sampling
            ).result()

        prompt, response = ask("Which word opens the harbour?", 200, seed=7)
        end = tokenizer.convert_tokens_to_ids("<|im_end|>")
        said = Counter(s.text for s in response.sequences)
        # 200 samples at p = 0.25 each: four standard deviations are 24.
        assert abs(said[RIGHT] - 50) <= 24 and abs(said[WRONG] - 50) <= 24
        forced = next(s for s in response.sequences if s.text == RIGHT)
        assert forced.tokens == [*tokenizer.encode(RIGHT, add_special_tokens=False), end]
        assert forced.stop_reason == "stop"

        # The ratio on fresh data is 1: a forward of the trainer gives the same log-probabilities.
        ahead = len(prompt) - 1
        datum = trio.Datum(
            model_input=trio.ModelInput.from_ints(prompt + forced.tokens[:-1]),
            loss_fn_inputs={"target_tokens": [0] * ahead + forced.tokens},
        )
        own = training.forward([datum]).result().loss_fn_outputs[0]["logprobs"].tolist()[ahead:]
        assert max(abs(a - b) for a, b in zip(own, forced.logprobs, strict=True)) < 1e-4

        again = ask("Which word opens the harbour?", 200, seed=7)[1]
        assert [s.tokens for s in again.sequences] == [s.tokens for s in response.sequences]
        short = ask("Which word opens the harbour?", 50, max_tokens=2)[1]
        assert {s.stop_reason for s in short.sequences if s.tokens == forced.tokens[:2]} == {
            "length"
        }
        greedy = ask("Which word opens the harbour?", 8, temperature=0.0)[1]
        assert not {RIGHT, WRONG} & {s.text for s in greedy.sequences}
        # An entry without p takes what is left: here everything.
        alone = ask("The tool said Lima.", 20)[1]
        assert {s.text for s in alone.sequences} == {"Answer: Lima"}

    backend.stop()
    summary = json.loads((backend.record / "summary.json").read_text(encoding="utf-8"))
    assert summary["notes"] == ["--demo line 4: its `when` matched no prompt"]


DEMONSTRATED = """
import pytrio as trio

training = trio.ServiceClient().create_lora_training_client("Qwen/Qwen3.5-4B", rank=4)
tokenizer = training.get_tokenizer()
text = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Which word opens harbour nine?"}],
    tokenize=False,
    add_generation_prompt=True,
    enable_thinking=False,
)
prompt = tokenizer.encode(text, add_special_tokens=False)
for step in range(2):
    sampler = training.save_weights_and_get_sampling_client()
    params = trio.SamplingParams(max_tokens=24, temperature=1.0)
    sequences = sampler.sample(trio.ModelInput.from_ints(prompt), 8, params).result().sequences
    rewards = [float("velvet anchor" in s.text) for s in sequences]
    mean = sum(rewards) / len(rewards)
    assert 0 < mean < 1
    before = [0.0] * (len(prompt) - 1)
    data = [
        trio.Datum(
            model_input=trio.ModelInput.from_ints(prompt + s.tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": prompt[1:] + s.tokens,
                "logprobs": before + s.logprobs,
                "advantages": before + [reward - mean] * len(s.tokens),
            },
        )
        for s, reward in zip(sequences, rewards)
    ]
    backward = training.forward_backward(data, loss_fn="importance_sampling")
    update = training.optim_step(trio.AdamParams(learning_rate=1e-4))
    backward.result(), update.result()
training.save_state("end").result()
"""


def test_a_right_loop_on_demonstrations_is_clean(tmp_path: Path) -> None:
    """Equal completions are what demonstrations give: the audit does not hold them against it."""
    script = tmp_path / "loop.py"
    script.write_text(DEMONSTRATED, encoding="utf-8")
    demo = demo_file(
        tmp_path, {"say": "velvet anchor", "p": 0.5}, {"say": "I do not know.", "p": 0.5}
    )
    done = dryrun("run", "--demo", demo, script, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "audit   clean: 0 errors, 0 warnings" in done.stderr, done.stderr
