from collections.abc import Iterator

import pytest

from program import Warm


@pytest.fixture(scope="session")
def sqrtdk() -> Iterator[Warm]:
    """`sqrtdk check`, each call a process of its own."""
    with Warm() as warm:
        yield warm
