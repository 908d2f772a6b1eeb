#!/usr/bin/env python3
"""Builds and measures the small models that ship with the skill (maintainers' tool).

    build_standin.py train       pre-train both models (under an hour on two cores), resumable
    build_standin.py tokenizer   tokenizer and chat templates only (seconds)
    build_standin.py check       tokenizer and template properties on generated conversations
    build_standin.py report      success, format and degenerate rates -> standin_report.json, .md
    build_standin.py vision      train `vl`, which sees pictures, from `standin` (about 20 minutes)
    build_standin.py vision-report   its rates per kind of picture -> vision_report.md

Both text models learn the corpus without mistakes first. `large` goes on like that; `standin` goes
on with deliberate mistakes, so that it succeeds sometimes: what reinforcement learning then removes
is the habit of making mistakes, not ignorance. Same seed, same steps, same machine kind: same
weights. A stopped run goes on where its last checkpoint (under --work) was written; `vision` after
the last finished stage. Exit codes: 0 done, 1 a property or a size limit does not hold, 2 usage.
"""

from __future__ import annotations

import os

# More than one thread is slower when a neighbour keeps the other core busy (OpenMP spins). Before
# torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
DEFAULT_OUT = SCRIPTS.parent / "skills" / "pytrio-skill" / "scripts" / "trio_local" / "weights"
KINDS = ("standin", "large")
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors")
VISION_FILES = (*TEXT_FILES, "preprocessor_config.json", *MODEL_FILES)
BASE_STEPS, END_STEPS, MATHS_STEPS = 1384, 550, 300
BASE_HORIZON = 2200  # where the learning rate of the common stage would end
LIMIT_ONE, LIMIT_ALL = 4_000_000, 8_000_000  # bytes shipped


def templates() -> dict[str, str]:
    return {
        "qwen3.5": (SCRIPTS / "standin" / "chat_template.jinja").read_text(encoding="utf-8"),
        "qwen3": (SCRIPTS / "standin" / "chat_template_qwen3.jinja").read_text(encoding="utf-8"),
    }


def publish(source: Path, target: Path, names: tuple[str, ...]) -> None:
    """Copy files into a model folder so that a reader sees each either old or new, never half."""
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(source / name, target / (name + ".new"))
        os.replace(target / (name + ".new"), target / name)


def publish_tokenizers(staging: Path, out: Path) -> None:
    """The tokenizer beside each model's weights, and, in a folder of its own without weights, once
    more with the template of the Qwen3 family: what names of that family are given."""
    for kind in KINDS:
        publish(staging, out / kind, TEXT_FILES)
    publish(staging, out / "qwen3", TEXT_FILES)
    (out / "qwen3" / "chat_template.jinja").write_text(templates()["qwen3"], encoding="utf-8")
    if (out / KINDS[0] / "config.json").exists():
        publish(out / KINDS[0], out / "qwen3", ("config.json",))


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def load_model(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(folder), local_files_only=True, dtype=torch.float32
    ).eval()


def command_tokenizer(args: argparse.Namespace) -> int:
    from standin import tokenizer

    staging = args.work / "tokenizer"
    tokenizer.write(staging, args.seed, templates())
    publish_tokenizers(staging, args.out)
    print(f"tokenizer of {tokenizer.VOCAB_SIZE} tokens in {args.out}")
    return 0


def command_train(args: argparse.Namespace) -> int:
    begun = time.time()
    # All: the common stage first, then both second stages side by side, one core each.
    if args.kind == "all":
        options = [
            f"--{name.replace('_', '-')}={value}"
            for name, value in vars(args).items()
            if name not in ("kind", "command", "run")
        ]
        command = [sys.executable, str(Path(__file__).resolve()), "train", *options, "--kind"]
        code = subprocess.run([*command, "base"]).returncode
        if code == 0:
            both = [subprocess.Popen([*command, kind]) for kind in KINDS]
            code = max(process.wait() for process in both)
        print(f"{(time.time() - begun) / 60:.1f} minutes")
        return code or check_sizes(args.out)

    import torch

    torch.set_num_threads(1)
    from standin import corpus, tokenizer, train

    staging = args.work / f"tokenizer-{args.kind}"
    tokenizer.write(staging, args.seed, templates())
    tok = load_tokenizer(staging)

    def stage(name: str, stream: str, steps: int, **options: Any) -> Any:
        return train.train(
            name,
            stream,
            steps,
            args.seed,
            tok,
            templates(),
            args.work,
            max_minutes=args.minutes,
            **options,
        )

    # The common stage is trained, or taken from its checkpoint when that is complete.
    model = stage("base", "large", args.base_steps, horizon=BASE_HORIZON)
    if args.kind == "base":
        return 0
    noise = corpus.NOISE if args.kind == "standin" else corpus.SILENT
    model = stage(
        args.kind,
        f"{args.kind}-end",
        args.end_steps,
        noise=noise,
        mix=corpus.END_MIX,
        scale=0.5,
        start_from=model.state_dict(),
    )
    if args.kind == "large":  # maths is learnt last
        model = stage(
            "large-maths",
            "large-maths",
            args.maths_steps,
            mix=corpus.MATHS_MIX,
            scale=0.25,
            start_from=model.state_dict(),
        )
    train.export(model, tok, args.work / "export" / args.kind)
    publish(args.work / "export" / args.kind, args.out / args.kind, MODEL_FILES)
    publish_tokenizers(staging, args.out)
    print(
        f"{args.kind}: {model.num_parameters():,} parameters, "
        f"{(time.time() - begun) / 60:.1f} minutes, in {args.out / args.kind}"
    )
    return 0


def check_sizes(out: Path) -> int:
    sizes = {
        kind: sum(f.stat().st_size for f in (out / kind).iterdir())
        for kind in KINDS
        if (out / kind).exists()
    }
    print("bytes: " + ", ".join(f"{kind} {size:,}" for kind, size in sizes.items()))
    return int(any(size > LIMIT_ONE for size in sizes.values()) or sum(sizes.values()) > LIMIT_ALL)


ODD_TEXTS = (
    "汉字与标点，。！",
    "emoji 🙂🚀 and flags 🇩🇪",
    "tab\tand  double  spaces ",
    "\r\n windows\r\nlines\n\n\n",
    "e\u0301 is composed",
    "\u200bzero width",
    "x" * 300,
    "<think>kept</think>",
    "№½²",
    "العربية हिन्दी ไทย",
    "\\boxed{12}\n\n 3",
)


def command_check(args: argparse.Namespace) -> int:
    """Properties that training loops rely on; prints one line each and the first counterexample."""
    import unicodedata

    from standin import corpus

    folder = args.out / "standin"
    tok, family_templates = load_tokenizer(folder), templates()
    encode = partial(tok.encode, add_special_tokens=False)
    failures: list[str] = []

    for text in ODD_TEXTS:
        if tok.decode(encode(text), skip_special_tokens=False) != unicodedata.normalize(
            "NFC", text
        ):
            failures.append(f"not lossless: {text!r}")
    kept = tok.decode(
        encode("<|im_start|><think><tool_call></tool_call></think><|im_end|>"),
        skip_special_tokens=True,
    )
    if kept != "<think><tool_call></tool_call></think>":
        failures.append(f"skip_special_tokens left {kept!r}")
    for text_file in TEXT_FILES:
        if (args.out / "standin" / text_file).read_bytes() != (
            args.out / "large" / text_file
        ).read_bytes():
            failures.append(f"{text_file} differs between the two models")

    try:  # the SDK loads tokenizers through ModelScope when a user sets it so
        from modelscope import AutoTokenizer as ModelScopeTokenizer

        other = ModelScopeTokenizer.from_pretrained(str(folder), local_files_only=True)
        if (
            any(other.encode(text, add_special_tokens=False) != encode(text) for text in ODD_TEXTS)
            or other.chat_template != tok.chat_template
        ):
            failures.append("ModelScope's AutoTokenizer reads the folder differently")
    except ImportError:
        print("modelscope is not installed: its loader was not checked", file=sys.stderr)

    rng = random.Random(f"check-{args.seed}")
    endings = (
        "",
        "\n",
        "\n\n",
        "7",
        " 12",
        "\n3 apples",
        "- item",
        "\t",
        "你好",
        "'s",
        "  ",
        "\\boxed{1}",
        "{",
        ".\n\n",
    )
    count = 0
    for _ in range(args.conversations):
        for family, template in family_templates.items():
            episode = corpus.episode(rng, corpus.NOISE)
            for answer in (rng.choice(endings) + episode.turns[0][0], rng.choice(endings)):
                if "<tool_call>" in answer:
                    continue  # calls go in as tool_calls, below
                options = {
                    "tools": episode.tools or None,
                    "chat_template": template,
                    "tokenize": False,
                    "enable_thinking": False,
                }
                reply = {"role": "assistant", "content": answer.split("</think>")[-1]}
                prompt = encode(
                    tok.apply_chat_template(episode.prompt, add_generation_prompt=True, **options)
                )
                full = encode(tok.apply_chat_template([*episode.prompt, reply], **options))
                count += 1
                if full[: len(prompt)] != prompt:
                    failures.append(f"{family}: prompt is no token prefix with reply {answer!r}")
        # A call written by the corpus is what the template writes for the same call as structured
        # data.
        for family, template in family_templates.items():
            arguments = {"query": rng.choice(["home of Ben", "x", "汉字", 'a "b"'])}
            base = [{"role": "user", "content": "q"}]
            call = {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"type": "function", "function": {"name": "search", "arguments": arguments}}
                ],
            }
            text = tok.apply_chat_template([*base, call], chat_template=template, tokenize=False)
            if not text.endswith(
                "</think>\n\n" + corpus.tool_call(family, "search", arguments) + "<|im_end|>\n"
            ):
                failures.append(
                    f"{family}: the corpus and the template write tool calls differently: {text!r}"
                )
    print(
        f"{count} conversations, {len(ODD_TEXTS)} odd texts: "
        + ("all properties hold" if not failures else f"{len(failures)} failures")
    )
    for failure in failures[:10]:
        print("  " + failure)
    return int(bool(failures))


def command_report(args: argparse.Namespace) -> int:
    import torch

    torch.set_num_threads(1)
    from tqdm import tqdm

    from standin import measure

    begun = time.time()
    report: dict[str, Any] = {
        "seed": args.seed,
        "share": args.share,
        "group": measure.GROUP,
        "max_tokens": measure.MAX_TOKENS,
        "models": {},
    }
    bar = tqdm(total=len(KINDS) * len(measure.PROMPTS))
    for kind in KINDS:
        folder = args.out / kind
        tok, model = load_tokenizer(folder), load_model(folder)
        tasks = {}
        for task in measure.PROMPTS:
            bar.set_postfix_str(f"{kind} {task}")
            tasks[task] = measure.rates(model, tok, templates(), task, args.seed, args.share)
            bar.update()
        report["models"][kind] = {
            "parameters": model.num_parameters(),
            "bytes": sum(f.stat().st_size for f in folder.iterdir()),
            "tasks": tasks,
        }
    bar.close()
    lines = [
        "# Stand-in models: measured rates",
        "",
        f"Written by `scripts/build_standin.py report` (seed {args.seed}). Success, format and "
        f"degenerate groups (all right or all wrong) at temperature 1 in groups of "
        f"{measure.GROUP}; greedy on other prompts.",
        "",
        "| model | task | success | format | degenerate groups | greedy | turns | samples |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, entry in report["models"].items():
        for task, r in entry["tasks"].items():
            lines.append(
                f"| {kind} | {task} | {r['success']:.2f} | {r['format']:.2f} | "
                f"{r['degenerate_groups']:.2f} | {r['greedy_success']:.2f} | "
                f"{r['turns']:.1f} | {r['samples']} |"
            )
    target = args.report_to
    (target / "standin_report.json").write_text(
        json.dumps(report, indent=1) + "\n", encoding="utf-8"
    )
    (target / "standin_report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines[4:]))
    print(f"{(time.time() - begun) / 60:.1f} minutes", file=sys.stderr)
    return 0


def command_vision(args: argparse.Namespace) -> int:
    import torch

    torch.set_num_threads(1)
    from standin import vision

    begun, staging = time.time(), args.work / "export" / "vl"
    steps = vision.STEPS if args.steps is None else args.steps
    model = vision.train(staging, args.work, args.text_model, templates(), args.seed, steps)
    publish(staging, args.out / "vl", VISION_FILES)
    size = sum(f.stat().st_size for f in (args.out / "vl").iterdir())
    print(
        f"vl: {model.num_parameters():,} parameters, {size:,} bytes, "
        f"{(time.time() - begun) / 60:.1f} minutes, in {args.out / 'vl'}"
    )
    return int(size > LIMIT_ONE)


def command_vision_report(args: argparse.Namespace) -> int:
    import torch

    torch.set_num_threads(1)
    from tqdm import tqdm

    from standin import pictures, vision

    model, tok, processor = vision.load(args.out / "vl")
    kinds = {
        kind: vision.rates(model, tok, processor, kind, args.pictures, args.seed)
        for kind in tqdm(pictures.KINDS)
    }
    names = list(kinds[pictures.KINDS[0]])
    kinds["mean"] = {name: sum(r[name] for r in kinds.values()) / len(kinds) for name in names}
    lines = [
        "# Vision stand-in: measured rates",
        "",
        f"Written by `scripts/build_standin.py vision-report` (seed {args.seed}, {args.pictures} "
        "fresh pictures a kind). Success and format at temperature 1, the rest greedy; exchanged: "
        "the right text with another question's picture, and how often that has the same answer: "
        "what looking earns then.",
        "",
        "| kind | " + " | ".join(name.replace("_", " ") for name in names) + " |",
        "|---" * (1 + len(names)) + "|",
    ]
    for kind, r in kinds.items():
        lines.append(f"| {kind} | " + " | ".join(f"{r[name]:.2f}" for name in names) + " |")
    target = args.report_to / "vision_report.md"
    # Where the weights came from is written by hand and outlives a new measurement.
    old = target.read_text(encoding="utf-8") if target.exists() else ""
    origin = "".join(old.partition("\n## Origin\n")[1:])
    target.write_text("\n".join(lines) + "\n" + origin, encoding="utf-8", newline="\n")
    print("\n".join(lines[4:]))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--out",
        type=Path,
        default=DEFAULT_OUT,
        help="folder of the model folders (default: inside the skill)",
    )
    common.add_argument(
        "--work",
        type=Path,
        default=Path("build") / "standin",
        help="checkpoints and logs (default: ./build/standin)",
    )
    common.add_argument("--seed", type=int, default=0)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "tokenizer", parents=[common], help="write tokenizer and templates only"
    ).set_defaults(run=command_tokenizer)
    sub = commands.add_parser("train", parents=[common], help="pre-train the models")
    sub.add_argument(
        "--kind",
        choices=("base", *KINDS, "all"),
        default="all",
        help="base: only the stage common to both",
    )
    sub.add_argument("--base-steps", type=int, default=BASE_STEPS, help="steps of the common stage")
    sub.add_argument(
        "--end-steps", type=int, default=END_STEPS, help="steps of each model's own stage"
    )
    sub.add_argument(
        "--maths-steps", type=int, default=MATHS_STEPS, help="steps of large's last stage"
    )
    sub.add_argument(
        "--minutes",
        type=float,
        default=0,
        help="stop each model after so long (0: never; not reproducible)",
    )
    sub.set_defaults(run=command_train)
    sub = commands.add_parser("check", parents=[common], help="tokenizer and template properties")
    sub.add_argument("--conversations", type=int, default=500)
    sub.set_defaults(run=command_check)
    sub = commands.add_parser("report", parents=[common], help="measure both models")
    sub.add_argument("--share", type=float, default=1.0, help="share of the prompts to use")
    sub.add_argument(
        "--report-to", type=Path, default=SCRIPTS, help="folder of standin_report.json and .md"
    )
    sub.set_defaults(run=command_report)
    sub = commands.add_parser("vision", parents=[common], help="train the model that sees pictures")
    sub.add_argument(
        "--text-model",
        type=Path,
        default=DEFAULT_OUT / "standin",
        help="folder whose weights, tokenizer and template it starts from",
    )
    sub.add_argument(
        "--steps",
        type=int,
        nargs=4,
        metavar=("TOWER", "SILENT", "SILENT2", "NOISY"),
        help="steps of the stages; a few each only show that they run",
    )
    sub.set_defaults(run=command_vision)
    sub = commands.add_parser("vision-report", parents=[common], help="measure it")
    sub.add_argument("--pictures", type=int, default=200, help="pictures a kind")
    sub.add_argument("--report-to", type=Path, default=SCRIPTS, help="folder of vision_report.md")
    sub.set_defaults(run=command_vision_report)
    args = parser.parse_args()
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
