"""The vLLM environment and the tiny model of the end-to-end tests."""

from tests.e2e.conftest import model, python

__all__ = ["model", "python"]
