"""`epee warmup`: compile the GPU kernels into the cache, ahead of time."""

from __future__ import annotations

import typer


def warmup(
    num_ranks: list[int] = typer.Option([1, 2, 4, 8], "--ranks", help="Sizes of groups; may be given several times."),
    architecture: list[str] = typer.Option(
        ["sm_90a", "sm_100a"], "--arch", help="GPU architectures; may be given several times."
    ),
) -> None:
    """Compile the GPU kernels into the cache; needs NVRTC (`pip install cuda-bindings nvidia-cuda-nvrtc`), no GPU."""
    from .kernels import warm_up

    count = warm_up(num_ranks, architecture)
    typer.echo(f"{count} kernels are in the cache")
