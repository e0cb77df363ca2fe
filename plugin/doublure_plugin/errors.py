"""The plugin's exception tree. Texts follow the bridge's form: what, expected, got, next step."""

from __future__ import annotations

from doublure_bridge import BridgeError

__all__ = [
    "CaptureError",
    "NondeterministicSourceError",
    "PluginError",
    "SessionError",
    "SourceError",
    "SpawnError",
    "TrainerError",
    "WeightsError",
]


class PluginError(BridgeError):
    """Anything the plugin refuses or cannot do.

    Args are those of `BridgeError`: what failed, what was expected, what came, what to do next.
    """


class CaptureError(PluginError):
    """Pixels or rows that cannot be learned from: wrong type, size, colour, origin or values."""


class SourceError(PluginError):
    """A source description without an unambiguous digest."""


class NondeterministicSourceError(SourceError):
    """The source draws different images for the same parameter, so there is nothing to learn."""


class SessionError(PluginError):
    """The session cannot do this: bad options, or it has been closed."""


class WeightsError(PluginError):
    """Weights that must not reach the screen."""


class TrainerError(PluginError):
    """The trainer refused, failed or speaks another protocol."""


class SpawnError(TrainerError):
    """A local trainer cannot be started."""
