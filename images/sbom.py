"""Writes an image's software bill of materials, in CycloneDX's JSON: `sbom.py NAME OVERLAY`.

Lists the Python packages by their installed metadata, Python itself, and the Debian packages of the base. Runs while an
image is built, on the Python that the packages are installed in: so the list is that of the image, whatever the index
and the constraints were, and each platform has its own. The file is the same for the same content: it has no time and
no serial number.

Two things are not listed: what a package holds inside (torch brings libraries of NVIDIA's and others), and the files
that `cpu_only.py` has removed from one.
"""

import json
import platform
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

FILE = "opt/tandem/sbom.cdx.json"
"""The file in the image."""
DISTRIBUTION = "tandem-training"
MAX_LICENSE_LENGTH = 80
"""Old packages have the whole text of their license in the field for its name."""

Component = dict[str, Any]


def python_packages(folders: Iterable[Path]) -> Iterator[Component]:
    """The distributions that are installed in some folders. A name that stands in two is that of the first."""
    known: set[str] = set()
    for distribution in metadata.distributions(path=[str(folder) for folder in folders]):
        name = distribution.metadata["Name"]
        normalized = re.sub(r"[-_.]+", "-", name).lower()
        if normalized not in known:
            known.add(normalized)
            found = _component(name, distribution.version, f"pkg:pypi/{normalized}@{quote(distribution.version)}")
            yield found | _licenses(distribution)


def debian_packages(root: Path) -> Iterator[Component]:
    """The installed packages of a Debian; none if it is another system."""
    status, release = root / "var/lib/dpkg/status", root / "etc/os-release"
    if not status.is_file():
        return
    system = dict(line.split("=", 1) for line in release.read_text().splitlines() if "=" in line)
    distribution, version = (system.get(key, "").strip('"') for key in ("ID", "VERSION_ID"))
    for paragraph in status.read_text(errors="replace").split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version|Architecture|Status): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            address = f"pkg:deb/{distribution}/{fields['Package']}@{quote(fields['Version'], safe='')}"
            address += f"?arch={fields['Architecture']}&distro={distribution}-{version}"
            yield _component(fields["Package"], fields["Version"], address)


def document(name: str, version: str, components: Iterable[Component]) -> dict[str, Any]:
    """The bill of materials of an image."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "container", "bom-ref": name, "name": name, "version": version}},
        "components": sorted(components, key=lambda component: str(component["bom-ref"])),
    }


def _component(name: str, version: str, address: str) -> Component:
    return {"type": "library", "bom-ref": address, "name": name, "version": version, "purl": address}


def _licenses(distribution: metadata.Distribution) -> Component:
    fields = distribution.metadata
    if expression := fields.get("License-Expression"):
        return {"licenses": [{"expression": expression}]}
    text = (fields.get("License") or "").strip()
    is_name = 0 < len(text) <= MAX_LICENSE_LENGTH and "\n" not in text and text != "UNKNOWN"
    return {"licenses": [{"license": {"name": text}}]} if is_name else {}


def main(name: str, overlay: Path, root: Path = Path("/")) -> None:
    """Write the file into the overlay, whose packages are those of the last layer.

    Args:
        root: folder with the Debian.
    """
    site = Path(sysconfig.get_path("purelib"))
    own = overlay / site.relative_to("/")
    # pip may have put others beside it.
    (tandem,) = metadata.distributions(name=DISTRIBUTION, path=[str(own)])
    python = platform.python_version()
    components = [
        *python_packages([own, site]),
        _component("python", python, f"pkg:generic/python@{quote(python)}"),
        *debian_packages(root),
    ]
    path = overlay / FILE
    path.write_text(json.dumps(document(name, tandem.version, components), indent=1) + "\n")
    print(f"listed {len(components)} packages in /{FILE}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
