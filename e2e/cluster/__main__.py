"""`python -m e2e.cluster up|down|env|build`."""

from __future__ import annotations

import argparse
import sys

from . import images, lifecycle, node, tools
from .commands import ClusterError
from .layout import INDEX_MAX, NODES_MAX, Layout


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="boot it; does nothing if it stands")
    down = commands.add_parser("down", help="end it and remove all that it made")
    env = commands.add_parser("env", help='print KUBECONFIG and PATH for a shell: eval "$(… env)"')
    commands.add_parser("build", help="only what is built once: the tools and the images")
    for command in (up, down, env):
        command.add_argument("--name", default="tandem", help="of files, links and namespaces on this host")
    up.add_argument("--index", type=int, default=0, help=f"chooses the subnets, 0 to {INDEX_MAX}")
    up.add_argument("--nodes", type=int, help=f"real nodes, 0 to {NODES_MAX}; 2 unless --bare")
    up.add_argument("--bare", action="store_true", help="etcd and the API server alone, without root")
    arguments = parser.parse_args(argv)
    try:
        match arguments.command:
            case "up":
                nodes = arguments.nodes if arguments.nodes is not None else 0 if arguments.bare else 2
                lifecycle.up(Layout(arguments.name, arguments.index, nodes, arguments.bare))
            case "down":
                lifecycle.down(arguments.name)
            case "build":
                node.require()
                tools.ensure()
                images.ensure()
            case "env":
                layout = lifecycle.existing(arguments.name)
                if layout is None:
                    raise ClusterError(f"no cluster {arguments.name}: `make cluster` boots one")
                print(f'export KUBECONFIG="{layout.kubeconfig()}"\nexport PATH="{tools.directory()}:$PATH"')
    except (ClusterError, ValueError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
