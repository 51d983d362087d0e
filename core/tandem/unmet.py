"""One thing that keeps a job from running where it is to run, or that makes it run otherwise than it looks."""

from dataclasses import dataclass

from tandem.manifest.fields import Path


@dataclass(frozen=True)
class Unmet:
    """What was found, at the field of the manifest that it is about."""

    field: Path
    """Path of the field, from the top of the manifest; empty where it is about no field."""
    message: str
    """What is wrong and what to do, in a sentence without its full stop."""
    fails: bool = True
    """Whether the job cannot run. If not, it is a warning: the job runs, and perhaps not as it was meant."""
    suggestion: str = ""
    """What was probably meant."""
