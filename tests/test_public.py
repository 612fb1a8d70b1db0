"""The names that scripts import from the package itself."""

import roundoff


def test_every_public_name_is_there_and_is_the_rooms_own() -> None:
    for name in roundoff.__all__:
        assert getattr(roundoff, name) is not None
    assert roundoff.max_diff.__module__.startswith("roundoff.compare")
    assert set(dir(roundoff)) == set(roundoff.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(roundoff, "nothing")
