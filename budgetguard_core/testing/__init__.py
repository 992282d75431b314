"""What users and adapters test with: a manual clock, scripted replies, the conformance suite."""

from budgetguard_core.testing.clock import ManualClock

__all__ = ["ManualClock"]
