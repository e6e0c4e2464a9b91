"""A launcher as frameworks have: it makes its `ServerArgs` itself, without our flags.

python -m tests.sglang.own_launcher [SGLang's flags, and those of its plugins]
"""

from __future__ import annotations

import argparse
import inspect

from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs


def main() -> None:
    load_plugins()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = vars(parser.parse_args())
    known = inspect.signature(ServerArgs).parameters
    defaults = vars(parser.parse_args(["--model-path", given["model_path"]]))
    launch_server(
        ServerArgs(
            **{
                name: value
                for name, value in given.items()
                if name in known and (name == "model_path" or value != defaults[name])
            }
        )
    )


if __name__ == "__main__":
    main()
