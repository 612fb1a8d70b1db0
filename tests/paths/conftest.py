"""What a user does, as a user does it: from the printed line to its result, against the truth."""

from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a GPU its tests are skipped."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def _switches_as_they_were() -> Iterator[None]:
    """A snippet may set torch's switches, and a page its threads: they are put back."""
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    threads = torch.get_num_threads()
    yield
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = cudnn
    torch.set_num_threads(threads)


@pytest.fixture
def fresh() -> Iterator[None]:
    """What is compiled is compiled anew."""
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()
