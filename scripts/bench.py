#!/usr/bin/env python3
"""Speed of the local backend, as ratios measured in one run.

    python scripts/bench.py                 all comparisons
    python scripts/bench.py sft sample      some of them

Each comparison runs its two sides in turn, A B A B ..., and prints the median of the paired
ratios A/B. Machines differ and are noisy: ratios carry over, seconds do not.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parent.parent
DRYRUN = ROOT / "skills" / "pytrio-skill" / "scripts" / "dryrun.py"
FOLDER = ROOT / "skills" / "pytrio-skill" / "scripts" / "trio_local" / "weights" / "standin"
MODEL = "Qwen/Qwen3.5-4B"
RANK = 32
LORA_MODULES = [
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"
]  # fmt: skip


def paired(name: str, ours: Callable[[], object], bare: Callable[[], object], runs: int) -> float:
    """Median ratio of `runs` pairs after one warm-up of each side, printed."""
    ours(), bare()
    ratios, mine, theirs = [], [], []
    for _ in range(runs):
        start = time.perf_counter()
        ours()
        middle = time.perf_counter()
        bare()
        end = time.perf_counter()
        mine.append(middle - start)
        theirs.append(end - middle)
        ratios.append((middle - start) / (end - middle))
    ratio = statistics.median(ratios)
    print(
        f"{name:<34} {ratio:5.2f}   ({min(ratios):.2f} to {max(ratios):.2f}; "
        f"{statistics.median(mine):.3f} s against {statistics.median(theirs):.3f} s)",
        flush=True,
    )
    return ratio


def endless_model() -> Path:
    """A copy of the stand-in that no token ends, so that both sides decode equally many."""
    folder = Path(tempfile.mkdtemp(prefix="trio-bench-model-"))
    for path in FOLDER.iterdir():
        shutil.copy(path, folder / path.name)
    for name, key, value in (
        ("generation_config.json", "eos_token_id", None),
        ("tokenizer_config.json", "eos_token", None),
    ):
        settings = json.loads((folder / name).read_text(encoding="utf-8"))
        settings[key] = value
        (folder / name).write_text(json.dumps(settings), encoding="utf-8")
    return folder


CLIENTS: list = []


class Server:
    """A backend process for the time of a `with` block."""

    def __enter__(self) -> str:
        folder = tempfile.mkdtemp(prefix="trio-bench-")
        command = [sys.executable, str(DRYRUN), "serve", "--follow-parent"]
        command += ["--store", f"{folder}/store", "--record", f"{folder}/record"]
        command += ["--model", f"*=hf:{endless_model()}"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder
        )
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())["url"]

    def __exit__(self, *_: object) -> None:
        # A client left to the garbage collector would wait a quarter of an hour for a dead backend.
        for client in CLIENTS:
            client._runtime.shutdown()
        CLIENTS.clear()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def service(url: str, **settings: object):
    """The SDK's root client on the backend at `url`."""
    import pytrio as trio

    home = tempfile.mkdtemp(prefix="trio-bench-home-")
    trio.configure(home=home, base_url=url, api_key="bench", **settings)
    CLIENTS.append(trio.ServiceClient())
    return CLIENTS[-1]


class Bare:
    """What a person would write without a server: transformers, peft, AdamW, a decode loop."""

    def __init__(self) -> None:
        import torch
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        base = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
        self.base = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
        config = LoraConfig(r=RANK, lora_alpha=512, target_modules=LORA_MODULES)
        self.model = get_peft_model(base, config).eval()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def train(self, tokens: list[list[int]], advantages: list[float] | None = None) -> float:
        """One step on equally long rows: cross-entropy, or importance sampling with advantages
        (on fresh samples the old log-probability is the current one)."""
        import torch
        import torch.nn.functional as F

        rows = torch.tensor(tokens)
        logits = self.model(input_ids=rows[:, :-1], use_cache=False).logits.float()
        logprobs = -F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
        logprobs = logprobs.view(len(tokens), -1)
        if advantages is None:
            loss = -logprobs.mean()
        else:
            ratio = torch.exp(logprobs - logprobs.detach())
            loss = -(ratio * torch.tensor(advantages)[:, None]).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def decode(
        self, model, prompts: list[list[int]], new_tokens: int, greedy: bool
    ) -> list[list[int]]:
        """Decode equally long prompts as one batch with a KV cache."""
        import torch

        with torch.inference_mode():
            output = model(input_ids=torch.tensor(prompts), use_cache=True)
            columns, scores = [], []
            for _ in range(new_tokens):
                logprobs = torch.log_softmax(output.logits[:, -1].float(), dim=-1)
                if greedy:
                    chosen = logprobs.argmax(dim=-1, keepdim=True)
                else:
                    chosen = torch.multinomial(logprobs.exp(), 1)
                columns.append(chosen)
                scores.append(logprobs.gather(1, chosen))
                if len(columns) < new_tokens:
                    output = model(input_ids=chosen, cache=output.cache, use_cache=True)
            return torch.cat(columns, dim=1).tolist()


def token_rows(rows: int, length: int, seed: int = 0) -> list[list[int]]:
    """Random ids that are no special tokens."""
    import random

    generator = random.Random(seed)
    return [[generator.randrange(10, 500) for _ in range(length)] for _ in range(rows)]


def bench_sft(runs: int) -> float:
    """An SFT step of 16 x 64 tokens through the SDK against bare torch + peft."""
    import pytrio as trio

    rows = token_rows(16, 65)
    data = [
        trio.Datum(
            model_input=trio.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * 64},
        )
        for row in rows
    ]
    with Server() as url:
        training = service(url).create_lora_training_client(MODEL, rank=RANK)

        def ours() -> None:
            backward = training.forward_backward(data)
            step = training.optim_step(trio.AdamParams())
            backward.result(), step.result()

        bare = Bare()
        return paired("SFT step 16 x 64", ours, lambda: bare.train(rows), runs)


def sample_all(sampler, prompts: list[list[int]], count: int, new_tokens: int, temperature: float):
    """Submit one request per prompt, then collect all."""
    import pytrio as trio

    params = trio.SamplingParams(max_tokens=new_tokens, temperature=temperature)
    futures = [
        sampler.sample(trio.ModelInput.from_ints(prompt), count, params) for prompt in prompts
    ]
    return [future.result() for future in futures]


def bench_sample(runs: int) -> float:
    """64 concurrent single-sample requests of 64 new tokens against one batched decode."""
    prompts = token_rows(64, 40)
    worst = 0.0
    with Server() as url:
        for in_flight in (64, 16):
            client = service(url, sampling_request_max_in_flight=in_flight)
            sampler = client.create_sampling_client(MODEL)
            bare = Bare()
            for temperature in (0.0, 1.0):
                ratio = paired(
                    f"64 requests, {in_flight} in flight, T={temperature:g}",
                    partial(sample_all, sampler, prompts, 1, 64, temperature),
                    partial(bare.decode, bare.base, prompts, 64, temperature == 0),
                    runs,
                )
                worst = max(worst, ratio) if in_flight == 64 else worst
    return worst


def grpo_step(training, prompts: list[list[int]]) -> None:
    """One on-policy GRPO step through the SDK: sample, reward, build, train, step."""
    import pytrio as trio

    sampler = training.save_weights_and_get_sampling_client()
    responses = sample_all(sampler, prompts, 8, 32, 1.0)
    data = []
    for prompt, response in zip(prompts, responses, strict=True):
        rewards = [sum(s.tokens) % 2 for s in response.sequences]
        mean = sum(rewards) / len(rewards)
        for sequence, reward in zip(response.sequences, rewards, strict=True):
            ahead = len(prompt) - 1
            advantages = [0.0] * ahead + [reward - mean] * len(sequence.tokens)
            data.append(
                trio.Datum(
                    model_input=trio.ModelInput.from_ints(prompt + sequence.tokens[:-1]),
                    loss_fn_inputs={
                        "target_tokens": [0] * ahead + sequence.tokens,
                        "logprobs": [0.0] * ahead + sequence.logprobs,
                        "advantages": advantages,
                    },
                )
            )
    backward = training.forward_backward(data, loss_fn="importance_sampling")
    step = training.optim_step(trio.AdamParams(learning_rate=1e-6))
    backward.result(), step.result()


def bare_grpo_step(bare: Bare, prompts: list[list[int]]) -> None:
    """The same step in bare torch + peft."""
    repeated = [prompt for prompt in prompts for _ in range(8)]
    bare.model.merge_adapter()
    completions = bare.decode(bare.model, repeated, 32, greedy=False)
    bare.model.unmerge_adapter()
    rewards = [sum(tokens) % 2 for tokens in completions]
    means = [sum(rewards[i : i + 8]) / 8 for i in range(0, 64, 8)]
    advantages = [reward - means[i // 8] for i, reward in enumerate(rewards)]
    bare.train([p + c for p, c in zip(repeated, completions, strict=True)], advantages)


def bench_grpo(runs: int) -> float:
    """One on-policy GRPO step, 8 prompts x 8 samples x 32 new tokens, LoRA rank 32."""
    prompts = token_rows(8, 40)
    with Server() as url:
        training = service(url).create_lora_training_client(MODEL, rank=RANK)
        bare = Bare()
        return paired(
            "GRPO step 8 x 8 x 32",
            lambda: grpo_step(training, prompts),
            lambda: bare_grpo_step(bare, prompts),
            runs,
        )


def bench_start(runs: int) -> float:
    """Server start to the first accepted request against importing torch and transformers."""
    import httpx

    def first_answer() -> float:
        """When a fresh server has answered."""
        with Server() as url:
            httpx.get(f"{url}/api/sdk/bootstrap", params={"sdk_version": "0"}).raise_for_status()
            return time.perf_counter()

    imports, starts = [], []
    for _ in range(runs + 1):
        begin = time.perf_counter()
        starts.append(first_answer() - begin)
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch, transformers"], check=True)
        imports.append(time.perf_counter() - begin)
    ratios = [a / b for a, b in zip(starts[1:], imports[1:], strict=True)]
    ratio = statistics.median(ratios)
    print(
        f"{'start to first request':<34} {ratio:5.2f}   ({min(ratios):.2f} to {max(ratios):.2f}; "
        f"{statistics.median(starts[1:]):.3f} s against {statistics.median(imports[1:]):.3f} s)"
    )
    return ratio


BENCHES: dict[str, tuple[Callable[[int], float], float]] = {
    "start": (bench_start, 3.0),
    "sft": (bench_sft, 1.5),
    "sample": (bench_sample, 1.4),
    "grpo": (bench_grpo, 1.25),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("benches", nargs="*", choices=[*BENCHES, []], help="which (default: all)")
    parser.add_argument("--runs", type=int, default=7, help="pairs per comparison (default: 7)")
    options = parser.parse_args()
    print(f"{'comparison':<34} ratio   (range of pairs; medians)")
    results = {}
    for name in options.benches or BENCHES:
        bench, limit = BENCHES[name]
        results[name] = (bench(options.runs), limit)
    print()
    for name, (ratio, limit) in results.items():
        verdict = "met" if ratio <= limit else "MISSED"
        print(f"{name:<8} {ratio:.2f}, aim at most {limit:.2f}: {verdict}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
