"""The command line. stdout is data, stderr is talk.

Exit codes: 0 done, 1 error, 2 usage, 3 infeasible budget, 4 verification failed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from punar.cli.app import app
from punar.cli.output import exit_code, say
from punar.errors import PunarError


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits; errors of ours become one message on stderr."""
    try:
        app(args=None if arguments is None else list(arguments))
    except PunarError as error:
        say(f"punar: {error}")
        sys.exit(exit_code(error))
