import volcano_sdk
from volcano_sdk.errors import LockLostError, TransportError, VolcanoError, chain, put_beside


def test_the_tree_is_as_it_is_drawn() -> None:
    tree = {
        name: [base.__name__ for base in kind.__mro__[1:-3]]
        for name in volcano_sdk.__all__
        if isinstance(kind := getattr(volcano_sdk, name), type) and issubclass(kind, Exception)
    }

    assert tree.pop("VolcanoError") == []
    assert tree.pop("PermissionDeniedError") == ["AuthenticationError", "VolcanoError"]
    assert len(tree) == 8
    assert set(map(tuple, tree.values())) == {("VolcanoError",)}


def test_what_an_error_did_not_come_with_is_none() -> None:
    error = VolcanoError("a sentence")
    assert (error.status, error.code, error.retry_after, error.request_id) == (None,) * 4


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:  # noqa: BLE001
        return caught


def test_a_companion_travels_at_the_end_of_the_chain_and_as_a_note() -> None:
    deepest, loss = ValueError("deepest"), LockLostError("lost")
    error = raised(KeyError("the body's"), deepest)

    put_beside(error, loss)

    assert chain(error) == [error, deepest, loss]
    assert error.__notes__ == ["LockLostError: lost"]


def test_a_companion_that_was_raised_while_the_error_was_handled_makes_no_circle() -> None:
    error = KeyError("the body's")
    try:
        try:
            raise error
        finally:
            raise TransportError("no answer")
    except TransportError as caught:
        companion = caught
    assert companion.__context__ is error

    put_beside(error, companion)

    assert chain(error) == [error, companion]


def test_a_companion_that_is_there_already_is_not_added() -> None:
    loss = LockLostError("lost")
    error = raised(KeyError("from the loss"), loss)

    put_beside(error, loss)
    put_beside(loss, loss)

    assert chain(error) == [error, loss]
    assert not hasattr(error, "__notes__")


def test_an_error_raised_from_none_has_its_companion_too() -> None:
    error = KeyError("from none")
    error.__context__ = ValueError("hidden")
    error.__suppress_context__ = True
    assert chain(error) == [error]

    loss = LockLostError("lost")
    put_beside(error, loss)

    assert chain(error) == [error, loss]
