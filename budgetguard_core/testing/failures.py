"""How the suite says that something is wrong: with the adapter, or with its driver."""


class NonConformance(AssertionError):
    """A clause does not hold through a driver."""


class DriverError(Exception):
    """A driver does not do what a scenario says, so that the suite cannot tell anything."""


def expect(condition: object, message: str) -> None:
    """Raise `NonConformance` unless the condition holds."""
    if not condition:
        raise NonConformance(message)
