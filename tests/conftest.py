"""What every test may count on: one event loop library, no clock in Hypothesis, and the root of the checkout.

And what `scripts/test` counts on: a test that wants the cores to itself is marked so (see `tests.real_time`).
"""

from pathlib import Path

import pytest
from hypothesis import settings

import compiled
from tests.real_time import RealTime

# Contracts assert in a module that no test file is: several import it, and all want to read what failed.
pytest.register_assert_rewrite("tests.contracts.execution_engine")

# Before any test file imports what may be compiled: `HEADRACE_COMPILED=… pytest` tests that form.
compiled.load()

ROOT = Path(__file__).resolve().parent.parent

# A busy machine is no bug: examples are bounded in number, never in wall time.
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RealTime(ROOT / "tests"))


@pytest.fixture
def anyio_backend() -> str:
    """`@pytest.mark.anyio` tests run on asyncio, the loop that the router runs on."""
    return "asyncio"


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout, for tests that read its files."""
    return ROOT
