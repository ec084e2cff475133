"""Why a backend may not serve a request: one filter a file, and the closed list of words they say it in."""

from enum import StrEnum


class Rejection(StrEnum):
    """Why a backend was passed over. The same word stands in the response header, the metric label and the log."""

    OTHER_MODEL = "other_model"
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"
    CONTEXT_TOO_SMALL = "context_too_small"
    QUALITY_TOO_LOW = "quality_too_low"
    BACKING_OFF = "backing_off"
    """It was overloaded a moment ago, and named no time."""
    SILENCE_ASKED = "silence_asked"
    """It named the time until when it wants none, and the time is not over."""
    ALREADY_TRIED = "already_tried"
    """It failed this very request before."""


SOFT = frozenset({Rejection.BACKING_OFF, Rejection.ALREADY_TRIED})
"""Reasons to go elsewhere first, not to refuse: they give way where no other backend is left (`pipeline.decide`)."""
