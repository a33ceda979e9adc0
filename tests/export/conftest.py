"""The fixture that runs checkpoints in a process without this package."""

from tests.checkpoint.conftest import fresh as fresh
