"""Shared by the tests of the algorithms, which train one model, as the contract suite does."""

from keel.testing.test_contract import programs_are_recorded_once

__all__ = ["programs_are_recorded_once"]
