"""Reading a file of settings."""

from __future__ import annotations

from pathlib import Path

from training.errors import SettingsError

#: Bytes that a file of settings may have. YAML takes seconds for a megabyte.
LARGEST_SETTINGS = 2**20


def settings_text(path: Path) -> str:
    """The text of a file of settings.

    Raises:
        SettingsError: for a file that cannot be read, is no text, or is larger than settings ever are.
    """
    try:
        size = path.stat().st_size
        if size > LARGEST_SETTINGS:
            raise SettingsError(f"{path} holds {size} bytes; settings have at most {LARGEST_SETTINGS}.")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"Cannot read the settings {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not text in UTF-8: {error}.") from error
