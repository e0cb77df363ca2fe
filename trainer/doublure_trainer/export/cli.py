"""`doublure export`: a learned model as a shader, an ONNX graph or plain tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["export"]


def export(
    model: Annotated[Path, typer.Argument(help="A model directory, or its weights file.")],
    to: Annotated[
        str, typer.Option("--to", help="glsl, hlsl, wgsl, shadertoy, safetensors or onnx.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="File or directory; by default here, named by the model.")
    ] = None,
    precision: Annotated[
        str, typer.Option(help="fp32 (as learned), fp16, or int8: texels in 8 bits.")
    ] = "fp32",
    storage: Annotated[
        str,
        typer.Option(
            help="Shaders: constants (all in the text), textures (fastest) or buffers; "
            "by default constants where they fit, else textures."
        ),
    ] = "",
    name: Annotated[str, typer.Option(help="Name of the function and of the files.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Write a learned stand-in for another engine."""
    # Here, so that asking for help does not import torch.
    from doublure_bridge import BridgeError
    from doublure_bridge.model_file import read_model

    from .package import check_target, export_model

    try:
        check_target(to)
        made = export_model(
            read_model(model),
            to,
            out=out,
            precision=precision,
            storage=storage,
            name=name,
            force=force,
        )
    except BridgeError as error:
        typer.echo(f"doublure export: {error}", err=True)
        raise typer.Exit(1) from None
    for path in made.paths:
        typer.echo(f"{path}  {path.stat().st_size:,} bytes")
    where = f", in {made.storage}" if made.storage else ""
    typer.echo(f"{made.name}: {made.variant.spec.family}, {made.variant.precision}{where}")
