"""`python -m tandem_runtime.router`: one router.

Exit codes: 0 after SIGTERM or SIGINT, 2 when it cannot start as told.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from ..process import die_with_parent, last_words
from .api_keys import ApiKeysError
from .config import RouterConfig
from .run import listen, run

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tandem_runtime.router")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one, told in the log")
    parser.add_argument("--peers", type=Path, help="JSON file that lists the workers")
    parser.add_argument(
        "--selector",
        default=os.environ.get("TANDEM_PEER_SELECTOR", ""),
        help="in a pod, instead: labels of the workers' EndpointSlices (TANDEM_PEER_SELECTOR)",
    )
    parser.add_argument("--api-keys", type=Path, help="file with the API keys that are valid, one per line")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    args = parser.parse_args(argv)
    die_with_parent()
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    config = RouterConfig(
        peers=args.peers, selector=args.selector, host=args.host, port=args.port, api_keys=args.api_keys
    )
    try:
        sock = listen(config)
    except (OSError, OverflowError) as error:
        last_words(f"cannot listen on {args.host} port {args.port}: {error}")
        return 2
    try:
        uvloop.run(run(config, sock))
    except (ApiKeysError, ValueError) as error:
        last_words(error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
