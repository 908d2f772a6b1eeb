"""A small project with the real scripts of packaging and release, for the tests of those."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conftest import ROOT

SCRIPTS = ("package.py", "check_release.py", "install_local.py")
SKILL_FILES = {
    "references/sft.md": "note\n",
    "examples/quickstart_sft.py": "print(1)\n",
    "scripts/dryrun.py": "print(2)\n",
    "scripts/audit/rules.py": "RULES = 1\n",
}


def skill_file(version: str) -> str:
    return (
        "---\nname: pytrio-skill\ndescription: >-\n  Write PyTRIO loops.\n  Not for trio.\n"
        f'license: MIT\ncompatibility: Python\nmetadata:\n  version: "{version}"\n---\n\n'
        "Read references/sft.md and copy examples/quickstart_sft.py.\n\n## Rules\n"
    )


def readme(version: str) -> str:
    return f"# x\n\n![version](https://img.shields.io/badge/version-{version}-blue)\n"


def manifest(version: str) -> str:
    return json.dumps({"name": "pytrio-skill", "version": version})


def marketplace(version: str, plugin: str | None = None) -> str:
    return json.dumps(
        {"metadata": {"version": version}, "plugins": [{"version": plugin or version}]}
    )


@dataclass
class Project:
    """A small project with the real release scripts, in a git repository of its own."""

    root: Path

    def git(self, *arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments]
        done = subprocess.run(command, cwd=self.root, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def commit(self) -> str:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "x")
        return self.git("rev-parse", "HEAD")

    def set_version(self, version: str) -> None:
        self.write("skills/pytrio-skill/SKILL.md", skill_file(version))
        self.write("README.md", readme(version))
        self.write("README.zh-CN.md", readme(version))
        self.write(".claude-plugin/plugin.json", manifest(version))
        self.write(".claude-plugin/marketplace.json", marketplace(version))
        self.write("CHANGELOG.md", f"# Changelog\n\n## {version}\n\n- New {version}.\n\n## 0.0.9\n")

    def run(self, script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(self.root / "scripts" / script), *map(str, arguments)],
            cwd=self.root,
            capture_output=True,
            text=True,
            check=False,
        )

    def pulls(self, **changes: Any) -> Path:
        """What GitHub answers about HEAD when a pull request brought it, with changes."""
        pull = {
            "merged_at": "2026-01-01T00:00:00Z",
            "base": {"ref": "main"},
            "merge_commit_sha": self.git("rev-parse", "HEAD"),
        }
        path = self.root.parent / "pulls.json"
        path.write_text(json.dumps([{**pull, **changes}]), encoding="utf-8")
        return path

    def decide_push(
        self, before: str, pulls: Path, *more: object
    ) -> subprocess.CompletedProcess[str]:
        arguments = ("decide", "--event", "push", "--before", before, "--pulls", pulls, *more)
        return self.run("check_release.py", *arguments)

    def decide_by_hand(self, ref: str = "refs/heads/main") -> subprocess.CompletedProcess[str]:
        return self.run("check_release.py", "decide", "--event", "workflow_dispatch", "--ref", ref)

    def build(self) -> Path:
        done = self.run("package.py")
        assert done.returncode == 0, done.stderr
        (archive,) = (self.root / "dist").glob("*.zip")
        return archive


def make_project(root: Path) -> Project:
    """Version 0.1.0, committed."""
    made = Project(root)
    for name in SCRIPTS:
        made.write(f"scripts/{name}", (ROOT / "scripts" / name).read_text(encoding="utf-8"))
    made.write(".gitignore", (ROOT / ".gitignore").read_text(encoding="utf-8"))
    for name, text in SKILL_FILES.items():
        made.write(f"skills/pytrio-skill/{name}", text)
    made.set_version("0.1.0")
    made.git("init", "--quiet", "--initial-branch", "main")
    made.commit()
    return made
