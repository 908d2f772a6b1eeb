#!/usr/bin/env python3
"""Put the skill of this clone into an agent's folder, replacing an earlier copy of it whole.

    python scripts/install_local.py --agent claude-code                      for all projects
    python scripts/install_local.py --agent codex --scope project --dir DIR  for one project

The copy is written beside its place and then renamed: there is never half a skill. What is not a
copy of this skill is left alone. Exit codes: 0 installed, 1 refused or failed, 2 usage.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

import package

# Where each agent looks, below a project or below the home directory.
AGENT_FOLDERS = {"claude-code": ".claude", "codex": ".agents"}


def skills_folder(agent: str, scope: str, directory: Path | None) -> Path:
    """The folder that holds the agent's skills."""
    if scope == "project":
        assert directory is not None
        return directory / AGENT_FOLDERS[agent] / "skills"
    if agent == "claude-code" and os.environ.get("CLAUDE_CONFIG_DIR"):
        return Path(os.environ["CLAUDE_CONFIG_DIR"]) / "skills"
    return Path.home() / AGENT_FOLDERS[agent] / "skills"


def refusal(target: Path) -> str | None:
    """Why `target` must not be replaced, in one line; None when it may be."""
    if not os.path.lexists(target):
        return None
    if not target.is_symlink() and target.resolve() == package.SKILL:
        return f"{target} is this clone's own folder"
    try:
        text = (target / "SKILL.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        text = ""
    if package.frontmatter(text).get("name") != package.SKILL.name:
        return f"{target} is not a copy of this skill; move it away first"
    return None


def replace(target: Path, files: dict[str, bytes]) -> None:
    """Make `target` a folder of exactly these files (bytes by name); on failure it is unchanged."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that renaming stays on one disk; the dot hides it from agents.
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    fresh, old = scratch / "new", scratch / "old"
    try:
        for name, content in files.items():
            path = fresh / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            if name in package.EXECUTABLE:
                path.chmod(0o755)
        if os.path.lexists(target):
            target.rename(old)
        try:
            fresh.rename(target)
        except OSError:
            if os.path.lexists(old):
                old.rename(target)
            raise
    finally:
        if old.is_symlink():
            old.unlink()
        shutil.rmtree(scratch)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agent", choices=sorted(AGENT_FOLDERS), required=True)
    parser.add_argument("--scope", choices=("user", "project"), default="user")
    parser.add_argument("--dir", type=Path, help="the project, with --scope project")
    options = parser.parse_args()
    if (options.scope == "project") != (options.dir is not None):
        parser.error("--scope project and --dir belong together")
    if options.dir is not None and not options.dir.is_dir():
        parser.error(f"{options.dir} is not a folder")
    target = skills_folder(options.agent, options.scope, options.dir) / package.SKILL.name
    target = target.absolute()
    found = package.problems()
    refused = refusal(target)
    if refused:
        found.append(refused)
    for problem in found:
        print(problem, file=sys.stderr)
    if found:
        return 1
    files = package.contents()
    try:
        replace(target, files)
    except OSError as error:
        print(f"cannot install: {error}", file=sys.stderr)
        return 1
    print(f"installed {len(files)} files of {target.name} {package.skill_version()} into {target}")
    print(f'verify    {sys.executable} "{target / "scripts" / "dryrun.py"}" doctor')
    print("          then start the agent anew and ask which skills it can see")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
