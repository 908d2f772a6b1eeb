"""Shell commands and options: each is checked against the program's own parser or `--help`."""

import argparse
import ast
import functools
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import dryrun
from docs.budgets import reading_costs
from docs.pages import (
    COMMAND_SECONDS,
    FOREIGN_PAGES,
    ROOT,
    SHELL,
    SKILL,
    USER_FILES,
    Block,
    Page,
    Problem,
    existing,
    last_lines,
    parsed,
)


@dataclass(frozen=True)
class Command:
    """One command of a shell block, without assignments in front of it and redirections."""

    page: Page
    line: int
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def problem(self, text: str) -> Problem:
        return Problem(self.page.path, self.line, f"`{self.text}`: {text}")


def commands_of(page: Page, block: Block) -> list[Command]:
    """The commands of a block; continued lines count as one. Raises ValueError on open quotes."""
    found = []
    pending, start = "", block.line
    for number, line in enumerate(block.body.splitlines(), block.line):
        start = start if pending else number
        if line.endswith("\\"):
            pending += line[:-1] + " "
            continue
        found += split_commands(page, start, pending + line)
        pending = ""
    return found


def split_commands(page: Page, line: int, text: str) -> list[Command]:
    """The commands of one line, parted at `&&`, `||`, `|` and `;`."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    found: list[list[str]] = [[]]
    words = iter(lexer)
    for word in words:
        if word in ("&&", "||", "|", ";", "&"):
            found.append([])
        elif word in (">", ">>", "<"):
            next(words, None)
        elif found[-1] or not re.match(r"[A-Z_]+=", word):
            found[-1].append(word)
    return [Command(page, line, tuple(words)) for words in found if words]


def flags_in(words: Iterable[str]) -> list[str]:
    """The `--options` among words, without their values."""
    text = " ".join(words)
    return re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text)


@functools.cache
def dryrun_flags() -> dict[str, frozenset[str]]:
    """Subcommand of dryrun.py -> its options; "" has those before a subcommand."""
    parser = dryrun.parser_of_commands()
    actions = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    parsers = {"": parser, **actions[0].choices}
    return {name: frozenset(flags_in([p.format_help()])) for name, p in parsers.items()}


@functools.cache
def examples() -> tuple[str, ...]:
    """File names of the examples."""
    return tuple(sorted(path.name for path in (SKILL / "examples").glob("*.py")))


@functools.cache
def example_flags(name: str) -> frozenset[str]:
    """The options of an example: fields of its configuration, as tyro names them.

    Read from the source: `--help` of all examples takes half a minute. A test compares both.
    """
    tree = ast.parse((SKILL / "examples" / name).read_text(encoding="utf-8"))
    flags = {"--help"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == "Config":
            for entry in node.body:
                if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                    flag = entry.target.id.replace("_", "-")
                    flags.add(f"--{flag}")
                    if ast.unparse(entry.annotation) == "bool":
                        flags.add(f"--no-{flag}")
    return frozenset(flags)


def unknown_flags(given: Iterable[str], known: Iterable[str], where: str) -> list[str]:
    """A sentence for every option that a program does not have."""
    known = set(known)
    return [f"{where} has no option {flag}" for flag in given if flag not in known]


def check_dryrun(command: Command, words: Sequence[str]) -> list[Problem]:
    """`dryrun.py WORDS`: its own parser takes it, the files exist, and so do their options."""
    border = words.index("--") if "--" in words else len(words)
    own, rest = list(words[:border]), list(words[border + 1 :])
    if own and own[0] in ("--help", "--version"):
        return []
    try:
        options = parsed_quietly(own)
    except ValueError as error:
        return [command.problem(str(error))]
    found = []
    scripts = [options.script] if options.command == "run" else []
    scripts += [str(path) for path in options.files] if options.command == "check" else []
    for script in scripts:
        if Path(script).name in USER_FILES or script.endswith("..."):
            continue
        if existing(command.page, script) is None:
            found.append(command.problem(f"{script} does not exist"))
        elif Path(script).name in examples():
            flags = example_flags(Path(script).name)
            found += [command.problem(p) for p in unknown_flags(flags_in(rest), flags, script)]
    return found


def parsed_quietly(words: list[str]) -> argparse.Namespace:
    """The options of a dryrun.py command. Raises ValueError with the parser's own message."""
    messages: list[str] = []
    with mock.patch.object(dryrun, "say", messages.append):
        try:
            return dryrun.parser_of_commands().parse_args(words)
        except SystemExit as error:
            raise ValueError(messages[-1] if messages else "not parsed") from error


def check_dryrun_command(command: Command) -> list[Problem]:
    """A shell command with dryrun.py in it."""
    place = next(i for i, word in enumerate(command.words) if word.endswith("dryrun.py"))
    script = command.words[place]
    # Inline code leaves the folder out.
    if script != "dryrun.py" and existing(command.page, script) is None:
        return [command.problem(f"{script} does not exist")]
    return check_dryrun(command, command.words[place + 1 :])


def check_example(command: Command) -> list[Problem]:
    """An example started by itself."""
    script = next(word for word in command.words if word.endswith(".py"))
    if existing(command.page, script) is None:
        return [command.problem(f"{script} does not exist")]
    flags = example_flags(Path(script).name)
    return [command.problem(p) for p in unknown_flags(flags_in(command.words), flags, script)]


def check_make(command: Command) -> list[Problem]:
    """Targets exist in the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    named = [word for word in command.words[1:] if "=" not in word and not word.startswith("-")]
    return [command.problem(f"no target {name}") for name in named if name not in targets]


@functools.cache
def pinned() -> dict[str, str]:
    """Package -> version, of all requirements files."""
    files = [*ROOT.glob("requirements*.txt"), SKILL / "scripts" / "requirements.txt"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    return {
        name.lower(): version
        for name, version in re.findall(r"^([\w.-]+)(?:\[.*?\])?==([\w.]+)", text, re.MULTILINE)
    }


def check_pip(command: Command) -> list[Problem]:
    """Requirements files exist, and pins agree with ours."""
    found = []
    words = command.words[command.words.index("install") + 1 :]
    for before, word in zip(("", *words), words, strict=False):
        if before in ("-r", "--requirement") and existing(command.page, word) is None:
            found.append(command.problem(f"{word} does not exist"))
        name, _, version = word.partition("==")
        if version and pinned().get(name.lower(), version) != version:
            found.append(command.problem(f"the project pins {name}=={pinned()[name.lower()]}"))
    return found


def check_trio(command: Command) -> list[Problem]:
    """The SDK's own command line: subcommands and options exist."""
    from pytrio.cli.main import cli

    place: Any = cli
    for word in command.words[1:]:
        if word.startswith("-") or not hasattr(place, "commands"):
            break
        if word not in place.commands:
            return [command.problem(f"trio has no command {word}")]
        place = place.commands[word]
    known = {option for parameter in place.params for option in parameter.opts} | {"--help"}
    return [command.problem(p) for p in unknown_flags(flags_in(command.words), known, "trio")]


def check_nothing(command: Command) -> list[Problem]:
    """A command of the user's machine or of the network, which we only declare."""
    return []


@dataclass(frozen=True)
class CommandKind:
    """Commands that a pattern matches at their start, and how they are checked."""

    kind: str
    pattern: str
    check: Callable[[Command], list[Problem]]


PYTHON = r"(?:\S*/)?(?:python[\d.]*|\$\w+|uv run(?: python)?) "
COMMAND_KINDS = (
    CommandKind("checked", rf"(?:{PYTHON})?\S*dryrun\.py\b", check_dryrun_command),
    CommandKind("checked", rf"{PYTHON}\S*examples/[\w-]+\.py\b", check_example),
    CommandKind("checked", r"make\b", check_make),
    CommandKind("checked", rf"(?:{PYTHON}-m )?(?:uv )?pip install ", check_pip),
    CommandKind("declared", rf"{PYTHON}-m (?:venv|zipfile) ", check_nothing),
    CommandKind("declared", rf"{PYTHON}(?:{'|'.join(USER_FILES)})\b", check_nothing),
    CommandKind("declared", r"(?:npx|git clone|curl|sha256sum|claude|codex|gh) ", check_nothing),
    CommandKind("declared", r"(?:cd|mkdir|cp|export|source|\.|ls|rm|ln|mv) ", check_nothing),
    CommandKind("checked", r"trio ", check_trio),
    CommandKind("declared", r"(?:vllm|swanlab|hf|alfworld-download)\b", check_nothing),
)  # fmt: skip
# Cheap enough to be run: the words after dryrun.py.
RUN_AS_WRITTEN = r"(?:--help|--version|doctor|models|rules|(?:\w+ )?--help|doctor --json|rules \w+)"


def kind_of(command: Command) -> CommandKind | None:
    """The first entry of the table that matches."""
    return next((k for k in COMMAND_KINDS if re.match(k.pattern, command.text)), None)


def shell_commands(page: Page) -> list[Command]:
    """All commands of a page's shell blocks; broken quoting is reported by `check_shell`."""
    found = []
    for block in page.blocks:
        if block.info == SHELL:
            try:
                found += commands_of(page, block)
            except ValueError:
                continue
    return found


def check_shell(page: Page) -> list[Problem]:
    """Every shell command is in the table and passes its check."""
    found = []
    for block in page.blocks:
        if block.info != SHELL:
            continue
        try:
            commands = commands_of(page, block)
        except ValueError as error:
            found.append(Problem(page.path, block.line, f"shell block: {error}"))
            continue
        for command in commands:
            kind = kind_of(command)
            if kind is None:
                found.append(command.problem("no entry of COMMAND_KINDS knows it"))
            else:
                found += kind.check(command)
    return found


def runnable(command: Command) -> list[str] | None:
    """Arguments of dryrun.py, where a command is cheap enough to be run as it is written."""
    match = re.search(r"dryrun\.py (.*)$", command.text)
    if not match:
        return None
    if re.fullmatch(RUN_AS_WRITTEN, match[1]):
        return match[1].split()
    checked = re.fullmatch(r"check (\S+\.py)", match[1])
    path = existing(command.page, checked[1]) if checked else None
    return ["check", str(path)] if path else None


def run_commands(pages: Sequence[Page]) -> tuple[int, list[Problem]]:
    """Run each cheap command once; the number of those run, and what failed."""
    wanted: dict[tuple[str, ...], Command] = {}
    for page in pages:
        for command in shell_commands(page):
            arguments = runnable(command)
            if arguments is not None:
                wanted.setdefault(tuple(arguments), command)
    found = []
    for words, command in wanted.items():
        with tempfile.TemporaryDirectory(prefix="check-docs-") as folder:
            done = subprocess.run(
                [sys.executable, str(SKILL / "scripts" / "dryrun.py"), *words],
                cwd=folder, env={**os.environ, "HOME": folder}, capture_output=True, text=True,
                timeout=COMMAND_SECONDS, check=False,
            )  # fmt: skip
        if done.returncode:
            last = last_lines(done.stdout + done.stderr)
            found.append(command.problem("\n    ".join([f"ended with {done.returncode}", *last])))
    return len(wanted), found


def examples_of(page: Page) -> tuple[str, ...]:
    """The examples that the note of a task names; for any other page all of them."""
    routed = {Path(c.note).name for c in reading_costs(parsed(SKILL / "SKILL.md")) if c.example}
    named = tuple(name for name in examples() if name in page.text)
    return named if named and page.path.name in routed else examples()


def check_flags(page: Page) -> list[Problem]:
    """Commands and options in inline code exist.

    An option without a program beside it must be one of dryrun.py or of an example of the page.
    """
    found = []
    ours = frozenset().union(*dryrun_flags().values(), *map(example_flags, examples_of(page)))
    for span in page.spans:
        if page.path.name in FOREIGN_PAGES and "dryrun.py" not in span.text:
            continue
        try:
            commands = split_commands(page, span.line, span.text)
        except ValueError:
            commands = []
        kind = kind_of(commands[0]) if len(commands) == 1 else None
        if kind and not is_sketch(span.text):
            found += kind.check(commands[0])
            continue
        named = re.match(r"(?:.*dryrun\.py )?(\w+)", span.text)
        command = named[1] if named else ""
        if "dryrun.py " in span.text and command not in dryrun_flags():
            found.append(Problem(page.path, span.line, f"dryrun.py has no command {command}"))
        is_command = command and command in dryrun_flags()
        known = dryrun_flags()[command] if is_command else ours
        where = f"dryrun.py {command}" if is_command else "what is meant here"
        given = flags_in([span.text.split(" -- ")[0]])
        found += [Problem(page.path, span.line, p) for p in unknown_flags(given, known, where)]
    return found


def is_sketch(text: str) -> bool:
    """A command with parts left out: `... run X`, `dryrun.py run --model '*=vl'`."""
    if re.search(r"\.\.\.|\[|--\w+ N\b|PREFILL|P,S,T|dryrun\.py$", text):
        return True
    is_command = re.search(r"dryrun\.py (?:run|audit|check)\b", text)
    return bool(is_command and not re.search(r"\.py\b|RECORDING|FILE", text[is_command.end() :]))
