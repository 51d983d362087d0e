"""The console of all commands: whatever it is given to draw, only printable characters and its own styles come out."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from tandem.printable import printable


class PrintableConsole(Console):
    """A rich console. Texts are made printable where they become segments, so that no caller can forget it."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of something that rich can draw."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
