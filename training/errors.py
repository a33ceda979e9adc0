"""What training scripts report in one line."""

from __future__ import annotations


class SettingsError(ValueError):
    """A setting that cannot work; the message says why and what to do."""
