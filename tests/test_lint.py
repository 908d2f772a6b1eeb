"""The source check: every rule fires on its bug and stays silent on correct code."""

import json
import re
from pathlib import Path

import pytest

from conftest import ROOT, SKILL
from lint.check import Finding, check_source
from lint.cli import check_files
from lint.rules import REFERENCE, RULES

# What most snippets begin with; a snippet that needs another beginning has its own import.
START = """\
import asyncio, random, re, statistics
import numpy as np
import torch
import pytrio as trio
service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=8)
tokenizer = training.get_tokenizer()
adam = trio.AdamParams(learning_rate=1e-4)
"""

# A rollout whose log-probabilities become a datum; PARAMS and the rest are filled in.
ROLLOUT = """\
PARAMS
for step in range(10):
    sampler = training.save_weights_and_get_sampling_client()
    INSIDE
    data = []
    for prompt in prompts:
        response = sampler.sample(trio.ModelInput.from_ints(prompt), 8, params).result()
        for s, reward in zip(response.sequences, score(response)):
            ahead = len(prompt) - 1
            data.append(trio.Datum(
                model_input=trio.ModelInput.from_ints(prompt + s.tokens[:-1]),
                loss_fn_inputs={
                    "target_tokens": [0] * ahead + s.tokens,
                    "logprobs": [0.0] * ahead + s.logprobs,
                    "advantages": [0.0] * ahead + [reward] * len(s.tokens),
                }))
    backward = training.forward_backward(data, loss_fn="importance_sampling")
    update = training.optim_step(adam)
    backward.result(), update.result()
training.save_weights_for_sampler("done").result()
"""


def rollout(params: str = "", inside: str = "pass") -> str:
    return ROLLOUT.replace("PARAMS", params).replace("INSIDE", inside)


def datum(keys: str, loss: str = "") -> str:
    call = f"out = training.forward_backward([d], {loss!r}).result()\nprint(out)\n" if loss else ""
    return (
        f"d = trio.Datum(model_input=trio.ModelInput.from_ints(x), loss_fn_inputs={keys})\n{call}"
    )


POLICY = '{"target_tokens": t, "logprobs": q, "advantages": a}'
PARAMS = "params = trio.SamplingParams(max_tokens=64)"

# (rule, what, snippet): the rule fires on the snippet.
WRONG = [
    ("C01", "mask beside advantages", datum(POLICY[:-1] + ', "weights": w}')),
    ("C01", "mask in a ppo datum", datum(POLICY[:-1] + ', "loss_mask": w}', "ppo")),
    ("C01", "dict() and a later key",
     'inputs = {"target_tokens": t, "logprobs": q, "advantages": a}\ninputs["mask"] = m\n'
     + datum("inputs")),
    ("C01", "no advantages", datum('{"target_tokens": t, "logprobs": q}', "ppo")),
    ("C01", "policy datum into cross_entropy", datum(POLICY, "cross_entropy")),
    ("C01", "a mask that the own loss never reads",
     datum('{"target_tokens": t, "weights": w}')
     + "def own(data, logprobs):\n    return -torch.cat(logprobs).mean(), {}\n"
     "training.forward_backward_custom([d], own).result()"),
    ("C02", "weight", datum('{"target_tokens": t, "weight": w}', "cross_entropy")),
    ("C02", "labels", datum('dict(labels=t, weights=w)')),
    ("C03", "bare step", "training.optim_step(adam)"),
    ("C03", "future never read", "backward = training.forward_backward(data, 'cross_entropy')"),
    ("C03", "untyped client",
     "def go(client, data):\n    client.forward_backward(data, loss_fn='cross_entropy')"),
    ("C03", "metrics of a future", "print(training.forward_backward(data).metrics)"),
    ("C03", "name of a future", "saved = training.save_state('a')\nprint(saved.path)"),
    ("C04", "one await too few",
     "async def f():\n    out = await training.forward_backward_async(data)\n"
     "    print(out.metrics)"),
    ("C04", "bare single await", "async def f():\n    await training.optim_step_async(adam)"),
    ("C04", "gathered futures",
     "async def f():\n    a, b = await asyncio.gather(training.forward_backward_async(d), "
     "training.optim_step_async(adam))\n    print(a.metrics, b)"),
    ("C04", "never awaited", "async def f():\n    training.optim_step_async(adam)"),
    ("C04", "read before await",
     "async def f(s: trio.SamplingClient):\n    print(s.sample_async(p, 1, k).sequences)"),
    ("C04", "one await too many",
     "async def f(s: trio.SamplingClient):\n    r = await (await s.sample_async(p, 1, k))\n"
     "    print(r)"),
    ("C04", "result of a response",
     "async def f(s: trio.SamplingClient):\n    r = (await s.sample_async(p, 1, k)).result()\n"
     "    print(r)"),
    ("C05", "close", "training.close()"),
    ("C05", "name=", "training.save_weights_and_get_sampling_client(name='a')"),
    ("C05", "configure timeout", "trio.configure(timeout=600)"),
    ("C05", "old metric key",
     "print(training.forward_backward(data).result().metrics['loss:sum'])"),
    ("C05", "old metric key by get",
     "def show(result):\n    return result.metrics.get('loss:mean', 0.0)"),
    ("C05", "loss metric", "m = training.forward(data).result().metrics\nprint(m['loss'])"),
    ("C05", "first metric", "print(next(iter(out.metrics.values())))"),
    ("C05", "private import", "from pytrio._utils import x"),
    ("C05", "lost module", "import pytrio.lib.training_client"),
    ("C05", "missing member", "from pytrio import SampleParams"),
    ("C05", "module attribute", "trio.LoraConfig(rank=8)"),
    ("C05", "field of a sequence",
     "def f(s: trio.types.SampleSequence):\n    return s.finish_reason"),
    ("C05", "missing argument", "sampler = service.create_sampling_client(model_path=p)"),
    ("C05", "positional model input", "trio.ModelInput([1, 2])"),
    ("C05", "unknown loss", "training.forward_backward(data, loss_fn='grpo').result()"),
    ("C05", "string annotation",
     "def f(client: 'trio.TrainingClient | None'):\n    client.train_step()"),
    ("C05", "attribute of a class",
     "class Run:\n    def __init__(self):\n        self.training = "
     "service.create_lora_training_client('m')\n    def end(self):\n        self.training.close()"),
    ("C06", "text encoded again", rollout(
        PARAMS, "pass").replace("ahead = len(prompt) - 1",
        "ahead = len(prompt) - 1; ids = tokenizer.encode(s.text, add_special_tokens=False)")),
    ("C06", "decoded and encoded", rollout(PARAMS).replace("ahead = len(prompt) - 1",
        "ahead = 1; text = tokenizer.decode(s.tokens).strip(); ids = tokenizer.encode(text)")),
    ("C06", "end token appended",
     rollout(PARAMS).replace("[0] * ahead + s.tokens,", "[0] * ahead + (s.tokens + [eos_id]),")),
    ("C06", "end token appended to a copy", rollout(PARAMS).replace("ahead = len(prompt) - 1",
        "ahead = 1; ids = list(s.tokens); ids.append(tokenizer.eos_token_id)")),
    ("C06", "border by text", "def f(prompt, answer):\n"
     "    start = len(tokenizer.encode(prompt))\n    ids = tokenizer.encode(prompt + answer)"),
    ("C06", "border by text in an f-string", "def f(q, answer):\n"
     "    head = tokenizer(q)['input_ids']\n    ids = tokenizer(f'{q}{answer}')['input_ids']\n"
     "    return len(head), ids"),
    ("C07", "temperature", rollout("params = trio.SamplingParams(max_tokens=9, temperature=0.7)")),
    ("C07", "top_p", rollout("params = trio.SamplingParams(max_tokens=9, top_p=0.95)")),
    ("C07", "top_k", rollout("", "params = trio.SamplingParams(max_tokens=9, top_k=20)")),
    ("C07", "default of a dataclass", "from dataclasses import dataclass\n@dataclass\n"
     "class Config:\n    temperature: float = 0.6\nconfig = Config()\n" + rollout(
         "params = trio.SamplingParams(max_tokens=9, temperature=config.temperature)")),
    ("C07", "default of argparse", "import argparse\nparser = argparse.ArgumentParser()\n"
     "parser.add_argument('--temperature', type=float, default=0.8)\nargs = parser.parse_args()\n"
     + rollout("params = trio.SamplingParams(max_tokens=9, temperature=args.temperature)")),
    ("C08", "seed before the loop", rollout("params = trio.SamplingParams(max_tokens=9, seed=0)")),
    ("C08", "constant seed inside", rollout(
        "SEED = 3", "params = trio.SamplingParams(max_tokens=9, seed=SEED + 1)")),
    ("C08", "one seed for a group", rollout(
        "", "params = trio.SamplingParams(max_tokens=9, seed=step)").replace(
        "response = sampler.sample(trio.ModelInput.from_ints(prompt), 8, params).result()",
        "futures = [sampler.sample(trio.ModelInput.from_ints(prompt), 1, params) "
        "for _ in range(8)]; response = futures[0].result()")),
    ("C09", "made before the loop", "sampler = training.save_weights_and_get_sampling_client()\n"
     + rollout(PARAMS).replace(
         "    sampler = training.save_weights_and_get_sampling_client()\n", "")),
    ("C09", "in an attribute", "class Run:\n    def __init__(self):\n"
     "        self.sampler = training.save_weights_and_get_sampling_client()\nrun = Run()\n"
     + rollout(PARAMS).replace(
         "    sampler = training.save_weights_and_get_sampling_client()\n",
         "    sampler = run.sampler\n")),
    ("C09", "base model", rollout(PARAMS).replace(
        "training.save_weights_and_get_sampling_client()", "service.create_sampling_client('m')")),
    ("C10", "stdev", datum(POLICY) + "def adv(rewards):\n    mean = statistics.mean(rewards)\n"
     "    return [(r - mean) / statistics.stdev(rewards) for r in rewards]"),
    ("C10", "std of numpy", datum(POLICY) + "def adv(rewards):\n    std = np.std(rewards)\n"
     "    return (rewards - np.mean(rewards)) / std"),
    ("C10", "two at once", datum(POLICY) + "def adv(rewards):\n"
     "    mean, spread = statistics.mean(rewards), statistics.pstdev(rewards)\n"
     "    return [(r - mean) / spread for r in rewards]"),
    ("C10", "mask from advantages",
     datum(POLICY) + "mask = [float(adv != 0) for adv in advantages]"),
    ("C10", "tensor mask", datum(POLICY) + "loss_mask = (advantages != 0.0).float()"),
    ("C10", "dropped after", datum(POLICY) + "for s, advantage in zip(seqs, advantages):\n"
     "    if len(s.tokens) > max_len:\n        continue\n    use(s, advantage)"),
    ("C10", "filtered after", "data = []\nfor p in prompts:\n    data.append(trio.Datum("
     f"model_input=m, loss_fn_inputs={POLICY}))\n"
     "data = [d for d in data if d.model_input.length <= 2048]"),
    ("C11", "up to a brace", r"m = re.findall(r'\\boxed\{([^}]+)\}', text)"),
    ("C11", "lazy", r"BOX = re.compile(r'\\boxed{(.*?)}')"),
    ("C11", "first box", r"m = re.search(r'\\boxed\{(-?\d+)\}', text)"),
    ("C11", "first of all", r"m = re.findall(r'\\boxed\{(-?\d+)\}', text)[0]"),
    ("C12", "configure", "trio.configure(api_key='sk-123')"),
    ("C12", "client", "service = trio.ServiceClient('sk-123')"),
    ("C12", "environment", "import os\nos.environ['PYTRIO_API_KEY'] = 'sk-123'"),
    ("C12", "constant", "API_KEY = 'sk-123'\ntrio.configure(api_key=API_KEY)"),
    ("C13", "weights only", "resumed = service.create_training_client_from_state(resume_path)\n"
     "resumed.optim_step(adam).result()"),
    ("C13", "load_state", "if config.resume:\n    training.load_state(path).result()\n"
     "training.optim_step(adam).result()"),
    ("C13", "no save", "for step in range(9):\n    training.optim_step(adam).result()"),
    ("C13", "no save in a function", "def step():\n    training.optim_step(adam).result()\n"
     "while True:\n    step()"),
    ("C13", "short life", "for step in range(9):\n    training.optim_step(adam).result()\n"
     "training.save_weights_for_sampler('a', ttl_seconds=600).result()"),
    ("C14", "template ids", "ids = tokenizer.apply_chat_template(messages)"),
    ("C14", "tokenize=True",
     "ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)"),
    ("C14", "special tokens twice", "text = tokenizer.apply_chat_template(m, tokenize=False)\n"
     "ids = tokenizer.encode(text)"),
    ("C14", "special tokens twice, through a function",
     "def render(m):\n    return tokenizer.apply_chat_template(m, tokenize=False)\n"
     "ids = tokenizer(render(m)).input_ids"),
    ("C15", "two values",
     "a = tokenizer.apply_chat_template(m, tokenize=False, enable_thinking=False)\n"
     "b = tokenizer.apply_chat_template(m, tokenize=False, enable_thinking=True)"),
    ("C15", "only sometimes",
     "a = tokenizer.apply_chat_template(m, tokenize=False, enable_thinking=False)\n"
     "b = tokenizer.apply_chat_template(m, tokenize=False)"),
    ("C16", "lr", "trio.AdamParams(lr=1e-4)"),
    ("C16", "max_new_tokens", "from pytrio.types import SamplingParams\n"
     "SamplingParams(max_new_tokens=8)"),
    ("C16", "no max_tokens", "params = trio.SamplingParams(temperature=1.0)\n"
     "training.create_sampling_client('p').sample(prompt, 1, params).result()"),
    ("C16", "no params", "training.create_sampling_client('p').sample(prompt, 1).result()"),
    ("C16", "loss setting",
     "training.forward_backward(data, 'ppo', loss_fn_config={'epsilon': 0.2}).result()"),
    ("C16", "distance for a bound",
     "CLIP = {'clip_high_threshold': 0.28}\n"
     "training.forward_backward(data, 'ppo', loss_fn_config=CLIP).result()"),
    ("C16", "rate of 0", "trio.AdamParams(learning_rate=0.0)"),
    ("C17", "inherited environment", "import subprocess, sys\n"
     "done = subprocess.run([sys.executable, '-c', code], timeout=5)"),
    ("C17", "copied environment", "import os, subprocess\nenv = {**os.environ, 'A': 'b'}\n"
     "done = subprocess.run(['python3', path], env=env, timeout=5)"),
    ("C17", "no time limit", "import subprocess, sys\n"
     "done = subprocess.run([sys.executable, '-I', '-c', code], env={})"),
    ("C17", "exec", "def run(code):\n    exec(code, {})"),
    ("C17", "eval", "def calculate(text):\n    return eval(text)"),
    ("C17", "exit code", "def reward(done):\n    return 1.0 if done.returncode == 0 else 0.0"),
    ("C18", "alarm", "import signal\nasync def f():\n    signal.alarm(5)"),
    ("C18", "setitimer", "import signal\nsignal.setitimer(signal.ITIMER_REAL, 5)"),
    ("C19", "turns in an f-string",
     "ids = tokenizer.encode(f'<|im_start|>user\\n{q}<|im_end|>\\n<|im_start|>assistant\\n')"),
    ("C19", "empty think block",
     "text = tokenizer.apply_chat_template(m, tokenize=False) + '<think>\\n\\n</think>\\n\\n'\n"
     "ids = tokenizer.encode(text, add_special_tokens=False)"),
    ("C20", "asarray", "out = training.forward(data).result()\n"
     "x = np.asarray(out.loss_fn_outputs[0]['logprobs'])"),
    ("C20", "concatenate", "def f(out):\n"
     "    return np.concatenate([o['logprobs'] for o in out.loss_fn_outputs])"),
    ("C20", "tensor of inputs", "def own(data, logprobs):\n"
     "    return torch.tensor(data[0].loss_fn_inputs['target_tokens'])"),
    ("C20", "iterated", "def f(d: trio.Datum):\n    return sum(d.loss_fn_inputs['weights'])"),
    ("C21", "micro-batches", "for part in parts:\n    training.forward_backward(part).result()\n"
     "training.optim_step(adam).result()"),
    ("C21", "micro-batches in a list", "for batch in batches:\n"
     "    futures = [training.forward_backward(part) for part in batch]\n"
     "    step = training.optim_step(adam)\n    print([f.result() for f in futures])\n"
     "    step.result()"),
    ("C21", "waited too early", "for batch in batches:\n"
     "    out = training.forward_backward(batch).result()\n"
     "    training.optim_step(adam).result()\n    print(out)"),
    ("C21", "awaited too early", "async def f():\n"
     "    out = await (await training.forward_backward_async(data))\n"
     "    await (await training.optim_step_async(adam))\n    print(out)"),
    ("C21", "accumulation", "for i, batch in enumerate(batches):\n"
     "    training.forward_backward(batch).result()\n    if (i + 1) % 4 == 0:\n"
     "        training.optim_step(adam).result()"),
    ("C22", "clamp alone", "def own(data, logprobs):\n"
     "    ratio = torch.exp(lp - old)\n"
     "    return -(torch.clamp(ratio, 0.8, 1.2) * advantage).mean()"),
    ("C22", "summed log-ratio", "def own(data, logprobs):\n    log_ratio = (lp - old).sum()\n"
     "    ratio = torch.exp(log_ratio)\n    return -(ratio * advantage), {}\n"),
    ("C22", "clamp by name", "def own(data, logprobs):\n    ratio = (lp - old).exp()\n"
     "    clipped = ratio.clamp(0.8, 1.2)\n    return -(advantages * clipped).sum(), {}"),
    ("C23", "unknown keyword", "import swanlab\nrun = swanlab.init(project='a', nmae='x')\n"
     "swanlab.finish()"),
    ("C23", "project with a slash", "import swanlab\nswanlab.init(project='math/grpo')\n"
     "swanlab.finish()"),
    ("C23", "numpy step", "import swanlab\nswanlab.log({'a': 1.0}, step=np.int64(3))"),
    ("C23", "step of a division", "from swanlab import log\nlog({'a': 1.0}, step=i / 2)"),
    ("C23", "never finished", "import swanlab\nswanlab.init(project='a')"),
    ("C23", "removed name", "import swanlab\nswanlab.define_nothing('a')"),
    ("C23", "mode", "import swanlab\nswanlab.init(mode='cloud')\nswanlab.finish()"),
    ("C24", "equals sign", "training.save_state('step=1').result()"),
    ("C24", "slash in an f-string", "training.save_state(f'run/{step}').result()"),
    ("C24", "one name in a loop", "for step in range(9):\n"
     "    training.save_weights_for_sampler('latest').result()"),
    ("C24", "one name every ten", "NAME = 'state'\nfor step in range(90):\n"
     "    if step % 10 == 0:\n        training.save_state(NAME).result()"),
    ("C25", "cut", "def build(prompt, answer):\n    tokens = prompt + answer\n"
     "    tokens = tokens[:max_length]\n    return trio.Datum(model_input=m, loss_fn_inputs=k)"),
    ("C25", "cut by a setting", "def build(input_ids):\n"
     "    return trio.Datum(model_input=trio.ModelInput.from_ints(input_ids[: config.max_len]), "
     "loss_fn_inputs=k)"),
    ("C26", "range with a rest",
     "for start in range(0, len(rows) - size + 1, size):\n    use(rows[start : start + size])"),
    ("C26", "floor", "count = len(rows) // size\nfor i in range(count):\n"
     "    use(rows[i * size : (i + 1) * size])"),
    ("C26", "shuffle", "rows = load()\nfor epoch in range(3):\n    random.shuffle(rows)"),
]  # fmt: skip

# (rule, what, snippet): the rule does not fire, although the snippet is near the bug.
RIGHT = [
    ("C01", "policy keys", datum(POLICY, "ppo")),
    ("C01", "cross-entropy beside policy",
     datum(POLICY) + datum('{"target_tokens": t, "weights": w}')),
    ("C01", "keys of an own loss", datum(POLICY[:-1] + ', "start": w}')
     + "def own(data, logprobs):\n    return f(data[0].loss_fn_inputs['start'], "
     "data[0].loss_fn_inputs['advantages'], data[0].loss_fn_inputs['logprobs'])\n"
     "training.forward_backward_custom([d], own).result()"),
    ("C02", "weights", datum('{"target_tokens": t, "weights": w}', "cross_entropy")),
    ("C02", "unknown keys", datum("make(t)", "cross_entropy")),
    ("C03", "tuple of results", "a = training.forward_backward(d)\nb = training.optim_step(adam)\n"
     "a.result(), b.result()"),
    ("C03", "collected", "waiting = []\nwaiting.append(training.optim_step(adam))\n"
     "for w in waiting:\n    w.result()"),
    ("C03", "awaited", "async def f():\n    await training.optim_step(adam)"),
    ("C04", "two awaits", "async def f():\n    b = await training.forward_backward_async(d)\n"
     "    s = await training.optim_step_async(adam)\n    out = await b\n    await s\n"
     "    print(out.metrics)"),
    ("C04", "rebound", "async def f():\n    out = await training.forward_backward_async(d)\n"
     "    out = await out\n    print(out.metrics['loss_mean'])"),
    ("C04", "gathered samples", "async def f(s: trio.SamplingClient):\n"
     "    rs = await asyncio.gather(*[s.sample_async(p, 1, k) for p in ps])\n"
     "    print([r.sequences[0].text for r in rs])"),
    ("C04", "task", "async def f(s: trio.SamplingClient):\n"
     "    task = asyncio.create_task(s.sample_async(p, 1, k))\n    r = await task\n"
     "    print(r.sequences)"),
    ("C05", "guarded", "if hasattr(training, 'close'):\n    training.close()"),
    ("C05", "somebody else's close", "file = open('x')\nfile.close()"),
    ("C05", "own metrics", "metrics = {'loss': 1.0}\nprint(metrics['loss'])"),
    ("C05", "real names", "print(training.model_id, training.lora.rank, service.user_id)\n"
     "print(training.forward(d).result().metrics['token_count'])"),
    ("C05", "custom metric",
     "print(training.forward_backward_custom(d, f).result().metrics['dpo/loss'])"),
    ("C06", "length of a text", rollout(PARAMS).replace(
        "ahead = len(prompt) - 1", "ahead = 1; n = len(tokenizer.encode(s.text))")),
    ("C06", "joined ids", "def f(prompt, answer):\n    head = tokenizer.encode(prompt)\n"
     "    tail = tokenizer.encode(answer) + [eos]\n    return head + tail, len(head)"),
    ("C07", "greedy evaluation", rollout(PARAMS) + "greedy = trio.SamplingParams(max_tokens=9, "
     "temperature=0.0)\nfor p in prompts:\n    r = training.create_sampling_client('p').sample("
     "p, 1, greedy).result()\n    print(r.sequences[0].text)"),
    ("C07", "explicit defaults", rollout(
        "params = trio.SamplingParams(max_tokens=9, temperature=1.0, top_p=1.0, top_k=-1)")),
    ("C08", "seed of the step", rollout(
        "", "params = trio.SamplingParams(max_tokens=9, seed=base + step)")),
    ("C08", "no seed", rollout("params = trio.SamplingParams(max_tokens=9, seed=None)")),
    ("C09", "teacher", "teacher = service.create_sampling_client('t')\n" + rollout(
        PARAMS, "scores = [teacher.compute_logprobs(p).result() for p in prompts]")),
    ("C09", "refreshed now and then",
     "sampler = training.save_weights_and_get_sampling_client()\n" + rollout(PARAMS).replace(
         "    sampler = training.save", "    if step % 4 == 0:\n        sampler = training.save")),
    ("C10", "epsilon", datum(POLICY) + "def adv(rewards):\n"
     "    std = np.std(rewards) + 1e-6\n    return (rewards - np.mean(rewards)) / std"),
    ("C10", "zero branch", datum(POLICY) + "def adv(rewards):\n"
     "    std = statistics.pstdev(rewards)\n"
     "    if std == 0:\n        return [0.0] * len(rewards)\n"
     "    return [r / std for r in rewards]"),
    ("C10", "guarded by the caller", datum(POLICY) + "def adv(rewards):\n"
     "    return [r / statistics.pstdev(rewards) for r in rewards]\n"
     "for rewards in groups:\n    if len(set(rewards)) > 1:\n        adv(rewards)"),
    ("C10", "filter of zeros", datum(POLICY) + "data = [d for d, adv in pairs if adv != 0]\n"
     "if advantage != 0:\n    use(advantage)"),
    ("C11", "digits", r"m = re.findall(r'\\boxed\{(-?\d+)\}', text)[-1]"),
    ("C11", "one level deep", r"m = re.findall(r'\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}', text)"),
    ("C12", "environment", "import os\ntrio.configure(api_key=os.environ['PYTRIO_API_KEY'])"),
    ("C12", "name of a variable", "API_KEY = 'PYTRIO_API_KEY'"),
    ("C12", "local", "trio.configure(api_key='any', base_url='http://127.0.0.1:8000')"),
    ("C13", "new stage", "training = service.create_training_client_from_state(config.sft_path)\n"
     "training.optim_step(adam).result()\ntraining.save_state('a').result()"),
    ("C13", "saved elsewhere", "from mine import finish\nfor i in range(3):\n"
     "    training.optim_step(adam).result()\nfinish(training)"),
    ("C14", "ids of the dict", "ids = tokenizer.apply_chat_template(m)['input_ids']"),
    ("C14", "return_dict", "ids = tokenizer.apply_chat_template(m, return_dict=False)"),
    ("C14", "no special tokens", "text = tokenizer.apply_chat_template(m, tokenize=False)\n"
     "ids = tokenizer.encode(text, add_special_tokens=False)"),
    ("C15", "one value", "a = tokenizer.apply_chat_template(m, tokenize=False, "
     "enable_thinking=t)\nb = tokenizer.apply_chat_template(n, tokenize=False, enable_thinking=t)"),
    ("C16", "params of a function", "def f(params: trio.SamplingParams, s: trio.SamplingClient):\n"
     "    return s.sample(p, 1, params).result()"),
    ("C16", "settings of ppo",
     "training.forward_backward(d, 'ppo', {'clip_low_threshold': 0.8}).result()"),
    ("C16", "somebody else's n", "class SamplingParams:\n    pass\nSamplingParams(n=3)"),
    ("C17", "a closed sandbox", "import subprocess, sys\n"
     "done = subprocess.run([sys.executable, '-I', '-c', code], env={}, timeout=5)"),
    ("C17", "git", "import subprocess\nsubprocess.run(['git', 'rev-parse', ref])"),
    ("C17", "eval mode", "model.eval()\nimport ast\nast.literal_eval(text)"),
    ("C18", "switched off", "import signal\nsignal.alarm(0)"),
    ("C19", "markers", "END = tokenizer.convert_tokens_to_ids('<|im_end|>')\n"
     "text = reply.split('<think>')[-1]\nok = '<|im_start|>' in reply\n"
     "params = trio.SamplingParams(max_tokens=9, stop=['<|im_end|>'])"),
    ("C19", "content of a message",
     "m = [{'role': 'assistant', 'content': f'<think>{r}</think>'}]\n"
     "text = tokenizer.apply_chat_template(m, tokenize=False)\n"
     "ids = tokenizer.encode(text, add_special_tokens=False)"),
    ("C20", "tolist", "def f(out):\n"
     "    return np.concatenate([o['logprobs'].to_numpy() for o in out.loss_fn_outputs])"),
    ("C20", "tensors of a custom loss", "def own(data, logprobs):\n"
     "    return torch.stack([lp.sum() for lp in logprobs]), {}"),
    ("C21", "one call a step", "for batch in batches:\n    b = training.forward_backward(batch)\n"
     "    s = training.optim_step(adam)\n    b.result(), s.result()"),
    ("C21", "a check before the step", "import math\nfor batch in batches:\n"
     "    out = training.forward_backward(batch).result()\n"
     "    if not math.isfinite(out.metrics['loss_mean']):\n        raise SystemExit\n"
     "    training.optim_step(adam).result()"),
    ("C21", "two losses", "for loss, part in parts:\n"
     "    training.forward_backward(part, loss).result()\ntraining.optim_step(adam).result()"),
    ("C22", "minimum", "def own(data, logprobs):\n    ratio = torch.exp(lp - old)\n"
     "    return -torch.minimum(ratio * adv, torch.clamp(ratio, 0.8, 1.2) * adv).mean(), {}"),
    ("C22", "mean log-ratio", "def own(data, logprobs):\n    log_ratio = (lp - old).mean()\n"
     "    ratio = torch.exp(log_ratio)\n    return -(ratio * advantage), {}\n"),
    ("C22", "cispo", "def own(data, logprobs):\n    ratio = torch.exp(lp - old).detach()\n"
     "    return -(torch.clamp(ratio, 0.0, 5.0) * adv * lp).mean(), {}"),
    ("C23", "a right run", "import swanlab\nswanlab.init(project='pytrio-grpo', name='a', "
     "mode='offline', experiment_name='b')\nswanlab.log({'a': 1.0}, step=int(step))\n"
     "swanlab.finish()"),
    ("C24", "step in the name", "for step in range(9):\n"
     "    training.save_state(f'step-{step:04d}').result()"),
    ("C24", "overwritten", "for step in range(9):\n"
     "    training.save_state('latest', overwrite=True).result()"),
    ("C24", "last step", "for step in range(9):\n    if step == 8:\n"
     "        training.save_state('last').result()"),
    ("C25", "shift", "def build(prompt, answer):\n    tokens = prompt + answer\n"
     "    return trio.Datum(model_input=trio.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=k)"),
    ("C25", "prompt cut", "def build(prompt, answer):\n    prompt = prompt[-max_prompt:]\n"
     "    answer = answer[: max_length - 1] + [eos]\n"
     "    return trio.Datum(model_input=m, loss_fn_inputs=k)"),
    ("C26", "all batches", "for start in range(0, len(rows), size):\n"
     "    use(rows[start : start + size])"),
    ("C26", "seeded", "rng = random.Random(3)\nfor epoch in range(3):\n    rng.shuffle(rows)"),
]  # fmt: skip


def codes(source: str) -> set[str]:
    return {finding.code for finding in check_source(source, "snippet.py")}


def ids(table: list[tuple[str, str, str]]) -> list[str]:
    return [f"{code}-{what}" for code, what, _ in table]


@pytest.mark.parametrize(("code", "what", "snippet"), WRONG, ids=ids(WRONG))
def test_bug_is_found(code: str, what: str, snippet: str) -> None:
    assert code in codes(START + snippet)


@pytest.mark.parametrize(("code", "what", "snippet"), RIGHT, ids=ids(RIGHT))
def test_correct_code_is_left_alone(code: str, what: str, snippet: str) -> None:
    assert code not in codes(START + snippet)


def test_every_rule_has_both_kinds_of_snippets() -> None:
    """A rule nobody can trigger, or that was never tried on correct code, is a defect."""
    all_codes = [rule.code for rule in RULES]
    assert all_codes == [f"C{number:02d}" for number in range(27)]
    for code in all_codes[1:]:
        assert code in {c for c, _, _ in WRONG}
        assert code in {c for c, _, _ in RIGHT}


# Loops as people write them, in styles that the snippets above do not have.
CLASS_STYLE = """\
from __future__ import annotations
import asyncio, json, random, statistics
from dataclasses import dataclass
from pathlib import Path
import pytrio as trio
import swanlab, tyro

@dataclass
class Config:
    temperature: float = 1.0
    seed: int = 0
    state: Path = Path("state.json")

@dataclass
class Rollout:
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    reward: float
    advantage: float = 0.0

class Trainer:
    def __init__(self, config: Config, service: trio.ServiceClient):
        self.config, self.service = config, service
        self.training: trio.TrainingClient | None = None
        self.limit = asyncio.Semaphore(32)
        self.rng = random.Random(config.seed)

    async def setup(self) -> int:
        if self.config.state.exists():
            saved = json.loads(self.config.state.read_text())
            create = self.service.create_training_client_from_state_with_optimizer_async
            self.training = await create(saved["path"])
            return saved["step"]
        self.training = await self.service.create_lora_training_client_async("m", seed=0)
        return 0

    async def group(self, sampler, prompt, gold) -> list[Rollout]:
        params = trio.SamplingParams(max_tokens=9, temperature=self.config.temperature,
                                     seed=self.rng.randrange(2**31))
        async with self.limit:
            response = await sampler.sample_async(trio.ModelInput.from_ints(prompt), 8, params)
        rollouts = [Rollout(prompt, list(s.tokens), list(s.logprobs), float(gold in s.text))
                    for s in response.sequences]
        mean = statistics.mean(r.reward for r in rollouts)
        std = statistics.pstdev(r.reward for r in rollouts)
        for r in rollouts:
            r.advantage = (r.reward - mean) / (std + 1e-6)
        return rollouts

    def datum(self, r: Rollout) -> trio.Datum:
        ahead = len(r.prompt) - 1
        inputs = {"target_tokens": [0] * ahead + r.tokens,
                  "logprobs": [0.0] * ahead + r.logprobs,
                  "advantages": [0.0] * ahead + [r.advantage] * len(r.tokens)}
        assert len({len(v) for v in inputs.values()}) == 1
        ids = r.prompt + r.tokens[:-1]
        return trio.Datum(model_input=trio.ModelInput.from_ints(ids), loss_fn_inputs=inputs)

    async def step(self, rows, number) -> dict[str, float]:
        sampler = await self.training.save_weights_and_get_sampling_client_async()
        groups = await asyncio.gather(*(self.group(sampler, *row) for row in rows))
        data = [self.datum(r) for group in groups for r in group if r.advantage != 0]
        if not data:
            return {}
        backward = await self.training.forward_backward_async(data, "importance_sampling")
        update = await self.training.optim_step_async(trio.AdamParams(learning_rate=1e-5))
        output, updated = await asyncio.gather(backward, update)
        saved = await (await self.training.save_state_async(f"step-{number}"))
        self.config.state.write_text(json.dumps({"path": saved.path, "step": number}))
        return {"loss": output.metrics["loss_mean"], **updated.metrics}

async def main(config: Config) -> None:
    trainer = Trainer(config, trio.ServiceClient())
    swanlab.init(project="pytrio-grpo", mode="offline")
    try:
        for number in range(await trainer.setup(), 100):
            swanlab.log(await trainer.step([([1, 2], "a")], number), step=number)
    finally:
        swanlab.finish()

asyncio.run(main(tyro.cli(Config)))
"""
PIPELINE_STYLE = """\
import pytrio as trio
from pytrio.types import APIFuture, ForwardBackwardOutput, OptimStepResponse

Pending = tuple[APIFuture[ForwardBackwardOutput], APIFuture[OptimStepResponse]]

def submit(training: trio.TrainingClient, batch: list[trio.Datum], rate: float) -> Pending:
    return (training.forward_backward(batch, loss_fn="cross_entropy"),
            training.optim_step(trio.AdamParams(learning_rate=rate)))

def settle(pending: Pending) -> dict[str, float]:
    backward, update = pending
    output = backward.result()
    update.result()
    return dict(output.metrics)

def with_retry(function, *arguments):
    for _ in range(3):
        try:
            return function(*arguments)
        except trio.PyTrioError:
            continue
    raise RuntimeError("no answer")

training = with_retry(trio.ServiceClient).create_lora_training_client("m")
queue: list[Pending] = []
for batch in batches:
    queue.append(submit(training, batch, 1e-4))
    while len(queue) > 2:
        print(settle(queue.pop(0))["loss_mean"])
for pending in queue:
    settle(pending)
if (saved := training.save_weights_for_sampler("sft").result()).path:
    sampler = with_retry(training.create_sampling_client, saved.path)
"""


@pytest.mark.parametrize("source", [CLASS_STYLE, PIPELINE_STYLE], ids=["class", "pipeline"])
def test_styles_have_no_finding(source: str) -> None:
    assert check_source(source, "loop.py") == []


@pytest.mark.parametrize(
    ("source", "old", "new", "code"),
    [
        (CLASS_STYLE, "temperature: float = 1.0", "temperature: float = 0.7", "C07"),
        (CLASS_STYLE, "self.rng.randrange(2**31)", "self.config.seed", "C08"),
        (CLASS_STYLE, "(std + 1e-6)", "std", "C10"),
        (CLASS_STYLE, "await asyncio.gather(backward, update)", "backward, update", "C04"),
        (CLASS_STYLE, '"loss": output', '"loss": output.loss, "x": output', "C05"),
        (CLASS_STYLE, 'f"step-{number}"', 'f"step={number}"', "C24"),
        (CLASS_STYLE, "_with_optimizer_async", "_async", "C13"),
        (CLASS_STYLE, '"logprobs": [0.0]', '"mask": m, "logprobs": [0.0]', "C01"),
        (CLASS_STYLE, "step=number)", "step=float(number))", "C23"),
        (PIPELINE_STYLE, "output.metrics", "output.metric", "C05"),
        (PIPELINE_STYLE, "output = backward.result()", "output = backward", "C03"),
        (PIPELINE_STYLE, "learning_rate=rate", "lr=rate", "C16"),
    ],
    ids=lambda value: value if len(value) < 40 else "",
)
def test_bugs_in_these_styles(source: str, old: str, new: str, code: str) -> None:
    assert source.count(old) == 1
    assert code in codes(source.replace(old, new))


# -- correct programs ------------------------------------------------------------------------------

BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
PROGRAMS = [
    *sorted((SKILL / "examples").glob("*.py")),
    *sorted((ROOT / "tests" / "loops").glob("*.py")),
    *sorted((ROOT / "tests" / "mutants" / "loops").glob("*.py")),
]
NOTES = [SKILL / "SKILL.md", *sorted((SKILL / "references").glob("*.md"))]
# File name -> {code: why it is right there}.
ALLOWED: dict[str, dict[str, str]] = {}


def unexpected(source: str, name: str) -> list[Finding]:
    return [f for f in check_source(source, name) if f.code not in ALLOWED.get(name, {})]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_correct_programs_have_no_finding(path: Path) -> None:
    assert unexpected(path.read_text(encoding="utf-8"), path.name) == []


@pytest.mark.parametrize("path", NOTES, ids=lambda path: path.name)
def test_blocks_of_the_notes_have_no_finding(path: Path) -> None:
    for block in BLOCK.findall(path.read_text(encoding="utf-8")):
        assert unexpected(block, path.name) == []


def test_other_files_have_no_finding() -> None:
    """A file that never imports pytrio is none of our business."""
    assert check_source("import os\nos.environ['X_API_KEY'] = 'abc'\neval(input())\n", "x.py") == []


# -- suppression -----------------------------------------------------------------------------------

STEP = START + "for batch in batches:\n    training.forward_backward(batch).result()\n"


def test_suppression_on_the_line_and_above() -> None:
    on_line = START + "training.close()  # trio: allow C05 a wrapper adds it\n"
    above = START + "# trio: allow C05 a wrapper adds it\n# and more\ntraining.close()\n"
    assert codes(on_line) == codes(above) == set()


def test_suppression_of_another_code_does_nothing() -> None:
    found = codes(START + "training.close()  # trio: allow C07 by design\n")
    assert found == {"C00", "C05"}


def test_suppression_needs_a_reason() -> None:
    found = check_source(START + "training.close()  # trio: allow C05\n", "x.py")
    assert [(f.code, f.severity) for f in found] == [("C05", "error"), ("C00", "warning")]


def test_useless_suppression_is_named() -> None:
    found = check_source(START + "print(1)  # trio: allow C05 once needed\n", "x.py")
    assert [(f.code, f.line) for f in found] == [("C00", START.count("\n") + 1)]


def test_suppression_in_a_text_is_none() -> None:
    assert codes(START + "print('# trio: allow C05 text')\n") == set()


# -- the command -----------------------------------------------------------------------------------


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_text(text, encoding=encoding)
    return path


def test_text_output_and_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clean = write(tmp_path / "clean.py", START)
    wrong = write(tmp_path / "wrong.py", START + "training.close()\n")
    assert check_files([clean], as_json=False) == 0
    assert capsys.readouterr().out == ""
    assert check_files([clean, wrong], as_json=False) == 2
    shown = capsys.readouterr()
    line = START.count("\n") + 1
    assert shown.out.startswith(f"{wrong}:{line}:1: C05 error: TrainingClient")
    assert "; nothing needs closing" in shown.out
    count, hint = shown.err.splitlines()
    assert count == "dryrun: checked 2 files: 1 error, 0 warnings"
    assert "# trio: allow CODE REASON" in hint


def test_warnings_alone_are_no_failure(tmp_path: Path) -> None:
    path = write(tmp_path / "a.py", START + "import swanlab\nswanlab.init(project='a')\n")
    assert check_files([path], as_json=False) == 0


def test_json_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.py", START + "training.close()\n")
    assert check_files([path], as_json=True) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == 1
    assert report["files"] == [str(path)]
    (finding,) = report["findings"]
    assert finding["file"] == str(path)
    assert finding["code"] == "C05" and finding["name"] == "no-such-name"
    assert finding["reference"] == REFERENCE


def test_bad_files_are_named_and_the_others_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing.py"
    broken = write(tmp_path / "broken.py", "def f(:\n")
    latin = tmp_path / "latin.py"
    latin.write_bytes("name = 'é'\n".encode("latin-1"))
    null = tmp_path / "null.py"
    null.write_bytes(b"x = 1\x00\n")
    wrong = write(tmp_path / "wrong.py", START + "training.close()\n")
    assert check_files([missing, broken, latin, null, tmp_path, wrong], as_json=False) == 3
    shown = capsys.readouterr()
    assert shown.out.count("\n") == 1 and "C05" in shown.out
    lines = shown.err.splitlines()
    assert len(lines) == 7  # five files, the count, what to do
    for path, line in zip([missing, broken, latin, null, tmp_path], lines, strict=False):
        assert line.startswith(f"dryrun: {path} ")


def test_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    path = write(tmp_path / "bom.py", START + "training.close()\n", "utf-8-sig")
    assert check_files([path], as_json=False) == 2


def test_findings_are_sorted_by_line() -> None:
    source = START + "trio.AdamParams(lr=1)\ntraining.close()\ntrio.configure(timeout=1)\n"
    lines = [finding.line for finding in check_source(source, "x.py")]
    assert lines == sorted(lines) and len(lines) >= 3


def test_syntax_error_is_raised() -> None:
    with pytest.raises(SyntaxError):
        check_source("import pytrio\ndef f(:\n", "x.py")
