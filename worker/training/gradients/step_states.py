"""State table of one optimizer's steps: whether gradients may be averaged, or are averages already. Pure."""

from __future__ import annotations

from typing import Final, Literal

from zenps.transitions import Transitions

StepState = Literal["open", "refused", "synchronized", "partial"]
StepEvent = Literal[
    "gradient",
    "refused",
    "ended",
    "averaged",
    "averaged in part",
    "warned",
    "consumed",
]

STEP: Final[Transitions[StepState, StepEvent]] = {
    "open": {
        "gradient": "open",
        "refused": "refused",
        "ended": "open",
        "averaged": "synchronized",
        "averaged in part": "partial",
        "consumed": "open",
    },
    "refused": {
        "gradient": "refused",
        "refused": "refused",
        "ended": "open",
        "consumed": "refused",
    },
    "synchronized": {
        "gradient": "open",
        "refused": "refused",
        "ended": "synchronized",
        "averaged": "synchronized",
        "averaged in part": "partial",
        "consumed": "open",
    },
    "partial": {
        "gradient": "open",
        "refused": "refused",
        "ended": "partial",
        "averaged": "synchronized",
        "averaged in part": "partial",
        "warned": "synchronized",
        "consumed": "open",
    },
}
"""The steps of one optimizer, one after the other.

``open``: the step awaits gradients, or has some. ``refused``: an error has ended it before its averages,
perhaps on this rank alone: then the others wait for its gradients. ``synchronized``: gradients are averages,
which ``step()`` applies. ``partial``: likewise, but residuals have kept a part of each, which would be pushed
with the next gradients if the averages were dropped.

``gradient``: backward has computed one. ``refused``: backward, ``synchronize()`` or ``zero_grad()`` has
raised. ``ended``: ranks end the step, with or without this rank's gradients; averages that are there stay.
``averaged``, ``averaged in part``: by ``synchronize()``. ``warned``: ``zero_grad()`` has raised for what
residuals have kept; the next call drops the averages all the same. ``consumed``: gradients were applied or
dropped.

Whether backward has run is not a state of its own: a refused step may have no gradient at all, and
``BackwardPasses`` counts them anyway.
"""

SYNCHRONIZED: Final[tuple[StepState, ...]] = ("synchronized", "partial")
"""The states in which gradients are averages."""
