#!/usr/bin/env python3
"""Decide whether a commit may be released, and verify what is released.

    python scripts/check_release.py decide --event push --before SHA --pulls FILE
    python scripts/check_release.py decide --event workflow_dispatch --ref refs/heads/main
    python scripts/check_release.py archive ZIP

`decide` looks at the commit that is checked out. --before is the commit that main was at before
the push; FILE holds what GitHub's `commits/SHA/pulls` answers. It prints `version=` and `tag=` and,
with --notes, writes the version's changelog. `archive` compares the zip and its
.sha256 with the commit. Exit codes: 0 release, or verified; 1 refused, something is wrong; 2 usage;
3 refused, there is nothing to release: the version is as it was.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import package

MAIN = "main"
NO_COMMIT = "0" * 40  # what GitHub calls the commit before a branch's first one
VERSION = re.compile(r"\d+\.\d+\.\d+")
SKILL_FILE = "skills/pytrio-skill/SKILL.md"
READMES = ("README.md", "README.zh-CN.md")
BADGE = re.compile(r"img\.shields\.io/badge/version-([^-/\s)]+)-")


def git(*arguments: str) -> bytes:
    """Output of a git command in the repository."""
    command = ["git", "-C", str(package.ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True).stdout


def committed(name: str, commit: str = "HEAD") -> str | None:
    """Text of a file in a commit; None when it has none."""
    try:
        return git("show", f"{commit}:{name}").decode("utf-8")
    except subprocess.CalledProcessError:
        return None


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


# -- where versions are written --------------------------------------------------------------------


def badge_version(text: str) -> str | None:
    """Version that the badge of a README shows."""
    match = BADGE.search(text)
    return match[1] if match else None


def plugin_version(text: str) -> str | None:
    return json.loads(text).get("version")


def marketplace_version(text: str) -> str | None:
    """Version of the one plugin of a marketplace, if it is also the marketplace's own."""
    read = json.loads(text)
    found = {plugin.get("version") for plugin in read.get("plugins", [])}
    found.add(read.get("metadata", {}).get("version"))
    return found.pop() if len(found) == 1 else None


# Every file that repeats the version of SKILL.md, and how to read it there.
PLACES: dict[str, Callable[[str], str | None]] = {
    **dict.fromkeys(READMES, badge_version),
    ".claude-plugin/plugin.json": plugin_version,
    ".claude-plugin/marketplace.json": marketplace_version,
}


def changelog_section(text: str, version: str) -> str:
    """What the changelog says about a version; empty when nothing."""
    match = re.search(
        rf"^## {re.escape(version)}(?: .*)?\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE
    )
    return match[1].strip() if match else ""


def version_problems(version: str) -> list[str]:
    """Places of the commit that do not say `version`."""
    found = []
    for name, read in PLACES.items():
        text = committed(name)
        if text is None:
            found.append(f"{name} is missing")
            continue
        try:
            there = read(text)
        except (ValueError, AttributeError, TypeError):
            there = None
        if there != version:
            found.append(f"{name} says version {there or 'nothing'}, SKILL.md says {version}")
    if not changelog_section(committed("CHANGELOG.md") or "", version):
        found.append(f"CHANGELOG.md has no text under `## {version}`")
    return found


def tag_problems(version: str) -> list[str]:
    """Tags that stand in the way: this version's, or a newer one's."""
    tags = git("tag", "--list", "v*").decode("utf-8").split()
    if f"v{version}" in tags:
        return [f"the tag v{version} exists"]
    released = [tag[1:] for tag in tags if VERSION.fullmatch(tag[1:])]
    newest = max(released, key=number, default=None)
    if newest and number(newest) > number(version):
        return [f"version {version} is older than the released {newest}"]
    return []


# -- what brought the commit -----------------------------------------------------------------------


def came_from_pull_request(pulls: Any, commit: str) -> bool:
    """Is the commit the result of a pull request that was merged into main?"""
    return any(
        pull.get("merged_at")
        and pull.get("base", {}).get("ref") == MAIN
        and pull.get("merge_commit_sha") == commit
        for pull in (pulls if isinstance(pulls, list) else [])
        if isinstance(pull, dict)
    )


def answer(path: Path) -> Any:
    """GitHub's answer, read from a file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"refused: {path} is not JSON: {error}") from None


def version_before(before: str) -> str:
    """The skill's version at the commit before the push; empty when there was none."""
    if not re.fullmatch(r"[0-9a-f]{40}", before):
        raise SystemExit("--before must be a full commit hash")
    if before == NO_COMMIT:
        return ""
    # A commit that a forced push has removed is not here: then nothing is known of the version.
    return package.version_in(committed(SKILL_FILE, before) or "")


def unchanged(version: str, options: argparse.Namespace) -> bool:
    """Did a push leave the version as it was?"""
    # Without a version there is nothing that could be unchanged: `decide` refuses it.
    return bool(version) and options.event == "push" and version_before(options.before) == version


def decide(version: str, options: argparse.Namespace) -> list[str]:
    """Why the commit must not be released as `version`, in words."""
    if not VERSION.fullmatch(version):
        return ["SKILL.md has no version such as 0.1.0 in its metadata"]
    found = []
    if options.event == "push":
        before = version_before(options.before)
        if VERSION.fullmatch(before) and number(before) > number(version):
            found.append(f"the version goes back from {before} to {version}")
        head = git("rev-parse", "HEAD").decode().strip()
        if not came_from_pull_request(answer(options.pulls), head):
            found.append(
                "the new version was pushed without a merged pull request; "
                "start the release by hand if that is meant"
            )
    elif options.ref != f"refs/heads/{MAIN}":
        found.append(f"a release is made from {MAIN}, not from {options.ref or 'nowhere'}")
    found += tag_problems(version)
    found += version_problems(version)
    if git("status", "--porcelain").strip():
        found.append("the working tree differs from the commit")
    return found


def committed_skill() -> dict[str, bytes]:
    """Every file of the skill in the commit: bytes by name."""
    folder = "skills/pytrio-skill/"
    listed = git("ls-tree", "-r", "-z", "--name-only", "HEAD", folder).decode("utf-8")
    names = [name for name in listed.split("\0") if name]
    return {name[len(folder) :]: git("show", f"HEAD:{name}") for name in names}


def archive_problems(archive: Path) -> list[str]:
    """What is wrong with a zip, its name or its checksum, compared with the commit."""
    version = package.version_in(committed(SKILL_FILE) or "")
    found = package.archive_problems(archive, committed_skill())
    if archive.name != f"pytrio-skill-{version}.zip":
        found.append(f"{archive.name}: must be called pytrio-skill-{version}.zip")
    checksum = archive.with_name(archive.name + ".sha256")
    if not checksum.is_file():
        found.append(f"{checksum.name} is missing")
    elif archive.is_file():
        line = checksum.read_text(encoding="utf-8")
        if line != f"{package.sha256(archive)}  {archive.name}\n":
            found.append(f"{checksum.name} is not the checksum of {archive.name}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    deciding = commands.add_parser("decide", help="may this commit be released")
    deciding.add_argument("--event", choices=("push", "workflow_dispatch"), required=True)
    deciding.add_argument("--before", default="", help="with push: main's earlier commit")
    deciding.add_argument("--pulls", type=Path, help="with push: GitHub's answer, JSON")
    deciding.add_argument("--ref", default="", help="with workflow_dispatch: the branch")
    deciding.add_argument("--notes", type=Path, help="write the version's changelog here")
    verifying = commands.add_parser("archive", help="is this the commit's zip")
    verifying.add_argument("zip", type=Path)
    options = parser.parse_args()
    try:
        git("rev-parse", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        print(f"{package.ROOT} has no commit that git can read; use a clone", file=sys.stderr)
        return 1
    if options.command == "archive":
        found = archive_problems(options.zip)
        for problem in found:
            print(problem, file=sys.stderr)
        if not found:
            print(f"{options.zip.name}: as committed, sha256 {package.sha256(options.zip)}")
        return bool(found)
    if options.event == "push" and (options.pulls is None or not options.before):
        deciding.error("--event push needs --before and --pulls")
    version = package.version_in(committed(SKILL_FILE) or "")
    if unchanged(version, options):
        print(f"refused: nothing to release, the version is {version} as before", file=sys.stderr)
        return 3
    found = decide(version, options)
    for problem in found:
        print(f"refused: {problem}", file=sys.stderr)
    if found:
        return 1
    if options.notes:
        notes = changelog_section(committed("CHANGELOG.md") or "", version)
        try:
            options.notes.write_text(notes + "\n", encoding="utf-8", newline="\n")
        except OSError as error:
            print(f"cannot write {options.notes}: {error.strerror}", file=sys.stderr)
            return 1
    print(f"version={version}\ntag=v{version}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
