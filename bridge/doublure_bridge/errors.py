"""The bridge's exception tree. Every error says what failed, expected, got and the next step."""

from __future__ import annotations

__all__ = [
    "AddressError",
    "BridgeError",
    "CodecError",
    "DatasetError",
    "LimitError",
    "ModelFileError",
    "SpecError",
    "TensorFileError",
    "VersionError",
]


class BridgeError(Exception):
    """Anything the bridge refuses.

    Args:
        what: The thing that failed, as a path: ``Rows.rows``, ``trainer address``.
        expected: What would have been right.
        got: What was there instead.
        next_step: What the reader can do about it.
    """

    def __init__(
        self, what: str, *, expected: object = "", got: object = "", next_step: str = ""
    ) -> None:
        self.what = what
        self.expected = str(expected)
        self.got = str(got)
        self.next_step = next_step
        text = what
        if self.expected:
            text += f": expected {self.expected}"
        if self.got:
            text += f"{',' if self.expected else ':'} got {self.got}"
        if next_step:
            text += f"; {next_step}"
        super().__init__(text)


class CodecError(BridgeError):
    """Bytes that are not a message: bad header, unknown types, wrong arrays."""


class LimitError(CodecError):
    """A message that is larger than this side accepts, found before anything is allocated."""


class VersionError(BridgeError):
    """The two sides speak protocol versions that do not overlap."""


class SpecError(BridgeError):
    """A model specification that no evaluator can read."""


class TensorFileError(BridgeError):
    """Bytes that are not a safetensors file, or not the one the specification describes."""


class ModelFileError(BridgeError):
    """A model file that is damaged, not ours, of another schema, or cannot be written."""


class DatasetError(BridgeError):
    """A dataset that is missing, damaged, changed, or of another schema."""


class AddressError(BridgeError):
    """An address that cannot be parsed, or that would leave this machine without keys."""
