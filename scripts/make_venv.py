#!/usr/bin/env python3
"""Create a virtual environment, if there is none, and install a requirements file into it.

    python scripts/make_venv.py FOLDER REQUIREMENTS

Says in one line what is wrong when this Python is too old, too new, or has no venv module.
"""

import subprocess
import sys
from pathlib import Path

SUPPORTED = ((3, 11), (3, 13))


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    folder, requirements = Path(sys.argv[1]), Path(sys.argv[2])
    oldest, newest = SUPPORTED
    if not oldest <= sys.version_info[:2] <= newest:
        print(
            f"Python {sys.version_info[0]}.{sys.version_info[1]} is not supported, 3.11 to 3.13 "
            "are; run make with PYTHON=python3.11, say",
            file=sys.stderr,
        )
        return 2
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if not python.exists():
        made = subprocess.run([sys.executable, "-m", "venv", str(folder)], check=False)
        if made.returncode:
            print(
                "cannot create a virtual environment; on Debian: apt-get install python3-venv",
                file=sys.stderr,
            )
            return made.returncode
    print(f"installing {requirements} into {folder} ...", flush=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return subprocess.run([*command, "-r", str(requirements)], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
