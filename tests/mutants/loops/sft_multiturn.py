"""Supervised fine-tuning on search conversations: every assistant turn is trained, nothing else."""

import random
from dataclasses import dataclass

import pytrio as trio

from standin import search

STEPS, BATCH, MAX_TOKENS = 3, 4, 420


@dataclass
class Segment:
    """Consecutive tokens of one author; only the assistant's carry loss."""

    ids: list[int]
    trained: bool


class Conversations:
    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer
        self.end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def text(self, messages: list[dict]) -> str:
        return self.tokenizer.apply_chat_template(
            messages,
            tools=[search.TOOL],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )

    def segments(self, row: dict) -> list[Segment]:
        """The conversation as the model will meet it, turn by turn."""
        messages = search.plain_prompt(row["question"])
        shown = self.text(messages)
        parts = [Segment(self.encode(shown), trained=False)]
        for fact in row["hops"]:
            query = search.query_of(fact)
            call = (
                "<tool_call>\n<function=search>\n<parameter=query>\n"
                f"{query}\n</parameter>\n</function>\n</tool_call>"
            )
            parts.append(Segment(self.encode(call) + [self.end], trained=True))
            found = search.render(search.retrieve(row["facts"], query))
            messages.append({"role": "assistant", "content": call})
            messages.append({"role": "tool", "content": found})
            longer = self.text(messages)
            # The template keeps this turn as it was written, so what it adds is the observation.
            written = shown + call + self.tokenizer.decode([self.end])
            assert longer.startswith(written)
            observed = longer[len(written) :]
            parts.append(Segment(self.encode(observed), trained=False))
            shown = longer
        reply = f"Answer: {row['answers'][0]}"
        parts.append(Segment(self.encode(reply) + [self.end], trained=True))
        return parts

    def datum(self, row: dict) -> trio.Datum | None:
        tokens, mask = [], []
        for part in self.segments(row):
            tokens += part.ids
            mask += [float(part.trained)] * len(part.ids)
        if len(tokens) > MAX_TOKENS:
            return None
        weights = mask[1:]
        return trio.Datum(
            model_input=trio.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights},
        )


def main() -> None:
    rng = random.Random(5)
    service = trio.ServiceClient()
    training = service.create_lora_training_client("Qwen/Qwen3.5-4B", rank=16, seed=1)
    conversations = Conversations(training.get_tokenizer())
    for step in range(STEPS):
        rows = [search.row(rng) for _ in range(BATCH)]
        data = [d for d in map(conversations.datum, rows) if d is not None]
        future = training.forward_backward(data, loss_fn="cross_entropy")
        update = training.optim_step(trio.AdamParams(learning_rate=3e-4))
        output = future.result()
        update.result()
        print(f"step {step} loss {output.metrics['loss_mean']:.4f} rows {len(data)}")
    path = training.save_weights_for_sampler("search-sft").result().path
    sampler = training.create_sampling_client(path)
    question = search.row(rng)["question"]
    asked = conversations.text(search.plain_prompt(question))
    prompt = trio.ModelInput.from_ints(conversations.encode(asked))
    params = trio.SamplingParams(max_tokens=64, temperature=0.0, stop=["<|im_end|>"])
    print(path, repr(sampler.sample(prompt, 1, params).result().sequences[0].text))


if __name__ == "__main__":
    main()
