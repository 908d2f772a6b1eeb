"""Every way in, on an empty HOME: the skills CLI, the zip, the plugin, a clone.

The commands of the README are run as they stand there, but for two substitutions: `npx skills` and
`claude` are pinned releases from npm, and git finds OWNER/pytrio-skill in a bare repository made of
the working tree. Nothing leaves the machine except npm's downloads.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import install_local
import package
from conftest import ROOT, SKILL
from shipping import Project, make_project

# Release of the CLI -> release of Node that it is run with. 1.5.26 is the last one for Node 20,
# 1.5.15 for Node 18: later ones do not start there.
NEWEST, FOR_NODE_20, FOR_NODE_18 = "1.7.4", "1.5.26", "1.5.15"
NODES = {NEWEST: "22.23.3", FOR_NODE_20: "20.20.2", FOR_NODE_18: "18.20.8"}
CLAUDE = "@anthropic-ai/claude-code@2.1.332"
BOTH = ("--agent", "claude-code", "codex")
FOLDERS = (".claude/skills/pytrio-skill", ".agents/skills/pytrio-skill")
COMMAND_SECONDS = 300


# -- what is installed from npm --------------------------------------------------------------------


def npm_folder(*packages: str) -> Path:
    """A folder with npm packages in it, kept in the temporary folder for the next run."""
    npm = shutil.which("npm")
    assert npm, "npm is missing; the install tests need Node.js with npm"
    name = re.sub(r"[^A-Za-z0-9.]+", "-", " ".join(packages)).strip("-")
    kept = Path(tempfile.gettempdir()) / "pytrio-skill-npm" / name
    if kept.is_dir():
        return kept
    kept.parent.mkdir(exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=kept.parent))
    # The packages' scripts have to run: one of them puts claude's program in place.
    command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(fresh), *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"npm could not install {packages}: {done.stderr}"
    try:
        fresh.rename(kept)
    except OSError:  # another process was faster
        shutil.rmtree(fresh)
    return kept


def node_package(version: str) -> str:
    """npm's package with the program of a Node release for this machine."""
    system = {"linux": "linux", "darwin": "darwin"}[sys.platform]
    machine = {"x86_64": "x64", "aarch64": "arm64", "arm64": "arm64"}[os.uname().machine]
    return f"node-{system}-{machine}@{version}"


def skills_command(version: str) -> str:
    """The command line that starts a release of the skills CLI."""
    folder = npm_folder(node_package(NODES[version]), f"skills@{version}")
    (node,) = folder.glob("node_modules/node-*/bin/node")
    return shlex.join([str(node), str(folder / "node_modules" / "skills" / "bin" / "cli.mjs")])


# -- a machine with an empty home ------------------------------------------------------------------


@dataclass
class Place:
    """An empty HOME, a project, and the repository that OWNER/pytrio-skill stands for."""

    root: Path
    tools: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("home/.claude", "home/.codex", "my-project", "bin", "owners/OWNER"):
            (self.root / name).mkdir(parents=True)
        self.tool("python", shlex.join([sys.executable]))
        self.tool("python3", shlex.join([sys.executable]))
        # Without this the CLI asks GitHub about OWNER/pytrio-skill before it takes git.
        block = self.root / "no_network.cjs"
        block.write_text(
            "globalThis.fetch = () => Promise.reject(new Error('no network'));\n", encoding="utf-8"
        )
        config = f'[url "{(self.root / "owners").as_uri()}/"]\n\tinsteadOf = https://github.com/\n'
        (self.home / ".gitconfig").write_text(config, encoding="utf-8")
        self.environment = {
            "HOME": str(self.home),
            "PATH": f"{self.root / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "NODE_OPTIONS": f"--require {block}",
            "DISABLE_TELEMETRY": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "GIT_TERMINAL_PROMPT": "0",
            "GIT_SSH_COMMAND": "false",
        }

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def project(self) -> Path:
        return self.root / "my-project"

    @property
    def upstream(self) -> Path:
        """The bare repository."""
        return self.root / "owners" / "OWNER" / "pytrio-skill.git"

    def tool(self, name: str, command: str) -> None:
        """A program on PATH that starts `command` with its own arguments."""
        path = self.root / "bin" / name
        path.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
        path.chmod(0o755)

    def use_skills(self, version: str) -> None:
        """Let `npx skills` be this release."""
        self.tool("npx", skills_command(version))
        path = self.root / "bin" / "npx"
        path.write_text(
            path.read_text(encoding="utf-8").replace("exec", "shift\nexec"), encoding="utf-8"
        )

    def run(self, command: str, cwd: Path | None = None) -> str:
        """Output of a shell command that must succeed."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=cwd or self.project,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        return done.stdout

    def publish_change(self) -> dict[str, bytes]:
        """Change a note and remove another file upstream; the skill's files after that."""
        work = self.root / "work"
        if not work.exists():
            self.run(f"git clone --quiet {self.upstream} {work}", self.root)
        skill = work / "skills" / "pytrio-skill"
        note = skill / "references" / "sft.md"
        note.write_text(note.read_text(encoding="utf-8") + "\nNew.\n", encoding="utf-8")
        (skill / "examples" / "alfworld.py").unlink(missing_ok=True)
        commit = "git -c user.name=a -c user.email=a@b.c commit --quiet --all --message change"
        self.run(f"{commit} && git push --quiet origin HEAD", work)
        return files_of(skill)


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare repository whose one commit is the working tree, as `git add --all` would see it."""
    tree = tmp_path_factory.mktemp("tree")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    bare = tmp_path_factory.mktemp("bare") / "pytrio-skill.git"
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for arguments in (
        ["init", "--quiet", "--initial-branch", "main"],
        ["add", "--all"],
        [*identity, "commit", "--quiet", "--message", "all"],
        ["clone", "--quiet", "--bare", ".", str(bare)],
    ):
        subprocess.run(["git", *arguments], cwd=tree, check=True, capture_output=True)
    return bare


@pytest.fixture
def place(tmp_path: Path, repository: Path) -> Place:
    made = Place(tmp_path)
    shutil.copytree(repository, made.upstream)
    return made


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, caches and dot files too: bytes by name."""
    folder = folder.resolve()
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if not path.is_dir()
    }


def same(found: dict[str, bytes], expected: dict[str, bytes]) -> bool:
    """Compared by hash and name; a plain `==` would print megabytes when it fails."""
    assert sorted(found) == sorted(expected)
    assert not [name for name in expected if found[name] != expected[name]]
    return True


def dangling_links(*folders: Path) -> list[Path]:
    return [
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.is_symlink() and not path.exists()
    ]


def answers(place: Place, folder: Path) -> None:
    """`doctor` and `check` work from an installed folder, from outside of it."""
    dryrun = f'python "{folder}/scripts/dryrun.py"'
    assert "ready for a dry run" in place.run(f"{dryrun} doctor")
    assert "0 errors" in place.run(f'{dryrun} check "{folder}/examples/quickstart_sft.py"')


def works(place: Place, folder: Path) -> None:
    """And the quickstart really trains there, without a trace in the folder."""
    before = files_of(folder)
    answers(place, folder)
    for path in [*folder.resolve().rglob("*"), folder.resolve()]:
        path.chmod(path.stat().st_mode & ~0o222)
    command = f'python "{folder}/scripts/dryrun.py" run "{folder}/examples/quickstart_sft.py"'
    output = place.run(command)
    assert "audit   clean" in output
    assert "tuned     TRIO trains language models in the cloud" in output
    for path in [folder.resolve(), *folder.resolve().rglob("*")]:
        path.chmod(path.stat().st_mode | 0o200)
    assert same(files_of(folder), before)


# -- the commands of the READMEs -------------------------------------------------------------------


def readme_commands(name: str = "README.md") -> dict[str, list[str]]:
    """Commands by heading, without comments."""
    found: dict[str, list[str]] = {}
    heading, inside = "", False
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            inside = line == "```bash"
        elif line.startswith("#") and not inside:
            heading = line.lstrip("# ")
        elif inside and (command := line.split(" #")[0].strip()):
            found.setdefault(heading, []).append(command)
    return found


README = readme_commands()
IN_TESTS = {  # headings whose commands a test below runs
    "With the skills CLI": "test_the_skills_cli_as_the_readme_says",
    "From the release zip": "test_the_zip_as_the_readme_says",
    "As a Claude Code plugin": "test_the_plugin_as_the_readme_says",
    "From a clone": "test_a_clone_as_the_readme_says",
    "From a prompt to a clean dry run": "test_the_walk_through_as_the_readme_says",
}
ELSEWHERE = {  # commands -> the file that shows where they are run
    "make demo": (".ci/run", "make demo"),
    "make test": (".ci/run", "make test"),
    "make lint": (".ci/run", "make lint"),
    "make test-slow": (".ci/run", "make test-slow"),
    "make package": ("tests/test_install.py", 'place.run("make package"'),
    "make docs-check": ("tests/test_docs.py", "check_docs"),
    "make mutation": ("tests/test_mutants.py", "mutants"),
    "make bench": ("scripts/bench.py", "def main"),  # minutes; only its start is tested, below
}
ON_THE_USERS_MACHINE = {  # they need the network, or an account
    "PIP_EXTRA_INDEX_URL=TORCH_CPU_INDEX make demo",
    "python -m pip install -r .claude/skills/pytrio-skill/scripts/requirements.txt",
    "PYTRIO_API_KEY=... python train.py",
}
DOCTOR = "python .claude/skills/pytrio-skill/scripts/dryrun.py doctor"


def test_every_command_is_accounted_for() -> None:
    """Run by a test, or declared as one that needs the network; and no entry is out of date."""
    every = {command for commands in README.values() for command in commands}
    assert set(IN_TESTS) <= set(README) and all(test in globals() for test in IN_TESTS.values())
    tested = {command for heading in IN_TESTS for command in README[heading]}
    tested -= ON_THE_USERS_MACHINE
    accounted = tested | set(ELSEWHERE) | ON_THE_USERS_MACHINE | {DOCTOR}
    assert every == accounted
    for command, (name, text) in ELSEWHERE.items():
        assert text in (ROOT / name).read_text(encoding="utf-8"), command


def test_make_knows_every_target() -> None:
    for command in [c for c in ELSEWHERE if c.startswith("make ")] + ["make bench"]:
        done = subprocess.run([*command.split(), "-n"], cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == 0, command


def test_both_readmes_have_the_same_commands() -> None:
    chinese = readme_commands("README.zh-CN.md")
    assert list(chinese.values()) == list(README.values())


# -- make install-local ----------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Project:
    return make_project(tmp_path / "project")


def local(small: Project, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    home = small.root.parent / "home"
    home.mkdir(exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if k != "CLAUDE_CONFIG_DIR"}
    return subprocess.run(
        [sys.executable, str(small.root / "scripts" / "install_local.py"), *map(str, arguments)],
        env={**environment, "HOME": str(home), "USERPROFILE": str(home), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("agent", "folder"), [("claude-code", ".claude/skills"), ("codex", ".agents/skills")]
)
def test_it_is_put_where_the_agent_looks(agent: str, folder: str, small: Project) -> None:
    expected = files_of(small.root / "skills" / "pytrio-skill")
    other = small.root.parent / "other"
    other.mkdir()
    done = local(small, "--agent", agent)
    assert done.returncode == 0, done.stderr
    target = small.root.parent / "home" / folder / "pytrio-skill"
    assert same(files_of(target), expected)
    assert str(target) in done.stdout and "doctor" in done.stdout
    done = local(small, "--agent", agent, "--scope", "project", "--dir", other)
    assert done.returncode == 0, done.stderr
    assert same(files_of(other / folder / "pytrio-skill"), expected)
    assert [path.name for path in (other / folder).iterdir()] == ["pytrio-skill"]


def test_claudes_own_setting_is_followed(small: Project) -> None:
    elsewhere = small.root.parent / "elsewhere"
    assert local(small, "--agent", "claude-code", CLAUDE_CONFIG_DIR=str(elsewhere)).returncode == 0
    assert (elsewhere / "skills" / "pytrio-skill" / "SKILL.md").is_file()


def test_an_earlier_copy_is_replaced_whole(small: Project) -> None:
    assert local(small, "--agent", "codex").returncode == 0
    target = small.root.parent / "home" / ".agents" / "skills" / "pytrio-skill"
    (target / "references" / "stale.md").write_text("old", encoding="utf-8")
    (target / "scripts" / "dryrun.py").write_text("edited", encoding="utf-8")
    small.write("skills/pytrio-skill/references/sft.md", "new\n")
    assert local(small, "--agent", "codex").returncode == 0
    assert same(files_of(target), files_of(small.root / "skills" / "pytrio-skill"))
    assert [path.name for path in target.parent.iterdir()] == ["pytrio-skill"]
    assert os.access(target / "scripts" / "dryrun.py", os.X_OK) or os.name == "nt"


def test_a_link_is_replaced_and_what_it_points_at_is_not(small: Project) -> None:
    """The skills CLI links one agent's folder to another's."""
    assert local(small, "--agent", "codex").returncode == 0
    skills = small.root.parent / "home" / ".claude" / "skills"
    skills.mkdir(parents=True)
    shared = small.root.parent / "home" / ".agents" / "skills" / "pytrio-skill"
    (skills / "pytrio-skill").symlink_to(shared)
    small.write("skills/pytrio-skill/references/sft.md", "new\n")
    assert local(small, "--agent", "claude-code").returncode == 0
    assert not (skills / "pytrio-skill").is_symlink()
    assert (shared / "references" / "sft.md").read_text(encoding="utf-8") == "note\n"


@pytest.mark.parametrize("what", ["folder", "file", "other skill", "dangling link", "own folder"])
def test_what_is_no_copy_is_left_alone(what: str, small: Project) -> None:
    target = small.root.parent / "home" / ".agents" / "skills" / "pytrio-skill"
    target.parent.mkdir(parents=True)
    if what == "file":
        target.write_text("mine", encoding="utf-8")
    elif what == "dangling link":
        target.symlink_to("nowhere")
    elif what == "own folder":
        target.parent.rmdir()
        target.parent.symlink_to(small.root / "skills")
    else:
        target.mkdir()
        text = "---\nname: other\n---\n" if what == "other skill" else "name: pytrio-skill\n"
        (target / "SKILL.md").write_text(text, encoding="utf-8")
    before = sorted(target.parent.iterdir())
    done = local(small, "--agent", "codex")
    assert done.returncode == 1
    assert "is not a copy of this skill" in done.stderr or "own folder" in done.stderr
    assert sorted(target.parent.iterdir()) == before
    assert what != "file" or target.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("moment", ["writing", "renaming"])
def test_a_failure_leaves_the_earlier_copy(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "skills" / "pytrio-skill"
    install_local.replace(target, {"SKILL.md": b"old", "references/a.md": b"old"})
    real_write, real_rename = Path.write_bytes, Path.rename

    def write(path: Path, content: bytes) -> int:
        if moment == "writing" and path.name == "b.md":
            raise OSError("disk full")
        return real_write(path, content)

    def rename(path: Path, to: Path) -> Path:
        if moment == "renaming" and path.name == "new":
            raise OSError("in use")
        return real_rename(path, to)

    monkeypatch.setattr(Path, "write_bytes", write)
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError):
        install_local.replace(target, {"SKILL.md": b"new", "references/b.md": b"new"})
    monkeypatch.undo()
    assert files_of(target) == {"SKILL.md": b"old", "references/a.md": b"old"}
    assert [path.name for path in target.parent.iterdir()] == ["pytrio-skill"]


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--agent", "cursor"),
        ("--agent", "codex", "--scope", "project"),
        ("--agent", "codex", "--dir", "."),
        ("--agent", "codex", "--scope", "project", "--dir", "nowhere"),
    ],
)
def test_unclear_wishes_are_usage_errors(arguments: tuple[str, ...], small: Project) -> None:
    done = local(small, *arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_a_folder_that_breaks_the_rules_is_not_installed(small: Project) -> None:
    small.write("skills/pytrio-skill/scripts/_util.py", "")
    done = local(small, "--agent", "codex")
    assert done.returncode == 1 and "installers drop" in done.stderr
    assert not (small.root.parent / "home" / ".agents").exists()


# -- the plugin's manifests ------------------------------------------------------------------------


def test_the_manifests_lead_to_the_skill() -> None:
    """Paths begin with `./`; a `skills` key without it has broken installations elsewhere."""
    folder = ROOT / ".claude-plugin"
    plugin = json.loads((folder / "plugin.json").read_text(encoding="utf-8"))
    market = json.loads((folder / "marketplace.json").read_text(encoding="utf-8"))
    (entry,) = market["plugins"]
    assert plugin["name"] == entry["name"] == market["name"] == SKILL.name
    assert entry["source"].startswith("./")
    assert "skills" not in plugin and "skills" not in entry  # found in skills/ by convention
    assert (ROOT / entry["source"] / "skills" / SKILL.name / "SKILL.md").is_file()


# -- with the real installers ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["link", "copy"])
@pytest.mark.parametrize("scope", ["project", "global"])
@pytest.mark.parametrize("version", [NEWEST, FOR_NODE_20])
def test_the_skills_cli(version: str, scope: str, mode: str, place: Place) -> None:
    """Same files for both agents, working through the link; again after a change; removed."""
    place.use_skills(version)
    base = place.project if scope == "project" else place.home
    claude, codex = (base / folder for folder in FOLDERS)
    flags = "--yes" + (" --global" if scope == "global" else "")
    add = f"npx skills add OWNER/pytrio-skill {' '.join(BOTH)} {flags}"
    add += " --copy" if mode == "copy" else ""
    place.run(add)
    assert claude.is_symlink() == (mode == "link")
    for folder in (claude, codex):
        assert same(files_of(folder), package.contents())
    if mode == "link":
        (works if scope == "project" else answers)(place, claude)
    changed = place.publish_change()
    (codex / "references" / "stale.md").write_text("old", encoding="utf-8")
    place.run(add)
    for folder in (claude, codex):
        assert same(files_of(folder), changed)
    place.run(f"npx skills remove pytrio-skill {flags}")
    assert not os.path.lexists(claude) and not os.path.lexists(codex)
    assert dangling_links(place.home, place.project) == []


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["claude-code", "codex"])
@pytest.mark.parametrize("version", [NEWEST, FOR_NODE_20])
def test_the_skills_cli_for_one_agent(version: str, agent: str, place: Place) -> None:
    place.use_skills(version)
    place.run(f"npx skills add OWNER/pytrio-skill --agent {agent} --yes")
    folder = place.project / dict(zip(("claude-code", "codex"), FOLDERS, strict=True))[agent]
    assert same(files_of(folder), package.contents())


@pytest.mark.slow
def test_the_skills_cli_updates_from_a_git_address(place: Place) -> None:
    """What a company with a git server of its own has: no GitHub, an address that ends in .git."""
    place.use_skills(NEWEST)
    place.run(f"npx skills add {place.upstream.as_uri()} {' '.join(BOTH)} --yes")
    changed = place.publish_change()
    place.run("npx skills update --project --yes")
    for folder in FOLDERS:
        assert same(files_of(place.project / folder), changed)


@pytest.mark.slow
@pytest.mark.parametrize("version", [NEWEST, FOR_NODE_20])
def test_the_skills_cli_as_the_readme_says(version: str, place: Place) -> None:
    place.use_skills(version)
    commands = README["With the skills CLI"]
    assert len(commands) == 9 and len([c for c in commands if " add " in c]) == 3
    for command in commands:
        changed = place.publish_change() if " update " in command else None
        output = place.run(command)
        base = place.home if "--global" in command else place.project
        if changed or " add " in command:
            expected = changed or package.contents()
            for folder in FOLDERS:
                assert same(files_of(base / folder), expected)
        if " list" in command:
            assert "pytrio-skill" in output
    assert dangling_links(place.home, place.project) == []
    assert not list(place.root.glob("home/.*/skills/*")) and not list(
        place.root.glob("my-project/.*/skills/*")
    )


@pytest.mark.slow
def test_the_skills_cli_for_node_18(place: Place) -> None:
    """As the README says: the line with --copy, for the project."""
    place.use_skills(FOR_NODE_18)
    (add,) = [c for c in README["With the skills CLI"] if "--copy" in c]
    place.run(add)
    for folder in FOLDERS:
        assert same(files_of(place.project / folder), package.contents())
    answers(place, place.project / FOLDERS[0])
    place.run("npx skills remove pytrio-skill --yes")
    assert dangling_links(place.home, place.project) == []


@pytest.mark.slow
@pytest.mark.parametrize(("version", "node"), [(NEWEST, FOR_NODE_20), (FOR_NODE_20, FOR_NODE_18)])
def test_the_node_versions_of_the_readme_are_bounds(version: str, node: str) -> None:
    """A newer CLI does not start on an older Node: that is why the README names a pin."""
    cli = npm_folder(node_package(NODES[version]), f"skills@{version}")
    (old,) = npm_folder(node_package(NODES[node]), f"skills@{node}").glob(
        "node_modules/node-*/bin/node"
    )
    command = [str(old), str(cli / "node_modules" / "skills" / "bin" / "cli.mjs"), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "SyntaxError" in done.stderr
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"skills@{FOR_NODE_20}`" in text and f"skills@{FOR_NODE_18}`" in text


@pytest.mark.slow
def test_the_zip_as_the_readme_says(place: Place) -> None:
    """And what an older version had is gone."""
    place.run("git clone --quiet https://github.com/OWNER/pytrio-skill clone", place.root)
    place.run("make package", place.root / "clone")
    for built in (place.root / "clone" / "dist").iterdir():
        shutil.copy(built, place.project)
    target = place.project / FOLDERS[0]
    (target / "references").mkdir(parents=True)
    (target / "references" / "stale.md").write_text("old", encoding="utf-8")
    for command in README["From the release zip"]:
        place.run(command)
    assert same(files_of(target), package.contents())
    works(place, target)
    assert "ready for a dry run" in place.run(DOCTOR)


@pytest.mark.slow
def test_the_plugin_as_the_readme_says(place: Place) -> None:
    """With the real Claude Code, which needs no login for it."""
    claude = npm_folder(CLAUDE) / "node_modules" / ".bin" / "claude"
    place.tool("claude", shlex.join([str(claude)]))
    commands = README["As a Claude Code plugin"]
    assert len(commands) == 5
    add, install, *updates, uninstall = commands
    checkout = place.root / "checkout"
    place.run(f"git clone --quiet {place.upstream} {checkout}", place.root)
    assert "Validation passed" in place.run("claude plugin validate --strict .", checkout)
    place.run(add)
    place.run(install)
    assert "pytrio-skill@pytrio-skill" in place.run("claude plugin list")
    assert "Skills (1)" in place.run("claude plugin details pytrio-skill@pytrio-skill")
    cache = place.home / ".claude" / "plugins" / "cache"
    (found,) = cache.rglob("SKILL.md")
    assert same(files_of(found.parent), package.contents())
    works(place, found.parent)
    # A new version upstream is what the update commands bring.
    work = place.root / "work"
    place.run(f"git clone --quiet {place.upstream} {work}", place.root)
    for name in ("plugin.json", "marketplace.json"):
        path = work / ".claude-plugin" / name
        text = path.read_text(encoding="utf-8").replace(package.skill_version(), "99.0.0")
        path.write_text(text, encoding="utf-8")
    changed = place.publish_change()
    for command in updates:
        place.run(command)
    (found,) = (cache / "pytrio-skill" / "pytrio-skill" / "99.0.0").rglob("SKILL.md")
    assert same(files_of(found.parent), changed)
    place.run(uninstall)
    assert "pytrio-skill@pytrio-skill" not in place.run("claude plugin list")


@pytest.mark.slow
def test_a_clone_as_the_readme_says(place: Place) -> None:
    commands = README["From a clone"]
    assert len(commands) == 4
    place.run("\n".join(commands), place.root)
    for folder in (place.home / FOLDERS[0], place.project / FOLDERS[1]):
        assert same(files_of(folder), package.contents())
    works(place, place.home / FOLDERS[0])
    answers(place, place.project / FOLDERS[1])
    status = place.run("git status --porcelain", place.root / "pytrio-skill")
    assert status == ""


@pytest.mark.slow
def test_the_walk_through_as_the_readme_says(place: Place) -> None:
    """From the installed skill, in a project, to rising rewards and a clean audit."""
    place.use_skills(NEWEST)
    place.run(README["With the skills CLI"][0])
    commands = README["From a prompt to a clean dry run"]
    *free, billed = commands
    assert len(free) == 4 and billed in ON_THE_USERS_MACHINE
    *_, output = [place.run(command) for command in free]
    assert "audit   clean" in output
    (metrics,) = place.project.rglob("metrics.jsonl")
    rewards = [
        row["reward"]
        for row in map(json.loads, metrics.read_text(encoding="utf-8").splitlines())
        if "reward" in row
    ]
    assert len(rewards) == 16 and rewards[0] < 0.7 < 0.9 < sum(rewards[-5:]) / 5
    assert same(files_of(place.project / FOLDERS[0]), package.contents())
