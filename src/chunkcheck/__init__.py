"""Run a batched function a few rows at a time and recompute each chunk in backward."""

from chunkcheck._api import chunk_and_checkpoint as chunk_and_checkpoint
from chunkcheck._api import chunked as chunked
from chunkcheck._sizes import ChunkSizePolicy as ChunkSizePolicy
from chunkcheck._sizes import MemoryBudget as MemoryBudget
from chunkcheck._sizes import NumChunks as NumChunks
from chunkcheck._strategies import Fused as Fused
from chunkcheck._strategies import GradInForward as GradInForward
from chunkcheck._strategies import NoCheckpoint as NoCheckpoint
from chunkcheck._strategies import NonReentrant as NonReentrant
from chunkcheck._strategies import Reentrant as Reentrant
from chunkcheck._strategies import StrategyName as StrategyName
from chunkcheck._typing import ChunkStrategy as ChunkStrategy

__all__ = [
    "ChunkSizePolicy",
    "ChunkStrategy",
    "Fused",
    "GradInForward",
    "MemoryBudget",
    "NoCheckpoint",
    "NonReentrant",
    "NumChunks",
    "Reentrant",
    "StrategyName",
    "chunk_and_checkpoint",
    "chunked",
]
__version__ = "0.2.0.dev0"

# So that reprs, pickles and tracebacks name what a user can import.
for _public in (
    ChunkSizePolicy,
    ChunkStrategy,
    Fused,
    GradInForward,
    MemoryBudget,
    NumChunks,
    NoCheckpoint,
    NonReentrant,
    Reentrant,
    chunk_and_checkpoint,
    chunked,
):
    _public.__module__ = __name__
del _public
