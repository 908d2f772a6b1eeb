"""Seeded bugs: small text changes of the correct loops in `loops/`, and the rules meant for them.

Every bug is one that people and coding agents have made. Most run to the end without a word; the
ones that do not are marked, because there the source check is the only help before the bill.
"""

# The texts are lines of the loops with their indentation, quoted once more.
# ruff: noqa: E501

from dataclasses import dataclass
from pathlib import Path

LOOPS = Path(__file__).resolve().parent / "loops"

Change = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Mutant:
    """One bug. `change` holds (old, new) texts; each `old` occurs once in the loop's source.

    `expect` are the rules of which at least one has to fire; `crashes` says that the script ends
    with an error on its own, so that no rule over a finished recording can be asked for.
    """

    name: str
    loop: str
    change: Change
    expect: tuple[str, ...]
    why: str
    args: tuple[str, ...] = ()
    crashes: bool = False


def loop_source(loop: str) -> str:
    return (LOOPS / f"{loop}.py").read_text(encoding="utf-8")


def mutated_source(mutant: Mutant) -> str:
    """The loop's source with the bug in it.

    Raises ValueError when a text to replace is missing, occurs more than once, or when the result
    does not parse.
    """
    source = loop_source(mutant.loop)
    for old, new in mutant.change:
        count = source.count(old)
        if count != 1:
            raise ValueError(
                f"{mutant.name}: {old!r} occurs {count} times in {mutant.loop}.py, not once"
            )
        source = source.replace(old, new)
    try:
        compile(source, f"{mutant.name}.py", "exec", dont_inherit=True)
    except SyntaxError as error:
        raise ValueError(f"{mutant.name}: line {error.lineno}: {error.msg}") from error
    return source


# Texts that several changes of one loop share.
_SFT_CALLS = """\
    backward = training.forward_backward(batch, loss_fn="cross_entropy")
    step = training.optim_step(adam)
"""
_SFT_MASK = "    mask = [0.0] * len(prompt) + [1.0] * len(answer)\n"
_SFT_SAVE = 'training.save_weights_for_sampler("chat-sft").result()'

_SFT = (
    Mutant(
        "sft-mask-late",
        "sft",
        (("weights = mask[1:]", "weights = mask[:-1]"),),
        ("A04", "A03"),
        "the first answer token is not trained",
    ),
    Mutant(
        "sft-mask-early",
        "sft",
        (("weights = mask[1:]", "weights = mask[2:] + [1.0]"),),
        ("A04", "A03"),
        "the last token of the generation prompt is trained",
    ),
    Mutant(
        "sft-no-shift",
        "sft",
        (("inputs = tokens[:-1]", "inputs = tokens[1:]"),),
        ("A03",),
        "targets equal inputs",
    ),
    Mutant(
        "sft-no-shift-full",
        "sft",
        (
            ("inputs = tokens[:-1]", "inputs = tokens"),
            ("targets = tokens[1:]", "targets = tokens"),
            ("weights = mask[1:]", "weights = mask"),
        ),
        ("A03",),
        "labels as for a Hugging Face model, which shifts by itself",
    ),
    Mutant(
        "sft-double-shift",
        "sft",
        (("targets = tokens[1:]", "targets = tokens[2:] + [END]"),),
        ("A03",),
        "targets are two ahead",
    ),
    Mutant(
        "sft-auto-shift",
        "sft",
        (
            (
                'forward_backward(batch, loss_fn="cross_entropy")',
                'forward_backward(batch, loss_fn="cross_entropy", auto_shift=True)',
            ),
        ),
        ("A03",),
        "shifted data are shifted again by the server",
    ),
    Mutant(
        "sft-all-weights-one",
        "sft",
        ((_SFT_MASK, "    mask = [1.0] * len(tokens)\n"),),
        ("A04",),
        "the prompt is trained",
    ),
    Mutant(
        "sft-mask-inverted",
        "sft",
        ((_SFT_MASK, "    mask = [1.0] * len(prompt) + [0.0] * len(answer)\n"),),
        ("A04",),
        "the prompt is trained and the answer is not",
    ),
    Mutant(
        "sft-key-weight",
        "sft",
        (('"weights": weights}', '"weight": weights}'),),
        ("C01", "C02", "A04"),
        "a misspelt key: all weights are one",
    ),
    Mutant(
        "sft-labels-kept-out",
        "sft",
        (('{"target_tokens": targets, "weights": weights}', '{"target_tokens": targets}'),),
        ("A04",),
        "the mask is built and never sent",
    ),
    Mutant(
        "sft-rows-without-weight",
        "sft",
        (("[1.0] * len(answer)\n", "[float(len(answer) > 14)] * len(answer)\n"),),
        ("A04",),
        "short answers have no trained token",
    ),
    Mutant(
        "sft-no-end-token",
        "sft",
        (("add_special_tokens=False) + [END]", "add_special_tokens=False)"),),
        ("A04", "C25"),
        "the model is not taught to stop",
    ),
    Mutant(
        "sft-wrong-end-token",
        "sft",
        (
            (
                'END = tokenizer.convert_tokens_to_ids("<|im_end|>")',
                'END = tokenizer.convert_tokens_to_ids("<|endoftext|>")',
            ),
        ),
        ("A04", "C25"),
        "the document's end instead of the turn's",
    ),
    Mutant(
        "sft-newline-after-end",
        "sft",
        (
            (
                "add_special_tokens=False) + [END]",
                'add_special_tokens=False) + [END] + tokenizer.encode("\\n")',
            ),
        ),
        ("A04", "C19"),
        "the template's newline behind the end token is trained",
    ),
    Mutant(
        "sft-header-trained",
        "sft",
        (
            (
                _SFT_MASK,
                "    border = len(render(question, add_generation_prompt=False))\n"
                "    mask = [0.0] * border + [1.0] * (len(tokens) - border)\n",
            ),
        ),
        ("A04",),
        "the border is measured without the generation prompt",
    ),
    Mutant(
        "sft-think-block-trained",
        "sft",
        (
            (
                "tokenizer.encode(reply, add_special_tokens=False)",
                'tokenizer.encode("<think>\\n\\n</think>\\n\\n" + reply, add_special_tokens=False)',
            ),
        ),
        ("A04", "C19"),
        "a second, empty think block is trained as content",
    ),
    Mutant(
        "sft-tail-cut",
        "sft",
        (
            (
                "return None  # cutting it would lose the end token",
                "tokens, mask = tokens[:MAX_LENGTH], mask[:MAX_LENGTH]",
            ),
        ),
        ("A04", "C25"),
        "truncation removes the end token of long rows",
    ),
    Mutant(
        "sft-padded",
        "sft",
        (
            (
                "    inputs = tokens[:-1]\n",
                "    room = MAX_LENGTH - len(tokens)\n"
                "    tokens = tokens + [tokenizer.pad_token_id] * room\n"
                "    mask = mask + [0.0] * room\n"
                "    inputs = tokens[:-1]\n",
            ),
        ),
        ("A02", "A04", "A18"),
        "padding to one length, as a data collator does",
    ),
    Mutant(
        "sft-own-format",
        "sft",
        (
            (
                "    prompt = render(question)\n",
                '    prompt = tokenizer.encode(f"Question: {question}\\nAnswer: ")\n',
            ),
        ),
        ("A17", "A04", "C14"),
        "trained without the template that the model is asked with",
    ),
    Mutant(
        "sft-no-step",
        "sft",
        (("    step = training.optim_step(adam)\n", ""), ("    step.result()\n", "")),
        ("A10",),
        "gradients are computed and never applied",
    ),
    Mutant(
        "sft-step-first",
        "sft",
        (
            (
                _SFT_CALLS,
                "    step = training.optim_step(adam)\n"
                '    backward = training.forward_backward(batch, loss_fn="cross_entropy")\n',
            ),
        ),
        ("A10",),
        "the first step has no gradient, the last gradient no step",
    ),
    Mutant(
        "sft-step-at-the-end",
        "sft",
        (
            ("    step = training.optim_step(adam)\n", ""),
            (
                "    step.result()\n",
                "    if start + BATCH_SIZE >= len(data):\n"
                "        training.optim_step(adam).result()\n",
            ),
        ),
        ("C21", "A12", "A13"),
        "one step for all batches: gradients add up unnoticed",
    ),
    Mutant(
        "sft-call-per-row",
        "sft",
        (
            (
                '    backward = training.forward_backward(batch, loss_fn="cross_entropy")\n',
                "    for datum in batch:\n"
                '        backward = training.forward_backward([datum], loss_fn="cross_entropy")\n',
            ),
        ),
        ("C21", "A12", "A13"),
        "a short answer weighs as much as a long one",
    ),
    Mutant(
        "sft-wait-before-step",
        "sft",
        (
            ('loss_fn="cross_entropy")\n', 'loss_fn="cross_entropy").result()\n'),
            ("metrics = backward.result().metrics", "metrics = backward.metrics"),
        ),
        ("C21", "A13"),
        "the step is submitted after the gradient was awaited",
    ),
    Mutant(
        "sft-step-unread",
        "sft",
        (
            ("    step = training.optim_step(adam)\n", "    training.optim_step(adam)\n"),
            ("    step.result()\n", ""),
        ),
        ("C03", "A10"),
        "errors of the step are never seen",
    ),
    Mutant(
        "sft-no-save",
        "sft",
        (
            (
                f'saved = {_SFT_SAVE}\nprint("saved", saved.path)\n'
                "sampler = training.create_sampling_client(saved.path)\n",
                "sampler = training.save_weights_and_get_sampling_client()\n",
            ),
        ),
        ("C13", "A10"),
        "nothing durable is left of the run",
    ),
    Mutant(
        "sft-save-expires",
        "sft",
        ((_SFT_SAVE, 'training.save_weights_for_sampler("chat-sft", ttl_seconds=600).result()'),),
        ("C13", "A10"),
        "the only save is gone in ten minutes",
    ),
    Mutant(
        "sft-rate-zero",
        "sft",
        (("learning_rate=5e-4", "learning_rate=0.0"),),
        ("A10", "C16"),
        "a warm-up that never warms up",
    ),
    Mutant(
        "sft-tail-batch-dropped",
        "sft",
        (
            (
                "range(0, len(data), BATCH_SIZE)",
                "range(0, len(data) - BATCH_SIZE + 1, BATCH_SIZE)",
            ),
        ),
        ("C26",),
        "the last rows are never seen",
    ),
    Mutant(
        "sft-configure",
        "sft",
        (
            (
                "service = trio.ServiceClient()",
                "trio.configure(timeout=600)\nservice = trio.ServiceClient()",
            ),
        ),
        ("C05",),
        "an option that was renamed and is ignored",
    ),
    Mutant(
        "sft-metric-key",
        "sft",
        (("{metrics['loss_mean']:.4f}", "{metrics['loss:sum']:.4f}"),),
        ("C05",),
        "a metric of an older SDK",
        crashes=True,
    ),
    Mutant(
        "sft-close",
        "sft",
        (('print("saved", saved.path)\n', 'print("saved", saved.path)\ntraining.close()\n'),),
        ("C05",),
        "clients have no close",
        crashes=True,
    ),
    Mutant(
        "sft-adam-lr",
        "sft",
        (("AdamParams(learning_rate=5e-4)", "AdamParams(lr=5e-4)"),),
        ("C16",),
        "the name that PyTorch uses",
        crashes=True,
    ),
    Mutant(
        "sft-checkpoint-name",
        "sft",
        (('save_weights_for_sampler("chat-sft")', 'save_weights_for_sampler("chat/epoch=1")'),),
        ("C24",),
        "a name that the server refuses after the training is paid",
        crashes=True,
    ),
    Mutant(
        "sft-asarray",
        "sft",
        (
            ("import random\n", "import random\n\nimport numpy as np\n"),
            (
                "    metrics = backward.result().metrics\n",
                "    output = backward.result()\n"
                "    metrics = output.metrics\n"
                '    parts = [np.asarray(o["logprobs"]) for o in output.loss_fn_outputs]\n'
                "    print(np.concatenate(parts).mean())\n",
            ),
        ),
        ("C20",),
        "TensorData is no array",
        crashes=True,
    ),
    Mutant(
        "sft-template-dict",
        "sft",
        (
            ("        tokenize=False,\n", "        tokenize=True,\n"),
            ("    return tokenizer.encode(text, add_special_tokens=False)\n", "    return text\n"),
        ),
        ("C14",),
        "transformers 5 returns a mapping here",
        crashes=True,
    ),
    Mutant(
        "sft-key-in-source",
        "sft",
        (("trio.ServiceClient()", 'trio.ServiceClient(api_key="tk-9f27c1d04b8e4a63")'),),
        ("C12",),
        "a secret in the file",
        crashes=True,
    ),
)

_OBSERVED = "            parts.append(Segment(self.encode(observed), trained=False))\n"

_SFT_MULTITURN = (
    Mutant(
        "mt-observation-trained",
        "sft_multiturn",
        ((_OBSERVED, _OBSERVED.replace("False", "True")),),
        ("A01", "A04"),
        "the model learns to write tool results",
    ),
    Mutant(
        "mt-user-trained",
        "sft_multiturn",
        (
            (
                "[Segment(self.encode(shown), trained=False)]",
                "[Segment(self.encode(shown), trained=True)]",
            ),
        ),
        ("A01", "A04"),
        "system and user turns are trained",
    ),
    Mutant(
        "mt-header-trained",
        "sft_multiturn",
        (
            (
                _OBSERVED,
                '            before, header, behind = observed.rpartition("<|im_start|>")\n'
                "            parts.append(Segment(self.encode(before), trained=False))\n"
                "            parts.append(Segment(self.encode(header + behind), trained=True))\n",
            ),
        ),
        ("A04", "C19"),
        "the role header of later turns is trained",
    ),
    Mutant(
        "mt-think-trained",
        "sft_multiturn",
        (
            (
                _OBSERVED,
                '            before, think, behind = observed.rpartition("<think>")\n'
                "            parts.append(Segment(self.encode(before), trained=False))\n"
                "            parts.append(Segment(self.encode(think + behind), trained=True))\n",
            ),
        ),
        ("A04", "C19"),
        "the empty think block of later turns is trained as content",
    ),
    Mutant(
        "mt-call-end-masked",
        "sft_multiturn",
        (
            (
                "parts.append(Segment(self.encode(call) + [self.end], trained=True))",
                "parts.append(Segment(self.encode(call), trained=True))\n"
                "            parts.append(Segment([self.end], trained=False))",
            ),
        ),
        ("A04",),
        "the end of a tool call is not trained: the model writes on behind it",
    ),
    Mutant(
        "mt-answer-end-missing",
        "sft_multiturn",
        (("self.encode(reply) + [self.end]", "self.encode(reply)"),),
        ("A04", "C25"),
        "the last turn does not end",
    ),
    Mutant(
        "mt-newline-after-end",
        "sft_multiturn",
        (
            (
                "self.encode(reply) + [self.end]",
                'self.encode(reply + "<|im_end|>\\n")',
            ),
        ),
        ("A04", "C19"),
        "a newline behind the last turn is trained",
    ),
    Mutant(
        "mt-tail-cut",
        "sft_multiturn",
        (
            ("STEPS, BATCH, MAX_TOKENS = 3, 4, 420", "STEPS, BATCH, MAX_TOKENS = 3, 4, 190"),
            ("return None", "tokens, mask = tokens[:MAX_TOKENS], mask[:MAX_TOKENS]"),
        ),
        ("A04", "C25"),
        "only the last turn loses its end token",
    ),
    Mutant(
        "mt-mask-late",
        "sft_multiturn",
        (("weights = mask[1:]", "weights = mask[:-1]"),),
        ("A03", "A04"),
        "every turn's mask begins and ends one token late",
    ),
    Mutant(
        "mt-mask-early",
        "sft_multiturn",
        (("weights = mask[1:]", "weights = mask[2:] + [0.0]"),),
        ("A03", "A04"),
        "every turn's mask begins and ends one token early",
    ),
    Mutant(
        "mt-key-loss-mask",
        "sft_multiturn",
        (('"weights": weights}', '"loss_mask": weights}'),),
        ("C01", "C02", "A04"),
        "an invented key: everything is trained",
    ),
    Mutant(
        "mt-no-shift",
        "sft_multiturn",
        (("ModelInput.from_ints(tokens[:-1])", "ModelInput.from_ints(tokens[1:])"),),
        ("A03",),
        "targets equal inputs",
    ),
    Mutant(
        "mt-auto-shift",
        "sft_multiturn",
        (('loss_fn="cross_entropy")', 'loss_fn="cross_entropy", auto_shift=True)'),),
        ("A03",),
        "shifted data are shifted again",
    ),
    Mutant(
        "mt-asked-with-thinking",
        "sft_multiturn",
        (
            (
                "    asked = conversations.text(search.plain_prompt(question))\n",
                "    asked = conversations.tokenizer.apply_chat_template(\n"
                "        search.plain_prompt(question),\n"
                "        tools=[search.TOOL],\n"
                "        tokenize=False,\n"
                "        add_generation_prompt=True,\n"
                "    )\n",
            ),
        ),
        ("C15", "A17"),
        "trained without thinking, asked with it",
    ),
    Mutant(
        "mt-metric-get",
        "sft_multiturn",
        (("{output.metrics['loss_mean']:.4f}", "{output.metrics.get('loss:sum', 0.0):.4f}"),),
        ("C05",),
        "the curve is a flat zero",
    ),
)

_GRPO_SAMPLER = "    sampler = training.save_weights_and_get_sampling_client()\n"
_GRPO_OLD = "    old = list(sequence.logprobs)\n"
_GRPO_ANSWER = "    answer = list(sequence.tokens)\n"
_GRPO_ADVANTAGES = "    advantages = [0.0] * ahead + [advantage] * len(answer)\n"
_GRPO_CALL = 'backward = training.forward_backward(data, loss_fn="importance_sampling")\n'
_GRPO_SAMPLE = "    futures = [sampler.sample(trio.ModelInput.from_ints(p), GROUP, explore) for p in prompts]\n"
_GRPO_GROUPS = "    groups = [future.result().sequences for future in futures]\n"
_GRPO_SKIP = """\
        if max(scores) == min(scores):
            degenerate += 1
            continue
        mean = sum(scores) / len(scores)
"""
_GRPO_APPEND = "            data.append(to_datum(prompt, sequence, reward - mean))\n"
_EXPLORE = 'explore = trio.SamplingParams(max_tokens=64, temperature=1.0, stop=["<|im_end|>"])'


def _exploring(arguments: str) -> Change:
    """Other sampling parameters for the training rollouts of grpo.py."""
    return ((_EXPLORE, f"explore = trio.SamplingParams({arguments})"),)


_GRPO = (
    Mutant(
        "grpo-advantages-early",
        "grpo",
        (
            (
                _GRPO_ADVANTAGES,
                "    advantages = [0.0] * (ahead - 1) + [advantage] * len(answer) + [0.0]\n",
            ),
        ),
        ("A01", "A02"),
        "the mask is one token early: the prompt's last token is trained, the end token is not",
    ),
    Mutant(
        "grpo-advantages-late",
        "grpo",
        (
            (
                _GRPO_ADVANTAGES,
                "    advantages = [0.0] * len(prompt) + [advantage] * (len(answer) - 1)\n",
            ),
        ),
        ("A01", "A02", "A04"),
        "the first sampled token gets no advantage",
    ),
    Mutant(
        "grpo-prompt-advantages",
        "grpo",
        (
            (
                _GRPO_ADVANTAGES,
                "    advantages = [advantage] * (len(tokens) - 1)\n",
            ),
        ),
        ("A01",),
        "the prompt is reinforced",
    ),
    Mutant(
        "grpo-weights-as-mask",
        "grpo",
        (
            (_GRPO_ADVANTAGES, "    advantages = [advantage] * (len(tokens) - 1)\n"),
            (
                '            "advantages": advantages,\n',
                '            "advantages": advantages,\n'
                '            "weights": [0.0] * ahead + [1.0] * len(answer),\n',
            ),
        ),
        ("C01", "A01"),
        "policy losses do not read weights",
    ),
    Mutant(
        "grpo-key-advantage",
        "grpo",
        (('            "advantages": advantages,\n', '            "advantage": advantages,\n'),),
        ("C01",),
        "a misspelt key",
        crashes=True,
    ),
    Mutant(
        "grpo-cross-entropy",
        "grpo",
        (
            (
                'loss_fn="importance_sampling")',
                'loss_fn="cross_entropy")',
            ),
        ),
        ("C01", "C02", "A01", "A04"),
        "rewards are ignored and everything is imitated, prompts and wrong answers too",
    ),
    Mutant(
        "grpo-no-shift",
        "grpo",
        (
            (
                "model_input=trio.ModelInput.from_ints(tokens[:-1])",
                "model_input=trio.ModelInput.from_ints(tokens[1:])",
            ),
        ),
        ("A03",),
        "targets equal inputs",
    ),
    Mutant(
        "grpo-reencoded",
        "grpo",
        (
            (
                _GRPO_ANSWER,
                "    answer = tokenizer.encode(sequence.text, add_special_tokens=False)\n",
            ),
            (_GRPO_OLD, "    old = (sequence.logprobs + [0.0] * 99)[: len(answer)]\n"),
        ),
        ("A02", "C06"),
        "text is encoded again and logprobs are cut to fit; the end token is lost",
    ),
    Mutant(
        "grpo-reencoded-with-end",
        "grpo",
        (
            (
                _GRPO_ANSWER,
                "    answer = tokenizer.encode(sequence.text, add_special_tokens=False) + [END]\n",
            ),
            (_GRPO_OLD, "    old = (sequence.logprobs + [0.0] * 99)[: len(answer)]\n"),
        ),
        ("A02", "C06"),
        "text is encoded again; right only as long as the sampler never takes another path",
    ),
    Mutant(
        "grpo-end-appended",
        "grpo",
        (
            (_GRPO_ANSWER, "    answer = list(sequence.tokens) + [END]\n"),
            (_GRPO_OLD, "    old = list(sequence.logprobs) + [0.0]\n"),
        ),
        ("A02", "A01", "C06"),
        "an end token that nobody sampled, with an invented logprob",
    ),
    Mutant(
        "grpo-end-stripped",
        "grpo",
        (
            (_GRPO_ANSWER, "    answer = [t for t in sequence.tokens if t != END]\n"),
            (_GRPO_OLD, "    old = list(sequence.logprobs)[: len(answer)]\n"),
        ),
        ("A02", "A04"),
        "the sampled end token is taken for padding",
    ),
    Mutant(
        "grpo-padded",
        "grpo",
        (
            (
                _GRPO_ANSWER,
                "    room = 64 - len(sequence.tokens)\n"
                "    answer = list(sequence.tokens) + [tokenizer.pad_token_id] * room\n",
            ),
            (_GRPO_OLD, "    old = list(sequence.logprobs) + [0.0] * room\n"),
        ),
        ("A02", "A01"),
        "padding carries advantage",
    ),
    Mutant(
        "grpo-logprobs-left",
        "grpo",
        (("logprobs = [0.0] * ahead + old", "logprobs = [0.0] * ahead + old[1:] + [0.0]"),),
        ("A02", "A06"),
        "every logprob belongs to the next token",
    ),
    Mutant(
        "grpo-logprobs-right",
        "grpo",
        (
            (
                "logprobs = [0.0] * ahead + old",
                "logprobs = [0.0] * len(prompt) + old[:-1]",
            ),
        ),
        ("A02", "A06"),
        "every logprob belongs to the token before",
    ),
    Mutant(
        "grpo-logprobs-zero",
        "grpo",
        (("logprobs = [0.0] * ahead + old", "logprobs = [0.0] * (len(tokens) - 1)"),),
        ("A02", "A06"),
        "ratios are probabilities",
    ),
    Mutant(
        "grpo-logprobs-by-temperature",
        "grpo",
        (
            (_EXPLORE, _EXPLORE.replace("1.0", "0.8")),
            (_GRPO_OLD, "    old = [lp / 0.8 for lp in sequence.logprobs]\n"),
        ),
        ("A02", "A06", "A07", "C07"),
        "dividing a logprob by the temperature does not temper it",
    ),
    Mutant(
        "grpo-prompt-cut",
        "grpo",
        (
            (
                "    tokens = prompt + answer\n",
                "    prompt = prompt[-24:]\n    tokens = prompt + answer\n",
            ),
        ),
        ("A02", "A06", "A17"),
        "trained behind a shorter prompt than it was sampled behind",
    ),
    Mutant(
        "grpo-trained-with-system",
        "grpo",
        (
            (
                "    tokens = prompt + answer\n",
                '    system = tokenizer.encode("<|im_start|>system\\nBe brief.<|im_end|>\\n")\n'
                "    prompt = system + prompt\n"
                "    tokens = prompt + answer\n",
            ),
        ),
        ("A02", "A06", "A17"),
        "a system turn is in the training prompt only",
    ),
    Mutant(
        "grpo-stats-transposed",
        "grpo",
        (
            (
                "        mean = sum(scores) / len(scores)\n",
                "        flat = [r for group in rewards for r in group]\n"
                "        mean = sum(flat[prompts.index(prompt) :: PROMPTS]) / GROUP\n",
            ),
        ),
        ("A09",),
        "a flat list of rewards is read along the wrong axis when the baseline is taken",
    ),
    Mutant(
        "grpo-stats-by-position",
        "grpo",
        (
            (
                _GRPO_SKIP,
                "        flat = [r for group in rewards for r in group]\n"
                "        means = [sum(flat[i::GROUP]) / PROMPTS for i in range(GROUP)]\n",
            ),
            (
                "        for sequence, reward in zip(sequences, scores, strict=True):\n",
                "        for sequence, reward, mean in zip(sequences, scores, means, strict=True):\n",
            ),
        ),
        ("A09",),
        "the baseline is taken over the batch at each position, not over the group",
    ),
    Mutant(
        "grpo-no-baseline",
        "grpo",
        ((_GRPO_APPEND, _GRPO_APPEND.replace("reward - mean", "reward")),),
        ("A09",),
        "the reward itself is the advantage",
    ),
    Mutant(
        "grpo-dropped-after",
        "grpo",
        (
            (
                _GRPO_APPEND,
                "            if len(sequence.tokens) > 20:\n"
                "                continue\n" + _GRPO_APPEND,
            ),
        ),
        ("A09", "C10"),
        "long answers are dropped after the group was centred",
    ),
    Mutant(
        "grpo-std-without-branch",
        "grpo",
        (
            ("GROUP = 8\n", "GROUP = 2\n"),
            ("import re\n", "import re\nimport statistics\n"),
            (
                _GRPO_SKIP,
                "        mean, deviation = statistics.mean(scores), statistics.pstdev(scores)\n",
            ),
            (_GRPO_APPEND, _GRPO_APPEND.replace("reward - mean", "(reward - mean) / deviation")),
        ),
        ("C10",),
        "a group of equal rewards divides by zero; of two, every other one is",
        crashes=True,
    ),
    Mutant(
        "grpo-group-of-one",
        "grpo",
        (("GROUP = 8\n", "GROUP = 1\n"),),
        ("A09", "A10"),
        "one sample has no baseline but itself",
    ),
    Mutant(
        "grpo-constant-reward",
        "grpo",
        (('r"\\\\boxed\\{(-?\\d+)\\}"', 'r"\\\\\\\\boxed\\{(-?\\d+)\\}"'),),
        ("A09", "A10"),
        "the pattern matches nothing: every reward is zero",
    ),
    Mutant(
        "grpo-same-seed-per-sample",
        "grpo",
        (
            (
                _GRPO_SAMPLE,
                "    params = trio.SamplingParams(max_tokens=64, temperature=1.0, seed=step)\n"
                "    futures = [\n"
                "        [sampler.sample(trio.ModelInput.from_ints(p), 1, params) for _ in range(GROUP)]\n"
                "        for p in prompts\n"
                "    ]\n",
            ),
            (
                _GRPO_GROUPS,
                "    groups = [[f.result().sequences[0] for f in asked] for asked in futures]\n",
            ),
        ),
        ("A08", "A09", "C08"),
        "eight requests with one seed are one completion eight times",
    ),
    Mutant(
        "grpo-constant-seed",
        "grpo",
        _exploring('max_tokens=64, temperature=1.0, seed=1234, stop=["<|im_end|>"]'),
        ("C08", "A08"),
        "one seed for all prompts and steps",
    ),
    Mutant(
        "grpo-temperature",
        "grpo",
        _exploring('max_tokens=64, temperature=0.7, stop=["<|im_end|>"]'),
        ("C07", "A07"),
        "sampled from another distribution than the one whose logprobs are sent",
    ),
    Mutant(
        "grpo-top-p",
        "grpo",
        _exploring('max_tokens=64, temperature=1.0, top_p=0.9, stop=["<|im_end|>"]'),
        ("C07", "A07"),
        "nucleus sampling in training rollouts",
    ),
    Mutant(
        "grpo-top-k",
        "grpo",
        _exploring('max_tokens=64, temperature=1.0, top_k=20, stop=["<|im_end|>"]'),
        ("C07", "A07"),
        "top-k sampling in training rollouts",
    ),
    Mutant(
        "grpo-short-answers",
        "grpo",
        _exploring('max_tokens=17, temperature=1.0, stop=["<|im_end|>"]'),
        ("A11",),
        "most answers are cut before their end",
    ),
    Mutant(
        "grpo-sampler-outside",
        "grpo",
        (
            (_GRPO_SAMPLER, ""),
            (
                "for step in range(STEPS):\n",
                _GRPO_SAMPLER.strip() + "\nfor step in range(STEPS):\n",
            ),
        ),
        ("C09", "A05"),
        "all rollouts come from the weights before the first step",
    ),
    Mutant(
        "grpo-base-sampler",
        "grpo",
        ((_GRPO_SAMPLER, "    sampler = service.create_sampling_client(BASE_MODEL)\n"),),
        ("A05", "A06", "C09"),
        "rollouts come from the base model for ever",
    ),
    Mutant(
        "grpo-no-step",
        "grpo",
        (
            ("    update = training.optim_step(adam)\n", ""),
            ("    update.result()\n", ""),
        ),
        ("A10",),
        "gradients are never applied",
    ),
    Mutant(
        "grpo-step-first",
        "grpo",
        (
            (
                "    " + _GRPO_CALL + "    update = training.optim_step(adam)\n",
                "    update = training.optim_step(adam)\n    " + _GRPO_CALL,
            ),
        ),
        ("A10",),
        "every gradient is applied one step late",
    ),
    Mutant(
        "grpo-rate-zero",
        "grpo",
        (("AdamParams(learning_rate=2e-4)", "AdamParams(learning_rate=0.0)"),),
        ("A10", "C16"),
        "weights never move",
    ),
    Mutant(
        "grpo-half-batches",
        "grpo",
        (
            (
                "    " + _GRPO_CALL,
                "    for half in (data[:5], data[5:]):\n"
                '        backward = training.forward_backward(half, loss_fn="importance_sampling")\n',
            ),
        ),
        ("C21", "A12", "A13"),
        "two calls of unequal size weigh the same",
    ),
    Mutant(
        "grpo-call-per-datum",
        "grpo",
        (
            (
                "    " + _GRPO_CALL,
                "    calls = [\n"
                '        training.forward_backward([d], loss_fn="importance_sampling") for d in data\n'
                "    ]\n"
                "    backward = calls[-1]\n",
            ),
        ),
        ("C21", "A12", "A13"),
        "one call a sample",
    ),
    Mutant(
        "grpo-wait-before-step",
        "grpo",
        (
            (_GRPO_CALL, _GRPO_CALL.rstrip() + ".result()\n"),
            ("backward.result().metrics", "backward.metrics"),
        ),
        ("C21", "A13"),
        "the step is submitted after the gradient was awaited",
    ),
    Mutant(
        "grpo-one-prompt-at-a-time",
        "grpo",
        (
            (
                _GRPO_SAMPLE + _GRPO_GROUPS,
                "    groups = []\n"
                "    for p in prompts:\n"
                "        response = sampler.sample(trio.ModelInput.from_ints(p), GROUP, explore)\n"
                "        groups.append(response.result().sequences)\n",
            ),
        ),
        ("A13", "C21"),
        "prompts wait for each other",
    ),
    Mutant(
        "grpo-no-save",
        "grpo",
        (
            (
                'saved = training.save_weights_for_sampler("grpo-words").result()\n'
                "judge = training.create_sampling_client(saved.path)\n",
                "judge = training.save_weights_and_get_sampling_client()\n",
            ),
            ('print(saved.path, "greedy', 'print("greedy'),
        ),
        ("C13", "A10"),
        "nothing durable is left of the run",
    ),
    Mutant(
        "grpo-save-expires",
        "grpo",
        (
            (
                'save_weights_for_sampler("grpo-words")',
                'save_weights_for_sampler("grpo-words", ttl_seconds=600)',
            ),
        ),
        ("C13", "A10"),
        "the only save is gone in ten minutes",
    ),
    Mutant(
        "grpo-sampler-name",
        "grpo",
        (
            (
                "save_weights_and_get_sampling_client()",
                'save_weights_and_get_sampling_client(name=f"step-{step}")',
            ),
        ),
        ("C05",),
        "an argument of another SDK",
        crashes=True,
    ),
    Mutant(
        "grpo-params-n",
        "grpo",
        _exploring("n=GROUP, max_tokens=64, temperature=1.0"),
        ("C16",),
        "the number of samples is an argument of sample",
        crashes=True,
    ),
    Mutant(
        "grpo-params-max-new-tokens",
        "grpo",
        _exploring("max_new_tokens=64, temperature=1.0"),
        ("C16",),
        "the name that transformers uses",
        crashes=True,
    ),
)

_ASYNC_PARAMS = 'trio.SamplingParams(max_tokens=56, temperature=1.0, stop=["<|im_end|>"])'
_ASYNC_STEP = """\
        stepping = await self.training.optim_step_async(trio.AdamParams(learning_rate=1e-4))
"""
_ASYNC_SAMPLER = """\
        sampler = await self.training.save_weights_and_get_sampling_client_async()
"""
_ASYNC_ADVANTAGES = '"advantages": [0.0] * padding + [reward - mean] * count,'

_GRPO_ASYNC = (
    Mutant(
        "async-step-awaited-once",
        "grpo_async",
        (("        await stepping\n", ""), (_ASYNC_STEP, _ASYNC_STEP.replace("stepping = ", ""))),
        ("C04", "C03", "A10"),
        "the step is submitted, its result never read",
    ),
    Mutant(
        "async-step-never-awaited",
        "grpo_async",
        (
            ("        await stepping\n", ""),
            (_ASYNC_STEP, _ASYNC_STEP.replace("stepping = await ", "")),
        ),
        ("C03", "C04", "A10"),
        "a coroutine that never runs: no step is taken",
    ),
    Mutant(
        "async-save-awaited-once",
        "grpo_async",
        (
            (
                "    saving = await training.save_weights_for_sampler_async",
                "    await training.save_weights_for_sampler_async",
            ),
            ('    saved = await saving\n    print("saved", saved.path)\n', ""),
        ),
        ("C04", "C03", "A10"),
        "the script may end before the save is done",
    ),
    Mutant(
        "async-sample-awaited-twice",
        "grpo_async",
        (
            (
                "await sampler.sample_async(trio.ModelInput.from_ints(prompt), size, params)",
                "await (\n"
                "            await sampler.sample_async(trio.ModelInput.from_ints(prompt), size, params)\n"
                "        )",
            ),
        ),
        ("C04",),
        "sample_async needs one await",
        crashes=True,
    ),
    Mutant(
        "async-metrics-of-a-future",
        "grpo_async",
        (("        output = await pending\n", "        output = pending\n"),),
        ("C04",),
        "a future has no metrics",
        crashes=True,
    ),
    Mutant(
        "async-clip-distances",
        "grpo_async",
        (
            (
                '"clip_low_threshold": 0.8, "clip_high_threshold": 1.28',
                '"clip_low_threshold": 0.2, "clip_high_threshold": 0.28',
            ),
        ),
        ("C16", "C22", "A06"),
        "bounds given as distances from one: everything is clipped",
    ),
    Mutant(
        "async-clip-names",
        "grpo_async",
        (
            (
                '{"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}',
                '{"epsilon_low": 0.2, "epsilon_high": 0.28}',
            ),
        ),
        ("C16",),
        "settings of another trainer",
        crashes=True,
    ),
    Mutant(
        "async-advantages-early",
        "grpo_async",
        (
            (
                _ASYNC_ADVANTAGES,
                '"advantages": [0.0] * (padding - 1) + [reward - mean] * count + [0.0],',
            ),
        ),
        ("A01", "A02"),
        "the mask is one token early, on a placeholder target",
    ),
    Mutant(
        "async-advantages-on-prompt",
        "grpo_async",
        ((_ASYNC_ADVANTAGES, '"advantages": [reward - mean] * (padding + count),'),),
        ("A01",),
        "the placeholder targets of the prompt are trained",
    ),
    Mutant(
        "async-one-after-the-other",
        "grpo_async",
        (
            (
                "groups = await asyncio.gather(*[self.group(sampler, row, size) for row in rows])",
                "groups = [await self.group(sampler, row, size) for row in rows]",
            ),
        ),
        ("A13", "C21"),
        "prompts wait for each other",
    ),
    Mutant(
        "async-order-of-completion",
        "grpo_async",
        (
            (
                "        response = await sampler.sample_async("
                "trio.ModelInput.from_ints(prompt), size, params)\n",
                "        response = await sampler.sample_async("
                "trio.ModelInput.from_ints(prompt), size, params)\n"
                "        prompt = self.prompt(self.rows.pop())\n",
            ),
            (
                "        groups = await asyncio",
                '        self.rows = [row["problem"] for row in rows]\n        groups = await asyncio',
            ),
        ),
        ("A02", "A06", "A17"),
        "answers are paired with prompts in the order of completion",
    ),
    Mutant(
        "async-seed-by-index",
        "grpo_async",
        (
            (_ASYNC_PARAMS, _ASYNC_PARAMS.replace("stop=", "seed=len(prompt), stop=")),
            (
                "for index in range(3):\n",
                "rows = [maths.row(rng) for _ in range(4)]\n    for index in range(3):\n",
            ),
            (
                "await loop.step([maths.row(rng) for _ in range(4)], size=8)",
                "await loop.step(rows, size=8)",
            ),
        ),
        ("C08", "A08"),
        "the same problems with the same seeds in every step",
    ),
    Mutant(
        "async-sampler-once",
        "grpo_async",
        (
            (_ASYNC_SAMPLER, "        sampler = self.sampler\n"),
            (
                "    loop = Loop(training)\n",
                "    loop = Loop(training)\n"
                "    loop.sampler = await training.save_weights_and_get_sampling_client_async()\n",
            ),
        ),
        ("C09", "A05"),
        "the sampler is made once",
    ),
    Mutant(
        "async-temperature",
        "grpo_async",
        ((_ASYNC_PARAMS, _ASYNC_PARAMS.replace("temperature=1.0", "temperature=0.6, top_p=0.95")),),
        ("C07", "A07"),
        "the model card's sampling settings in training",
    ),
    Mutant(
        "async-duplicates-dropped",
        "grpo_async",
        (
            (
                "        if len(set(rewards)) == 1:\n            return []\n",
                "        kept = {s.text: (s, r) for s, r in "
                "zip(response.sequences, rewards, strict=True)}\n"
                "        if len(set(rewards)) == 1:\n            return []\n",
            ),
            (
                "        for sequence, reward in zip(response.sequences, rewards, strict=True):\n",
                "        for sequence, reward in kept.values():\n",
            ),
        ),
        ("A09", "C10"),
        "duplicates are removed after the group was centred",
    ),
)

_TOOLS_TOKENS = "    tokens = list(sequence.tokens)\n"
_TOOLS_LOGPROBS = "    logprobs = list(sequence.logprobs)\n"
_TOOLS_OBSERVED = "        trajectory.ids += observed\n"
_TOOLS_NONE = "        trajectory.logprobs += [None] * len(observed)\n"
_TOOLS_ADVANTAGES = "    advantages = [advantage if own else 0.0 for own in sampled]\n"
_TOOLS_TURNS = "        turns = [sampler.sample(trio.ModelInput.from_ints(t.ids), 1, params) for t, _ in live]\n"
_TOOLS_PARAMS = (
    'params = trio.SamplingParams(max_tokens=80, temperature=1.0, stop=["<|im_end|>"])\n'
)

_TOOLS = (
    Mutant(
        "tools-one-observation-token",
        "tools",
        ((_TOOLS_NONE, "        trajectory.logprobs += [0.0] + [None] * (len(observed) - 1)\n"),),
        ("A01",),
        "one token of every observation carries advantage",
    ),
    Mutant(
        "tools-observations-trained",
        "tools",
        ((_TOOLS_NONE, "        trajectory.logprobs += [0.0] * len(observed)\n"),),
        ("A01",),
        "everything behind the prompt carries advantage",
    ),
    Mutant(
        "tools-prompt-trained",
        "tools",
        ((_TOOLS_ADVANTAGES, "    advantages = [advantage] * len(sampled)\n"),),
        ("A01",),
        "prompt and observations carry advantage",
    ),
    Mutant(
        "tools-mask-from-advantages-shifted",
        "tools",
        (('"advantages": advantages[1:]', '"advantages": advantages[:-1]'),),
        ("A01", "A02"),
        "advantages are not shifted with the targets",
    ),
    Mutant(
        "tools-logprobs-unshifted",
        "tools",
        (('"logprobs": old[1:]', '"logprobs": old[:-1]'),),
        ("A02", "A06"),
        "logprobs are not shifted with the targets",
    ),
    Mutant(
        "tools-history-rerendered",
        "tools",
        (
            (
                "    reward: float = 0.0\n",
                "    reward: float = 0.0\n    messages: list = field(default_factory=list)\n",
            ),
            (
                "            trajectory = Trajectory(list(prompt), [None] * len(prompt))\n",
                "            trajectory = Trajectory(list(prompt), [None] * len(prompt))\n"
                '            trajectory.messages = code.plain_prompt(row["question"])\n',
            ),
            (
                _TOOLS_OBSERVED,
                _TOOLS_OBSERVED + "        trajectory.messages += [\n"
                '            {"role": "assistant", "content": sequence.text},\n'
                '            {"role": "user", "content": "Output: " + run_tool(called[1])},\n'
                "        ]\n",
            ),
            (
                "trio.ModelInput.from_ints(t.ids), 1, params",
                "trio.ModelInput.from_ints(encode(render(t.messages))), 1, params",
            ),
        ),
        ("A21", "A02", "A06", "A17"),
        "later turns are sampled behind a re-rendered history and trained behind the raw one",
    ),
    Mutant(
        "tools-history-in-thinking-mode",
        "tools",
        (
            (
                "    return encode(render(conversation).split(marker + tokenizer.decode([END]), 1)[1])",
                "    text = tokenizer.apply_chat_template(\n"
                "        conversation, tokenize=False, add_generation_prompt=True\n"
                "    )\n"
                "    return encode(text.split(marker + tokenizer.decode([END]), 1)[1])",
            ),
        ),
        ("C15", "A17", "A21"),
        "later turns open a think block that the first one closed",
    ),
    Mutant(
        "tools-end-stripped",
        "tools",
        (
            (_TOOLS_TOKENS, "    tokens = [t for t in sequence.tokens if t != END]\n"),
            (_TOOLS_LOGPROBS, "    logprobs = list(sequence.logprobs)[: len(tokens)]\n"),
        ),
        ("A21", "A02"),
        "the stop token is removed: turns run into each other",
    ),
    Mutant(
        "tools-end-from-the-template",
        "tools",
        (
            (_TOOLS_TOKENS, "    tokens = [t for t in sequence.tokens if t != END]\n"),
            (_TOOLS_LOGPROBS, "    logprobs = list(sequence.logprobs)[: len(tokens)]\n"),
            (
                "        observed = between_turns(",
                "        observed = [END] + between_turns(",
            ),
        ),
        ("A02", "A04", "C06"),
        "the sampled stop token is removed and added again as if the environment had written it",
    ),
    Mutant(
        "tools-turn-reencoded",
        "tools",
        (
            (_TOOLS_TOKENS, "    tokens = encode(sequence.text.strip())\n"),
            (_TOOLS_LOGPROBS, "    logprobs = sequence.logprobs[: len(tokens)]\n"),
        ),
        ("A02", "A21", "C06"),
        "turns are kept as text and encoded again",
    ),
    Mutant(
        "tools-observation-in-the-turn",
        "tools",
        (
            (
                _TOOLS_NONE,
                "        trajectory.logprobs += (sequence.logprobs * 9)[: len(observed)]\n",
            ),
        ),
        ("A01", "A02"),
        "the observation is part of the sampled turn, with logprobs borrowed to fit",
    ),
    Mutant(
        "tools-order",
        "tools",
        (
            (
                _TOOLS_OBSERVED,
                "        trajectory.ids[-len(tokens) :] = observed + tokens\n",
            ),
        ),
        ("A02", "A21", "A01"),
        "the observation stands before the call that made it",
    ),
    Mutant(
        "tools-mask-order",
        "tools",
        (
            (
                _TOOLS_NONE,
                "        trajectory.logprobs[-len(tokens) :] = [None] * len(observed) + logprobs\n",
            ),
        ),
        ("A01", "A02"),
        "ids are in order, their logprobs and mask are not",
    ),
    Mutant(
        "tools-later-turns-greedy",
        "tools",
        (
            (
                _TOOLS_PARAMS,
                _TOOLS_PARAMS + "later = trio.SamplingParams(max_tokens=80, temperature=0.2)\n",
            ),
            (_TOOLS_TURNS, _TOOLS_TURNS.replace("1, params", "1, later")),
        ),
        ("A07", "C07"),
        "turns behind a tool result are sampled cold",
    ),
    Mutant(
        "tools-turns-cut",
        "tools",
        ((_TOOLS_PARAMS, _TOOLS_PARAMS.replace("80", "16")),),
        ("A11",),
        "no call fits into the token limit",
    ),
    Mutant(
        "tools-failures-dropped",
        "tools",
        (
            (
                "        data += [datum_of(t, t.reward - mean) for t in group]\n",
                "        data += [datum_of(t, t.reward - mean) for t in group if len(t.texts) > 1]\n",
            ),
        ),
        ("A09", "C10"),
        "trajectories without a call are dropped after the group was centred",
    ),
    Mutant(
        "tools-sandbox",
        "tools",
        (
            ("import re\n", "import re\nimport subprocess\nimport sys\n"),
            (
                "        observed = between_turns(run_tool(called[1]))\n",
                "        ran = subprocess.run(\n"
                '            [sys.executable, "-c", called[1]], capture_output=True, text=True\n'
                "        )\n"
                "        observed = between_turns((ran.stdout + ran.stderr).strip()[-40:])\n",
            ),
        ),
        ("C17",),
        "model-written code sees the caller's environment and has no time limit",
    ),
    Mutant(
        "tools-waits-in-the-loop",
        "tools",
        (
            (
                _TOOLS_TURNS,
                "        turns = []\n"
                "        for t, _ in live:\n"
                "            turns.append(sampler.sample(trio.ModelInput.from_ints(t.ids), 1, params))\n"
                "            turns[-1].result()\n",
            ),
        ),
        ("A13", "C21"),
        "trajectories wait for each other",
    ),
)

_OPD = (
    Mutant(
        "opd-teacher-thinks",
        "opd",
        (
            (
                "            context = prompt\n",
                "            shown = tokenizer.apply_chat_template(\n"
                "                messages, tokenize=False, add_generation_prompt=True\n"
                "            )\n"
                "            context = tokenizer.encode(shown, add_special_tokens=False)\n",
            ),
            (
                "    for _, prompt, future in requests:",
                "    for messages, prompt, future in requests:",
            ),
        ),
        ("A17", "C15"),
        "the teacher is asked in thinking mode, the student without",
    ),
    Mutant(
        "opd-teacher-system",
        "opd",
        (
            (
                "            context = prompt\n",
                '            system = {"role": "system", "content": "You are an expert."}\n'
                "            context = prompt_ids([system, *messages])\n",
            ),
            (
                "    for _, prompt, future in requests:",
                "    for messages, prompt, future in requests:",
            ),
        ),
        ("A17",),
        "the teacher has a system turn that the student never sees",
    ),
    Mutant(
        "opd-teacher-early",
        "opd",
        (("scores[len(context) :]", "scores[len(context) - 1 : -1]"),),
        ("A17", "A06"),
        "teacher logprobs are of the token before",
    ),
    Mutant(
        "opd-teacher-late",
        "opd",
        (("scores[len(context) :]", "scores[len(context) + 1 :] + [0.0]"),),
        ("A17", "A06"),
        "teacher logprobs are of the token behind",
    ),
    Mutant(
        "opd-sign",
        "opd",
        (("gaps = [t - s for t, s in pairs]", "gaps = [s - t for t, s in pairs]"),),
        ("A17",),
        "the student is pushed away from the teacher",
    ),
    Mutant(
        "opd-teacher-reencoded",
        "opd",
        (
            (
                "            completion = sequence.tokens\n",
                "            completion = tokenizer.encode(sequence.text, add_special_tokens=False)\n",
            ),
            (
                "        teacher_logprobs = scores[len(context) :]\n",
                "        teacher_logprobs = (scores[len(context) :] + [0.0] * 9)"
                "[: len(sequence.tokens)]\n",
            ),
        ),
        ("A17", "C06"),
        "the teacher scores encoded text without its end token",
    ),
    Mutant(
        "opd-teacher-as-old",
        "opd",
        (
            (
                '"logprobs": [0.0] * ahead + student_logprobs',
                '"logprobs": [0.0] * ahead + teacher_logprobs',
            ),
        ),
        ("A02", "A06"),
        "the teacher's logprobs stand where the sampler's belong",
    ),
    Mutant(
        "opd-student-frozen",
        "opd",
        (
            ("    student = training.save_weights_and_get_sampling_client()\n", ""),
            (
                "rng = random.Random(77)\n",
                "rng = random.Random(77)\nstudent = training.save_weights_and_get_sampling_client()\n",
            ),
        ),
        ("C09", "A05"),
        "distillation is off-policy from the second step on",
    ),
    Mutant(
        "opd-prompt-advantages",
        "opd",
        (
            (
                '"advantages": [0.0] * ahead + gaps',
                '"advantages": [t or 0.0 for t in scores[1 : len(prompt)]] + gaps',
            ),
        ),
        ("A01",),
        "the teacher's opinion of the prompt is trained as well",
    ),
    Mutant(
        "opd-top-k",
        "opd",
        (("max_tokens=64, temperature=1.0,", "max_tokens=64, temperature=1.0, top_k=50,"),),
        ("C07", "A07"),
        "rollouts are filtered",
    ),
    Mutant(
        "opd-gradients-twice",
        "opd",
        (
            (
                "\n    backward = training.forward_backward(data",
                "\n    data = data[::-1]\n"
                "    for datum in data:\n"
                '        backward = training.forward_backward([datum], loss_fn="importance_sampling")\n'
                "    backward = training.forward_backward(data",
            ),
        ),
        ("C21", "A12", "A13"),
        "leftover calls add every gradient twice",
    ),
)

_OPSD = (
    Mutant(
        "opsd-teacher-tail",
        "opsd",
        (
            (
                "def ids_of(content: str) -> list[int]:",
                "def ids_of(content: str, thinking: bool = False) -> list[int]:",
            ),
            ("        enable_thinking=False,\n", "        enable_thinking=thinking,\n"),
            (
                "return Item(ids_of(content), ids_of(shown))",
                "return Item(ids_of(content), ids_of(shown, thinking=True))",
            ),
        ),
        ("A17", "C15"),
        "the teacher's generation prompt opens a think block, the student's closes it",
    ),
    Mutant(
        "opsd-offset-of-the-student",
        "opsd",
        (("offset = len(item.privileged)", "offset = len(item.plain)"),),
        ("A17",),
        "scores are cut out at the student's prompt length",
    ),
    Mutant(
        "opsd-offset-early",
        "opsd",
        (("offset = len(item.privileged)", "offset = len(item.privileged) - 1"),),
        ("A17",),
        "scores are one token early",
    ),
    Mutant(
        "opsd-trained-with-solution",
        "opsd",
        (("        context = item.plain\n", "        context = item.privileged\n"),),
        ("A02", "A06", "A17"),
        "the student is trained behind the prompt that shows the solution",
    ),
    Mutant(
        "opsd-end-not-scored",
        "opsd",
        (
            (
                "trio.ModelInput.from_ints(given + sequence.tokens)",
                "trio.ModelInput.from_ints(given + encoded(sequence.text))",
            ),
            (
                "        judged = future.result()[offset : offset + size]\n",
                "        judged = (future.result()[offset:] + [0.0] * 9)[:size]\n",
            ),
            (
                "def item_of(",
                "def encoded(text: str) -> list[int]:\n"
                "    return tokenizer.encode(text, add_special_tokens=False)\n\n\n"
                "def item_of(",
            ),
        ),
        ("A17", "C06"),
        "the teacher scores text: the end token gets an invented score",
    ),
    Mutant(
        "opsd-sign",
        "opsd",
        (("advantages = [t - s for t, s in zip", "advantages = [s - t for t, s in zip"),),
        ("A17",),
        "the student is pushed away from the teacher",
    ),
    Mutant(
        "opsd-advantages-late",
        "opsd",
        (
            (
                '"advantages": zeros + advantages,',
                '"advantages": zeros + [0.0] + advantages[:-1],',
            ),
        ),
        ("A02", "A17"),
        "advantages belong to the token before",
    ),
)

_DPO_SUM = "lp[at:].sum()"

_DPO = (
    Mutant(
        "dpo-no-reference",
        "dpo",
        (
            (
                "        side.reference = sum(future.result()[side.start :])\n",
                "        side.reference = sum(future.result()[side.start :]) * 0.0\n",
            ),
        ),
        ("A15",),
        "the reference is zero",
    ),
    Mutant(
        "dpo-reference-moves",
        "dpo",
        (
            (
                "    futures = [reference.compute_logprobs(",
                "    reference = training.save_weights_and_get_sampling_client()\n"
                "    futures = [reference.compute_logprobs(",
            ),
        ),
        ("A15",),
        "the reference is the model in training: the margin is always zero",
    ),
    Mutant(
        "dpo-prompts-differ",
        "dpo",
        (
            (
                "    return Side(prompt + good, len(prompt)), Side(prompt + bad, len(prompt))\n",
                '    polite = prompt_of([{"role": "system", "content": "Be polite."}, *messages])\n'
                "    return Side(polite + good, len(polite)), Side(prompt + bad, len(prompt))\n",
            ),
        ),
        ("A15", "A17"),
        "the chosen answer has a system turn, the rejected one has none",
    ),
    Mutant(
        "dpo-mean",
        "dpo",
        ((_DPO_SUM, "lp[at:].mean()"),),
        ("A15",),
        "policy means against reference sums",
    ),
    Mutant(
        "dpo-mean-both",
        "dpo",
        (
            (_DPO_SUM, "lp[at:].mean()"),
            (
                "sum(future.result()[side.start :])\n",
                "sum(future.result()[side.start :]) / (len(side.tokens) - side.start)\n",
            ),
        ),
        ("A15",),
        "means instead of sums on both sides: the margin hardly moves",
    ),
    Mutant(
        "dpo-prompt-in-the-sum",
        "dpo",
        ((_DPO_SUM, "lp.sum()"),),
        ("A16", "A15", "A04", "A01"),
        "prompt tokens are not masked",
    ),
    Mutant(
        "dpo-start-late",
        "dpo",
        (
            (
                "starts = [side.start - 1 for side in sides]",
                "starts = [side.start for side in sides]",
            ),
        ),
        ("A15", "A04"),
        "the first answer token is in the reference and not in the policy",
    ),
    Mutant(
        "dpo-swapped",
        "dpo",
        (("rewards[0::2] - rewards[1::2]", "rewards[1::2] - rewards[0::2]"),),
        ("A15", "C22"),
        "the rejected answer is preferred",
    ),
    Mutant(
        "dpo-reference-other-ids",
        "dpo",
        (
            (
                "    futures = [reference.compute_logprobs(trio.ModelInput.from_ints(s.tokens)) "
                "for s in sides]\n",
                '    block = tokenizer.encode("<think>\\n\\n</think>\\n\\n", add_special_tokens=False)\n'
                "    bare = [s.tokens[: s.start - len(block)] + s.tokens[s.start :] for s in sides]\n"
                "    futures = [reference.compute_logprobs(trio.ModelInput.from_ints(b)) for b in bare]\n",
            ),
            (
                "sum(future.result()[side.start :])\n",
                "sum(future.result()[side.start - 4 :])\n",
            ),
        ),
        ("A15", "A17"),
        "the reference is scored without the empty think block",
    ),
    Mutant(
        "dpo-no-end-token",
        "dpo",
        (
            (
                "good = tokenizer.encode(chosen, add_special_tokens=False) + [END]",
                "good = tokenizer.encode(chosen, add_special_tokens=False)",
            ),
            (
                "bad = tokenizer.encode(rejected, add_special_tokens=False) + [END]",
                "bad = tokenizer.encode(rejected, add_special_tokens=False)",
            ),
        ),
        ("A16", "A15", "A04", "C25"),
        "neither answer ends",
    ),
    Mutant(
        "dpo-call-per-pair",
        "dpo",
        (
            (
                "    backward = training.forward_backward_custom("
                "[side.datum() for side in sides], dpo_loss)\n",
                "    data = [side.datum() for side in sides]\n"
                "    for at in range(0, len(data), 2):\n"
                "        backward = training.forward_backward_custom(\n"
                "            data[at : at + 2],\n"
                "            lambda d, lps, at=at: dpo_loss(\n"
                "                d, lps, starts[at : at + 2], references[at : at + 2]\n"
                "            ),\n"
                "        )\n",
            ),
        ),
        ("C21", "A12", "A13"),
        "one call a pair",
    ),
    Mutant(
        "dpo-no-save",
        "dpo",
        (
            (
                'print("saved", training.save_weights_for_sampler("dpo-polite").result().path)\n',
                "training.save_weights_and_get_sampling_client()\n",
            ),
        ),
        ("C13", "A10"),
        "nothing durable is left of the run",
    ),
)

_CUSTOM_LOSS = "        loss = -torch.stack(objectives).mean()\n"

_CUSTOM = (
    Mutant(
        "custom-prompt-included",
        "custom",
        (
            ("            answer = lp[start:]\n", "            answer = lp\n"),
            (
                "                old.append(sequence.logprobs)\n",
                "                old.append([0.0] * (len(prompt) - 1) + sequence.logprobs)\n",
            ),
        ),
        ("A01", "A04", "A16"),
        "the mean runs over prompt tokens too",
    ),
    Mutant(
        "custom-start-early",
        "custom",
        (
            ("starts.append(len(prompt) - 1)", "starts.append(len(prompt) - 2)"),
            ("old.append(sequence.logprobs)", "old.append([0.0] + sequence.logprobs)"),
        ),
        ("A01", "A04", "A16"),
        "the last prompt token is part of the answer",
    ),
    Mutant(
        "custom-start-late",
        "custom",
        (
            ("starts.append(len(prompt) - 1)", "starts.append(len(prompt))"),
            ("old.append(sequence.logprobs)", "old.append(sequence.logprobs[:-1])"),
        ),
        ("A01", "A02", "A04", "A16"),
        "the first sampled token is left out, and old logprobs are one off",
    ),
    Mutant(
        "custom-detached",
        "custom",
        (
            (
                _CUSTOM_LOSS,
                "        loss = -torch.stack(objectives).mean().detach()\n"
                "        loss = loss + 0.0 * sum(lp.sum() for lp in logprobs)\n",
            ),
        ),
        ("A10", "A16", "A04"),
        "the gradient is zero",
    ),
    Mutant(
        "custom-scaled",
        "custom",
        ((_CUSTOM_LOSS, "        loss = -torch.stack(objectives).mean() * 65536\n"),),
        ("A16",),
        "the loss is scaled up as for half precision",
    ),
    Mutant(
        "custom-sum-of-log-ratios",
        "custom",
        (
            (
                "log_ratio = (answer - torch.tensor(q)).mean()",
                "log_ratio = (answer - torch.tensor(q)).sum()",
            ),
        ),
        ("C22", "A16"),
        "a sequence ratio from a sum explodes with length",
    ),
    Mutant(
        "custom-no-minimum",
        "custom",
        (
            (
                "objectives.append(torch.minimum(ratio * advantage, clipped * advantage))",
                "objectives.append(clipped * advantage)",
            ),
        ),
        ("C22",),
        "only the clipped half of the surrogate",
    ),
    Mutant(
        "custom-metric-name",
        "custom",
        (('"gspo/loss": float(loss.detach())', '"loss_mean": float(loss.detach())'),),
        ("A16", "C05"),
        "a metric of the server is hidden",
    ),
    Mutant(
        "custom-weights-in-datum",
        "custom",
        (
            (
                'loss_fn_inputs={"target_tokens": tokens[1:]},',
                "loss_fn_inputs={\n"
                '                            "target_tokens": tokens[1:],\n'
                '                            "weights": [0.0] * (len(prompt) - 1)\n'
                "                            + [1.0] * len(sequence.tokens),\n"
                "                        },",
            ),
            ("            answer = lp[start:]\n", "            answer = lp\n"),
            (
                "                old.append(sequence.logprobs)\n",
                "                old.append([0.0] * (len(prompt) - 1) + sequence.logprobs)\n",
            ),
        ),
        ("A01", "A04", "A16", "C01"),
        "a mask in the datum does not mask a loss of one's own",
    ),
    Mutant(
        "custom-old-in-other-order",
        "custom",
        (
            (
                "            assert len(answer) == len(q), (len(answer), len(q))\n",
                "            answer = answer[: len(q)]\n            q = q[: len(answer)]\n",
            ),
            ("make_loss(starts, old, advantages)", "make_loss(starts, old[::-1], advantages)"),
        ),
        ("A16", "A02", "A06"),
        "old logprobs belong to other samples",
    ),
)

_RESUME = (
    Mutant(
        "resume-without-optimizer",
        "resume",
        (
            (
                "create_training_client_from_state_with_optimizer(",
                "create_training_client_from_state(",
            ),
        ),
        ("C13", "A14"),
        "Adam starts anew",
    ),
    Mutant(
        "resume-from-row-zero",
        "resume",
        (('again["step"], again["position"], FULL', 'again["step"], 0, FULL'),),
        ("A14", "C13"),
        "the first batches are trained twice",
    ),
    Mutant(
        "resume-from-the-start",
        "resume",
        (('again["step"], again["position"], FULL', "0, 0, FULL"),),
        ("A14", "C13"),
        "neither step nor position is taken up",
    ),
    Mutant(
        "resume-position-behind",
        "resume",
        (('"position": position}', '"position": position - BATCH}'),),
        ("A14",),
        "the batch before the save is repeated",
    ),
    Mutant(
        "resume-weights-loaded",
        "resume",
        (
            (
                'service.create_training_client_from_state_with_optimizer(again["path"])',
                'service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=16, seed=7)\n'
                'resumed.load_state(again["path"]).result()',
            ),
        ),
        ("C13", "A14"),
        "load_state restores weights only",
    ),
    Mutant(
        "resume-sampler-weights",
        "resume",
        (
            (
                '    state = training.save_state(f"step-{step}").result()\n',
                '    state = training.save_weights_for_sampler(f"step-{step}").result()\n',
            ),
        ),
        ("C13", "A14"),
        "sampler weights hold no optimiser state",
        crashes=True,
    ),
    Mutant(
        "resume-metric-first-value",
        "resume",
        (
            (
                'backward.result().metrics["loss_mean"]',
                "next(iter(backward.result().metrics.values()))",
            ),
        ),
        ("C05",),
        "a sum is logged as the loss",
    ),
    Mutant(
        "resume-mask-early",
        "resume",
        (
            (
                "[0.0] * (len(prompt) - 1) + [1.0] * len(answer)",
                "[0.0] * (len(prompt) - 2) + [1.0] * (len(answer) + 1)",
            ),
        ),
        ("A04", "A03"),
        "one token of the generation prompt is trained",
    ),
)

_EPOCHS_AFTER = "        output = backward.result()\n        update.result()\n"

_PPO_EPOCHS = (
    Mutant(
        "epochs-old-from-new-sampler",
        "ppo_epochs",
        (
            (
                _EPOCHS_AFTER,
                _EPOCHS_AFTER + "        newer = training.save_weights_and_get_sampling_client()\n"
                "        scoring = [\n"
                '            newer.compute_logprobs(trio.ModelInput.from_ints(s["prompt"] + s["tokens"]))\n'
                "            for s in samples\n"
                "        ]\n"
                "        for sample, future in zip(samples, scoring, strict=True):\n"
                '            sample["logprobs"] = future.result()[len(sample["prompt"]) :]\n',
            ),
        ),
        ("A02", "A06"),
        "old logprobs are recomputed after the update: the clip never acts",
    ),
    Mutant(
        "epochs-old-from-output",
        "ppo_epochs",
        (
            (
                _EPOCHS_AFTER,
                _EPOCHS_AFTER
                + "        for sample, served in zip(samples, output.loss_fn_outputs, strict=True):\n"
                '            sample["logprobs"] = served["logprobs"].tolist()[-len(sample["tokens"]) :]\n',
            ),
        ),
        ("A02",),
        "the second pass takes the first one's logprobs as old",
    ),
    Mutant(
        "epochs-shuffled-apart",
        "ppo_epochs",
        (
            (
                "        data = [as_datum(sample) for sample in samples]\n",
                '        advantages = [sample["advantage"] for sample in samples]\n'
                "        rng.shuffle(advantages)\n"
                "        for sample, advantage in zip(samples, advantages, strict=True):\n"
                '            sample["advantage"] = advantage\n'
                "        data = [as_datum(sample) for sample in samples]\n",
            ),
        ),
        ("A09",),
        "advantages are shuffled and samples are not",
    ),
    Mutant(
        "epochs-bounds-as-distances",
        "ppo_epochs",
        (
            (
                '"clip_low_threshold": 0.8, "clip_high_threshold": 1.2',
                '"clip_low_threshold": 0.2, "clip_high_threshold": 0.2',
            ),
        ),
        ("A06", "C16", "C22"),
        "bounds given as distances from one",
    ),
    Mutant(
        "epochs-reward-in-prompt",
        "ppo_epochs",
        (
            (
                '"advantages": [0.0] * before + [sample["advantage"]] * len(tokens)',
                '"advantages": [sample["advantage"]] * (before + len(tokens))',
            ),
        ),
        ("A01",),
        "the prompt's placeholder targets carry advantage",
    ),
    Mutant(
        "epochs-fixed-baseline",
        "ppo_epochs",
        (('"advantage": reward - baseline,', '"advantage": reward - 0.5,'),),
        ("A09",),
        "a fixed number instead of the group's mean",
    ),
    Mutant(
        "epochs-one-step-for-all-passes",
        "ppo_epochs",
        (
            (
                "        update = training.optim_step(trio.AdamParams(learning_rate=1e-4))\n"
                "        output = backward.result()\n"
                "        update.result()\n",
                "        output = backward.result()\n",
            ),
            (
                "\nsaved = training.save",
                "    training.optim_step(trio.AdamParams(learning_rate=1e-4)).result()\n"
                "\nsaved = training.save",
            ),
        ),
        ("C21", "A12", "A13"),
        "passes without a step in between only add the same gradient again",
    ),
)

_REJECT = (
    Mutant(
        "reject-prompt-trained",
        "reject",
        (
            (
                "weights = [0.0] * len(prompt) + [1.0] * len(completion)",
                "weights = [1.0] * len(tokens)",
            ),
        ),
        ("A01", "A04"),
        "the prompt is trained",
    ),
    Mutant(
        "reject-text-kept",
        "reject",
        (
            (
                "                right.append(sequence.tokens)\n",
                "                right.append(tokenizer.encode(sequence.text, add_special_tokens=False))\n",
            ),
        ),
        ("A02", "A04", "C06"),
        "own samples are kept as text: the end token is lost",
    ),
    Mutant(
        "reject-mask-late",
        "reject",
        (('"weights": weights[1:]}', '"weights": weights[:-1]}'),),
        ("A03", "A04", "A01"),
        "the first token of the answer is not trained",
    ),
    Mutant(
        "reject-base-sampler",
        "reject",
        (
            (
                "    sampler = training.save_weights_and_get_sampling_client()\n",
                '    sampler = service.create_sampling_client("Qwen/Qwen3.5-4B")\n',
            ),
        ),
        ("A05", "C09"),
        "every round starts from the base model's answers",
    ),
    Mutant(
        "reject-truncated-kept",
        "reject",
        (
            ("max_tokens=64, temperature=1.0", "max_tokens=26, temperature=1.0"),
            (
                'if sequence.stop_reason == "stop" and boxes[-1:] == [words.gold(row)]:',
                "if sequence.stop_reason or boxes[-1:] == [words.gold(row)]:",
            ),
        ),
        ("A04", "A11"),
        "answers that were cut are imitated",
    ),
)

_VISION = (
    Mutant(
        "vision-count",
        "vision",
        (("expected_tokens=count)", "expected_tokens=count + 1)"),),
        ("A18",),
        "visual tokens are counted with the image placeholder",
        crashes=True,
    ),
    Mutant(
        "vision-swapped",
        "vision",
        (("chunks = [first, picture, last,", "chunks = [last, picture, first,"),),
        ("A02",),
        "the texts before and after the picture change places in the datum",
    ),
    Mutant(
        "vision-moved",
        "vision",
        (("chunks = [first, picture, last,", "chunks = [picture, first, last,"),),
        ("A02",),
        "the picture stands before all text in the datum",
    ),
    Mutant(
        "vision-truncated",
        "vision",
        (("chunks = [first, picture, last,", "chunks = [first, last,"),),
        ("A02",),
        "a length limit that cuts the picture out of the datum",
    ),
    Mutant(
        "vision-other-picture",
        "vision",
        (
            (
                "                data.append(to_datum(prompt, sequence, reward - mean))\n",
                "                data.append(to_datum(prompts[0], sequence, reward - mean))\n",
            ),
        ),
        ("A02",),
        "every completion is trained behind the first prompt and picture",
    ),
    Mutant(
        "vision-resize",
        "vision",
        (("judge.sample(encode_prompt(row, SIDE)", "judge.sample(encode_prompt(row, 2 * SIDE)"),),
        ("A18",),
        "evaluation sees the pictures in another size than training",
    ),
    Mutant(
        "vision-late",
        "vision",
        (
            (
                "ahead = len(model_input) - len(answer)",
                "ahead = len(model_input) - len(answer) + 1",
            ),
            (
                '"target_tokens": [0] * ahead + answer,',
                '"target_tokens": [0] * ahead + answer[1:],',
            ),
            ('"logprobs": [0.0] * ahead + old,', '"logprobs": [0.0] * ahead + old[1:],'),
            ("[advantage] * len(answer),", "[advantage] * (len(answer) - 1),"),
        ),
        ("A01",),
        "the first token of the answer has no advantage",
    ),
)

MUTANTS = (
    *_SFT,
    *_SFT_MULTITURN,
    *_GRPO,
    *_GRPO_ASYNC,
    *_TOOLS,
    *_OPD,
    *_OPSD,
    *_DPO,
    *_CUSTOM,
    *_RESUME,
    *_PPO_EPOCHS,
    *_REJECT,
    *_VISION,
)
