"""Outcomes live as long as the result that they belong to."""

import gc
import weakref

import pytest

from budgetguard_core import Budget
from budgetguard_core.kit import Envelope, outcome_of, remember


class Message:
    pass


def outcome(messages=()):
    return Envelope(budget=Budget()).open().end(messages, "final")


def test_an_outcome_is_found_and_gets_its_messages_back():
    message = Message()
    ended = outcome([message])
    remember(message, ended)
    assert outcome_of(message, messages=[message], final="final") == ended


def test_an_unknown_result_has_none():
    assert outcome_of(Message()) is None
    assert outcome_of(None) is None


@pytest.mark.slow
def test_nothing_is_kept_when_the_result_is_gone():
    message = Message()
    remember(message, outcome([message]))
    gone = weakref.ref(message)
    del message
    gc.collect()
    assert gone() is None


def test_an_object_at_the_same_address_is_not_taken_for_the_result():
    first = Message()
    remember(first, outcome())
    remember(first, outcome())
    other = Message()
    assert outcome_of(other) is None


def test_an_exception_carries_its_outcome():
    error, ended = ValueError(), outcome()
    remember(error, ended)
    assert outcome_of(error) is ended
