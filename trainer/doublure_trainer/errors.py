"""The trainer's exception tree, and how an exception becomes an `Error` message."""

from __future__ import annotations

from doublure_bridge import BridgeError, Error

__all__ = ["DirectoryError", "LaunchError", "RefusedError", "TrainerError", "error_message"]

_TEXT_BYTES = 2048
_DETAIL_BYTES = 16384


class TrainerError(BridgeError):
    """Anything the trainer server or a job refuses."""


class DirectoryError(TrainerError):
    """A directory that cannot be created, written, or is held by another job."""


class LaunchError(TrainerError):
    """A job process that could not be started."""


class RefusedError(TrainerError):
    """A session that cannot be served as asked.

    Args:
        code: Code of the `Error` message that tells the host.
    """

    def __init__(
        self,
        what: str,
        *,
        code: str,
        expected: object = "",
        got: object = "",
        next_step: str = "",
    ) -> None:
        super().__init__(what, expected=expected, got=got, next_step=next_step)
        self.code = code


def error_message(
    code: str,
    what: str,
    *,
    session: bytes = b"",
    expected: str = "",
    got: str = "",
    next_step: str = "",
    detail: str = "",
    fatal: bool = True,
    cause: BridgeError | None = None,
) -> Error:
    """An `Error` message whose texts fit their limits; of a long detail the end is kept.

    Args:
        cause: An exception to take expected, got and next step from, where they are not given.
    """
    if cause is not None:
        what = what or cause.what
        expected, got = expected or cause.expected, got or cause.got
        next_step = next_step or cause.next_step
    return Error(
        session=session,
        code=code,
        what=_head(what),
        expected=_head(expected),
        got=_head(got),
        next_step=_head(next_step),
        detail=detail.encode("utf-8", "replace")[-_DETAIL_BYTES:].decode("utf-8", "ignore"),
        fatal=fatal,
    )


def _head(text: str) -> str:
    return text.encode("utf-8", "replace")[:_TEXT_BYTES].decode("utf-8", "ignore")
