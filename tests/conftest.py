"""Fixtures and options for all tests."""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

torch.set_num_threads(1)  # the tensors are small: threads would only cost time

hypothesis.settings.register_profile("dev", max_examples=50, deadline=None)
hypothesis.settings.register_profile("ci", max_examples=500, deadline=None)
hypothesis.settings.register_profile("nightly", max_examples=10_000, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the choice of the device to test on."""
    parser.addoption(
        "--device", choices=("cpu", "cuda"), default="cpu", help="the device to test on"
    )


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return the device to test on, or skip where there is none."""
    name: str = request.config.getoption("--device")
    if name == "cuda" and not torch.cuda.is_available():
        if os.environ.get("CHUNKCHECK_REQUIRE_CUDA") == "1":
            pytest.fail("CHUNKCHECK_REQUIRE_CUDA=1, but torch finds no CUDA device")
        pytest.skip("torch finds no CUDA device")
    return torch.device(name)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Start each test from the same random state."""
    torch.manual_seed(0)
