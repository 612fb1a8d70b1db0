import pickle

import pytest

from roundoff import errors


@pytest.mark.parametrize("name", [n for n in errors.__all__ if n != "RoundoffError"])
def test_each_error_is_ours_and_a_builtin(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.RoundoffError)
    assert kind.__mro__[1] is errors.RoundoffError
    builtin = (ValueError, TypeError, RuntimeError, ImportError, MemoryError)
    assert issubclass(kind, builtin)


def test_an_error_survives_a_process_boundary() -> None:
    error = pickle.loads(pickle.dumps(errors.ArgumentError("size", got=0, hint="use 2")))
    assert isinstance(error, errors.ArgumentError)
    assert (error.got, error.hint, str(error)) == (0, "use 2", "size: got 0; try: use 2")
