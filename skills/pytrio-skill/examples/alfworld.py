"""ALFWorld: household games in the TextWorld engine, one tool call a turn, success reinforced.

Environment: ALFWorld, arXiv:2010.03768; group advantages over whole episodes as in GiGPO's GRPO
baseline, arXiv:2505.10978. A trajectory i of G on one game is sampled turns with the house's
answers between them. With r_i = 1 when the task is done, less 0.1 for each invalid action:

    A_i  = r_i - mean(r_1 ... r_G)
    loss = -sum_i sum_t m_it * min(ratio_it * A_i, clip(ratio_it, 0.8, 1.2) * A_i)
    m_it = 1 where token t was sampled, 0 for what the house or the template wrote

Needs `pip install alfworld==0.4.2`, which compiles a planner for some minutes.
Dry run (free, offline):   python scripts/dryrun.py run examples/alfworld.py -- --data sample
On the cloud (billed):     PYTRIO_API_KEY=... python examples/alfworld.py --games json_2.1.1
Expected in the dry run:   success 0.47 to 0.94 (last three of 12 steps), seen games 0.42 to 0.96,
                           held out 0.42 to 0.88, about 140 s on one core; seed 1 0.38 to 0.93,
                           0.96 and 0.92
An interrupted run continues when the same command is given again.
"""

import asyncio
import contextlib
import copy
import functools
import gc
import hashlib
import importlib
import json
import math
import os
import random
import re
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Literal, NoReturn

import pytrio as trio
import tyro
from tqdm import tqdm

NAME = "alfworld"
SKILL = "pytrio-skill 0.1.0"
INSTALL = (
    "pip install alfworld==0.4.2 (compiles a planner for some minutes: cmake and a C++ compiler)"
)
SYSTEM = "Finish the task in the house. Use exactly one tool call per turn."
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "act",
        "description": "Do one action.",
        "parameters": {
            "type": "object",
            "properties": {"action": {"type": "string"}},
            "required": ["action"],
        },
    },
}
STOP = ["<|im_end|>"]
# Stands for an assistant's text in a rendering; one word that no template trims or splits.
PLACEHOLDER = "the-assistant-wrote-this"
INVALID_ACTION = -0.1  # as published; 50 of them outweigh a success
# Bounds are of the ratio, not distances from 1; the cloud's defaults are unknown.
LOSS_CONFIG = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


@dataclass(frozen=True)
class Config:
    data: Literal["alfworld", "sample"] = "alfworld"
    """`alfworld` (the downloaded data set in --games) or `sample` (generated small houses, no
    download, smaller defaults)."""
    games: Path | None = None
    """Folder json_2.1.1 that `alfworld-download` made: train, valid_seen, valid_unseen."""
    base_model: str = "Qwen/Qwen3.5-4B"
    """Model to adapt; the one of nearly all public PyTRIO runs."""
    steps: int = 80
    """Optimiser steps; the public run took 80."""
    games_per_step: int = 8
    """Games per step; 8 in the public run."""
    group_size: int = 8
    """Trajectories per game; 8 in the public run."""
    learning_rate: float = 1e-6
    """Learning rate of AdamW; 1e-6 in the public run, 4e-6 in AgentOPSD's."""
    rank: int = 32
    """LoRA rank, 4 to 64; 32 is the SDK's default."""
    max_steps: int = 50
    """Actions a trajectory may take; 50 as published."""
    max_tokens: int = 512
    """Longest turn; 512 to 2048 in public runs."""
    max_trajectory_tokens: int = 12_000
    """Prompt, turns and observations together; 12,000 in the public run."""
    seed: int = 0
    """Order of games, initial weights. Sampling gets none: one seed repeats the same turns."""
    eval_games: int = 140
    """Games of each evaluation, seen and held out; ALFWorld has 140 and 134."""
    eval_temperature: float = 0.01
    """0.01 as published; 1 shows the policy that is trained."""
    eval_base: bool = True
    """Evaluate the untrained model, too."""
    save_every: int = 10
    """Steps between checkpoints: what a killed run does again at most."""
    run_dir: Path = Path("runs/alfworld")
    """Folder of metrics.jsonl, run_state.json and SwanLab's files."""
    fresh: bool = False
    """Discard the run in --run-dir instead of resuming it."""
    swanlab: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto` is online when SWANLAB_API_KEY is set and offline otherwise."""


# What `--data sample` replaces; a flag on the command line still wins.
SAMPLE: dict[str, Any] = {"steps": 12, "games_per_step": 4, "learning_rate": 6e-4, "max_steps": 7}
SAMPLE |= {"max_tokens": 48, "eval_games": 24, "eval_temperature": 1.0, "save_every": 4}
# What may differ when a run is resumed; any other change makes it another run.
FREE_TO_CHANGE = {"steps", "save_every", "run_dir", "fresh", "swanlab", "eval_base", "games"}


def stop(line: str) -> NoReturn:
    """End with one line that says what is wrong and what to do."""
    raise SystemExit(f"{NAME}: {line}")


def check_config(config: Config) -> None:
    lowest = {"group_size": 2, "rank": 4, "seed": 0}
    for name, value in asdict(config).items():
        if type(value) is int and value < lowest.get(name, 1):
            flag = "--" + name.replace("_", "-")
            stop(f"{flag} must be at least {lowest.get(name, 1)}, got {value}")
    if not 0 < config.learning_rate < 1:
        stop(f"--learning-rate must be between 0 and 1, got {config.learning_rate}")
    if not 0 <= config.eval_temperature <= 2:
        stop(f"--eval-temperature must be between 0 and 2, got {config.eval_temperature}")
    if config.data == "alfworld" and config.games is None:
        stop("--data alfworld needs --games, the folder json_2.1.1 that `alfworld-download` makes")
    if config.swanlab == "online" and not os.environ.get("SWANLAB_API_KEY"):
        stop("--swanlab online needs SWANLAB_API_KEY in the environment; offline does not")


# -- games ----------------------------------------------------------------------------------------

# Every object has its usual place, the same in all houses: knowledge that a small model can hold.
CLOSED = ("fridge", "cabinet")
FOUND = {
    "fridge": ("apple", "egg", "potato"),
    "cabinet": ("mug", "plate", "bowl"),
    "desk": ("book", "pen", "phone"),
    "shelf": ("towel", "soap", "candle"),
}
HOMES = {thing: place for place, things in FOUND.items() for thing in things}
TARGETS = ("table", "counter", "sofa", "bed")
# treatment -> (the appliance, the objects it makes sense for)
TREATMENTS = {
    "heat": ("microwave", ("apple", "egg", "potato", "mug", "plate")),
    "cool": ("freezer", ("apple", "egg", "potato", "bowl", "plate")),
    "clean": ("sink", ("mug", "plate", "bowl", "soap", "apple")),
}
PLACES = (*FOUND, *TARGETS, *(appliance for appliance, _ in TREATMENTS.values()))

# The six ALFWorld task types; the generated games use the four about one object and one place.
KINDS = {verb: f"pick_{verb}_then_place_in_recep" for verb in TREATMENTS}
KINDS[""] = "pick_and_place_simple"
TASK_TYPES = (*KINDS.values(), "look_at_obj_in_light", "pick_two_obj_and_place")

# `home` says where a thing is whenever nobody carries it, so a wrong place needs no own fact.
TREAT = """\
 (:action {0} :parameters (?t - thing ?p - place)
  :precondition (and (at ?p) ({0}s ?p) (carried ?t))
  :effect (not (raw ?t)))
"""
DOMAIN = """\
(define (domain house)
 (:requirements :adl :typing)
 (:types place thing)
 (:predicates
  (at ?p - place) (room ?p - place) (shut ?p - place) (surface ?p - place) (target ?p - place)
  (heats ?p - place) (cools ?p - place) (cleans ?p - place)
  (home ?t - thing ?p - place) (carried ?t - thing) (raw ?t - thing) (delivered ?t - thing))
 (:action go :parameters (?o - place ?p - place)
  :precondition (and (at ?o) (room ?p) (not (= ?o ?p)))
  :effect (and (not (at ?o)) (at ?p)))
 (:action open :parameters (?p - place)
  :precondition (and (at ?p) (shut ?p))
  :effect (not (shut ?p)))
 (:action take :parameters (?t - thing ?p - place)
  :precondition (and (at ?p) (home ?t ?p) (not (shut ?p)) (not (carried ?t)))
  :effect (carried ?t))
TREATMENTS (:action put :parameters (?t - thing ?p - place)
  :precondition (and (at ?p) (target ?p) (carried ?t) (not (raw ?t)))
  :effect (and (not (carried ?t)) (delivered ?t)))
 (:action misput :parameters (?t - thing ?p - place)
  :precondition (and (at ?p) (surface ?p) (carried ?t) (or (raw ?t) (not (target ?p))))
  :effect (not (carried ?t))))
""".replace("TREATMENTS", "".join(TREAT.format(verb) for verb in TREATMENTS))


@functools.cache
def grammar() -> str:
    """The texts. The engine knows the fact `not_x` once an action has deleted `x`.

    Every expansion copies its context, so the rules are as few and as flat as the texts allow.
    """
    status = "\\nAt: {p.name} (%s). Carrying: %s."
    texts = {
        "go": ("go to {p}", "You go to the {p.name}." + status % ("#door#", "#load#")),
        "open": ("open {p}", "You open the {p.name}." + status % ("open", "#load#")),
        "take": ("take {t} from {p}", "You take the {t.name}." + status % ("#door#", "#load#")),
        "put": ("put {t} on {p}", "You put down the {t.name}. Done!"),
    }
    back = "Not here. The {t.name} goes back." + status % ("here", "nothing")
    texts["misput"] = ("put {t} on {p}", back)
    for verb in TREATMENTS:
        done = status % ("here", "{t.name} ready")
        texts[verb] = (verb + " {t} with {p}", f"You {verb} the {{t.name}}." + done)
    load = "{t.name | carried(t:thing)}"
    rules: dict[str, list[dict[str, str]]] = {
        "intro": [{"rhs": "You are at the door.\\nAt: door (here). Carrying: nothing."}],
        "door": [
            {"condition": "shut(p:place)", "rhs": "closed"},
            {"condition": "not_shut(p:place)", "rhs": "open"},
            {"rhs": "here"},
        ],
        "load": [
            {"condition": "carried(t:thing) & not_raw(t:thing)", "rhs": load + " ready"},
            {"condition": "carried(t:thing)", "rhs": load},
            {"rhs": "nothing"},
        ],
    }
    rules |= {f"{name}.text": [{"rhs": text}] for name, (_, text) in texts.items()}
    lines = json.dumps(rules, indent=1).replace("\\\\n", "\\n")
    form = 'action %s {\n template :: "%s";\n feedback :: "#%s.text#";\n}\n'
    actions = [form % (name, command, name) for name, (command, _) in texts.items()]
    return f'grammar :: """\n{lines}\n""";\n' + "".join(actions)


@dataclass(frozen=True)
class Game:
    """What the engine loads; `task` is None where the first observation says it (ALFWorld)."""

    id: str
    kind: str
    pddl_domain: str = field(repr=False)
    grammar: str = field(repr=False)
    pddl_problem: str = field(repr=False)
    task: str | None


def small_game(treatment: str, thing: str, target: str, places: list[str]) -> Game:
    facts = ["(at door)", f"(home {thing} {HOMES[thing]})", f"(target {target})"]
    facts += [f"(room {place})" for place in places]
    facts += [f"(shut {place})" for place in places if place in CLOSED]
    facts += [f"(surface {place})" for place in places if place in TARGETS]
    task = f"put a {thing} on the {target}"
    if treatment:
        facts += [f"(raw {thing})", f"({treatment}s {TREATMENTS[treatment][0]})"]
        task = f"{treatment} a {thing} and put it on the {target}"
    problem = (
        "(define (problem house) (:domain house)\n"
        f" (:objects door {' '.join(places)} - place {thing} - thing)\n"
        f" (:init {' '.join(facts)})\n"
        f" (:goal (delivered {thing})))\n"
    )
    name = hashlib.sha256(problem.encode()).hexdigest()[:10]
    return Game(f"house-{name}", KINDS[treatment], DOMAIN, grammar(), problem, task)


def sample_games(count: int) -> list[Game]:
    """Different games, no two with the same task in the same places; three quarters of them need a
    treatment on the way."""
    rng = random.Random(0)
    games: dict[tuple[str, frozenset[str]], Game] = {}
    while len(games) < count:
        treatment = rng.choice(["", *TREATMENTS])
        thing = rng.choice(TREATMENTS[treatment][1] if treatment else list(HOMES))
        needed = [HOMES[thing], target := rng.choice(TARGETS)]
        needed += [TREATMENTS[treatment][0]] if treatment else []
        others = [place for place in PLACES if place not in needed]
        places = needed + rng.sample(others, 5 - len(needed))
        rng.shuffle(places)
        game = small_game(treatment, thing, target, places)
        assert game.task
        games.setdefault((game.task, frozenset(places)), game)
    return list(games.values())


def read_games(folder: Path, split: str) -> list[Game]:
    """The playable games of one split of the ALFWorld data set, sorted by path."""
    root = folder / split
    games: list[Game] = []
    shared: dict[str, str] = {}  # the domain is the same text in thousands of files
    for path in sorted(root.rglob("game.tw-pddl")):
        trial = path.parent.relative_to(root).as_posix()
        if "movable" in trial or "Sliced" in trial:  # ALFWorld itself cannot play these
            continue
        try:
            at = path
            data = json.loads(path.read_text(encoding="utf-8"))
            texts = [data[key] for key in ("pddl_domain", "grammar", "pddl_problem")]
            if not all(isinstance(text, str) and text.strip() for text in texts):
                raise ValueError("an empty field, or one that is no text")
            at = path.with_name("traj_data.json")
            kind = json.loads(at.read_text(encoding="utf-8"))["task_type"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            stop(f"{at} is damaged ({str(error).splitlines()[0][:200]}); download it again")
        if data.get("solvable") is True and kind in TASK_TYPES:
            domain, texts_of_game, problem = [shared.setdefault(text, text) for text in texts]
            games.append(Game(trial, kind, domain, texts_of_game, problem, None))
    if not games:
        stop(f"no games in {root}; --games takes the folder json_2.1.1 of `alfworld-download`")
    return games


def load_games(config: Config) -> tuple[list[Game], dict[str, list[Game]]]:
    """Games to train on, and those of each evaluation: `seen` are of the kind trained on (in the
    sample the very games), `held_out` are not."""
    if config.data == "sample":
        games = sample_games(128 + config.eval_games)
        train, held_out = games[:128], games[128:]
        return train, {"seen": train[: config.eval_games], "held_out": held_out}
    assert config.games is not None
    evaluations = {}
    for name, split in (("seen", "valid_seen"), ("held_out", "valid_unseen")):
        games = read_games(config.games, split)
        random.Random(0).shuffle(games)
        evaluations[name] = games[: config.eval_games]
    return read_games(config.games, "train"), evaluations


@dataclass(frozen=True)
class View:
    """What a player sees: `actions` are the admissible ones, empty when the game is over."""

    text: str
    actions: tuple[str, ...]
    won: bool
    task: str


LOCK = threading.RLock()  # the parsers, the translator and the planner all keep global state
FREE_LIBRARIES: list[Any] = []  # planner libraries whose house is closed


def quiet(*words: Any, file: Any = None, **rest: Any) -> None:
    """The translator's `print`: its result goes to a file, its chatter nowhere."""
    if file is not None:
        print(*words, file=file, **rest)


@functools.cache
def prepare_engine() -> None:
    """Import the engine and put bounded caches where it does the same work again and again."""
    argv = sys.argv
    try:
        # The translator parses the command line when it is imported.
        sys.argv = ["translate.py", "domain", "task"]
        import fast_downward.translate.translate
        from fast_downward import interface
        from textworld.envs.pddl import logic, textgen
        from textworld.logic import Rule
    except ImportError as error:
        stop(f"the household games need TextWorld ({error}): {INSTALL}")
    finally:
        sys.argv = argv

    # The translator is silenced by swapping sys.stdout, which would swallow the lines of other
    # threads: its modules get a mute `print` instead, and the swap goes.
    for name, module in list(sys.modules.items()):
        if name.startswith("fast_downward.translate"):
            vars(module)["print"] = quiet
    interface.CapturingStdout = lambda: contextlib.nullcontext(())

    translate, load_lib = interface.pddl2sas, fast_downward.load_lib

    # A real ALFWorld game takes seconds here, and each of its copies asks twice.
    @functools.lru_cache(maxsize=64)
    def pddl2sas(domain: str, problem: str, verbose: bool = False, optimize: bool = False) -> Any:
        if optimize:  # only for the planner's own solutions, which no player may see
            return None, ""
        argv, collecting = sys.argv, gc.isenabled()
        gc.disable()  # a translation makes millions of objects and no garbage: twice as fast
        try:
            return translate(domain, problem, verbose=verbose)
        finally:
            sys.argv = argv
            if collecting:
                gc.enable()

    def library() -> Any:
        # A copy of the 30 MB library is made for each game and never unloaded: use them again.
        if FREE_LIBRARIES:
            return FREE_LIBRARIES.pop()
        made = load_lib()
        made.load_sas_replan = quiet
        return made

    parse = functools.lru_cache(maxsize=4096)(textgen._parse_and_convert)

    def symbols(text: str, rule_name: str = "symbols", **_: Any) -> list[Any]:
        # Copies: the engine writes its context into what it gets.
        return [copy.copy(symbol) for symbol in parse(text, rule_name=rule_name)]

    def copy_context(context: dict[str, Any]) -> dict[str, Any]:
        # The engine deep-copies the variables for each symbol of a text but never changes one.
        own = {key: dict(context[key]) for key in ("variables", "mapping")}
        return {**context, **own}

    fast_downward.pddl2sas = pddl2sas
    fast_downward.load_lib = library
    textgen._parse_and_convert = symbols
    textgen.copy_context = copy_context
    logic._parse_and_convert = functools.lru_cache(maxsize=64)(logic._parse_and_convert)
    conjunction = functools.lru_cache(maxsize=4096)(Rule.parse_conjunctive_query)
    Rule.parse_conjunctive_query = staticmethod(conjunction)


def new_environment(alfred: bool) -> tuple[Any, Any]:
    """A new environment and its planner library."""
    prepare_engine()
    from textworld.core import EnvInfos
    from textworld.envs.pddl import PddlEnv

    env = PddlEnv(EnvInfos(won=True, admissible_commands=True))
    if not alfred:
        return env, env.downward_lib
    path, here = list(sys.path), os.path.dirname(os.path.realpath(__file__))
    try:
        # This file has the package's name, and a script's own folder comes first.
        sys.path[:] = [folder for folder in path if os.path.realpath(folder) != here]
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    except ImportError as error:
        stop(f"these games need alfworld ({error}): {INSTALL}")
    finally:
        sys.path[:] = path
    return AlfredDemangler(env, shuffle=False), env.downward_lib


UNLISTED = "help"  # the engine's own command; public code leaves it out, too


def natural(command: str) -> tuple[bool, list[Any]]:
    """Moves first; "drawer 10" after "drawer 2"."""
    words = [(0, int(w), "") if w.isdecimal() else (1, 0, w) for w in command.split()]
    return not command.startswith("go to "), words


class House:
    """One independent copy of a game. `step` never raises: a wrong action changes nothing."""

    def __init__(self, game: Game) -> None:
        self.game = game
        with LOCK:
            self._env, library = new_environment(game.task is None)
            self._free = weakref.finalize(self, FREE_LIBRARIES.append, library)
            try:
                self._env.load(
                    {
                        "pddl_domain": game.pddl_domain,
                        "grammar": game.grammar,
                        "pddl_problem": game.pddl_problem,
                    }
                )
            except (Exception, SystemExit) as error:
                raise RuntimeError(f"game {game.id} cannot be loaded: {error!r:.200}") from error
        places = re.search(r"\(:objects door (.+?) - place", game.pddl_problem)
        moves = [f"go to {place}" for place in places[1].split()] if places else []
        self._rank = {move: rank for rank, move in enumerate(moves)}
        self._commands: dict[str, str] = {}  # what may be written -> the engine's command
        self.view = View("", (), False, game.task or "")

    def reset(self) -> View:
        with LOCK:
            state = self._env.reset()
        text, task = state["feedback"].strip(), self.view.task
        if self.game.task is None:
            text = re.sub(r"\A-= Welcome[^\n]*\n+", "", text)
            text, _, task = text.partition("Your task is to:")
        return self._seen(text.strip(), state, task.strip().removesuffix("."))

    def step(self, action: str) -> View:
        with LOCK:
            command = self._commands.get(" ".join(action.lower().split()))
            if command is None:
                return self._refused()
            state, _, _ = self._env.step(command)
            return self._seen(state["feedback"].strip(), state, self.view.task)

    def close(self) -> None:
        """Give the planner's library back; the house stays readable but nothing happens in it."""
        with LOCK:
            self._commands, self._env = {}, None
            self.view = View(self.view.text, (), self.view.won, self.view.task)
            self._free()

    def _refused(self) -> View:
        view = self.view
        # Nothing changed, so the status line of our own games is still the last one.
        status = "" if self.game.task is None else "".join(view.text.partition("\n")[1:])
        text = "Nothing happens." + (
            " Done!" if view.won and self.game.task is not None else status
        )
        return View(text, view.actions, view.won, view.task)

    def _seen(self, text: str, state: Mapping[str, Any], task: str) -> View:
        won = bool(state["won"])
        # A won game is over: no further action may change the verdict.
        commands = [] if won else list(state["admissible_commands"])
        self._commands = {" ".join(command.lower().split()): command for command in commands}
        if self.game.task is None:
            listed = [c for c in self._commands if c != UNLISTED]
            actions = tuple(sorted(listed, key=natural))
        else:
            last = len(self._rank)
            actions = tuple(sorted(commands, key=lambda c: (self._rank.get(c, last), c)))
        self.view = View(text, actions, won, task)
        return self.view


# -- rollouts -------------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def order_of_epoch(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def batch_of_step(items: Sequence[Any], step: int, size: int, seed: int) -> tuple[int, list[Any]]:
    """Epoch and items of a step: a function of its number, so that resuming needs nothing else."""
    places = [divmod(position, len(items)) for position in range(step * size, (step + 1) * size)]
    return places[0][0], [items[order_of_epoch(len(items), seed, e)[i]] for e, i in places]


@dataclass(frozen=True)
class Turn:
    """One request: the ids the model was given, and what it wrote."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


@dataclass
class Trajectory:
    game: Game
    turns: list[Turn] = field(default_factory=list)
    steps: int = 0  # actions the house was given, invalid ones included
    malformed: int = 0  # turns that are not one tool call
    inadmissible: int = 0  # actions that the house did not offer
    end: str = ""
    """won; limit (steps), truncated (a turn), full (tokens): not won; foreign_id: not scored."""
    reward: float | None = None  # None is neither trained on nor part of a mean


def parse_turn(text: str) -> tuple[Literal["call", "answer", "malformed"], str]:
    """What a turn is: one well-formed call of TOOL at its end and the argument, or an answer.

    Templates write calls as XML (Qwen3.5) or JSON (Qwen3); a model writes what its template shows.
    """
    name, (parameter,) = TOOL["function"]["name"], TOOL["function"]["parameters"]["properties"]
    text = text.rpartition("</think>")[2].strip()
    if not re.search(r"</?tool_call|<function=", text):
        return "answer", text
    before, _, rest = text.partition("<tool_call>")
    body, closed, after = rest.rpartition("</tool_call>")
    whole = closed and not after and not re.search(r"</tool_call|<function=|<think>", before)
    body = body.strip() if whole else ""
    xml = rf"<function={name}>\s*<parameter={parameter}>(.*)</parameter>\s*</function>"
    argument: Any = None
    if found := re.fullmatch(xml, body, re.DOTALL):
        argument = found[1]
    else:
        try:
            call = json.loads(body)
            argument = call["arguments"][parameter] if call["name"] == name else None
        except (ValueError, TypeError, KeyError, RecursionError):
            pass
    if not isinstance(argument, str) or not argument.strip():
        return "malformed", text
    if re.search(r"<tool_call>|<function=|<parameter=", argument):  # another call
        return "malformed", text
    return "call", argument.strip("\n")


def show(view: View) -> str:
    """What the model reads each turn."""
    return f"Task: {view.task}.\n{view.text}\nActions: {', '.join(view.actions)}"


def first_prompt(tokenizer: Any, view: View) -> list[int]:
    """The game's beginning through the model's own chat template, thinking off."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": show(view)}]
    text = tokenizer.apply_chat_template(
        messages, tools=[TOOL], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    return tokenizer.encode(text, add_special_tokens=False)


def after_turn(tokenizer: Any, observation: str) -> list[int]:
    """What the template writes behind an assistant's turn when the tool has answered: the turn's
    end, the answer, the header of the next turn with its empty think block.

    Rendered with a placeholder as the turn: a template may trim real text, or drop its thinking.
    """
    messages = [
        {"role": "user", "content": "-"},
        {"role": "assistant", "content": PLACEHOLDER},
        {"role": "tool", "content": observation},
    ]
    text = tokenizer.apply_chat_template(
        messages, tools=[TOOL], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    _, found, after = text.partition(PLACEHOLDER)
    if not found:
        stop("this model's chat template does not write an assistant's text before a tool's answer")
    return tokenizer.encode(after, add_special_tokens=False)


def next_prompt(turn: Turn, after: list[int]) -> list[int]:
    """All ids so far and what follows, less the part of it that the model has written itself: a
    turn that stopped by itself ends with the end token, one that was cut does not.

    Sampled ids are never decoded and encoded again: they would be other ids.
    """
    ends = range(min(len(turn.tokens), len(after)), 0, -1)
    written = next((n for n in ends if turn.tokens[-n:] == after[:n]), 0)
    return turn.prompt + turn.tokens + after[written:]


def joined_turns(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Turns in which each prompt begins with all ids before it share a datum; a turn whose prompt
    does not (history rendered again, or cut) begins another."""
    runs: list[list[Turn]] = []
    so_far: list[int] = []
    for turn in turns:
        if runs and turn.prompt[: len(so_far)] == so_far:
            runs[-1].append(turn)
        else:
            runs.append([turn])
        so_far = turn.prompt + turn.tokens
    return runs


def build_datum(turns: Sequence[Turn], advantage: float) -> trio.Datum:
    """Position t of the input predicts token t + 1: all lists lose their first, the input its last.

    Only what was sampled has log-probabilities and an advantage; prompts, tool answers and the
    template's own tokens have 0 and so no gradient.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    advantages: list[float] = []
    for turn in turns:
        given = len(turn.prompt) - len(tokens)
        assert turn.prompt[: len(tokens)] == tokens, "a prompt does not continue the turns before"
        tokens += turn.prompt[len(tokens) :] + turn.tokens
        logprobs += [0.0] * given + turn.logprobs
        advantages += [0.0] * given + [advantage] * len(turn.tokens)
    lengths = [len(tokens), len(logprobs), len(advantages)]
    assert len(set(lengths)) == 1, f"tokens, logprobs, advantages: {lengths}"
    return trio.Datum(
        model_input=trio.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": logprobs[1:],
            "advantages": advantages[1:],
        },
    )


@dataclass(frozen=True)
class Rollout:
    """What every trajectory of a round shares."""

    sampler: trio.SamplingClient
    tokenizer: Any
    config: Config
    temperature: float

    async def request(self, prompt: list[int], count: int) -> list[Any]:
        """`count` turns after the prompt, none longer than the trajectory has room for."""
        room = self.config.max_trajectory_tokens - len(prompt)
        # Only at temperature 1, without top-p and top-k, are the log-probabilities that come back
        # those of the distribution that was sampled from.
        params = trio.SamplingParams(
            max_tokens=min(self.config.max_tokens, room),
            temperature=self.temperature,
            top_p=1.0,
            top_k=-1,
            stop=STOP,
        )
        response = await self.sampler.sample_async(trio.ModelInput.from_ints(prompt), count, params)
        return response.sequences

    async def act(self, trajectory: Trajectory, house: House, sequence: Any) -> str:
        """Let a turn act on the house; what the model reads next."""
        kind, action = parse_turn(self.tokenizer.decode(sequence.tokens).removesuffix(STOP[0]))
        action = " ".join(action.split()) if kind == "call" else ""
        trajectory.steps += 1
        trajectory.malformed += kind != "call"
        trajectory.inadmissible += kind == "call" and action.lower() not in house.view.actions
        view = await asyncio.to_thread(house.step, action)
        return show(view)

    async def play(self, game: Game, house: House, prompt: list[int], first: Any) -> Trajectory:
        """A trajectory from its first turn on: a turn waits for nothing but the one before."""
        trajectory, sequence = Trajectory(game), first
        while True:
            tokens, logprobs = sequence.tokens, sequence.logprobs
            assert len(tokens) == len(logprobs), f"{len(tokens)} tokens, {len(logprobs)} logprobs"
            trajectory.turns.append(Turn(prompt, tokens, logprobs))
            if not tokens or max(tokens) >= len(self.tokenizer):
                trajectory.end = (
                    "foreign_id"  # the model's vocabulary is padded: no way to train it
                )
                return trajectory
            if sequence.stop_reason == "length":
                trajectory.end = "truncated"
                break
            text = await self.act(trajectory, house, sequence)
            if house.view.won or trajectory.steps >= self.config.max_steps:
                trajectory.end = "won" if house.view.won else "limit"
                break
            prompt = next_prompt(trajectory.turns[-1], after_turn(self.tokenizer, text))
            if len(prompt) >= self.config.max_trajectory_tokens:
                trajectory.end = "full"
                break
            (sequence,) = await self.request(prompt, 1)
        invalid = trajectory.malformed + trajectory.inadmissible
        trajectory.reward = (trajectory.end == "won") + INVALID_ACTION * invalid
        return trajectory

    async def group(self, game: Game, count: int) -> list[Trajectory]:
        """`count` independent copies of a game. The first turns come from one request, so that
        their prompt is computed once."""
        houses = [await asyncio.to_thread(House, game) for _ in range(count)]
        try:
            views = [await asyncio.to_thread(house.reset) for house in houses]
            assert len(set(views)) == 1, f"the copies of {game.id} do not begin alike"
            prompt = first_prompt(self.tokenizer, views[0])
            if len(prompt) >= self.config.max_trajectory_tokens:
                return []
            firsts = await self.request(prompt, count)
            pairs = zip(houses, firsts, strict=False)  # fewer may come back; see build_batch
            return await asyncio.gather(*[self.play(game, h, prompt, first) for h, first in pairs])
        finally:
            for house in houses:
                house.close()

    async def groups(self, games: Sequence[Game], count: int) -> list[list[Trajectory]]:
        return await asyncio.gather(*[self.group(game, count) for game in games])


def group_advantages(rewards: Sequence[float | None]) -> list[float]:
    """Reward minus the mean of those that count; all 0 for a group that teaches nothing."""
    scored = [reward for reward in rewards if reward is not None]
    if len(scored) < 2 or max(scored) - min(scored) < 1e-6:
        return [0.0] * len(rewards)
    mean = fmean(scored)
    return [0.0 if reward is None else reward - mean for reward in rewards]


def build_batch(
    groups: Sequence[Sequence[Trajectory]], group_size: int
) -> tuple[list[trio.Datum], dict[str, float]]:
    """Datums of the groups that differ within, and what the rollouts were like."""
    data: list[trio.Datum] = []
    degenerate, trained, scale = 0, 0, [0.0]
    for group in groups:
        advantages = group_advantages([trajectory.reward for trajectory in group])
        if len(group) < group_size:  # came back short: its mean is not the group's
            advantages = [0.0] * len(group)
        degenerate += not any(advantages)
        scale += advantages
        for trajectory, advantage in zip(group, advantages, strict=True):
            if advantage:
                trained += 1
                data += [build_datum(run, advantage) for run in joined_turns(trajectory.turns)]
    return data, {
        "advantage/std": pstdev(scale),
        "frac_degenerate": degenerate / len(groups),
        "datums": len(data),
        "train/datums_per_trajectory": len(data) / max(1, trained),
        "tokens/train": sum(datum.model_input.length for datum in data),
        **describe([trajectory for group in groups for trajectory in group]),
    }


def describe(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What a set of trajectories was like; training and evaluation report the same."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    scored = [t for t in trajectories if t.reward is not None]
    by_kind: dict[str, list[bool]] = {}
    for trajectory in scored:
        by_kind.setdefault(trajectory.game.kind, []).append(trajectory.end == "won")
    steps = sum(t.steps for t in trajectories)
    malformed = sum(t.malformed for t in trajectories)
    inadmissible = sum(t.inadmissible for t in trajectories)
    count, ends = max(1, len(trajectories)), Counter(t.end for t in trajectories)
    whole = [len(t.turns[-1].prompt) + len(t.turns[-1].tokens) for t in trajectories]
    return {
        "reward/mean": mean_of([t.reward for t in scored if t.reward is not None]),
        "reward/success_rate": mean_of([t.end == "won" for t in scored]),
        **{f"reward/success_rate/{kind}": mean_of(won) for kind, won in sorted(by_kind.items())},
        "reward/scored": len(scored),
        "rollout/steps_mean": steps / count,
        "rollout/invalid_actions_mean": (malformed + inadmissible) / count,
        "rollout/valid_tool_call_rate": 1 - malformed / max(1, steps),
        "rollout/admissible_action_rate": 1 - (malformed + inadmissible) / max(1, steps),
        "rollout/trajectory_tokens": mean_of(whole),
        "rollout/trajectory_tokens_max": max(whole, default=0),
        "tokens/prefill": sum(len(turn.prompt) for turn in turns),
        "tokens/sample": sum(len(turn.tokens) for turn in turns),
        **{f"rollout/end_{end}": number / count for end, number in ends.items()},
    }


def mean_of(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def evaluate(rollout: Rollout, games: dict[str, list[Game]]) -> dict[str, float]:
    """One trajectory a game; base and trained weights go through this."""
    results = {}
    for name, chosen in games.items():
        groups = asyncio.run(rollout.groups(chosen, 1))
        about = describe([trajectory for group in groups for trajectory in group])
        results[f"{name}/success_rate"] = about["reward/success_rate"]
        results[f"{name}/reward"] = about["reward/mean"]
        results[f"{name}/steps"] = about["rollout/steps_mean"]
        results[f"{name}/invalid_actions"] = about["rollout/invalid_actions_mean"]
        results[f"{name}/games"] = about["reward/scored"]
    return results


def write_whole(path: Path, text: str) -> None:
    """All of it or nothing, whenever the process is killed."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8", newline="\n")
    os.replace(temporary, path)


def save_run_state(config: Config, state: dict[str, Any]) -> None:
    write_whole(config.run_dir / "run_state.json", json.dumps(state, indent=2) + "\n")


def open_run(config: Config, rows: list[str]) -> dict[str, Any]:
    """The state to start from: a new run's, or that of the last checkpoint of the run in the
    folder. Raises SystemExit when that one had other settings."""
    path = config.run_dir / "run_state.json"
    settings = {k: v for k, v in asdict(config).items() if k not in FREE_TO_CHANGE}
    settings["rows"] = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12]
    config.run_dir.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {"step": 0, "checkpoint": None, "weights": None, "eval": {}}
    if path.exists() and not config.fresh:
        state = json.loads(path.read_text(encoding="utf-8"))
        old = state["config"]
        changes = [f"{k} was {old.get(k)}, is {v}" for k, v in settings.items() if old.get(k) != v]
        if changes and not state["checkpoint"]:  # nothing trained is lost
            state = {"step": 0, "checkpoint": None, "weights": None, "eval": {}}
        elif changes:
            line = f"{config.run_dir} holds another run ({'; '.join(changes)})"
            stop(f"{line}; choose another --run-dir, or --fresh to discard that run")
    state["config"] = settings
    save_run_state(config, state)
    return state


def swanlab_call(function: str, /, **arguments: Any) -> None:
    """`swanlab.FUNCTION(...)`: a chart that fails is reported, and never stops a paid run."""
    try:
        getattr(importlib.import_module("swanlab"), function)(**arguments)
    except Exception as error:
        print(f"SwanLab {function} failed, metrics.jsonl goes on: {error}")


def open_log(config: Config, last_step: int) -> None:
    """Start SwanLab, and drop the metrics of steps after the checkpoint: they are done again."""
    mode: str = config.swanlab
    if mode == "auto":
        mode = "online" if os.environ.get("SWANLAB_API_KEY") else "offline"
    # swanlab itself stops at a plain value in this variable.
    project = os.environ.pop("SWANLAB_PROJECT", f"pytrio-{NAME}")
    details = asdict(config) | {"sdk": version("pytrio"), "skill": SKILL}
    details = json.loads(json.dumps(details, default=str))
    swanlab_call("init", project=project, name=config.run_dir.name, mode=mode, config=details,
                 log_dir=str(config.run_dir / "swanlab"))  # fmt: skip
    path = config.run_dir / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    # A line that was being written when the run was killed has no closing brace.
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    rows = [row for row in rows if row["step"] <= last_step]
    write_whole(path, "".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        chart(row)


def chart(row: dict[str, Any]) -> None:
    values = {key: float(value) for key, value in row.items() if value is not None}
    swanlab_call("log", data=values, step=row["step"])


def log(config: Config, row: dict[str, Any]) -> None:
    """metrics.jsonl is the record, SwanLab a copy."""
    with (config.run_dir / "metrics.jsonl").open("a", encoding="utf-8", newline="\n") as file:
        file.write(json.dumps(row) + "\n")
    chart(row)


def train(
    service: trio.ServiceClient,
    tokenizer: Any,
    games: list[Game],
    config: Config,
    state: dict[str, Any],
) -> None:
    """From the state's step to the last; afterwards the state names durable sampler weights."""
    if state["checkpoint"]:
        print(f"resuming after step {state['step']} from {state['checkpoint']}")
        training = service.create_training_client_from_state_with_optimizer(state["checkpoint"])
    else:
        training = service.create_lora_training_client(
            config.base_model, rank=config.rank, seed=config.seed
        )
    adam = trio.AdamParams(learning_rate=config.learning_rate, grad_clip_norm=1.0)
    first = state["step"]
    bar = tqdm(range(first + 1, config.steps + 1), initial=first, total=config.steps, disable=None)
    for step in bar:
        start = time.monotonic()
        epoch, batch = batch_of_step(games, step - 1, config.games_per_step, config.seed)
        # A sampling client keeps the weights it was made with: each step needs a new one.
        sampler = training.save_weights_and_get_sampling_client()
        rollout = Rollout(sampler, tokenizer, config, temperature=1.0)
        groups = asyncio.run(rollout.groups(batch, config.group_size))
        data, metrics = build_batch(groups, config.group_size)
        metrics["time/rollout_seconds"] = time.monotonic() - start
        if data:
            # One call for the whole batch, and both submitted before either is waited for.
            backward = training.forward_backward(data, loss_fn="ppo", loss_fn_config=LOSS_CONFIG)
            update = training.optim_step(adam)
            metrics["loss"] = backward.result().metrics["loss_mean"]
            update.result()
        metrics |= {"epoch": epoch, "learning_rate": config.learning_rate}
        metrics["time/step_seconds"] = time.monotonic() - start
        row = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        log(config, {"step": step, **row})
        bar.write(
            f"step {step:3d}/{config.steps}  success {metrics['reward/success_rate']:.3f}"
            f"  reward {metrics['reward/mean']:.3f}"
            f"  degenerate {metrics['frac_degenerate']:.2f}  datums {len(data)}"
            f"  steps {metrics['rollout/steps_mean']:.1f}"
            f"  invalid {metrics['rollout/invalid_actions_mean']:.2f}"
            f"  tokens prefill {metrics['tokens/prefill']:,} sample {metrics['tokens/sample']:,}"
            f" train {metrics['tokens/train']:,}"
        )
        if step % config.save_every == 0 or step == config.steps:
            # The state file is written last: it never names a step that is not saved.
            path = training.save_state(f"step-{step}", overwrite=True).result().path
            state |= {"step": step, "checkpoint": path, "weights": None}
            state |= {"epoch": epoch, "cursor": step * config.games_per_step}
            state["eval"].pop("trained", None)
            save_run_state(config, state)
    # The loop's sampler weights expire after hours; these do not.
    saved = training.save_weights_for_sampler(f"{NAME}-step-{state['step']}")
    state["weights"] = saved.result().path
    save_run_state(config, state)


def check_room(tokenizer: Any, game: Game, config: Config) -> None:
    """Before anything is paid: a game must fit, and TextWorld be installed."""
    house = House(game)
    length = len(first_prompt(tokenizer, house.reset()))
    house.close()
    if length + config.max_tokens > config.max_trajectory_tokens:
        line = f"the first prompt of {game.id} has {length} tokens and a turn {config.max_tokens}"
        stop(f"{line}; --max-trajectory-tokens {config.max_trajectory_tokens} has no room for them")


def main(config: Config) -> None:
    check_config(config)
    prepare_engine()
    games, evaluations = load_games(config)
    state = open_run(config, [game.id for game in games])
    results = state["eval"]
    # Behind its first turn every trajectory asks for itself; the SDK's default is 16 at once.
    trio.configure(sampling_request_max_in_flight=64)
    service = trio.ServiceClient()
    open_log(config, state["step"])
    try:
        base = service.create_sampling_client(config.base_model)
        tokenizer = base.get_tokenizer()
        check_room(tokenizer, games[0], config)
        if config.eval_base and "base" not in results:
            rollout = Rollout(base, tokenizer, config, config.eval_temperature)
            results["base"] = evaluate(rollout, evaluations)
            save_run_state(config, state)
        if state["step"] < config.steps or not state["weights"]:
            train(service, tokenizer, games, config, state)
        if "trained" not in results:
            tuned = service.create_sampling_client(config.base_model, model_path=state["weights"])
            rollout = Rollout(tuned, tokenizer, config, config.eval_temperature)
            results["trained"] = evaluate(rollout, evaluations)
            save_run_state(config, state)
    finally:
        swanlab_call("finish")
    for name, result in results.items():
        numbers = "  ".join(f"{key} {value:.3g}" for key, value in result.items())
        print(f"{name:<8} {numbers}")
    print(f"weights  {state['weights']}")


if __name__ == "__main__":
    arguments = tyro.cli(Config)
    if arguments.data == "sample":
        arguments = tyro.cli(Config, default=replace(arguments, **SAMPLE))
    main(arguments)
