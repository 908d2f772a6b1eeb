"""The household games of alfworld.py: the same as the stand-in was trained on, independent copies,
nothing that a model writes can break them, and ALFWorld's own games."""

import asyncio
import json
import random
import re
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from alfred_fixture import PUT, TASKS, game_file, make_alfred_fixture, write_game
from conftest import SKILL, outcome
from standin import household
from test_agents import agent, encoded, tokenizer_with, xml
from test_examples import dryrun_command, environment
from test_sandbox import Scripted

EXAMPLE = SKILL / "examples" / "alfworld.py"

# What a model may write instead of an action.
WRONG = [
    "", " ", "look", "inventory", "help", "examine", "go to", "go to door", "go to the moon",
    "go", "open", "put", "take", "x" * 10_000, '"\'"', "take (apple)", "a\nb\n", "\x00", "\ud800",
    "\u65e5\u672c\u8a9e \U0001f34e", "{p.name}", "#load#", "open open open", "put apple on", "heat",
    "go to fridge\n\ngo to table", "__import__('os')", "quit", "restart", "|", "()", "-1", "\\",
    "go to table; open fridge", "None", "%s", "misput apple on table", "go to fridge " * 99,
]  # fmt: skip


@pytest.fixture
def module() -> Any:
    return agent("alfworld.py")


def row_of(game: Any) -> dict[str, Any]:
    """The game as the stand-in's trainer knows it."""
    objects = re.search(r":objects door (.+?) - place (\w+) - thing", game.pddl_problem)
    target = re.search(r"\(target (\w+)\)", game.pddl_problem)
    assert objects and target
    verb = game.task.split()[0]
    treatment = "" if verb == "put" else verb
    row = {"id": game.id, "task": game.task, "object": objects[2], "target": target[1]}
    return row | {"treatment": treatment, "places": objects[1].split()}


def assert_same(module: Any, view: Any, seen: str) -> None:
    """Lines in another order; the actions in the same."""
    ours = view.text if view.won else module.show(view)
    assert sorted(ours.split("\n")) == sorted(seen.split("\n"))


def some_action(rng: random.Random, reference: household.Game) -> str:
    """Admissible, clever, possible elsewhere, or nonsense."""
    kind = rng.random()
    if kind < 0.5 and not reference.won:
        return rng.choice(reference.admissible())
    if kind < 0.7 and not reference.won:
        return reference.expert()
    if kind < 0.85:
        return rng.choice(WRONG)
    thing, place = rng.choice(list(household.HOMES)), rng.choice(household.TARGETS)
    mine = reference.row["object"]
    return rng.choice(
        [f"go to {place}", f"  Go To {place}\n", f"OPEN  {place} ", f"open {household.HOMES[mine]}",
         f"take {thing} from {place}", f"take {mine} from {household.HOMES[mine]}",
         f"put {mine} on {place}", f"put {thing} on {place}", f"heat {mine} with microwave",
         f"clean {thing} with sink", f"cool {mine} with freezer"]
    )  # fmt: skip


BEGIN = "You are at the door."


def test_the_games_are_those_of_the_stand_in(module: Any) -> None:
    """Texts, actions, verdicts; every game can be won, also after it went wrong."""
    kinds, turns = set(), 0
    for number, game in enumerate(module.sample_games(60)):
        house, reference = module.House(game), household.Game(row_of(game))
        view = house.reset()
        assert_same(module, view, reference.observe(BEGIN))
        assert view.task == game.task and not view.won
        for _ in range(12):
            assert list(view.actions) == reference.admissible()
            action = reference.expert()
            seen, won = reference.step(action)
            view = house.step(action)
            assert_same(module, view, seen)
            assert view.won == won
            if won:
                break
        assert view.won and view.actions == ()
        kinds.add(game.kind)
        rng = random.Random(number)
        reference, view = household.Game(row_of(game)), house.reset()
        assert_same(module, view, reference.observe(BEGIN))
        for _ in range(25):
            action = some_action(rng, reference)
            seen, won = reference.step(action)
            view = house.step(action)
            turns += 1
            assert_same(module, view, seen)
            assert (view.won, view.actions) == (won, house.view.actions)
            if not won:
                assert list(view.actions) == reference.admissible()
        house.close()
    assert kinds == set(module.KINDS.values()) and turns == 60 * 25


def test_the_names_are_those_of_the_stand_in(module: Any) -> None:
    assert module.HOMES == household.HOMES and module.TREATMENTS == household.TREATMENTS
    assert module.TARGETS == household.TARGETS and module.CLOSED == household.CLOSED
    assert household.TOOL_NAMES[0] == module.TOOL["function"]["name"]
    assert module.SYSTEM in household.SYSTEMS


def test_the_sample_games_differ(module: Any) -> None:
    train, evaluations = module.load_games(module.Config(data="sample", eval_games=64))
    held_out = evaluations["held_out"]
    assert (len(train), len(held_out)) == (128, 64)
    assert evaluations["seen"] == train[:64]

    def tasks(games: Sequence[Any]) -> set[tuple[str, frozenset[str]]]:
        return {(game.task, frozenset(row_of(game)["places"])) for game in games}

    assert len(tasks([*train, *held_out])) == 192
    assert not tasks(train) & tasks(held_out)
    assert len({game.id for game in [*train, *held_out]}) == 192
    assert module.sample_games(128) == train  # the same in every run
    for game in train[:20]:
        places = row_of(game)["places"]
        assert len(places) == len(set(places)) == 5


def test_copies_are_independent(module: Any) -> None:
    """Eight of one game, played in turn: each is always where its own actions led."""
    for game in module.sample_games(6):
        houses = [module.House(game) for _ in range(8)]
        views = [house.reset() for house in houses]
        assert len(set(views)) == 1
        references, rng = [household.Game(row_of(game)) for _ in houses], random.Random(2)
        for _ in range(80):
            one = rng.randrange(8)
            if references[one].won:
                references[one] = household.Game(row_of(game))
                assert_same(module, houses[one].reset(), references[one].observe(BEGIN))
                continue
            seen, _ = references[one].step(action := some_action(rng, references[one]))
            assert_same(module, houses[one].step(action), seen)
        for house, reference in zip(houses, references, strict=True):
            assert_same(module, house.step("nothing of the kind"), reference.step("x")[0])
            assert house.view.won == reference.won
            if not reference.won:
                assert list(house.view.actions) == reference.admissible()
        places = {reference.at for reference in references}
        assert len(places) > 1  # they went different ways
        for house in houses:
            house.close()


def test_a_library_is_used_again_but_not_a_state(module: Any) -> None:
    game, other = module.sample_games(2)
    house = module.House(game)
    house.reset()
    house.step(house.view.actions[0])
    moved = house.view
    library = house._env.downward_lib
    house.close()
    house.close()  # gives it back once
    assert module.FREE_LIBRARIES.count(library) == 1
    assert house.view.text == moved.text and house.view.actions == ()
    assert house.step(moved.actions[0]).text.startswith("Nothing happens.")
    for again in (game, other):
        fresh = module.House(again)
        reference = household.Game(row_of(again))
        assert_same(module, fresh.reset(), reference.observe(BEGIN))
        fresh.close()
    assert len(module.FREE_LIBRARIES) == len({id(lib) for lib in module.FREE_LIBRARIES})


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_nothing_happens_for_a_wrong_action(module: Any, text: str) -> None:
    house = house_for_wrong_actions(module)
    before = house.view
    view = house.step(text)
    status = before.text.partition("\n")[2]
    assert view.text == f"Nothing happens.\n{status}"
    assert (view.actions, view.won, view.task) == (before.actions, False, before.task)
    assert house.view == before  # and the next wrong one says the same


@cache
def house_for_wrong_actions(module: Any) -> Any:
    house = module.House(module.sample_games(1)[0])
    house.reset()
    return house


def test_threads_do_not_meet(module: Any) -> None:
    """Eight players at once; the program's own output and arguments stay as they are."""
    games, problems = module.sample_games(16), []
    stdout, argv = sys.stdout, list(sys.argv)

    def play(number: int) -> None:
        try:
            rng = random.Random(number)
            for episode in range(4):
                game = games[rng.randrange(16)]
                house, reference = module.House(game), household.Game(row_of(game))
                assert_same(module, house.reset(), reference.observe(BEGIN))
                for _ in range(15):
                    seen, _ = reference.step(action := some_action(rng, reference))
                    assert_same(module, house.step(action), seen)
                    assert sys.stdout is stdout and sys.argv == argv
                if episode % 2:
                    house.close()
        except BaseException as error:
            problems.append(repr(error))

    threads = [threading.Thread(target=play, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


# -- other processes ------------------------------------------------------------------------------

# As `python examples/alfworld.py` finds its modules: the script's own folder comes first.
AS_A_SCRIPT = f"""
import importlib.util, json, os, random, sys
sys.path[0] = {str(EXAMPLE.parent)!r}
spec = importlib.util.spec_from_file_location("the_example", {str(EXAMPLE)!r})
module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
WRONG = json.loads({json.dumps(WRONG)!r})
"""
TRANSCRIPT = """
for number, game in enumerate(module.sample_games(12)):
    rng, house = random.Random(number), module.House(game)
    view = house.reset()
    print(game.id, ascii(view))
    for _ in range(12):
        view = house.step(rng.choice(view.actions or WRONG))
        print(ascii(view))
"""
EPISODES = """
def resident():  # MB
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

rng, early = random.Random(1), None
for number, game in enumerate(module.sample_games(1000)):
    house = module.House(game)
    view = house.reset()
    for _ in range(10):
        if view.won:
            break
        view = house.step(rng.choice(view.actions if rng.random() < 0.8 else WRONG))
    if number % 2:  # the others are left to the garbage collector
        house.close()
    del house
    if number == 200:
        early = resident()
print(json.dumps({"growth": resident() - early, "libraries": len(module.FREE_LIBRARIES)}))
"""


def elsewhere(code: str, *, folder: Path, seconds: float = 60, **variables: str) -> str:
    """Output of the code in a process of its own."""
    command = [sys.executable, "-B", "-c", AS_A_SCRIPT + code]
    done = outcome(command, folder, environment(**variables), seconds)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_same_actions_are_the_same_game_in_another_process(tmp_path: Path) -> None:
    """Whatever the order of its sets."""
    one, other = (elsewhere(TRANSCRIPT, folder=tmp_path, PYTHONHASHSEED=seed) for seed in "12")
    assert one == other
    assert one.count("View(") == 12 * 13 and one.count("house-") == 12


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_thousand_episodes_leave_nothing_behind(tmp_path: Path) -> None:
    found = json.loads(elsewhere(EPISODES, folder=tmp_path, seconds=200))
    assert found["growth"] < 20, found
    assert found["libraries"] <= 3


# -- ALFWorld's games -----------------------------------------------------------------------------

SOLUTIONS = {
    "pick_and_place_simple": [
        "go to cabinet 1", "open cabinet 1", "take mug 1 from cabinet 1", "go to diningtable 1",
        "move mug 1 to diningtable 1",
    ],
    "pick_heat_then_place_in_recep": [
        "go to fridge 1", "open fridge 1", "take apple 1 from fridge 1", "go to microwave 1",
        "heat apple 1 with microwave 1", "go to diningtable 1", "move apple 1 to diningtable 1",
    ],
    "pick_clean_then_place_in_recep": [
        "go to countertop 1", "take plate 1 from countertop 1", "go to sinkbasin 1",
        "clean plate 1 with sinkbasin 1", "go to diningtable 1", "move plate 1 to diningtable 1",
    ],
}  # fmt: skip


def alfworld_folder(module: Any, root: Path) -> Path:
    assert module.NAME == "alfworld"  # asked for first: it makes room for the package of its name
    return make_alfred_fixture(root / "json_2.1.1")


def test_alfworlds_games_are_played(module: Any, tmp_path: Path) -> None:
    folder = alfworld_folder(module, tmp_path)
    games = module.read_games(folder, "train")
    # Unsolvable ones, movable receptacles, slices and other tasks are skipped, as ALFWorld does.
    assert [game.kind for game in games] == sorted(TASKS)
    assert games[0].pddl_domain is games[2].pddl_domain
    for game in games:
        house = module.House(game)
        begun = view = house.reset()
        assert view.task == TASKS[game.kind][2] and view.text.startswith("You are in the middle of")
        assert "Welcome" not in view.text and "Your task" not in view.text
        moves = [action for action in view.actions if action.startswith("go to ")]
        assert list(view.actions[: len(moves)]) == moves and len(moves) == 7
        cabinets = [move for move in moves if "cabinet" in move]
        assert cabinets == ["go to cabinet 1", "go to cabinet 2"]
        for action in SOLUTIONS[game.kind]:
            assert not view.won
            assert action in view.actions
            assert "help" not in view.actions and "quit" not in view.actions
            view = house.step(f" {action.upper()} ")
            assert view.text and not view.text.startswith("Nothing happens")
        assert view.won and view.actions == ()
        assert house.step("look").text == "Nothing happens." and house.view.won
        assert house.reset() == begun
        # A wrong one changes nothing.
        assert "carrying" in house.step("inventory").text
        assert house.step("nonsense") == module.View(
            "Nothing happens.", house.view.actions, False, begun.task
        )
        other = module.House(game)
        other.reset()
        other.step("go to fridge 1")
        assert house.step("look").text != other.step("look").text  # their own copies
        house.close()
        other.close()


def test_an_alfworld_run_has_its_evaluations(module: Any, tmp_path: Path) -> None:
    folder = alfworld_folder(module, tmp_path)
    train, evaluations = module.load_games(module.Config(games=folder, eval_games=5))
    assert len(train) == 3
    assert {name: [game.id for game in games] for name, games in evaluations.items()} == {
        "seen": [f"{PUT}-Mug-None-DiningTable-valid_seen/trial_T2026"],
        "held_out": [f"{PUT}-Mug-None-DiningTable-valid_unseen/trial_T2026"],
    }


def test_a_script_finds_the_package_of_its_own_name(module: Any, tmp_path: Path) -> None:
    """`import alfworld` in alfworld.py must not find the script itself."""
    folder = alfworld_folder(module, tmp_path)
    code = f"""
from pathlib import Path
house = module.House(module.read_games(Path({str(folder)!r}), "valid_seen")[0])
for view in [house.reset(), *map(house.step, {SOLUTIONS[PUT]!r})]:
    print(view)
"""
    one, other = (elsewhere(code, folder=tmp_path, PYTHONHASHSEED=seed) for seed in "12")
    assert one == other and one.count("View(") == one.count(TASKS[PUT][2]) == 6
    assert "won=True" in one.splitlines()[-1]


@pytest.mark.slow
def test_alfworlds_games_run_dry(module: Any, tmp_path: Path) -> None:
    folder = alfworld_folder(module, tmp_path)
    arguments = ["--steps", "1", "--no-eval-base", "--group-size", "2", "--games-per-step", "3"]
    arguments += ["--max-steps", "3", "--max-tokens", "48", "--swanlab", "disabled"]
    command = dryrun_command(EXAMPLE, "--data", "alfworld", "--games", str(folder), *arguments)
    # By chance both of each group do equally badly, and then nothing is trained.
    command[3:3] = ["--accept", "A10=the stand-in does not know these games"]
    done = outcome(command, tmp_path, environment(), 200)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("runs/*/metrics.jsonl")
    (row,) = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert row["reward/scored"] == 6 and row["rollout/steps_mean"] > 0


def half(text: str) -> str:
    return text[: len(text) // 2]


DAMAGES: list[tuple[str, Callable[[str], str | bytes]]] = [
    ("game.tw-pddl", half),
    ("game.tw-pddl", lambda text: ""),
    ("game.tw-pddl", lambda text: "[]"),
    ("game.tw-pddl", lambda text: "3"),
    ("game.tw-pddl", lambda text: "null"),
    ("game.tw-pddl", lambda text: '"text"'),
    ("game.tw-pddl", lambda text: '{"grammar": "x"}'),
    ("game.tw-pddl", lambda text: json.dumps(json.loads(text) | {"grammar": 3})),
    ("game.tw-pddl", lambda text: json.dumps(json.loads(text) | {"pddl_problem": " "})),
    ("game.tw-pddl", lambda text: b"\xff\xfe\x00"),
    ("traj_data.json", half),
    ("traj_data.json", lambda text: "[]"),
    ("traj_data.json", lambda text: "{}"),
]


@pytest.mark.parametrize(("file", "damage"), DAMAGES, ids=range(len(DAMAGES)))
def test_a_damaged_file_is_named_in_one_line(
    module: Any, file: str, damage: Callable[[str], str | bytes], tmp_path: Path
) -> None:
    assert module
    folder = tmp_path / "json_2.1.1"
    written = write_game(folder / "train" / f"{PUT}-Mug-None-DiningTable-1", PUT, game_file(PUT))
    path = written.with_name(file)
    spoilt = damage(path.read_text(encoding="utf-8"))
    path.write_bytes(spoilt if isinstance(spoilt, bytes) else spoilt.encode())
    with pytest.raises(SystemExit) as stopped:
        module.read_games(folder, "train")
    line = str(stopped.value)
    assert line.startswith("alfworld: ") and "\n" not in line and str(path) in line
    assert "is damaged" in line


@pytest.mark.parametrize("missing", ["traj_data.json", "the split", "the folder"])
def test_what_is_missing_is_named_in_one_line(module: Any, missing: str, tmp_path: Path) -> None:
    assert module
    folder = tmp_path / "json_2.1.1"
    path = folder / "train"
    if missing == "traj_data.json":
        written = write_game(path / f"{PUT}-Mug-None-DiningTable-1", PUT, game_file(PUT))
        path = written.with_name(missing)
        path.unlink()
    elif missing == "the split":
        folder.mkdir()
    with pytest.raises(SystemExit) as stopped:
        module.read_games(folder, "train")
    assert str(path) in str(stopped.value) and "\n" not in str(stopped.value)


@pytest.mark.parametrize("field", ["pddl_domain", "grammar", "pddl_problem"])
@pytest.mark.parametrize("text", ["garbage", "half"])
def test_a_game_that_cannot_be_loaded_is_named(module: Any, field: str, text: str) -> None:
    """Valid JSON around a damaged text; the houses after it are not harmed."""
    assert module
    texts = {key: str(game_file(PUT)[key]) for key in ("pddl_domain", "grammar", "pddl_problem")}
    whole = module.Game("the-trial", PUT, *texts.values(), None)
    texts[field] = half(texts[field]) if text == "half" else text
    broken = module.Game("the-trial", PUT, *texts.values(), None)
    with pytest.raises(RuntimeError, match="game the-trial cannot be loaded") as failed:
        module.House(broken).reset()
    assert "\n" not in str(failed.value)
    house = module.House(whole)
    assert house.reset().task == TASKS[PUT][2]
    house.close()


# -- rewards --------------------------------------------------------------------------------------


def act(action: str) -> str:
    return xml(action, name="act", key="action") + "<|im_end|>"


def expert_turns(game: Any) -> list[str]:
    reference, turns = household.Game(row_of(game)), []
    while not reference.won:
        turns.append(act(reference.expert()))
        reference.step(reference.expert())
    return turns


@pytest.mark.parametrize(
    ("before", "end", "reward", "malformed", "inadmissible"),
    [
        ([], "won", 1.0, 0, 0),
        ([act("go to the moon"), "I do not know.<|im_end|>"], "won", 0.8, 1, 1),
        (["<tool_call>\nopen<|im_end|>", act("look")], "won", 0.8, 1, 1),
        ([act("dance")] * 3, "won", 0.7, 0, 3),
        ([act("dance")] * 20, "limit", -2.0, 0, 20),
        (["Done!<|im_end|>"] * 20, "limit", -2.0, 20, 0),
        ([""], "foreign_id", None, 0, 0),
    ],
)
def test_success_is_paid_and_invalid_actions_cost(
    module: Any,
    before: list[str],
    end: str,
    reward: float | None,
    malformed: int,
    inadmissible: int,
) -> None:
    tokenizer, game = tokenizer_with("standin"), module.sample_games(1)[0]
    said = [*before, *expert_turns(game)] if end == "won" else before
    sampler = Scripted(tokenizer, said)
    config = module.Config(data="sample", max_steps=20)
    rollout = module.Rollout(sampler, tokenizer, config, 1.0)
    ((played,),) = asyncio.run(rollout.groups([game], 1))
    assert played.end == end and played.reward == pytest.approx(reward)
    assert (played.malformed, played.inadmissible) == (malformed, inadmissible)
    assert played.steps == (len(said) if end != "foreign_id" else 0)
    assert not sampler.tokens and [turn.prompt for turn in played.turns] == sampler.prompts
    (run,) = module.joined_turns(played.turns)
    assert run == played.turns
    first = tokenizer.decode(played.turns[0].prompt)
    assert f"Task: {game.task}.\nYou are at the door.\nAt: door (here)." in first
    if len(said) > 1:
        house = module.House(game)
        house.reset()
        house.step(module.parse_turn(said[0].removesuffix("<|im_end|>"))[1])
        second = tokenizer.decode(sampler.prompts[1][len(sampler.prompts[0]) :])
        assert f"Actions: {', '.join(house.view.actions)}\n</tool_response>" in second
        house.close()


def test_a_cut_turn_does_nothing(module: Any) -> None:
    tokenizer, game = tokenizer_with("standin"), module.sample_games(1)[0]
    sampler = Scripted(tokenizer, [act("go to the moon")], reason="length")
    rollout = module.Rollout(sampler, tokenizer, module.Config(data="sample"), 1.0)
    ((played,),) = asyncio.run(rollout.groups([game], 1))
    assert (played.end, played.reward, played.steps) == ("truncated", 0.0, 0)
    assert encoded(tokenizer, act("go to the moon")) == played.turns[0].tokens
