"""A small folder in the layout of ALFWorld's data set, made from the package's own domain and
grammar: one kitchen, three tasks."""

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

# receptacle, its type, whether it can be opened
KITCHEN = (
    ("fridge_bar_1", "FridgeType", True),
    ("microwave_bar_1", "MicrowaveType", True),
    ("sink_bar_1_bar_sinkbasin", "SinkBasinType", False),
    ("countertop_bar_1", "CounterTopType", False),
    ("diningtable_bar_1", "DiningTableType", False),
    ("cabinet_bar_1", "CabinetType", True),
    ("cabinet_bar_2", "CabinetType", True),
)
# object, its type, where it is
THINGS = (
    ("apple_bar_1", "AppleType", "fridge_bar_1"),
    ("mug_bar_1", "MugType", "cabinet_bar_2"),
    ("plate_bar_1", "PlateType", "countertop_bar_1"),
)
# kind -> (thing, the fact besides its place, the words of the task)
TASKS = {
    "pick_and_place_simple": ("Mug", "", "put some mug on diningtable"),
    "pick_heat_then_place_in_recep": ("Apple", "isHot", "put a hot apple in diningtable"),
    "pick_clean_then_place_in_recep": ("Plate", "isClean", "put a clean plate in diningtable"),
}
PUT = "pick_and_place_simple"


def problem(kind: str) -> str:
    """The kitchen and the goal of a task in PDDL."""
    thing, fact, _ = TASKS[kind]
    receptacle_types = sorted({kind for _, kind, _ in KITCHEN})
    object_types = sorted({kind for _, kind, _ in THINGS} | {"KnifeType", "ButterKnifeType"})
    locations = [f"loc_bar_{number}" for number in range(len(KITCHEN) + 1)]
    facts = ["(= (total-cost) 0)", f"(atLocation agent1 {locations[0]})"]
    location_of = {}
    for (name, receptacle_type, openable), location in zip(KITCHEN, locations[1:], strict=True):
        location_of[name] = location
        facts += [f"(receptacleType {name} {receptacle_type})"]
        facts += [f"(receptacleAtLocation {name} {location})"]
        facts += [f"(openable {name})"] if openable else []
    for receptacle_type in receptacle_types:
        facts += [f"(canContain {receptacle_type} {object_type})" for _, object_type, _ in THINGS]
    for name, object_type, where in THINGS:
        facts += [f"(objectType {name} {object_type})", f"(inReceptacle {name} {where})"]
        facts += [f"(objectAtLocation {name} {location_of[where]})"]
        abilities = ("pickupable", "heatable", "cleanable", "coolable")
        facts += [f"({ability} {name})" for ability in abilities]
    also = f"({fact} ?o) " if fact else ""
    return (
        "(define (problem kitchen) (:domain alfred)\n(:objects\n agent1 - agent\n"
        f" {' '.join(locations)} - location\n {' '.join(k[0] for k in KITCHEN)} - receptacle\n"
        f" {' '.join(t[0] for t in THINGS)} - object\n"
        f" {' '.join(receptacle_types)} - rtype\n {' '.join(object_types)} - otype)\n"
        "(:init\n " + "\n ".join(facts) + ")\n(:goal (and (exists (?r - receptacle ?o - object) "
        f"(and {also}(inReceptacle ?o ?r) (objectType ?o {thing}Type) "
        "(receptacleType ?r DiningTableType)))))\n(:metric minimize (total-cost)))\n"
    )


def game_file(kind: str, **changes: object) -> Mapping[str, object]:
    """What stands in a game.tw-pddl."""
    data = files("alfworld") / "data"
    grammar = (data / "alfred.twl2").read_text(encoding="utf-8")
    assert grammar.count("UNKNOWN GOAL.") == 1
    return {
        "pddl_domain": (data / "alfred.pddl").read_text(encoding="utf-8"),
        "grammar": grammar.replace("UNKNOWN GOAL.", TASKS[kind][2] + "."),
        "pddl_problem": problem(kind),
        "solvable": True,
        "walkthrough": [],
    } | changes


def write_game(folder: Path, kind: str, game: Mapping[str, object], task_type: str = "") -> Path:
    """One trial; returns its game file."""
    trial = folder / "trial_T2026"
    trial.mkdir(parents=True)
    (trial / "game.tw-pddl").write_text(json.dumps(game), encoding="utf-8")
    about = {"task_type": task_type or kind}
    (trial / "traj_data.json").write_text(json.dumps(about), encoding="utf-8")
    return trial / "game.tw-pddl"


def make_alfred_fixture(root: Path) -> Path:
    """Three games to train on beside those that ALFWorld skips, one game in each evaluation."""
    for kind, (thing, _, _) in TASKS.items():
        write_game(root / "train" / f"{kind}-{thing}-None-DiningTable-1", kind, game_file(kind))
    skipped = game_file(PUT, solvable=False)
    write_game(root / "train" / f"{PUT}-Unsolvable-None-DiningTable-1", PUT, skipped)
    unsaid = {key: value for key, value in game_file(PUT).items() if key != "solvable"}
    write_game(root / "train" / f"{PUT}-Unsaid-None-DiningTable-1", PUT, unsaid)
    movable = root / "train" / "pick_and_place_with_movable_recep-Mug-Plate-DiningTable-1"
    write_game(movable, PUT, game_file(PUT))
    write_game(root / "train" / f"{PUT}-AppleSliced-None-DiningTable-1", PUT, game_file(PUT))
    other = root / "train" / "pick_and_dance-Mug-None-DiningTable-1"
    write_game(other, PUT, game_file(PUT), task_type="pick_and_dance")
    for split in ("valid_seen", "valid_unseen"):
        write_game(root / split / f"{PUT}-Mug-None-DiningTable-{split}", PUT, game_file(PUT))
    return root
