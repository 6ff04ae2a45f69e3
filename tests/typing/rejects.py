"""What both checkers must reject; checked by `nox -s types`, never run.

Every ignore is an assertion: both checkers report one that they do not need.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from chunkcheck import Fused, NonReentrant, Reentrant, chunk_and_checkpoint, chunked

Flat: TypeAlias = Callable[..., tuple[Tensor, ...]]


def scaled(x: Tensor, aux: dict[str, Tensor], scale: float = 1.0) -> Tensor:
    return x * aux["y"] * scale


def keyword_only(x: Tensor, *, scale: float) -> Tensor:
    return x * scale


@functools.partial(chunked, chunk_size=4)
def decorated(x: Tensor, scale: float = 1.0) -> Tensor:
    return x * scale


def arguments(x: Tensor, aux: dict[str, Tensor], xs: list[Tensor]) -> None:
    chunk_and_checkpoint(scaled, x, x, chunk_size=4)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunk_and_checkpoint(scaled, x, chunk_size=4)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunk_and_checkpoint(scaled, x, aux, 2.0, x, chunk_size=4)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunk_and_checkpoint(scaled, *xs, chunk_size=4)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunk_and_checkpoint(torch.softmax, x, "0", chunk_size=4)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunk_and_checkpoint(keyword_only, x, chunk_size=4)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunk_and_checkpoint(x, x, chunk_size=4)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunk_and_checkpoint(chunk_size=4)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    n: int = chunk_and_checkpoint(scaled, x, aux, chunk_size=4)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]

    chunked(scaled, chunk_size=4)(x, x)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunked(scaled, chunk_size=4)(x)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    chunked(scaled, chunk_size=4)(x, aux, 2.0, x)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    chunked(keyword_only, chunk_size=4)(x)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    chunked(x, chunk_size=4)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunked(chunk_size=4)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    n = chunked(scaled, chunk_size=4)(x, aux)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    decorated(x, "2.0")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    decorated()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    del n


def keywords(x: Tensor, aux: dict[str, Tensor]) -> None:
    chunk_and_checkpoint(scaled, x, aux, chunk_size=4, scale=2.0)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunk_and_checkpoint(scaled, x, aux=aux, chunk_size=4)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunk_and_checkpoint(scaled, x, aux, chunk_size=4, batchdim=0)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunk_and_checkpoint(f=scaled, chunk_size=4)  # type: ignore[arg-type, call-arg]  # pyright: ignore[reportCallIssue]

    chunked(scaled, chunk_size=4)(x, aux, scales=2.0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    chunked(scaled, chunk_size=4)(x, aux, scale="2.0")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunked(scaled, chunk_size=4, batchdim=0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    chunked(scaled, 4)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    decorated(x, scales=2.0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def sizes(x: Tensor, aux: dict[str, Tensor]) -> None:
    chunk_and_checkpoint(scaled, x, aux)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    chunk_and_checkpoint(scaled, x, aux, chunk_size="4")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunk_and_checkpoint(scaled, x, aux, chunk_size=4.0)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunked(scaled)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    chunked(scaled, chunk_size="4")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def batch_dims(x: Tensor, aux: dict[str, Tensor], dims: list[int]) -> None:
    chunk_and_checkpoint(scaled, x, aux, chunk_size=4, batch_dim="oops")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunk_and_checkpoint(scaled, x, aux, chunk_size=4, batch_dim=0.5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunk_and_checkpoint(scaled, x, aux, chunk_size=4, batch_dim=(0, "oops"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunk_and_checkpoint(scaled, x, aux, chunk_size=4, batch_dim=(0, (1, "oops")))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunk_and_checkpoint(scaled, x, aux, chunk_size=4, batch_dim=[0, None])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunk_and_checkpoint(scaled, x, aux, chunk_size=4, batch_dim=dims)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunk_and_checkpoint(scaled, x, aux, chunk_size=4, batch_dim={"x": 1.5})  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
    chunk_and_checkpoint(scaled, x, aux, chunk_size=4, batch_dim={0: 0})  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
    chunked(scaled, chunk_size=4, batch_dim="oops")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunked(scaled, chunk_size=4, batch_dim={"x": "sum"})  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]


def out_dims(x: Tensor, aux: dict[str, Tensor]) -> None:
    chunk_and_checkpoint(scaled, x, aux, chunk_size=4, out_dim="max")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunk_and_checkpoint(scaled, x, aux, chunk_size=4, out_dim=(0, "max"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunk_and_checkpoint(scaled, x, aux, chunk_size=4, out_dim={"loss": 0.5})  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
    chunked(scaled, chunk_size=4, out_dim="max")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def fixed(f: Flat, x: Tensor) -> tuple[Tensor, ...]:
    return f(x)


def single(f: Flat, *tensors: Tensor) -> Tensor:
    return f(*tensors)[0]


def strategies(x: Tensor, aux: dict[str, Tensor], name: str) -> None:
    chunk_and_checkpoint(scaled, x, aux, chunk_size=4, strategy="nonreentrant")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunk_and_checkpoint(scaled, x, aux, chunk_size=4, strategy=name)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunk_and_checkpoint(scaled, x, aux, chunk_size=4, strategy=None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunk_and_checkpoint(scaled, x, aux, chunk_size=4, strategy=NonReentrant)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunk_and_checkpoint(scaled, x, aux, chunk_size=4, strategy=fixed)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunk_and_checkpoint(scaled, x, aux, chunk_size=4, strategy=single)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunked(scaled, chunk_size=4, strategy="nonreentrant")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    chunked(scaled, chunk_size=4, strategy=None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    Reentrant(determinism_check="none")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Fused(keep_chunks="2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    NonReentrant(False)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    NonReentrant(determinism_check="all")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    NonReentrant(context_fn=lambda: None)  # type: ignore[arg-type, return-value]  # pyright: ignore[reportArgumentType]
    NonReentrant().early_stop = True  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
