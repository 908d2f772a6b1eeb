"""Train, stop, and go on from the saved state: optimiser, step and data position are restored."""

import json
import random
import tempfile
from pathlib import Path

import pytrio as trio

from standin import maths

BATCH = 4
HALF, FULL = 2, 4
run_file = Path(tempfile.mkdtemp()) / "run_state.json"
rows = [maths.row(random.Random(500 + i)) for i in range(BATCH * FULL)]


def datum_of(tokenizer, row: dict) -> trio.Datum:
    text = tokenizer.apply_chat_template(
        maths.plain_prompt(row["problem"]),
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    prompt = tokenizer.encode(text, add_special_tokens=False)
    answer = tokenizer.encode(maths.completion(row), add_special_tokens=False)
    answer.append(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    tokens = prompt + answer
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
    )


def train(training: trio.TrainingClient, step: int, position: int, until: int) -> None:
    """Steps `step` to `until`, starting at row `position`; the state is saved after the last."""
    tokenizer = training.get_tokenizer()
    while step < until:
        batch = [datum_of(tokenizer, row) for row in rows[position : position + BATCH]]
        backward = training.forward_backward(batch, loss_fn="cross_entropy")
        update = training.optim_step(trio.AdamParams(learning_rate=3e-4))
        loss = backward.result().metrics["loss_mean"]
        update.result()
        step += 1
        position += BATCH
        print(f"step {step} row {position} loss {loss:.4f}")
    state = training.save_state(f"step-{step}").result()
    saved = {"path": state.path, "step": step, "position": position}
    run_file.write_text(json.dumps(saved), encoding="utf-8")


service = trio.ServiceClient()
train(service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=16, seed=7), 0, 0, HALF)

# What a second process would do after the first was stopped.
again = json.loads(run_file.read_text(encoding="utf-8"))
resumed = service.create_training_client_from_state_with_optimizer(again["path"])
train(resumed, again["step"], again["position"], FULL)
print("weights", resumed.save_weights_for_sampler("maths-sft").result().path)
