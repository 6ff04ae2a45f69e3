"""Which of its two ways the engine takes, as its log says."""

from __future__ import annotations

import logging
from collections.abc import Callable


class _Notes(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.notes.append(record.getMessage())


def keeps_own_graphs(call: Callable[[], object]) -> bool:
    """Whether in this call each chunk keeps its own graph, for lack of a better way."""
    log = logging.getLogger("chunkcheck")
    level, notes = log.level, _Notes()
    log.addHandler(notes)
    log.setLevel(logging.INFO)
    try:
        call()
    finally:
        log.removeHandler(notes)
        log.setLevel(level)
    return any("its own graph" in note for note in notes.notes)
