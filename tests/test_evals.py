"""The evaluation kit: its harness with agents that are known, and every task's two solutions."""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import tomllib

from conftest import ROOT, outcome

EVALS = ROOT / "evals"
sys.path.insert(0, str(EVALS))

import tasks as kit  # noqa: E402

RUN = EVALS / "run.py"
DUMMY = f"{sys.executable} {EVALS / 'dummy_agent.py'}"
ALL = sorted(path.name for path in kit.TASKS.iterdir() if path.is_dir())
# Of the slow tests, each of which is a dry run, an eighth of the tasks is done; EVALS=all does all.
IS_ALL = {"": False, "all": True}[os.environ.get("EVALS", "")]
OTHERS = sorted(kit.TASKS.glob("*/other.py"))
# The fastest tasks: what is tested on them is the harness.
SFT, DPO = "01-faq-sft", "08-dpo-zh"


def chosen(names: Iterable[str]) -> list[str]:
    """Every eighth task by its number, or all."""
    return [name for name in names if IS_ALL or int(name[:2]) % 8 == 1]


def evaluate(*arguments: object, folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """`run.py ARGUMENTS` in a folder."""
    command = [sys.executable, str(RUN), *map(str, arguments)]
    return outcome(command, folder, {**os.environ, **environment}, 550)


def results(folder: Path) -> dict:
    return json.loads((folder / "out" / "results.json").read_text(encoding="utf-8"))


def agent_of(mode: str) -> str:
    return f"{DUMMY} {mode} {{prompt_file}} {{workdir}}"


def outcomes(value: dict) -> dict[tuple[str, str], bool]:
    return {(e["task"], e["arm"]): e["passed"] for e in value["entries"]}


# -- the harness -----------------------------------------------------------------------------------


def test_an_agent_that_solves_the_task_passes_in_both_arms(tmp_path: Path) -> None:
    done = evaluate(
        "--agent", agent_of("reference"), "--tasks", SFT, "--out", "out", folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    value = results(tmp_path)
    assert outcomes(value) == {(SFT, "with"): True, (SFT, "without"): True}
    assert value["summary"]["arms"]["with"]["pass_rate"] == 1.0
    assert value["summary"]["difference"] == 0.0
    entry = value["entries"][0]
    assert entry["agent"]["status"] == 0
    assert entry["agent"]["tokens"] == {"input": 0, "output": 0}
    assert {"text", "passed", "evidence"} == set(entry["expectations"][0])
    assert "pass rate" in done.stdout and "difference +0.0 points" in done.stdout
    with_skill = tmp_path / "out" / SFT / "with" / "1" / "work"
    for place in (".claude", ".agents"):
        assert (with_skill / place / "skills/pytrio-skill/SKILL.md").is_file()
        assert (with_skill / place / "skills/pytrio-skill/scripts/dryrun.py").is_file()
    assert not (tmp_path / "out" / SFT / "without" / "1" / "work" / ".claude").exists()
    prompt = (tmp_path / "out" / SFT / "with" / "1" / "prompt.md").read_text(encoding="utf-8")
    assert "faq.jsonl" in prompt and "command.txt" in prompt


def test_a_plausible_mistake_fails_with_evidence(tmp_path: Path) -> None:
    done = evaluate(
        "--agent", agent_of("wrong"), "--tasks", DPO, "--arms", "without", "--out", "out",
        folder=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (entry,) = results(tmp_path)["entries"]
    assert not entry["passed"] and not entry["error"]
    failed = [e["text"] for e in entry["expectations"] if not e["passed"]]
    # Nothing crashes and the audit has no error: only the task's own expectation tells.
    assert failed == ["better answers go up, worse ones down"]


def test_an_agent_that_writes_nothing_fails(tmp_path: Path) -> None:
    evaluate(
        "--agent", agent_of("nothing"), "--tasks", SFT, "--arms", "with", "--out", "out",
        folder=tmp_path,
    )  # fmt: skip
    value = results(tmp_path)
    (entry,) = value["entries"]
    assert [e["text"] for e in entry["expectations"]] == ["there is a script to run"]
    assert not entry["passed"] and not entry["error"]
    assert value["summary"]["arms"]["with"] == {
        "passed": 0, "failed": 1, "errors": 0, "pass_rate": 0.0,
        "mean_seconds": entry["agent"]["seconds"], "mean_tokens": {},
    }  # fmt: skip
    assert value["summary"]["difference"] is None


def test_an_agent_that_never_ends_is_stopped_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = (
        f"echo $$ > {pids}; sleep 3600 & echo $! >> {pids}; wait; : {{prompt_file}} {{workdir}}"
    )
    evaluate(
        "--agent", f"sh -c '{script}'", "--tasks", SFT, "--arms", "with", "--out", "out",
        "--agent-seconds", 1, folder=tmp_path,
    )  # fmt: skip
    (entry,) = results(tmp_path)["entries"]
    assert entry["agent"]["status"] == "timeout"
    assert not entry["passed"] and not entry["error"]
    started = [int(line) for line in pids.read_text(encoding="utf-8").split()]
    assert len(started) == 2
    for pid in started:
        assert not is_running(pid)


def is_running(pid: int) -> bool:
    """Whether a process lives; one that waits to be collected does not."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    return "\nState:\tZ" not in status


def test_a_crashed_agent_is_an_error_and_is_tried_again_on_resume(tmp_path: Path) -> None:
    """Its first attempt dies, as without a network; the second writes nothing. What was judged is
    not done again."""
    seen = tmp_path / "seen"
    script = f"echo x >> {seen}; test $(wc -l < {seen}) -ne 1 : {{prompt_file}} {{workdir}}"
    script = script.replace(" : ", " || exit 7; : ")
    arguments = ["--agent", f"sh -c '{script}'", "--tasks", f"{SFT},{DPO}", "--arms", "with"]
    arguments += ["--out", "out"]
    evaluate(*arguments, folder=tmp_path)
    first = results(tmp_path)
    assert [bool(e["error"]) for e in first["entries"]] == [True, False]
    assert first["summary"]["arms"]["with"]["errors"] == 1
    assert first["summary"]["arms"]["with"]["failed"] == 1

    refused = evaluate(*arguments, folder=tmp_path)
    assert refused.returncode == 3 and "--resume" in refused.stderr

    resumed = evaluate(*arguments, "--resume", folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    second = results(tmp_path)
    assert [e["task"] for e in second["entries"]] == [DPO, SFT]
    assert not any(e["error"] for e in second["entries"])
    assert len(seen.read_text(encoding="utf-8").split()) == 3

    arguments[1] = agent_of("nothing")
    other = evaluate(*arguments, "--resume", folder=tmp_path)
    assert other.returncode == 3 and "another agent" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--agent", "no-such-command {prompt_file} {workdir}"], "no command 'no-such-command'"),
        (["--agent", f"{DUMMY} nothing {{prompt_file}}"], "lacks {workdir}"),
        (["--agent", "x '{prompt_file} {workdir}"], "No closing quotation"),
        (["--agent", ""], "lacks {prompt_file} and {workdir}"),
        (["--agent", agent_of("nothing"), "--tasks", "99-*"], "no task matches '99-*'"),
        (["--agent", agent_of("nothing"), "--arms", "with,both"], "unknown both"),
        (["--agent", agent_of("nothing"), "--arms", "with,with"], "names one twice"),
        (["--agent", agent_of("nothing"), "--tasks", "/etc"], "no task matches '/etc'"),
        (["--agent", agent_of("nothing"), "--out", "/dev/null/x"], "cannot write there"),
        (["--agent", agent_of("nothing"), "--repeat", "0"], "at least 1"),
        (["grade", "77", "."], "no task matches"),
        (["grade", "01", "no-such-folder"], "no folder"),
        (["selfcheck", "--tasks", "x"], "no task matches 'x'"),
        ([], "required"),
    ],
)  # fmt: skip
def test_usage_mistakes_get_one_line_and_status_3(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    done = evaluate(*arguments, folder=tmp_path)
    assert done.returncode == 3
    assert said in done.stderr
    assert done.stderr.startswith("run.py: ") and done.stderr.count("\n") == 1
    assert not (tmp_path / "eval-results").exists()


def test_keys_are_kept_from_the_agent(tmp_path: Path) -> None:
    script = "env > seen.txt; : {prompt_file} {workdir}"
    evaluate(
        "--agent", f"sh -c '{script}'", "--tasks", SFT, "--arms", "with", "--out", "out",
        "--keep-env", "MINE_API_KEY", folder=tmp_path,
        MINE_API_KEY="a", OTHER_API_KEY="b", PYTRIO_API_KEY="c", HF_TOKEN="d",
    )  # fmt: skip
    work = tmp_path / "out" / SFT / "with" / "1" / "work"
    seen = (work / "seen.txt").read_text(encoding="utf-8")
    assert "MINE_API_KEY=a" in seen and "PATH=" in seen
    for name in ("OTHER_API_KEY", "PYTRIO_API_KEY", "HF_TOKEN"):
        assert name not in seen


def test_paths_with_spaces_and_signs_reach_the_agent_whole(tmp_path: Path) -> None:
    folder = tmp_path / "a b; $(touch hacked) 'q'"
    folder.mkdir()
    done = evaluate(
        "--agent", agent_of("nothing"), "--tasks", SFT, "--arms", "with", "--out", "out",
        folder=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (entry,) = results(folder)["entries"]
    assert entry["agent"]["status"] == 0
    assert not list(tmp_path.rglob("hacked"))


# -- finding the script ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("python train.py", ("train.py", (), ())),
        ("`python3 ./train.py --steps 4`\n", ("train.py", ("--steps", "4"), ())),
        ("# my command\n\npython train.py --name 'a b'", ("train.py", ("--name", "a b"), ())),
        ("A=1 PYTRIO_API_KEY=x python sub/loop.py", ("sub/loop.py", (), (("A", "1"),))),
        (
            "python x/dryrun.py run --demo demos.jsonl train.py -- --steps 4",
            ("train.py", ("--steps", "4"), ()),
        ),
        ("$ python x/dryrun.py run train.py", ("train.py", (), ())),
    ],
)
def test_commands_people_write_are_understood(tmp_path: Path, line: str, expected: tuple) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("train.py", "sub/loop.py"):
        (tmp_path / name).write_text("", encoding="utf-8")
    (tmp_path / "command.txt").write_text(line, encoding="utf-8")
    found = kit.find_command(tmp_path)
    assert (found.script, found.arguments, found.environment) == expected


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "is empty"),
        ("make train", "starts no Python file"),
        ("python gone.py", "not in the folder"),
        ("python ../outside.py", "not in the folder"),
        ("python 'x.py", "No closing quotation"),
    ],
)
def test_commands_that_cannot_be_run_say_why(tmp_path: Path, line: str, said: str) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "outside.py").write_text("", encoding="utf-8")
    (work / "command.txt").write_text(line, encoding="utf-8")
    with pytest.raises(kit.NoScript, match=said):
        kit.find_command(work)


def test_without_a_command_the_only_script_of_pytrio_is_taken(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("import json\n", encoding="utf-8")
    (tmp_path / ".claude" / "skills").mkdir(parents=True)
    (tmp_path / ".claude" / "skills" / "example.py").write_text("import pytrio\n", encoding="utf-8")
    with pytest.raises(kit.NoScript, match="none"):
        kit.find_command(tmp_path)
    (tmp_path / "a.py").write_text("import pytrio as trio\n", encoding="utf-8")
    assert kit.find_command(tmp_path).script == "a.py"
    (tmp_path / "b.py").write_text("from pytrio import Datum\n", encoding="utf-8")
    with pytest.raises(kit.NoScript, match=r"a\.py, b\.py"):
        kit.find_command(tmp_path)


# -- the tasks -------------------------------------------------------------------------------------


def test_tasks_have_numbers_of_their_own() -> None:
    numbers = [name.split("-")[0] for name in ALL]
    assert numbers == [f"{n:02}" for n in range(1, len(ALL) + 1)]


@pytest.mark.parametrize("name", ALL)
def test_tasks_are_complete(name: str) -> None:
    (task,) = kit.load_tasks(name)
    prompt = (task.folder / "prompt.md").read_text(encoding="utf-8")
    has_chinese = any("\u4e00" <= c <= "\u9fff" for c in prompt)
    assert has_chinese == (task.language == "zh"), task.name
    assert callable(task.grader()), task.name
    for solution in task.solutions:
        compile(task.source(solution), f"{task.name}/{solution}", "exec", dont_inherit=True)
    wrong = tomllib.loads((task.folder / "wrong.toml").read_text(encoding="utf-8"))
    assert len(wrong["says"]) > 20, f"{task.name}: wrong.toml must say what is wrong"
    assert task.source("wrong") != task.source("reference")
    assert len(task.prompt) > 300


def test_a_task_with_an_unknown_setting_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "01-x"
    folder.mkdir()
    (folder / "task.toml").write_text(
        'title="x"\nlanguage="en"\nkind="sft"\ndemo=1\n', encoding="utf-8"
    )
    with pytest.raises(kit.TaskError, match="unknown demo"):
        kit.load_tasks("*", tmp_path)


def test_a_grader_that_breaks_is_an_error_and_not_a_failure(tmp_path: Path) -> None:
    task = kit.load_tasks(SFT)[0]
    broken = tmp_path / "broken" / SFT
    shutil.copytree(task.folder, broken)
    (broken / "grader.py").write_text("def grade(run):\n    return 1 / 0\n", encoding="utf-8")
    work = tmp_path / "given"
    work.mkdir()
    shutil.copytree(task.files, work, dirs_exist_ok=True)
    shutil.copy(task.folder / "reference.py", work)
    judged = kit.grade(kit.load_task(broken), work, tmp_path / "scratch")
    assert "ZeroDivisionError" in judged.error and not judged.passed


def test_a_run_that_never_ends_is_stopped_and_fails(tmp_path: Path) -> None:
    task = kit.load_tasks(SFT)[0]
    limited = tmp_path / "limited" / SFT
    shutil.copytree(task.folder, limited)
    settings = (limited / "task.toml").read_text(encoding="utf-8")
    (limited / "task.toml").write_text(settings + "seconds = 12\n", encoding="utf-8")
    work = tmp_path / "given"
    work.mkdir()
    source = "import time, pytrio\npytrio.ServiceClient()\ntime.sleep(3600)\n"
    (work / "loop.py").write_text(source, encoding="utf-8")
    (tmp_path / "scratch").mkdir()
    judged = kit.grade(kit.load_task(limited), work, tmp_path / "scratch")
    assert not judged.passed and not judged.error
    assert judged.expectations[0].text == "the script ends without failure"
    assert "stopped after 12 s" in judged.expectations[0].evidence


def solved(task: kit.Task, solution: str, target: str, tmp_path: Path) -> kit.Grade:
    """Grade a solution that lies in the work folder as `target`, named by a command."""
    work = tmp_path / "given"
    (work / target).parent.mkdir(parents=True)
    if task.files.is_dir():
        shutil.copytree(task.files, work, dirs_exist_ok=True)
    (work / target).write_text(task.source(solution), encoding="utf-8")
    (work / "command.txt").write_text(f"python {target}\n", encoding="utf-8")
    return kit.grade(task, work, tmp_path / "scratch")


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(ALL))
def test_reference_passes_under_any_file_name(name: str, tmp_path: Path) -> None:
    judged = solved(kit.load_tasks(name)[0], "reference", "src/my_experiment.py", tmp_path)
    assert not judged.error
    assert [f"{e.text}: {e.evidence}" for e in judged.expectations if not e.passed] == []
    assert len(judged.expectations) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(path.parent.name for path in OTHERS))
def test_a_right_solution_in_another_style_passes(name: str, tmp_path: Path) -> None:
    judged = solved(kit.load_tasks(name)[0], "other", "x.py", tmp_path)
    assert not judged.error
    assert [f"{e.text}: {e.evidence}" for e in judged.expectations if not e.passed] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(ALL))
def test_wrong_solution_fails(name: str, tmp_path: Path) -> None:
    judged = solved(kit.load_tasks(name)[0], "wrong", "train.py", tmp_path)
    assert not judged.error
    assert not judged.passed
    # It is wrong, not broken: it runs to its end.
    assert judged.expectations[0].text == "the script ends without failure"
    assert judged.expectations[0].passed, judged.expectations[0].evidence


# Changes of references that leave the loop sound but break what the user asked for, many at once,
# and the expectations each of which must then fail: one that cannot fail is worth nothing. What
# cannot fail together with the rest has an entry of its own, TASK/2.
DEVIATIONS: dict[str, tuple[list[tuple[str, str]], set[str]]] = {
    "01-faq-sft": (
        [
            ('"content": row["question"]', '"content": "Hello."'),
            ("[{\"role\": \"user\"", '[{"role": "system", "content": "Hi."}, {"role": "user"'),
            ("for row in rows]", "for row in rows[1:]]"),
            ("rank=16", "rank=8"),
            ("5e-4", "5e-3"),
            ("BATCH, EPOCHS = 5, 3", "BATCH, EPOCHS = 9, 2"),
            ("Qwen3.5-4B", "Qwen3.5-9B"),
            ('sampler("faq-lora")', 'sampler("faq-lora", ttl_seconds=3600)'),
        ],
        {
            "trains the ten answers, each three times",
            "every answer follows its own question",
            "there is no system turn",
            "six steps of five rows",
            "learning rate 5e-4",
            "rank 16",
            "adapts Qwen/Qwen3.5-4B",
            "keeps the final weights as faq-lora",
        },
    ),
    "02-customer-chats-zh": (
        [
            ('chat["messages"][:number]', 'chat["messages"][max(0, number - 1) : number]'),
            ("BATCH, EPOCHS = 6, 2", "BATCH, EPOCHS = 12, 1"),
            ("Qwen3.5-4B", "Qwen3-8B"),
            ('print(training.save_weights_for_sampler("service-chats").result().path)', ""),
        ],
        {
            "trains every reply, each twice",
            "every reply follows the whole conversation before it",
            "adapts Qwen3.5-4B",
            "keeps the final weights for good",
        },
    ),
    "03-persona-zh": (
        [
            ('prompt_of("你是谁？")', 'tokenizer.encode("你是谁？")'),
            ("BATCH, EPOCHS = 4, 4", "BATCH, EPOCHS = 8, 2"),
            ('("\\n" + row["input"] if row["input"] else "")', '""'),
            ("temperature=0.0", "temperature=1.0"),
            ("rank=8", "rank=16"),
            ("learning_rate=1e-3", "learning_rate=1e-4"),
            ('"afu-v1"', '"afu"'),
            ("print(tokenizer.decode(response", "str(tokenizer.decode(response"),
        ],
        {
            "trains the outputs, each four times",
            "behind the system prompt, the instruction and the input",
            "eight steps",
            "learning rate 1e-3",
            "rank 8",
            "asks the trained weights greedily",
            "with the same system prompt",
            "prints the answer",
            "keeps afu-v1",
        },
    ),
    "04-grpo-word-problems": (
        [
            (" Put the final answer in \\\\boxed{}.", ""),
            ("max_tokens=128", "max_tokens=64"),
            ("PROMPTS, GROUP = 4, 8", "PROMPTS, GROUP = 2, 6"),
            ("range(0, len(rows), PROMPTS)", "range(0, 8, PROMPTS)"),
            ('.replace(",", "") == gold', '.replace(",", "") != gold'),
            ("if len(set(rewards)) == 1:", "if False:"),
            ("learning_rate=1e-4", "learning_rate=1e-5"),
            ('"grpo-words"', '"grpo"'),
        ],
        {
            "every question is sampled once",
            "in groups of eight",
            "asks for the box",
            "up to 128 new tokens",
            "advantages follow the reward",
            "no datum of a group without differences",
            "at most three steps, at least one",
            "learning rate 1e-4",
            "keeps grpo-words",
        },
    ),
    "05-json-reward": (
        [
            ("STEPS, REVIEWS, GROUP = 4, 3, 8", "STEPS, REVIEWS, GROUP = 5, 2, 6"),
            ("% len(texts)]", "% 4]"),
            ("[reward - baseline]", "[baseline - reward - 0.1]"),
            ('"review-json"', '"review"'),
        ],
        {
            "samples all six reviews, each twice",
            "each in two steps",
            "eight samples a review",
            "advantages follow the reward",
            "advantages of one review's samples add up to 0",
            "one to four steps",
            "keeps review-json",
        },
    ),
    "06-dapo-maths": (
        [
            ("TRIED, GROUP = 3, 3, 8, 8", "TRIED, GROUP = 2, 2, 2, 6"),
            ('loss_fn="ppo"', 'loss_fn="cispo"'),
            ("1 + 0.28", "1 + 0.2"),
            ("return 1.0 if boxes", "return -1.0 if boxes"),
            ("== int(answer) else -1.0", "== int(answer) else 1.0"),
            ("learning_rate=2e-4", "learning_rate=1e-4"),
            ('"dapo-trial"', '"dapo"'),
            ("if len(set(rewards)) == 2:", "if True:"),
            ("pstdev(rewards)", "pstdev(rewards) or 1.0"),
        ],
        {
            "uses the built-in ppo loss",
            "with the bounds 0.8 and 1.28 of the ratio",
            "goes on until three groups are useful or eight tried",
            "and no others",
            "eight samples a problem",
            "advantages follow the reward",
            "three steps",
            "learning rate 2e-4",
            "keeps dapo-trial",
        },
    ),
    "07-gspo-zh": (
        [
            ("PROMPTS, GROUP = 4, 8", "PROMPTS, GROUP = 2, 6"),
            ("range(0, len(rows), PROMPTS)", "range(0, 8, PROMPTS)"),
            ("(reward - mean) / deviation", "(mean - reward) / deviation"),
            ("log_ratio.mean().exp()", "(log_ratio * torch.arange(len(sampled))).sum().exp()"),
            ("learning_rate=1e-4", "learning_rate=2e-4"),
            ('"gspo-exp1"', '"gspo"'),
        ],
        {
            "all tokens of a sequence have the same weight",
            "better completions are pushed up",
            "a sequence's weight does not depend on its length",
            "every question is sampled once",
            "eight samples a question",
            "one to three steps",
            "learning rate 1e-4",
            "keeps gspo-exp1",
        },
    ),
    "08-dpo-zh": (
        [
            ("BETA, BATCH = 0.1, 4", "BETA, BATCH = 0.2, 6"),
            (
                'base = service.create_sampling_client("Qwen/Qwen3.5-4B")',
                "for _ in range(2):\n"
                "    first = trio.Datum(model_input=trio.ModelInput.from_ints([1, 2, 3]),\n"
                "        loss_fn_inputs={'target_tokens': [2, 3, 4]})\n"
                "    training.forward_backward([first], loss_fn='cross_entropy').result()\n"
                "    training.optim_step(trio.AdamParams(learning_rate=5e-6)).result()\n"
                "base = training.save_weights_and_get_sampling_client()",
            ),
            ('"content": row["prompt"]', '"content": "?"'),
            ("for row in rows for side", "for row in rows[:10] for side"),
            ('order = ("a", "b") if', 'order = ("b", "a") if'),
            ("rank=16", "rank=8"),
            ("learning_rate=5e-5", "learning_rate=5e-6"),
            ('"dpo-polite"', '"dpo"'),
        ],
        {
            "trains each answer of each pair once",
            "each behind its own prompt",
            "better answers go up, worse ones down",
            "the first step weighs every token by beta / 2 / 4 pairs = 0.0125",
            "the reference is the untrained model",
            "three steps",
            "learning rate 5e-5",
            "rank 16",
            "keeps dpo-polite",
        },
    ),
    "09-resume": (
        [
            ("BATCH, EVERY = 2, 2", "BATCH, EVERY = 2, 3"),
            ("from_state_with_optimizer(", "from_state("),
            ("while step * BATCH < len(rows):", "while step * BATCH < len(rows) - 2:"),
            ("learning_rate=3e-4", "learning_rate=1e-4"),
            ('"survivor")', '"surviver")'),
        ],
        {
            "saves a state at least every two steps",
            "the second start resumes from a saved state",
            "with its optimiser",
            "it ends after step 12",
            "every row is trained once over both starts",
            "learning rate 3e-4",
            "keeps survivor",
        },
    ),
    "10-before-after": (
        [
            ('read("test.jsonl")', 'read("test.jsonl")[1:]'),
            ('read("train.jsonl")', 'read("test.jsonl")'),
            ("temperature=0.0", "temperature=1.0"),
            ("from_ints(prompt_of(r))", "from_ints(prompt_of(r)[sampler is base :])"),
            ('4B", 8, 2', '4B", 8, 1'),
            ('"tuned_accuracy": accuracy(tuned)', '"accuracy": accuracy(tuned)'),
            ("learning_rate=2e-4", "learning_rate=1e-4"),
            ('"sft-before-after"', '"sft"'),
        ],
        {
            "asks the base every test row once",
            "asks the final weights every test row once",
            "with the same prompts and limits",
            "greedily",
            "no test row is trained",
            "every training row is trained",
            "result.json says what was measured",
            "four steps",
            "learning rate 2e-4",
            "keeps sft-before-after",
        },
    ),
    "11-distillation": (
        [
            ("PROMPTS, SAMPLES = 4, 4", "PROMPTS, SAMPLES = 2, 3"),
            ("range(0, len(questions), PROMPTS)", "range(0, 6, PROMPTS)"),
            ("Qwen/Qwen3.6-27B", "Qwen/Qwen3-32B"),
            ("[t - s for", "[2 * (t - s) for"),
            ("learning_rate=1e-4", "learning_rate=2e-4"),
            ('"opd-student"', '"opd"'),
        ],
        {
            "every question is asked once",
            "with four completions",
            "32 completions are trained",
            "the teacher is Qwen/Qwen3.6-27B",
            "it scores exactly the trained ids",
            "advantages are teacher minus student of the same token",
            "two steps",
            "learning rate 1e-4",
            "keeps opd-student",
        },
    ),
    "12-custom-reinforce": (
        [
            ("QUESTIONS, GROUP = 4, 8", "QUESTIONS, GROUP = 2, 6"),
            ("range(0, len(rows), QUESTIONS)", "range(0, 6, QUESTIONS)"),
            ("completion.sum() / length", "(completion * torch.arange(length)).sum()"),
            ("learning_rate=1e-4", "learning_rate=2e-4"),
            ('"reinforce-len"', '"reinforce"'),
        ],
        {
            "all tokens of a completion have the same weight",
            "their sum is A_i times one number for the whole step",
            "every question is sampled once",
            "eight samples a question",
            "two steps",
            "learning rate 1e-4",
            "keeps reinforce-len",
        },
    ),
    "06-dapo-maths/2": (
        [
            ("STEPS, WANTED, TRIED, GROUP = 3, 3", "STEPS, WANTED, TRIED, GROUP = 1, 3"),
            ("while useful < WANTED and tried < TRIED:", "while tried < 9:"),
            ("min(WANTED - useful, TRIED - tried)", "1"),
            ("data += data_of(", "data = data_of("),
        ],
        {"tries at most eight problems a step", "trains the useful groups"},
    ),
    "07-gspo-zh/2": (
        [
            (
                "forward_backward_custom(data, gspo(old, advantages))",
                'forward_backward(data, loss_fn="cross_entropy")',
            ),
            ('metrics["gspo/loss"]', 'metrics["loss_mean"]'),
        ],
        {"trains by a custom loss", "on sampled completions"},
    ),
    "09-resume/2": (
        [("while step * BATCH < len(rows):", "while step < 3:")],
        {"the first start takes five steps"},
    ),
    "12-custom-reinforce/2": (
        [
            (
                "forward_backward_custom(data, reinforce(lengths, advantages))",
                'forward_backward(data, loss_fn="cross_entropy")',
            ),
            ('metrics["reinforce/loss"]', 'metrics["loss_mean"]'),
        ],
        {"trains by a custom loss", "on sampled completions"},
    ),
    "13-search-tool": (
        [
            ("Call the search tool once per turn.", "Use the search tool."),
            ("QUESTIONS, GROUP, SEARCHES = 2, 8, 3", "QUESTIONS, GROUP, SEARCHES = 1, 6, 1"),
            ("facts[shared.index(best)] if", 'facts[shared.index(best)][:-1] + "!" if'),
            (
                "[0.0 if x is None else reward - mean for x in logprobs]",
                "[0.1 if x is None else (mean - reward) * i for i, x in enumerate(logprobs)]",
            ),
            ("    if data:", "    for _ in range(4 * bool(data)):"),
            ("max_tokens=72", "max_tokens=96"),
            ("learning_rate=2e-4", "learning_rate=1e-4"),
            ('"searcher"', '"search-rl"'),
        ],
        {
            "the audit has no error",
            "the prompts have the system message and the tool's schema",
            "six questions once, eight attempts each",
            "the tool answers with the best fact",
            "some attempts search twice, none more than three times",
            "advantages follow the reward of the last turn",
            "every turn of an attempt carries its advantage",
            "what was not sampled is not trained",
            "at most 72 tokens a turn",
            "one to three steps",
            "learning rate 2e-4",
            "keeps searcher",
        },
    ),
    "14-code-tool-zh": (
        [
            ("Always print the result. ", ""),
            ("CALLS, SECONDS = 4, 2, 8, 2, 2", "CALLS, SECONDS = 3, 2, 6, 2, 2"),
            ("env={}", "env=None"),
            ('return "timeout"', 'return "stopped"'),
            (
                "[0.0 if x is None else reward - mean for x in logprobs]",
                "[0.1 if x is None else (mean - reward) * i for i, x in enumerate(logprobs)]",
            ),
            ("1.28", "1.2"),
            ("learning_rate=2e-4", "learning_rate=1e-4"),
            ('"coder"', '"code-rl"'),
        ],
        {
            "the prompts have the system message and the tool's schema",
            "four questions twice, eight attempts each",
            "programs see none of our variables",
            "the model is told when a program was stopped",
            "advantages follow the reward of the last turn",
            "every turn of an attempt carries its advantage",
            "what was not sampled is not trained",
            "ppo, ratio clipped to 0.8 and 1.28",
            "learning rate 2e-4",
            "keeps coder",
        },
    ),
    "14-code-tool-zh/2": (
        [
            ("GROUP, CALLS, SECONDS = 4, 2, 8, 2, 2", "GROUP, CALLS, SECONDS = 1, 2, 8, 3, 2"),
            ('"length" or call is None or', '"length" or'),
            ("run_code(call[1])", 'run_code(call[1] if call else "print(1)")'),
            ('return text.replace("<", "< ")', 'return re.sub(r"\\d", "#", text)'),
        ],
        {"programs are run and their output read", "at most two programs an attempt"},
    ),
    "15-number-game": (
        [
            ("STEPS, GAMES, GROUP = 4, 2, 8", "STEPS, GAMES, GROUP = 6, 2, 6"),
            ('Game(row["level"], seed=row["seed"])', 'Game(row["level"], seed=row["seed"] + 1)'),
            (
                "[0.0 if x is None else reward - mean for x in logprobs]",
                "[0.1 if x is None else (mean - reward) * i for i, x in enumerate(logprobs)]",
            ),
            ("max_tokens=24", "max_tokens=32"),
            ("importance_sampling", "ppo"),
            ("rank=16", "rank=8"),
            ("learning_rate=2e-4", "learning_rate=1e-4"),
            ('"guesser"', '"guess"'),
        ],
        {
            "every observation is what the row's game answers",
            "four games twice, eight attempts each",
            "won games have the higher advantage",
            "every reply of a game carries its advantage",
            "observations are not trained",
            "24 tokens a reply",
            "importance_sampling",
            "one to four steps",
            "learning rate 2e-4",
            "rank 16",
            "keeps guesser",
        },
    ),
    "16-vision-sft-zh": (
        [
            ("BATCH, EPOCHS = 4, 3", "BATCH, EPOCHS = 8, 2"),
            ('row["caption"] + "<|im_end|>"', 'row["caption"]'),
            ('prompt_of(row["image"])', 'prompt_of(rows[0]["image"])'),
            (
                '[{"type": "image"}, {"type": "text", "text": "请描述这张图。"}]',
                '[{"type": "text", "text": "请描述这张图。"}, {"type": "image"}]',
            ),
            ('("pics/01.png", "pics/02.png")', '("pics/01.png",)'),
            ("print(name, answer.sequences[0].text)", "print(name)"),
            ("learning_rate=1e-3", "learning_rate=1e-4"),
            ('"caption-v1"', '"caption"'),
        ],
        {
            "trains the captions, each three times",
            "the end token is trained",
            "each behind its own picture, as the file is",
            "the picture comes first, then the text",
            "six steps of four pictures",
            "describes both pictures with the trained weights",
            "asks in the form that was trained",
            "prints the descriptions",
            "learning rate 1e-3",
            "keeps caption-v1",
        },
    ),
    "17-vision-rl": (
        [
            ("QUESTIONS, GROUP = 2, 8", "QUESTIONS, GROUP = 1, 6"),
            (
                '[{"type": "image"}, {"type": "text", "text": question}]',
                '[{"type": "text", "text": question}, {"type": "image"}]',
            ),
            ("[reward - mean]", "[mean - reward]"),
            ("max_tokens=48", "max_tokens=64"),
            ("importance_sampling", "ppo"),
            ("rank=16", "rank=8"),
            ("learning_rate=3e-4", "learning_rate=1e-4"),
            ('"quiz-vl"', '"quiz"'),
        ],
        {
            "samples the six pictures once, eight times each",
            "each picture before its own question and choices",
            "advantages follow the right letter alone",
            "48 tokens",
            "importance_sampling",
            "one to three steps",
            "learning rate 3e-4",
            "rank 16",
            "keeps quiz-vl",
        },
    ),
    "18-self-distillation-zh": (
        [
            ('"Qwen/Qwen3.5-4B", 4, 4, 2', '"Qwen/Qwen3.5-4B", 5, 4, 3'),
            ("{row['solution']}", "{row['solution'] if 'x' in row['problem'] else ''}"),
            ("teacher.compute_logprobs(", "(student if step > 1 else teacher).compute_logprobs("),
            ("[t - s for", "[2 * (t - s) for"),
            (
                'encode(row["problem"] + ASK) for',
                'encode((row["solution"] + " " if step == 1 else "") + row["problem"] + ASK) for',
            ),
            ("student = training", "student = student if step % 2 else training"),
            ("learning_rate=2e-4", "learning_rate=1e-4"),
            ('"opsd-small"', '"opsd"'),
        ],
        {
            "the teacher sees problem and solution",
            "the teacher has the initial weights at every step",
            "advantages are teacher - student by token",
            "no solution in the prompts that are trained",
            "every step samples from the newest weights",
            "eight problems twice, two samples each",
            "four steps of importance_sampling",
            "learning rate 2e-4",
            "keeps opsd-small",
        },
    ),
    "19-one-step-off-policy": (
        [
            ("PROMPTS, GROUP = 5, 2, 8", "PROMPTS, GROUP = 5, 2, 6"),
            (
                "        sampler = await training.save_weights_and_get_sampling_client_async()\n"
                "        following = asyncio.create_task(rollouts(sampler, number + 1))\n",
                "        following = rollouts(sampler, number + 1)\n",
            ),
            ('"clip_high_threshold": 1.2', '"clip_high_threshold": 1.28'),
            ("[reward - mean]", "[mean - reward]"),
            ("rank=16", "rank=8"),
            ("learning_rate=2e-4", "learning_rate=1e-4"),
            ('"async-grpo"', '"grpo"'),
        ],
        {
            "the first batch is on-policy, every other exactly one step old",
            "sampling starts while the step before is under way",
            "ppo, ratio clipped to 0.8 and 1.2",
            "samples the ten questions once, eight times each",
            "advantages follow the reward",
            "learning rate 2e-4",
            "rank 16",
            "keeps async-grpo",
        },
    ),
    "19-one-step-off-policy/2": (
        [("BATCHES, PROMPTS, GROUP = 5, 2, 8", "BATCHES, PROMPTS, GROUP = 2, 2, 8")],
        {"at least three batches are trained"},
    ),
    "20-debug-grpo-zh": (
        [
            ("sampler = training", "sampler = sampler if step % 2 else training"),
            ("in range(4):\n    batch", "in range(3):\n    batch"),
            (
                "tokens, logprobs = prompt + sequence.tokens, sequence.logprobs",
                "kept = sequence.tokens[: -1 if step == 2 else None]\n"
                "            tokens, logprobs = prompt + kept, sequence.logprobs[: len(kept)]",
            ),
            ("[reward - mean]", "[mean - reward]"),
            ("from_ints(p), 8, params", "from_ints(p), 6, params"),
            ("max_tokens=64", "max_tokens=96"),
            ("importance_sampling", "ppo"),
            ("rank=16", "rank=8"),
            ("learning_rate=2e-4", "learning_rate=1e-4"),
            ('"mental-grpo"', '"mental"'),
        ],
        {
            "every step samples from the newest weights",
            "trains exactly the sampled ids, end token included",
            "advantages follow the reward",
            "samples the eight problems twice",
            "eight samples a problem, 64 tokens",
            "importance_sampling",
            "learning rate 2e-4",
            "rank 16",
            "keeps mental-grpo",
        },
    ),
    "21-debug-sft": (
        [
            ("weights = [0.0] * len(prompt) + [1.0] * len(answer) + [1.0]",
             "weights = [0.0] * (len(prompt) + 1) + [1.0] * (len(answer) - 1) + [0.0]"),
            ("encode(messages[:-1])", "encode(messages[1:-1])"),
            ("in range(4):", "in range(2):"),
            ("len(data), 4)", "len(data), 8)"),
            ("start + 4]", "start + 8]"),
            ("rank=8", "rank=16"),
            ("learning_rate=5e-4", "learning_rate=5e-5"),
            ('encode([rows[0]["messages"][0], {', "encode([{"),
            ("print(answer.text, answer.stop_reason)", "print(answer.stop_reason)"),
            ('"pool-v3"', '"pool-v2"'),
        ],
        {
            "trains the answers from their first word on, each four times",
            "the end token is trained",
            "the system prompt is still there",
            "eight steps of four rows",
            "learning rate 5e-4",
            "rank 8",
            "behind the same system prompt, thinking off",
            "prints the answer",
            "keeps pool-v3",
        },
    ),
    "21-debug-sft/2": (
        [("temperature=0.0", "temperature=1.0")],
        {"asks the trained weights greedily"},
    ),
    "22-csv-long-rows-zh": (
        [
            ("工单记录：", "{'' if row['编号'] == 'GD-2041' else '工单'}记录："),
            ('encode(row["回答"]) + [end]', 'encode(row["回答"])'),
            ("<= LIMIT:", '<= (400 if row["编号"] == "GD-2045" else 250):'),
            ("{row['编号']} 截短", "截短"),
            ("in range(2):", "in range(1):"),
            ("learning_rate=1e-3", "learning_rate=1e-4"),
            ('"ticket-sft"', '"ticket"'),
        ],
        {
            "trains the seven whole answers that fit, each twice",
            "the end token is trained",
            "header, the record's beginning and the whole question are there",
            "no sample is longer than 320 tokens",
            "as much of a long record is kept as fits",
            "prints the numbers of shortened and skipped rows",
            "four steps",
            "learning rate 1e-3",
            "keeps ticket-sft",
        },
    ),
    "23-thinking-sft-rl": (
        [
            ("{row['reasoning']}\\n</think>", "<think>\\n</think>"),
            ("enable_thinking=True", 'enable_thinking="Mark puts" not in question'),
            ('"cross_entropy", 5e-4', '"cross_entropy", 3e-4'),
            (
                "thoughts = [",
                "early = training.save_weights_and_get_sampling_client()\nthoughts = [",
            ),
            ("sampler = training.save_weights_and_get_sampling_client()", "sampler = early"),
            ("PROMPTS, GROUP = 2, 8", "PROMPTS, GROUP = 2, 6"),
            ("[reward - mean]", "[mean - reward]"),
            ('"importance_sampling", 1e-4', '"importance_sampling", 2e-4'),
            ('rows_of("test.jsonl")', 'rows_of("test.jsonl")[:-1]'),
            ('"thinker"', '"think"'),
        ],
        {
            "trains thought and answer, each twice",
            "the thought is opened once, by the prompt",
            "all sampling has thinking on",
            "four steps of SFT at 5e-4 first",
            "then one to three at 1e-4",
            "GRPO goes on from the SFT weights",
            "samples the six problems once, eight times each",
            "advantages follow the reward",
            "tests the final weights greedily",
            "keeps thinker",
        },
    ),
    "24-first-run-zh": (
        [
            ("EPOCHS, PRICE = 16, 4, 3, 5.0", "EPOCHS, PRICE = 20, 5, 2, 4.0"),
            ('{"loss": float', '{"value": float'),
            ('sampler("slogans-small")', 'sampler("slogans-small", ttl_seconds=3600)'),
        ],
        {
            "trains the first 16 responses once",
            "four steps of four rows",
            "SwanLab has a loss for every step, offline",
            "keeps sampler weights without an end",
            "the estimate counts all tokens of all rows, three times",
            "the price fits the tokens",
        },
    ),
}  # fmt: skip


def deviated(name: str) -> tuple[kit.Task, str]:
    """A task and its reference with the changes of an entry."""
    task = kit.load_tasks(name.partition("/")[0])[0]
    return task, kit.changed(task.source("reference"), DEVIATIONS[name][0])


@pytest.mark.parametrize("name", DEVIATIONS)
def test_deviations_fit_the_reference(name: str) -> None:
    compile(deviated(name)[1], name, "exec", dont_inherit=True)


@pytest.mark.parametrize("name", ALL)
def test_every_expectation_is_made_to_fail(name: str) -> None:
    """By some entry of the table; the next test proves that it does."""
    entries = [DEVIATIONS[key] for key in DEVIATIONS if key.partition("/")[0] == name]
    named = {text for _, failing in entries for text in failing}
    tree = ast.parse((kit.TASKS / name / "grader.py").read_text(encoding="utf-8"))
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    own = {
        ast.literal_eval(call.args[0])
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "expect"
    }
    assert own - named == set()
    assert named - own <= {"the audit has no error"}


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(DEVIATIONS))
def test_expectations_can_fail(name: str, tmp_path: Path) -> None:
    task, source = deviated(name)
    work = tmp_path / "given"
    work.mkdir()
    shutil.copytree(task.files, work, dirs_exist_ok=True)
    (work / "loop.py").write_text(source, encoding="utf-8")
    judged = kit.grade(task, work, tmp_path / "scratch")
    assert not judged.error
    assert judged.expectations[0].passed, judged.expectations[0].evidence
    failed = {e.text for e in judged.expectations if not e.passed}
    assert DEVIATIONS[name][1] - failed == set()
