"""The guarded writes on real engines: SQLite, PostgreSQL, and each Redis that can be had here."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from types import ModuleType

import pytest
from running import EXAMPLES, load, show

engines = load("guarded-writes", "engines")
REDISES = engines.redis_binaries() or {"redis": None}
KINDS = ["sqlite", "postgresql", *REDISES]
LARGEST = 2**53 - 1

Engine = tuple[ModuleType, str]


@pytest.fixture(scope="module", params=KINDS)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """(The module with connect, write and read; where its database is)."""
    with ExitStack() as stack:
        if request.param == "sqlite":
            yield load("guarded-writes", "guarded_sqlite"), str(tmp_path_factory.mktemp("s") / "db")
        elif request.param == "postgresql":
            url = stack.enter_context(engines.postgresql())
            yield load("guarded-writes", "guarded_postgresql"), url
        else:
            if REDISES[request.param] is None:
                pytest.skip("no redis-server on PATH, and none in a package for this machine")
            url = stack.enter_context(engines.redis(REDISES[request.param]))
            yield load("guarded-writes", "guarded_redis"), url


@pytest.fixture
def ticket() -> int:
    """New in each test: the engine's data is shared."""
    return random.randrange(1, 2**31)


def test_the_same_token_writes_again_and_an_older_one_is_refused(
    engine: Engine, ticket: int
) -> None:
    guarded, where = engine
    with closing(guarded.connect(where)) as database:
        assert guarded.write(database, ticket, "draft", fencing_token=7)
        assert guarded.write(database, ticket, "answer", fencing_token=7)
        assert not guarded.write(database, ticket, "late", fencing_token=6)
        assert "answer" == guarded.read(database, ticket)
        assert guarded.write(database, ticket, "newer", fencing_token=8)
        assert not guarded.write(database, ticket, "late", fencing_token=7)
        assert "newer" == guarded.read(database, ticket)


def test_tokens_are_compared_to_the_last_digit(engine: Engine, ticket: int) -> None:
    """As numbers, and exactly: as texts 9 is above 10; a double's text may lack digits."""
    guarded, where = engine
    with closing(guarded.connect(where)) as database:
        assert guarded.write(database, ticket, "9", fencing_token=9)
        assert guarded.write(database, ticket, "10", fencing_token=10)
        assert guarded.write(database, ticket, "largest", fencing_token=LARGEST)
        assert guarded.write(database, ticket, "again", fencing_token=LARGEST)
        assert not guarded.write(database, ticket, "one less", fencing_token=LARGEST - 1)
        assert "again" == guarded.read(database, ticket)


def test_the_largest_token_wins_whatever_the_order(engine: Engine, ticket: int) -> None:
    guarded, where = engine
    base = 1_790_000_000_000_000
    tokens = [base + number for number in range(40)]
    random.shuffle(tokens)

    def write_all(share: list[int]) -> None:
        with closing(guarded.connect(where)) as database:
            for token in share:
                guarded.write(database, ticket, str(token), fencing_token=token)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write_all, [tokens[n::4] for n in range(4)]))

    with closing(guarded.connect(where)) as database:
        assert str(base + 39) == guarded.read(database, ticket)


@pytest.mark.timeout(90)
def test_the_sleeper_is_refused_on_every_engine() -> None:
    if not engines.redis_binaries():
        pytest.skip("no redis-server on PATH, and none in a package for this machine")
    lines = show("guarded-writes")

    for name in ("sqlite", "postgresql", "redis"):
        assert [
            f"{name}: holder True",
            f"{name}: again True",
            f"{name}: sleeper False",
            f"{name}: on and off",
        ] == [line for line in lines if line.startswith(name)]


def test_the_recipes_for_other_stores_say_that_nothing_runs_them() -> None:
    recipes = (EXAMPLES / "guarded-writes" / "recipes.md").read_text(encoding="utf-8")

    for store in ("MySQL", "S3", "DynamoDB", "MongoDB"):
        assert store in recipes
