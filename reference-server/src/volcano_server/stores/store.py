"""The seam: what the batch queue asks of a store.

A store loads the slots of a batch (one statement), decides each command in its order of arrival
with `lease.decide_all`, writes what changed (one statement), commits, and only then answers.
The batching itself lives once, above the stores, in `batch.py`, which has at most one `apply` and
one `read` under way; a `read` handed over before an `apply` is answered before it.

    StoreOpenError                  one sentence for the operator; `exit_status` of sysexits.h
    ├── StorePathError              73  no such directory, not a file, not writable
    ├── NotAStoreError              65  not a database, damaged, or another program's
    ├── StoreInUseError             75  another server has it
    ├── NewerSchemaError            65  written by a later version of this program
    ├── StoreBrokenError            74  the disk is full or failing
    └── StoreUnreachableError       69  no answer from the database
    StoreUnavailableError           while open: this job was not done, a later one may be
"""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

from volcano_server.lease import Answer, Held, Read, Write


class StoreUnavailableError(Exception):
    """The store cannot answer: locked, full, unreachable, too late.  The text is the operator's."""


class StoreOpenError(Exception):
    """The store cannot be opened.  The text is one sentence that says why and what to do."""

    exit_status: ClassVar[int]


class StorePathError(StoreOpenError):
    exit_status = 73  # EX_CANTCREAT


class NotAStoreError(StoreOpenError):
    exit_status = 65  # EX_DATAERR


class StoreInUseError(StoreOpenError):
    exit_status = 75  # EX_TEMPFAIL


class NewerSchemaError(StoreOpenError):
    exit_status = 65  # EX_DATAERR


class StoreBrokenError(StoreOpenError):
    exit_status = 74  # EX_IOERR


class StoreUnreachableError(StoreOpenError):
    exit_status = 69  # EX_UNAVAILABLE


class HeldKeys(NamedTuple):
    """What a look through some slots found.  `looked_to`: where to go on, None at the end."""

    held: Sequence[tuple[str, Held]]
    looked_to: str | None


class Store(Protocol):
    async def open(self) -> None:
        """Make the store ready, once.  Raises StoreOpenError, for the operator to read."""

    async def close(self) -> None:
        """Finish what was accepted and let go of files and connections."""

    async def apply(
        self, commands: Sequence[Write], may_commit: Callable[[], bool]
    ) -> list[Answer]:
        """Decide and write a whole batch: all or nothing, answered when it is on disk.

        `may_commit` is asked once, right before the commit and from whatever thread does it.  If it
        says no, the batch came too late and nothing may be written.  Raises StoreUnavailableError
        when nothing was acknowledged (also where a store cannot know the outcome of its commit).
        """

    async def read(self, commands: Sequence[Read]) -> list[Answer]:
        """Answer from committed state.  Raises StoreUnavailableError."""

    async def held(self, project: str, prefix: str, after: str, limit: int) -> HeldKeys:
        """Which keys are not free among the next `limit` of a project that begin with `prefix`.

        In the order of the keys, from behind `after`, from committed state.  May be called while an
        `apply` or a `read` is under way.  Raises StoreUnavailableError.
        """

    async def sweep(self, limit: int) -> int:
        """Look at the next `limit` slots and delete those free for a day; how many were deleted.

        May be called while an `apply` or a `read` is under way.  Raises StoreUnavailableError.
        """


class SharedCounts(Protocol):
    """Where replicas add up how many operations each project has done in a window."""

    async def add(self, counts: Mapping[tuple[str, int], int]) -> Mapping[tuple[str, int], int]:
        """Add to the sums of (project, number of the window); the sums afterwards.

        Raises StoreUnavailableError; then it is not known whether they were added.
        """


class News(NamedTuple):
    """Rows (number, text) in the order of their numbers.  `now`: the store's time after them."""

    rows: Sequence[tuple[int, str]]
    now: int
    is_all: bool


@runtime_checkable
class SharedNews(Protocol):
    """Where the servers that share a store leave word of what they did: feed.py."""

    async def begin_news(self) -> tuple[int, Sequence[int], int]:
        """From now on batches leave word: a number of ours, those that are there, the store's time.

        Raises StoreUnavailableError.
        """

    async def read_news(self, top: int, missing: Sequence[int]) -> News | None:
        """What is behind `top` and of those missing; None where some may have been lost.

        Raises StoreUnavailableError.
        """
