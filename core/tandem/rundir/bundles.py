"""Bundles: copies of many small files of a run in a few objects, for a pod that has none of them yet.

    bundles/000000   the contents of up to MAX_FILES results of evaluations, each with the version of its object

A long run has thousands of results, and each is an object of its own: it is created once, by whichever pod was first. A
new pod would need a request for each. The coordinator's pod therefore writes copies of them. The last bundle is
replaced as it grows; a full one is never changed.

**A bundle decides nothing.** A copy counts only if the listing has an object of that name in that version; everything
else is read as if there were no bundles. So a result that was deleted or replaced meanwhile, a bundle that is damaged,
and one of an earlier coordinator cost requests, and nothing else.

Rejected: results in bundles alone (each pod may delete a result that cannot be right, and of two that write one the
first counts: what creating an object decides would need a protocol of its own).
"""

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from pydantic import ValidationError

from tandem.model import Model
from tandem.rundir.durable import encode
from tandem.rundir.store import Content, ListedObject, Stale, Store
from tandem.rundir.sync_state import tag_of

BUNDLES = "bundles"
BUNDLED = "evaluations/"
"""Folder whose files are bundled: the only one that grows with the length of a run."""
MAX_FILES = 1000
MAX_BYTES = 4 * 2**20
"""Bytes of contents in a bundle."""
MAX_FILE_BYTES = 64 * 2**10
"""Size in bytes up to which a file is bundled."""
STEP = 50
"""Number of new files after which a bundle is written. A reader reads fewer files one by one."""
_NAME = re.compile(rf"{BUNDLES}/[0-9]{{6}}")


class BundledFile(Model):
    """A copy of an object."""

    version: dict[str, str]
    content: str


class Bundle(Model):
    """The content of a bundle."""

    files: dict[str, BundledFile] = {}
    """Copies, by the names of their objects."""


def bundled_contents(
    store: Store, listing: Mapping[str, ListedObject], objects: Iterable[ListedObject]
) -> dict[str, Content]:
    """The contents of objects as far as bundles have them; none if reading the bundles would save no requests.

    Args:
        listing: all objects.

    Raises:
        StoreAccessError, StoreUnavailableError: a bundle cannot be read.
    """
    tags = {entry.name: tag_of(entry.version) for entry in objects if entry.name.startswith(BUNDLED)}
    names = [name for name in listing if _NAME.fullmatch(name)]
    if len(tags) <= len(names):
        return {}
    return {
        name: Content(file.content.encode(), file.version, "")
        for bundle_name in sorted(names)
        for name, file in _read(store, bundle_name)[0].items()
        if tags.get(name) == tag_of(file.version)
    }


def _read(store: Store, name: str) -> tuple[dict[str, BundledFile], Mapping[str, str] | None]:
    """The files in a bundle, none if it is damaged or gone, and its version."""
    content = store.read(name)
    if content is None:
        return {}, None
    with suppress(ValidationError):
        return Bundle.read_json(content.data).files, content.version
    return {}, content.version


class BundleWriter:
    """Writes the bundles of a run. One process of the job has one; what a second one would write counts as well."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tags: dict[str, str] | None = None
        """Versions of the objects that are bundled, or never will be; None: not known yet."""
        self._number = 0
        self._files: dict[str, BundledFile] = {}
        """Files of the last bundle."""
        self._version: Mapping[str, str] | None = None
        """Version of the last bundle; None: it is not written yet."""

    def write(self, versions: Mapping[str, Mapping[str, str]], read: Callable[[str], bytes | None]) -> None:
        """Bundle what is not bundled yet, if it is worth a request.

        Args:
            versions: of the objects in BUNDLED, by name.
            read: returns the content of one of them; None if it is not known.

        Raises:
            StoreAccessError, StoreUnavailableError: the bucket does not answer; the next call continues.
        """
        if len(versions) < STEP:
            return
        tags = self._tags = self._survey() if self._tags is None else self._tags
        new = [name for name, version in versions.items() if tags.get(name) != tag_of(version)]
        if len(new) < STEP:
            return
        size = sum(len(file.content) for file in self._files.values())
        for name in new:
            content = read(name)
            if content is None:
                continue
            with suppress(UnicodeDecodeError):
                if len(content) <= MAX_FILE_BYTES:
                    self._files[name] = BundledFile(version=dict(versions[name]), content=content.decode())
                    size += len(content)
            if len(self._files) >= MAX_FILES or size >= MAX_BYTES:
                self._put()
                self._number, self._files, self._version, size = self._number + 1, {}, None, 0
        if self._files:
            self._put()
        if self._tags is not None:
            tags.update((name, tag_of(versions[name])) for name in new)

    def _survey(self) -> dict[str, str]:
        """Read the bundles that are there."""
        tags: dict[str, str] = {}
        self._number, self._files, self._version = 0, {}, None
        for entry in self._store.entries(f"{BUNDLES}/"):
            if _NAME.fullmatch(entry.name):
                self._number = int(entry.name.rpartition("/")[2])
                self._files, self._version = _read(self._store, entry.name)
                tags.update((name, tag_of(file.version)) for name, file in self._files.items())
        return tags

    def _put(self) -> None:
        name = f"{BUNDLES}/{self._number:06d}"
        try:
            self._version = self._store.replace(name, encode(Bundle(files=self._files).dump()), self._version)
        except Stale:
            # Another coordinator has written it: the next call reads what it has.
            self._tags = None
