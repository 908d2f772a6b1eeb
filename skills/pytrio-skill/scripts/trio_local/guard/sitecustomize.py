"""Loaded by every Python of a dry run before the script: nothing may reach the PyTRIO cloud.

Two things, both from outside the SDK: an audit hook ends the process when it looks up a cloud
host, and the SDK is given, through its own `configure`, a private home, so that profiles and
keys on this machine are neither read nor changed.
"""

import importlib.machinery
import importlib.util
import os
import sys

# Read by dryrun.py: the exit status of a script that tried to reach the cloud.
CLOUD_CONTACT_STATUS = 96

BLOCKED = tuple(filter(None, os.environ.get("TRIO_DRYRUN_BLOCKED", "").split(",")))
SDK_HOME = os.environ.get("TRIO_DRYRUN_SDK_HOME", "")
HOME_VARIABLES = ("HOME", "USERPROFILE")


def is_blocked(host):
    name = host.decode("ascii", "replace") if isinstance(host, bytes) else str(host or "")
    name = name.lower().rstrip(".")
    return any(name == blocked or name.endswith("." + blocked) for blocked in BLOCKED)


def forbid_cloud(event, arguments):
    if event == "socket.getaddrinfo" and is_blocked(arguments[0]):
        sys.stderr.write(
            f"dryrun: stopped: the script tried to reach {arguments[0]}; a dry run talks to the "
            "local backend only, so leave base_url and api_key out of the code\n"
        )
        sys.stderr.flush()
        os._exit(CLOUD_CONTACT_STATUS)


class PrivateHome:
    """Import hook that configures `pytrio` once, right after it is first imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "pytrio":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("pytrio")
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_configure(module):
            # While it is imported, the SDK reads the profiles below the home folder.
            kept = {name: os.environ.get(name) for name in HOME_VARIABLES}
            os.environ.update(dict.fromkeys(HOME_VARIABLES, SDK_HOME))
            try:
                load(module)
            finally:
                for name, value in kept.items():
                    if value is None:
                        del os.environ[name]
                    else:
                        os.environ[name] = value
            module.configure(
                home=SDK_HOME,
                base_url=os.environ.get("PYTRIO_BASE_URL"),
                api_key=os.environ.get("PYTRIO_API_KEY"),
            )

        spec.loader.exec_module = load_and_configure  # type: ignore[method-assign]
        return spec


def load_the_hidden_one():
    """Run the `sitecustomize` that this one stands in front of, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [path for path in sys.path if os.path.abspath(path or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if BLOCKED:
    sys.addaudithook(forbid_cloud)
if SDK_HOME:
    sys.meta_path.insert(0, PrivateHome())
load_the_hidden_one()
