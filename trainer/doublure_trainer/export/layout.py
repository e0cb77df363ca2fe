"""The numbers of a variant as one block of 16-byte words, for constants and for storage buffers.

The network comes first: for every layer, for every four outputs, the bias and then one vector for
every input (padded to four), each vector the four outputs' weights. Then every texture, texel after
texel, row after row, slice after slice. Each part starts on a whole word.

A vector is four float32 (one word) or four float16 (half a word); a texel is four float16 (half a
word) or four bytes (a quarter). Everything is little-endian.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .variant import Variant, widths

__all__ = ["Part", "layout", "network_vectors", "pack", "quads"]

Array: TypeAlias = npt.NDArray[Any]

WORD = 16


@dataclass(frozen=True, slots=True)
class Part:
    """One run of words.

    Attributes:
        name: `network`, or the texture's tensor name.
        word: Index of its first word.
        words: How many there are.
    """

    name: str
    word: int
    words: int


def quads(count: int) -> int:
    """How many vectors of four hold `count` values."""
    return (count + 3) // 4


def network_vectors(variant: Variant) -> Array:
    """Biases and weight columns, float32 [n, 4], in the block's order; padding is zero."""
    parts = []
    for i, (fan_in, fan_out) in enumerate(pairwise(widths(variant.spec))):
        rows, columns = quads(fan_out), quads(fan_in) * 4
        block = np.zeros((rows * 4, 1 + columns), np.float32)
        block[:fan_out, 0] = variant.network[f"mlp.{i}.bias"]
        block[:fan_out, 1 : 1 + fan_in] = variant.network[f"mlp.{i}.weight"]
        parts.append(block.reshape(rows, 4, 1 + columns).transpose(0, 2, 1).reshape(-1, 4))
    return np.concatenate(parts)


def layout(variant: Variant, *, network: bool) -> list[Part]:
    """Where each part lies; `network` says whether the network is in the block at all."""
    sizes = []
    if network:
        vectors = sum(quads(o) * (1 + 4 * quads(i)) for i, o in pairwise(widths(variant.spec)))
        sizes.append(("network", vectors * (8 if variant.half_network else 16)))
    sizes += [(t.name, t.stored.nbytes) for t in variant.texels]
    parts, at = [], 0
    for name, nbytes in sizes:
        count = -(-nbytes // WORD)
        parts.append(Part(name, at, count))
        at += count
    return parts


def pack(variant: Variant, *, network: bool) -> Array:
    """The block, uint32 [words, 4]."""
    chunks = []
    texels = {t.name: t for t in variant.texels}
    for part in layout(variant, network=network):
        if part.name == "network":
            kind = "<f2" if variant.half_network else "<f4"
            data = network_vectors(variant).astype(kind).tobytes()
        else:
            stored = texels[part.name].stored
            data = np.ascontiguousarray(stored.astype(stored.dtype.newbyteorder("<"))).tobytes()
        chunks.append(data.ljust(part.words * WORD, b"\0"))
    return np.frombuffer(b"".join(chunks), dtype="<u4").reshape(-1, 4)
