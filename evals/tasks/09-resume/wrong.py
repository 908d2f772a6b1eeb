"""Wrong: the rows are shuffled anew after a restart, so some repeat and some are never seen."""

import json
import random
from pathlib import Path

import pytrio as trio

BATCH, EVERY = 2, 2
PROGRESS = Path("run/progress.json")

rows = [json.loads(line) for line in Path("train.jsonl").read_text(encoding="utf-8").splitlines()]
random.seed()
random.shuffle(rows)
service = trio.ServiceClient()
if PROGRESS.exists():
    progress = json.loads(PROGRESS.read_text(encoding="utf-8"))
    training = service.create_training_client_from_state_with_optimizer(progress["path"])
    step = progress["step"]
    print(f"going on after step {step}")
else:
    training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=16, seed=0)
    step = 0
tokenizer = training.get_tokenizer()
end = tokenizer.convert_tokens_to_ids("<|im_end|>")


def datum_of(row: dict) -> trio.Datum:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": row["prompt"]}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    prompt = tokenizer.encode(text, add_special_tokens=False)
    answer = tokenizer.encode(row["completion"], add_special_tokens=False) + [end]
    tokens = prompt + answer
    weights = [0.0] * len(prompt) + [1.0] * len(answer)
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},
    )


def save_progress(step: int) -> None:
    """The server's state first; the local file changes whole, and only when that state exists."""
    # A step that was saved and killed before the file was written is saved again.
    state = training.save_state(f"survivor-step-{step}", overwrite=True).result()
    PROGRESS.parent.mkdir(exist_ok=True)
    part = PROGRESS.with_suffix(".part")
    part.write_text(json.dumps({"path": state.path, "step": step}), encoding="utf-8")
    part.replace(PROGRESS)


while step * BATCH < len(rows):
    batch = [datum_of(row) for row in rows[step * BATCH : (step + 1) * BATCH]]
    backward = training.forward_backward(batch, loss_fn="cross_entropy")
    update = training.optim_step(trio.AdamParams(learning_rate=3e-4))
    loss = backward.result().metrics["loss_mean"]
    update.result()
    step += 1
    print(f"step {step} loss {loss:.4f}")
    if step % EVERY == 0:
        save_progress(step)
print(training.save_weights_for_sampler("survivor").result().path)
