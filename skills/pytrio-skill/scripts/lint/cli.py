"""What `dryrun.py check FILE...` prints: one line a finding, or JSON."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lint.check import Finding, check_source

EXIT_CLEAN, EXIT_FINDINGS, EXIT_USAGE = 0, 2, 3
SCHEMA = 1


def check_files(paths: list[Path], as_json: bool) -> int:
    """Check files and print; 0 without error findings, 2 with some, 3 when one cannot be read.

    A file that cannot be read or parsed is named on standard error; the others are checked.
    """
    findings: list[tuple[Path, Finding]] = []
    checked, failed = 0, 0
    for path in paths:
        try:
            # As Python does, take a file with a byte order mark.
            if path.exists() and not path.is_file():
                raise OSError(0, "it is no file")
            source = path.read_text(encoding="utf-8-sig")
            findings += [(path, finding) for finding in check_source(source, str(path))]
            checked += 1
        except UnicodeDecodeError:
            problem: str | None = "is not a UTF-8 text file"
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        except SyntaxError as error:
            place = f" in line {error.lineno}" if error.lineno else ""
            problem = f"does not parse{place}: {error.msg}"
        except ValueError as error:  # a null byte
            problem = f"does not parse: {error}"
        except RecursionError:
            problem = "is nested too deeply to be checked"
        else:
            problem = None
        if problem:
            failed += 1
            print(f"dryrun: {path} {problem}", file=sys.stderr)
    errors = sum(finding.severity == "error" for _, finding in findings)
    if as_json:
        report: dict[str, Any] = {
            "schema": SCHEMA,
            "files": [str(path) for path in paths],
            "findings": [{"file": str(path), **asdict(finding)} for path, finding in findings],
        }
        print(json.dumps(report, indent=2))
    else:
        for path, finding in findings:
            place = f"{path}:{finding.line}:{finding.column}"
            print(f"{place}: {finding.code} {finding.severity}: {finding.message}; {finding.fix}")
    print(
        f"dryrun: checked {counted(checked, 'file')}: {counted(errors, 'error')}, "
        f"{counted(len(findings) - errors, 'warning')}",
        file=sys.stderr,
    )
    if errors:
        print(
            "dryrun: fix them; what is right as it is gets `# trio: allow CODE REASON` on its line",
            file=sys.stderr,
        )
    if failed:
        return EXIT_USAGE
    return EXIT_FINDINGS if errors else EXIT_CLEAN


def counted(number: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
