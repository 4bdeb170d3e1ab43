"""The `tandem` command: `up`, `ask`, `inspect`. Pods run `tandem_runtime.worker` and `.router` themselves."""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; its exit status: 0 done, 2 something given cannot work, 1 it failed."""
    parser = argparse.ArgumentParser(prog="tandem", description="Disaggregated prefill and decode.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in ("up", "ask", "inspect"):
        importlib.import_module(f".{name}", __package__).add_parser(commands)
    arguments = parser.parse_args(argv)
    status: int = arguments.run(arguments)
    return status
