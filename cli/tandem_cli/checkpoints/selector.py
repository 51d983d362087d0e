"""Resolves a word to a checkpoint: its name, a step, `latest`, `best` or `final`."""

from difflib import get_close_matches

from tandem.errors import UserError, enumerated
from tandem.rundir.checkpoint import Manifest
from tandem.rundir.layout import checkpoint_name
from tandem_cli.checkpoints.inventory import Entry, Inventory

WORDS = ("latest", "best", "final")


def choose(inventory: Inventory, word: str) -> Entry:
    """The checkpoint meant.

    Raises:
        UserError: there is no such one; names those that may have been meant.
    """
    run = inventory.rundir.path
    if not inventory.entries:
        raise UserError(f"{run} has no checkpoints")
    if word in WORDS:
        return _special(inventory, word)
    wanted = checkpoint_name(int(word)) if word.isascii() and word.isdecimal() else word.rstrip("/")
    for entry in inventory.entries:
        if entry.name == wanted:
            return entry
    raise UserError(f"{run} has no checkpoint {_shown(word)}{_nearest(inventory, wanted)}")


def sound(inventory: Inventory, word: str) -> tuple[Entry, Manifest]:
    """The checkpoint meant, which must be one that can be read, and its manifest.

    Raises:
        UserError: there is no such one, or it is damaged or set aside.
    """
    entry = choose(inventory, word)
    if entry.manifest is None:
        how = "was set aside" if entry.state in ("bad", "stale") else "cannot be used"
        raise UserError(f"{entry.name} {how}{f': {entry.why}' if entry.why else ''}. {known(inventory)}")
    return entry, entry.manifest


def counting(inventory: Inventory) -> list[tuple[Entry, Manifest]]:
    """All checkpoints that count, oldest first, with their manifests.

    Raises:
        UserError: there are none.
    """
    found = [(entry, entry.manifest) for entry in inventory.entries if entry.state == "counts"]
    sound = [(entry, manifest) for entry, manifest in found if manifest is not None]
    if not sound:
        raise UserError(f"{inventory.rundir.path} has no checkpoint that counts. {known(inventory)}")
    return sorted(sound, key=lambda one: one[0].step)


def known(inventory: Inventory, most: int = 5) -> str:
    """The checkpoints there are, as a sentence."""
    names = [entry.name for entry in inventory.entries if entry.manifest]
    return f"There are: {enumerated(names, most)}" if names else "No other can be read"


def _special(inventory: Inventory, word: str) -> Entry:
    run = inventory.rundir.path
    marked = {"latest": "is_latest", "best": "is_best", "final": "is_final"}[word]
    for entry in inventory.entries:
        if getattr(entry, marked):
            return entry
    if word == "latest":
        raise UserError(f"{run} has no checkpoint that counts. {known(inventory)}")
    if word == "final" and inventory.final is None:
        raise UserError(f"{run} has no final checkpoint: training is not complete. `latest` is the newest one")
    gone = inventory.final if word == "final" else inventory.lost_best
    if gone:
        raise UserError(f"the {word} checkpoint of {run}, {gone}, is not there any more. {known(inventory)}")
    raise UserError(f"{run} has no best checkpoint: none of those there has been evaluated. {known(inventory)}")


def _nearest(inventory: Inventory, wanted: str) -> str:
    """The end of a sentence that names what is near."""
    names = [entry.name for entry in inventory.entries]
    digits = wanted.removeprefix("step-").partition(".")[0]
    if digits.isascii() and digits.isdecimal():
        near = sorted(inventory.entries, key=lambda entry: abs(entry.step - int(digits)))[:2]
        if near[0].step == int(digits):
            return f". Did you mean {near[0].name}?"
        return f". The nearest: {', '.join(sorted(entry.name for entry in near))}"
    close = get_close_matches(wanted.lower(), [*WORDS, *names], n=1, cutoff=0.6)
    if close:
        return f". Did you mean {close[0]}?"
    return f"; give a name, a step, or one of {', '.join(WORDS)}. {known(inventory)}"


def _shown(word: str) -> str:
    return f"of step {int(word):,}" if word.isascii() and word.isdecimal() else word[:80]
