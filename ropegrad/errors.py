"""The one error that bad input raises."""


class SpecError(ValueError):
    """The arrays or options do not describe a RoPE problem; says what was passed and what would be right.

    Raised before any work: nothing has been written.
    """
