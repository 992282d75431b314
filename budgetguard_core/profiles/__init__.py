"""Named envelopes in a file: profiles, overlays for environments, and who wins over whom.

A value is taken from the first of these that has it: the program's own `Budget`, environment
variables (`BUDGETGUARD_MAX_COST_USD=5`), the overlay, the profile.
"""

from budgetguard_core.budget import ProfileId
from budgetguard_core.profiles.profile import Profile
from budgetguard_core.profiles.profiles import Profiles, examples, find_file, load_profile
from budgetguard_core.profiles.task import Selector, Task

__all__ = [
    "Profile",
    "ProfileId",
    "Profiles",
    "Selector",
    "Task",
    "examples",
    "find_file",
    "load_profile",
]
