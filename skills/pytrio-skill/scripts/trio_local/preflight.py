"""What is settled before a script starts: can it spend money, and on what does it run.

Standard library only, so that a missing package is reported and not stumbled over.
"""

import ast
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

CLOUD_HOSTS = ("pytrio.com", "pytrio.cn")
GUARDED_KEYWORDS = ("base_url", "api_key", "env", "home")
BACKEND_VARIABLES = ("PYTRIO_BASE_URL", "PYTRIO_API_KEY")


@dataclass(frozen=True)
class Finding:
    """A place in the script that would leave the local backend."""

    line: int
    message: str


def code_that_leaves(source: str, filename: str, local_url: str, local_key: str) -> list[Finding]:
    """Calls and assignments that set the SDK's address or key to anything but the backend's.

    A key whose value cannot be told from the text is let through: the backend itself refuses
    every key but its own. An address that cannot be told is a finding.
    Raises SyntaxError when the script does not parse.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the script's own run will show them
        tree = ast.parse(source, filename)
    origins = import_origins(tree)
    local = {"base_url": local_url, "api_key": local_key}
    findings = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            findings += call_findings(node, local, origins)
        elif isinstance(node, ast.Assign):
            findings += environment_findings(node, local)
    return sorted(findings, key=lambda finding: finding.line)


def import_origins(tree: ast.AST) -> dict[str, str]:
    """Imported names and where they come from: `{"trio": "pytrio", "Client": "pytrio.X"}`."""
    origins = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                origins[alias.asname or alias.name.split(".")[0]] = alias.name
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                origins[alias.asname or alias.name] = f"{module}.{alias.name}"
    return origins


def sdk_name(function: ast.expr, origins: dict[str, str]) -> str:
    """The name a call may have in the SDK; empty when it is known to be another package's."""
    root = function
    while isinstance(root, ast.Attribute):
        root = root.value
    origin = origins.get(root.id, "pytrio") if isinstance(root, ast.Name) else "pytrio"
    if origin.split(".")[0] != "pytrio":
        return ""
    if isinstance(function, ast.Attribute):
        return function.attr
    if isinstance(function, ast.Name):
        return origin.rpartition(".")[2] if function.id in origins else function.id
    return ""


def call_findings(node: ast.Call, local: dict[str, str], origins: dict[str, str]) -> list[Finding]:
    name = sdk_name(node.func, origins)
    if name not in ("configure", "ServiceClient"):
        return []
    arguments = {k.arg: k.value for k in node.keywords if k.arg in GUARDED_KEYWORDS}
    if name == "ServiceClient" and node.args:
        arguments["api_key"] = node.args[0]
    findings = []
    for keyword, value in arguments.items():
        problem = problem_with(keyword, value, local)
        if problem:
            findings.append(Finding(value.lineno, f"{name}({keyword}=...) {problem}"))
    return findings


def environment_findings(node: ast.Assign, local: dict[str, str]) -> list[Finding]:
    """`os.environ["PYTRIO_BASE_URL"] = ...` and the same for the key."""
    findings = []
    for target in node.targets:
        if not isinstance(target, ast.Subscript) or not isinstance(target.slice, ast.Constant):
            continue
        if target.slice.value in BACKEND_VARIABLES and "environ" in ast.unparse(target.value):
            keyword = "base_url" if target.slice.value.endswith("URL") else "api_key"
            problem = problem_with(keyword, node.value, local)
            if problem:
                findings.append(Finding(node.lineno, f"{target.slice.value} in code {problem}"))
    return findings


def problem_with(keyword: str, value: ast.expr, local: dict[str, str]) -> str | None:
    """Why this value would leave the backend, None when it would not."""
    if reads_backend_variable(value):
        return None
    if isinstance(value, ast.Constant):
        text = value.value
        if text is None or (keyword in local and str(text).rstrip("/") == local[keyword]):
            return None
        if keyword == "api_key":
            return "sets a key; leave it to PYTRIO_API_KEY"
        if keyword == "base_url":
            return f"sets {text!r}; leave it to PYTRIO_BASE_URL"
        return "would load a profile of this machine; leave it out"
    if keyword == "api_key":
        return None
    return "has a value that cannot be told from the text; leave it out"


def reads_backend_variable(value: ast.expr) -> bool:
    """`os.environ["PYTRIO_..."]`, `os.getenv("PYTRIO_...")` or `os.environ.get("PYTRIO_...")`."""
    constants = [n.value for n in ast.walk(value) if isinstance(n, ast.Constant)]
    text = ast.unparse(value)
    is_lookup = isinstance(value, (ast.Call, ast.Subscript)) and (
        "environ" in text or "getenv" in text
    )
    return is_lookup and len(constants) == 1 and constants[0] in BACKEND_VARIABLES


def blocked_hosts(home: Path, environment: dict[str, str]) -> list[str]:
    """Cloud hosts, and those that this machine's profiles or variables name."""
    urls = [environment.get("PYTRIO_BASE_URL", "")]
    for path in [*home.glob(".pytrio/config.toml"), *home.glob(".pytrio/envs/*/config.toml")]:
        try:
            urls += re.findall(r"base_url\s*=\s*[\"']([^\"']+)", path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            continue
    hosts = {urlsplit(url).hostname for url in urls} - {None, "127.0.0.1", "localhost", "::1"}
    return sorted({*CLOUD_HOSTS, *(host for host in hosts if host)})


def script_environment(url: str, key: str, sdk_home: Path, home: Path) -> dict[str, str]:
    """The script's environment: this one, pointed at the backend and kept from the cloud."""
    environment = dict(os.environ)
    guard = Path(__file__).resolve().parent / "guard"
    hosts = blocked_hosts(home, environment)
    environment.pop("PYTRIO_ENV", None)
    # A proxy would be asked for the loopback address too, and it would look up the cloud's hosts
    # where the guard does not see it.
    direct = ["127.0.0.1", "localhost", *hosts, *(f"{host}." for host in hosts)]
    for name in ("NO_PROXY", "no_proxy"):
        environment[name] = ",".join(filter(None, [environment.get(name, ""), *direct]))
    python_path = [str(guard), environment.get("PYTHONPATH", "")]
    environment.update(
        PYTRIO_BASE_URL=url,
        PYTRIO_API_KEY=key,
        PYTHONPATH=os.pathsep.join(filter(None, python_path)),
        # The guard lies in the skill's folder, which may be read-only.
        PYTHONDONTWRITEBYTECODE="1",
        TRIO_DRYRUN_BLOCKED=",".join(hosts),
        TRIO_DRYRUN_SDK_HOME=str(sdk_home),
    )
    return environment
