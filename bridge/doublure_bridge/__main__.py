"""The `doublure` command. Each package declares its sub-commands; this one only gathers them."""

# No postponed annotations here: typer reads those of `root` while its own import is local.

import os
import sys
from importlib.metadata import entry_points, version

__all__ = ["main"]

GROUP = "doublure.commands"


def main() -> None:
    """Run the command line; errors are one line without a traceback unless --debug is given."""
    try:
        _run()
    except KeyboardInterrupt:
        # While packages are imported; the commands answer it themselves.
        sys.exit(130)


def _run() -> None:
    try:
        import typer
    except ImportError:
        sys.exit(
            "doublure: the command line needs typer and rich: pip install 'doublure[cli]'\n"
            "Without them, `python -m doublure_plugin doctor` still works."
        )
    from .errors import BridgeError

    app = typer.Typer(
        name="doublure",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Live training of a cheap stand-in for an expensive shader.",
    )

    @app.callback(invoke_without_command=True)
    def root(
        context: typer.Context,
        show_version: bool = typer.Option(False, "--version", help="Print the version and leave."),
    ) -> None:
        if show_version:
            print(f"doublure {version('doublure')}")
            raise typer.Exit
        if context.invoked_subcommand is None:
            print(context.get_help())

    for entry in sorted(entry_points(group=GROUP), key=lambda e: e.name):
        try:
            app.command(entry.name)(entry.load())
        except ImportError as error:
            # Whatever else is on the line, what is missing is the answer.
            anything = {"ignore_unknown_options": True, "allow_extra_args": True}
            app.command(entry.name, help=f"(not installed: {error})", context_settings=anything)(
                _missing(entry.name, error)
            )

    # Taken out before parsing so that it works anywhere on the line, for every sub-command.
    debug = "--debug" in sys.argv or os.environ.get("DOUBLURE_DEBUG") == "1"
    sys.argv[:] = [word for word in sys.argv if word != "--debug"]
    try:
        app()
    except Exception as error:
        if debug:
            raise
        kind = "" if isinstance(error, BridgeError | OSError) else f"{type(error).__name__}: "
        print(f"doublure: {kind}{error}", file=sys.stderr)
        print("Run again with --debug for the traceback.", file=sys.stderr)
        sys.exit(1)


def _missing(name: str, error: ImportError):  # type: ignore[no-untyped-def]
    def command() -> None:
        extras = {"export": "export", "fit": "kernels", "train": "trainer", "trainer": "trainer"}
        extra = extras.get(name, "demo")
        raise SystemExit(f"doublure {name}: {error}; run `pip install 'doublure[{extra}]'`")

    return command


if __name__ == "__main__":
    main()
