"""Handoff of a stopped run: to a person, a queue, a webhook, or a cheaper model."""

from budgetguard_core.handoff.fallback import Fallback
from budgetguard_core.handoff.folder import Folder
from budgetguard_core.handoff.handoff import Handoff, Target
from budgetguard_core.handoff.record import HandedOver
from budgetguard_core.handoff.webhook import Webhook

__all__ = ["Fallback", "Folder", "HandedOver", "Handoff", "Target", "Webhook"]
