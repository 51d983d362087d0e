"""Images of the previous version: the present ones with its sources in the place of ours, so that they are built in
seconds. What they install differs in nothing that the tests are about."""

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

from tests.support.cluster.images import GIVEN, ISOLATION, Images
from tests.support.cluster.machine import ClusterError
from tests.support.cluster.machine import images as registry
from tests.support.cluster.machine.places import REGISTRY
from tests.support.previous import ARCHIVE, Previous

PREVIOUS_GIVEN = "TANDEM_PREVIOUS_IMAGES"
DOCKERFILE = """\
FROM {image}
USER 0:0
{copies}
RUN site="$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \\
    && find "$site" -maxdepth 1 -name 'tandem*' ! -name '*.dist-info' -exec rm -r {{}} + \\
    && cp -r /previous/* "$site" && rm -r /previous \\
    && python -m compileall -qq "$site/tandem" "$site"/tandem_*
USER 65532:65532
"""
BUILD_SECONDS = 300


def provide(present: Images, previous: Previous) -> Images:
    """Have the cluster's nodes find them.

    Raises:
        ClusterError: one cannot be built, or was not given for a cluster of your own.
    """
    if given := os.environ.get(PREVIOUS_GIVEN):
        return Images(**{name: given.format(name=name) for name in vars(present)})
    if GIVEN in os.environ:
        raise ClusterError(f"with {GIVEN}, set {PREVIOUS_GIVEN}, too: the images of the version before")
    found = Images(**{name: _built(name, image, previous) for name, image in vars(present).items()})
    registry.load(*vars(found).values())
    return found


def _installed(previous: Previous) -> list[str]:
    """The rooms that its images hold: those that it let a build see."""
    seen = (previous.folder / ".dockerignore").read_text().splitlines()
    return [room for room in previous.rooms if f"!{room}" in seen]


def _built(name: str, image: str, previous: Previous) -> str:
    copies = []
    for room in _installed(previous):
        (folder,) = [one for one in (previous.folder / room).iterdir() if one.is_dir() and one.suffix != ".dist-info"]
        copies.append(f"COPY {room}/{folder.name} /previous/{folder.name}")
    recipe = DOCKERFILE.format(image=image, copies="\n".join(copies))
    digest = hashlib.sha256(recipe.encode() + ARCHIVE.read_bytes()).hexdigest()[:16]
    wanted = f"{REGISTRY}/tandem-previous-{name}:{digest}"
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "Dockerfile"
        file.write_text(recipe)
        command = ["buildah", "bud", "--layers", f"--file={file}", f"--tag={wanted}", str(previous.folder)]
        built = subprocess.run(
            command, env={**os.environ, **ISOLATION}, capture_output=True, text=True, timeout=BUILD_SECONDS
        )
    if built.returncode != 0:
        raise ClusterError(f"{wanted} cannot be built: {built.stderr[-2000:]}")
    return wanted
