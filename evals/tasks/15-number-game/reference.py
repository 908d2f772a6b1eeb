"""RL in a text game: eight attempts at one game, ids only grow, only replies are trained."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from runpy import run_path

import pytrio as trio

STEPS, GAMES, GROUP = 4, 2, 8

Game = run_path("game.py")["Game"]
games = json.loads(Path("games.json").read_text(encoding="utf-8"))
service = trio.ServiceClient()
training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=16)
tokenizer = training.get_tokenizer()
params = trio.SamplingParams(max_tokens=24, temperature=1.0, stop=["<|im_end|>"])


def encode(text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def render(*contents: str) -> str:
    roles = ("user", "assistant", "user")
    return tokenizer.apply_chat_template(
        [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )


def after_turn(observation: str) -> list[int]:
    """What the template writes between two replies; a placeholder stands for the first."""
    return encode(render("-", "PLACEHOLDER", observation).partition("PLACEHOLDER")[2])


def play(sampler: trio.SamplingClient, row: dict, first):
    """(tokens, log-probabilities with None for what was not sampled, reward) of one attempt."""
    game = Game(row["level"], seed=row["seed"])
    tokens = encode(render(game.reset()))
    logprobs, reply = [None] * len(tokens), first
    while True:
        tokens += reply.tokens
        logprobs += reply.logprobs
        observation, is_over = game.step(tokenizer.decode(reply.tokens, skip_special_tokens=True))
        if is_over:
            return tokens, logprobs, float(game.won)
        after = after_turn(observation)
        after = after[1:] if reply.tokens[-1] == after[0] else after
        tokens += after
        logprobs += [None] * len(after)
        request = sampler.sample(trio.ModelInput.from_ints(tokens), 1, params)
        reply = request.result().sequences[0]


for step in range(STEPS):
    batch = [games[(step * GAMES + i) % len(games)] for i in range(GAMES)]
    sampler = training.save_weights_and_get_sampling_client()
    prompts = [encode(render(Game(row["level"], row["seed"]).reset())) for row in batch]
    firsts = [sampler.sample(trio.ModelInput.from_ints(p), GROUP, params) for p in prompts]
    jobs = [
        (sampler, row, first)
        for row, future in zip(batch, firsts, strict=True)
        for first in future.result().sequences
    ]
    with ThreadPoolExecutor(len(jobs)) as pool:
        attempts = list(pool.map(lambda job: play(*job), jobs))
    data = []
    for begin in range(0, len(attempts), GROUP):
        group = attempts[begin : begin + GROUP]
        mean = sum(reward for _, _, reward in group) / GROUP
        print(f"step {step} level {batch[begin // GROUP]['level']} won {mean:.2f}")
        for tokens, logprobs, reward in group:
            if reward != mean:
                advantages = [0.0 if x is None else reward - mean for x in logprobs]
                datum = trio.Datum(
                    model_input=trio.ModelInput.from_ints(tokens[:-1]),
                    loss_fn_inputs={
                        "target_tokens": tokens[1:],
                        "logprobs": [x or 0.0 for x in logprobs[1:]],
                        "advantages": advantages[1:],
                    },
                )
                data.append(datum)
    if data:
        backward = training.forward_backward(data, loss_fn="importance_sampling")
        update = training.optim_step(trio.AdamParams(learning_rate=2e-4))
        backward.result()
        update.result()
print(training.save_weights_for_sampler("guesser").result().path)
