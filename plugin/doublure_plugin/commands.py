"""The plugin's sub-commands of `doublure`, for typer."""

from __future__ import annotations

from typing import Annotated

import typer

from .doctor import doctor as _doctor

__all__ = ["doctor"]


def doctor(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Say what is installed, which devices there are, and whether a trainer starts."""
    raise typer.Exit(_doctor(as_json=json))
