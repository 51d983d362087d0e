"""What the user has to change before the job can work."""


class ConfigurationError(Exception):
    """The job cannot work as it is written; says what to change. Never retried."""

    reason = "ConfigurationError"
    """What the job's status calls it."""


class UnusableInput(ConfigurationError):  # noqa: N818 - it is what is the case
    """Data or weights that the job names are not there, may not be read, or are not what they should be.

    Once a generation has trained with them, only the process that finds them so is at fault, or its machine.
    """
