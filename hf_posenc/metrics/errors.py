"""What cannot be measured."""

from hf_posenc.errors import PositionEncodingError


class MeasurementError(PositionEncodingError, ValueError):
    """A sentence, a swap or a tokenizer with which the measurement would mean nothing."""
