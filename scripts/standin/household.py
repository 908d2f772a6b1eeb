"""A text household game with admissible actions, played through one tool `act(action)`.

Five places per house, one object to bring somewhere, sometimes heated, cooled or cleaned on the
way. Every object has its usual place, the same in all houses: that is the knowledge a small model
can hold, so it can plan from the task, from where it is and from what it carries (all three are in
every observation).
"""

from __future__ import annotations

import random
from typing import Any

# object -> where it is found
HOMES = {
    "apple": "fridge",
    "egg": "fridge",
    "potato": "fridge",
    "mug": "cabinet",
    "plate": "cabinet",
    "bowl": "cabinet",
    "book": "desk",
    "pen": "desk",
    "phone": "desk",
    "towel": "shelf",
    "soap": "shelf",
    "candle": "shelf",
}
CLOSED = ("fridge", "cabinet")  # must be opened before anything can be taken out
TARGETS = ("table", "counter", "sofa", "bed")
# treatment -> (the appliance, the objects it makes sense for)
TREATMENTS = {
    "heat": ("microwave", ("apple", "egg", "potato", "mug", "plate")),
    "cool": ("freezer", ("apple", "egg", "potato", "bowl", "plate")),
    "clean": ("sink", ("mug", "plate", "bowl", "soap", "apple")),
}

TOOL_NAMES = ("act", "step", "alfworld_step", "do_action")


def tool(name: str = "act") -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "Do one action.",
            "parameters": {
                "type": "object",
                "properties": {"action": {"type": "string"}},
                "required": ["action"],
            },
        },
    }


SYSTEMS = (
    "You act in a house. Do one listed action per turn with the tool.",
    "You are in a text game. Call the tool once per turn with one of the admissible actions.",
    "Finish the task in the house. Use exactly one tool call per turn.",
    "Play the game: pick one admissible action each turn.",
)
SYSTEM = SYSTEMS[0]


def row(rng: random.Random) -> dict[str, Any]:
    """One game: {"id", "task", "object", "target", "treatment", "places"}. A Game plays it."""
    treatment = rng.choice(["", "", *TREATMENTS])
    thing = rng.choice(TREATMENTS[treatment][1] if treatment else list(HOMES))
    target = rng.choice(TARGETS)
    needed = [HOMES[thing], target] + ([TREATMENTS[treatment][0]] if treatment else [])
    others = [
        place
        for place in (*set(HOMES.values()), *TARGETS, "microwave", "freezer", "sink")
        if place not in needed
    ]
    places = needed + rng.sample(sorted(others), 5 - len(needed))
    rng.shuffle(places)
    task = (
        f"put a {thing} on the {target}"
        if not treatment
        else f"{treatment} a {thing} and put it on the {target}"
    )
    return {
        "id": f"house-{rng.randrange(10**6):06d}",
        "task": task,
        "object": thing,
        "target": target,
        "treatment": treatment,
        "places": places,
    }


class Game:
    """The state of one game. `step` never raises: an inadmissible action changes nothing."""

    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row
        self.at = "door"
        self.carried = False
        self.treated = not row["treatment"]
        self.opened: set[str] = set()
        self.won = False

    def admissible(self) -> list[str]:
        thing = self.row["object"]
        actions = [f"go to {place}" for place in self.row["places"] if place != self.at]
        if self.at in CLOSED and self.at not in self.opened:
            actions.append(f"open {self.at}")
        elif self.at == HOMES[thing] and not self.carried:
            actions.append(f"take {thing} from {self.at}")
        if self.carried:
            if self.row["treatment"] and self.at == TREATMENTS[self.row["treatment"]][0]:
                actions.append(f"{self.row['treatment']} {thing} with {self.at}")
            elif self.at in TARGETS:
                actions.append(f"put {thing} on {self.at}")
        return actions

    def step(self, action: str) -> tuple[str, bool]:
        """Do the action; returns what is seen and whether the task is done."""
        action = " ".join(action.lower().split())
        if self.won or action not in self.admissible():
            return self.observe("Nothing happens."), self.won
        verb, rest = action.split(" ", 1)
        if verb == "go":
            self.at, seen = rest.removeprefix("to "), f"You go to the {rest.removeprefix('to ')}."
        elif verb == "open":
            self.opened.add(self.at)
            seen = f"You open the {self.at}."
        elif verb == "take":
            self.carried, seen = True, f"You take the {self.row['object']}."
        elif verb == "put":
            seen = f"You put down the {self.row['object']}."
            self.carried, self.won = False, self.at == self.row["target"] and self.treated
            if not self.won:  # wrong place: it goes back home, so that the game can go on
                seen = f"Not here. The {self.row['object']} goes back."
        else:
            self.treated, seen = True, f"You {verb} the {self.row['object']}."
        return self.observe(seen), self.won

    def observe(self, seen: str) -> str:
        """One observation: what happened, where, with what, and what can be done next."""
        if self.won:
            return f"{seen} Done!"
        state = "open" if self.at in self.opened else "closed" if self.at in CLOSED else "here"
        carrying = (
            f"{self.row['object']}{' ready' if self.treated and self.row['treatment'] else ''}"
            if self.carried
            else "nothing"
        )
        return (
            f"{seen}\nTask: {self.row['task']}.\nAt: {self.at} ({state}). Carrying: {carrying}.\n"
            f"Actions: {', '.join(self.admissible())}"
        )

    def expert(self) -> str:
        """The next right action."""
        thing, place = self.row["object"], HOMES[self.row["object"]]
        if not self.carried:
            if self.at != place:
                return f"go to {place}"
            return (
                f"open {place}"
                if place in CLOSED and place not in self.opened
                else f"take {thing} from {place}"
            )
        if not self.treated:
            appliance = TREATMENTS[self.row["treatment"]][0]
            return (
                f"go to {appliance}"
                if self.at != appliance
                else f"{self.row['treatment']} {thing} with {appliance}"
            )
        return (
            f"go to {self.row['target']}"
            if self.at != self.row["target"]
            else f"put {thing} on {self.at}"
        )


def plain_prompt(game: Game) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": game.observe("You are at the door.")},
    ]
