"""What the user has to change before the job can work."""


class ConfigurationError(Exception):
    """The job cannot work as it is written; says what to change. Never retried."""

    reason = "ConfigurationError"
    """What the job's status calls it."""
