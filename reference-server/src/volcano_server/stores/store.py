"""The seam: what the batch queue asks of a store.

A store loads the slots of a batch (one statement), decides each command in its order of arrival
with `lease.decide_all`, writes what changed (one statement), commits, and only then answers.
The batching itself lives once, above the stores, in `batch.py`, which never hands a store two
jobs at a time.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from volcano_server.lease import Answer, Read, Write


class StoreUnavailableError(Exception):
    """The store cannot answer (locked, full, unreachable, too late).  The text is for the operator."""


class Store(Protocol):
    async def open(self) -> None:
        """Make the store ready.  A user's mistake raises `StoreOpenError`."""

    async def close(self) -> None:
        """Finish what was accepted and let go of files and connections."""

    async def apply(self, commands: Sequence[Write], may_commit: Callable[[], bool]) -> list[Answer]:
        """Decide and write a whole batch: all or nothing, answered when it is on disk.

        `may_commit` is asked once, right before the commit and from whatever thread does it.  False:
        the batch came too late, nothing may be written.  Raises StoreUnavailableError when nothing
        was acknowledged (for a store whose commit's outcome can be unknown: also then).
        """

    async def read(self, commands: Sequence[Read]) -> list[Answer]:
        """Answer from committed state.  Raises StoreUnavailableError."""

    async def sweep(self, limit: int) -> int:
        """Look at the next `limit` slots and delete those free for a day; how many were deleted."""
