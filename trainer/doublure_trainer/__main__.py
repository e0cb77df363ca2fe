"""`python -m doublure_trainer` is `doublure trainer`; with `train` first it is `doublure train`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the trainer's command line; errors are one line unless --debug is given."""
    try:
        import typer

        from .cli import trainer
        from .train_command import main as train
    except ImportError as error:
        sys.exit(f"doublure trainer: {error}; run `pip install 'doublure[trainer]'`")
    if sys.argv[1:2] == ["train"]:
        train(words=sys.argv[2:])
        return
    debug = "--debug" in sys.argv or os.environ.get("DOUBLURE_DEBUG") == "1"
    sys.argv[:] = [word for word in sys.argv if word != "--debug"]
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(trainer)
    try:
        app(prog_name="python -m doublure_trainer")
    except Exception as error:
        if debug:
            raise
        sys.exit(f"doublure trainer: {error}\nRun again with --debug for the traceback.")


if __name__ == "__main__":
    main()
