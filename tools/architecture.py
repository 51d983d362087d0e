"""The picture of a job's architecture: its processes, their connections, and the files on the disk.

It contains its colours for light and dark mode, so it fits any page that shows it as an image.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from tandem_coordinator.charts.chart import Role, variables

WIDTH, HEIGHT = 960, 566
LINE = 18
"""Pixels from one line of text to the next."""


@dataclass(frozen=True)
class Box:
    """A process, or a storage, with its name and its role."""

    x: float
    y: float
    width: float
    height: float
    name: str
    does: tuple[str, ...] = ()
    role: Role = "ink"
    dashed: bool = False
    """Whether it exists on some platforms only."""

    def svg(self) -> Iterator[str]:
        """The SVG elements."""
        dashes = ' stroke-dasharray="6 4"' if self.dashed else ""
        yield (
            f'<rect x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" rx="8" '
            f'fill="var(--paper)" stroke="var(--{self.role})" stroke-width="1.6"{dashes}/>'
        )
        middle = self.x + self.width / 2
        first = self.y + (self.height - LINE * len(self.does)) / 2 + 5
        yield _text(middle, first, self.name, self.role, bold=True)
        for number, line in enumerate(self.does, 1):
            yield _text(middle, first + LINE * number, line, "muted")


@dataclass(frozen=True)
class Arrow:
    """A connection, with a label for what it carries."""

    path: tuple[tuple[float, float], ...]
    label: tuple[str, ...]
    position: tuple[float, float]
    """Position of the first line of the label."""
    anchor: str = "start"
    both: bool = False
    """Whether both ends send."""

    def svg(self) -> Iterator[str]:
        """The SVG elements."""
        points = " ".join(f"{x},{y}" for x, y in self.path)
        start = ' marker-start="url(#head)"' if self.both else ""
        style = 'fill="none" stroke="var(--other)" stroke-width="1.4"'
        yield f'<polyline points="{points}" {style} marker-end="url(#head)"{start}/>'
        x, y = self.position
        for number, line in enumerate(self.label):
            yield _text(x, y + LINE * number, line, "muted", anchor=self.anchor)


YOU = Box(30, 20, 240, 70, "you", ("tandem run, submit; kubectl",))
OPERATOR = Box(360, 20, 240, 70, "operator", ("one for a cluster; makes pods",), "other", dashed=True)
VIEWS = Box(690, 20, 240, 70, "your screens", ("live page, Prometheus, Grafana",))
COORDINATOR = Box(360, 180, 240, 70, "coordinator", ("one for a job; who is in the group",), "checkpoint")
WORKERS = Box(30, 150, 240, 276, "", (), "trainer")
AGENT = Box(46, 186, 208, 54, "agent", ("torchrun with our rendezvous",), "trainer")
RANKS = Box(46, 278, 208, 54, "ranks", ("forward, backward, optimizer",), "trainer")
WRITER = Box(46, 370, 208, 40, "checkpoint writer", (), "trainer")
EVALUATORS = Box(690, 278, 240, 70, "evaluators", ("on CPUs; each a part of the data",), "evaluator")
DISK = Box(
    30,
    480,
    900,
    66,
    "run directory, on a disk that all share",
    ("job · generations · checkpoints with checksums · evaluations · leases · logs",),
    "gpu",
)
BOXES = (YOU, OPERATOR, VIEWS, COORDINATOR, AGENT, RANKS, WRITER, EVALUATORS, DISK)
ARROWS = (
    Arrow(((270, 55), (360, 55)), ("manifest",), (315, 46), "middle"),
    Arrow(((480, 90), (480, 180)), ("pods; asks how the job is",), (490, 140), both=True),
    Arrow(((600, 215), (810, 215), (810, 90)), ("status, metrics",), (822, 150)),
    Arrow(((254, 213), (360, 213)), ("heartbeats",), (315, 204), "middle", both=True),
    Arrow(((150, 240), (150, 278)), ("starts, watches",), (162, 263), both=True),
    Arrow(((254, 305), (318, 305)), ("NCCL, gloo", "other workers"), (324, 301), both=True),
    Arrow(((150, 332), (150, 370)), ("one copy",), (162, 355)),
    Arrow(((150, 410), (150, 480)), ("parts, then one rename",), (162, 456)),
    Arrow(((480, 250), (480, 480)), ("records generations;", "reads logs and scores"), (490, 370), both=True),
    Arrow(((810, 348), (810, 480)), ("reads weights,", "claims, publishes"), (822, 410), both=True),
)


def _text(x: float, y: float, text: str, role: Role, *, bold: bool = False, anchor: str = "middle") -> str:
    size, weight = (15, 600) if bold else (12.5, 400)
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
        f'fill="var(--{role})">{escape(text)}</text>'
    )


def architecture_svg() -> str:
    """The picture, as an SVG file."""
    # Elements in the background come first: the frame of a worker, and arrows, which end at boxes.
    shapes = [line for shape in (WORKERS, *ARROWS, *BOXES) for line in shape.svg()]
    shapes.append(_text(150, 173, "worker × replicas", "trainer", bold=True))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            "<title>The processes of a job, and the run directory that they share</title>",
            f"<style>{variables()}text {{ font-family: var(--font) }}</style>",
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path d="M0,1 L10,5 L0,9 z" fill="var(--other)"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="var(--paper)"/>',
            *shapes,
            "</svg>\n",
        ]
    )
