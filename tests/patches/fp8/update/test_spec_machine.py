"""Any sequence of senders, faults, sleeps and requests, on toys: see `update_machine`; on engines: `test_spec_machine` of vllm."""

import logging

import pytest
from update_machine import TwoRanks, Updates, run


@pytest.fixture(autouse=True)
def quiet(caplog):
    """What the core logs about faults that are meant."""
    caplog.set_level(logging.CRITICAL, logger="flashpatch.fp8")


def test_any_sequence():
    run(Updates, 300, 32, 20)


def test_any_sequence_on_two_ranks():
    run(TwoRanks, 60, 12, 12)


@pytest.mark.full
def test_ten_thousand_operations():
    run(Updates, 10_000, 400, 40)


@pytest.mark.full
def test_a_thousand_operations_on_two_ranks():
    run(TwoRanks, 1_000, 80, 40)
