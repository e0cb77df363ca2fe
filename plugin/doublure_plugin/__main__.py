"""`python -m doublure_plugin doctor`: works in an engine's Python, without typer."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]

_USAGE = "usage: python -m doublure_plugin doctor [--json]"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 when all is well, 1 when something is missing, 2 for wrong use."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] != ["doctor"] or not set(words[1:]) <= {"--json"}:
        print(_USAGE, file=sys.stderr)
        return 2
    from .doctor import doctor

    return doctor(as_json="--json" in words)


if __name__ == "__main__":
    sys.exit(main())
