"""Errors that training scripts report in one line."""

from __future__ import annotations


class SettingsError(ValueError):
    """An invalid setting. The message says why, and what to do."""
