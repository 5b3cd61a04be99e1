"""What all tests share: examples of hypothesis have no time limit, so that a busy machine fails nothing."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("epee", settings.default, deadline=None)
settings.load_profile("epee")
