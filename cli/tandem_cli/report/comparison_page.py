"""Several runs side by side as one HTML page, in the manner of a report, and as a PNG file."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from tandem.distribution import version
from tandem.errors import UserError
from tandem.formatting import metric_name, printable, score, several
from tandem_cli.report import raster
from tandem_cli.report.comparison import Outcome, Row, best_label, winner
from tandem_cli.report.figures.compared import compared, labels
from tandem_cli.report.page import DrawnPicture, document, figure
from tandem_cli.report.run import Run
from tandem_cli.report.writing import replacing
from tandem_coordinator.charts import drawing
from tandem_coordinator.charts.chart import NARROW, WIDE, Look

TITLE = "Training loss and score"


class ComparisonPage:
    """What is told of several runs.

    Args:
        runs: two or more.
        outcomes: what became of each.
        rows: in what they differ, and their results.
        titles: what to call each.
    """

    def __init__(
        self, runs: Sequence[Run], outcomes: Sequence[Outcome], rows: Sequence[Row], titles: Sequence[str]
    ) -> None:
        self._runs, self._outcomes, self._rows = runs, outcomes, rows
        self._titles = [printable(title) for title in titles]
        self._charts = compared(runs, labels(titles))
        self._best = winner(runs, outcomes)

    def html(self) -> str:
        """The whole page."""
        body = [
            f'<header><div class="title"><h1>{escape(" · ".join(self._titles))}</h1></div>'
            f'<p class="lead">{escape(self._lead())}</p></header>',
            "<main>",
            self._figure(),
            self._table(),
            "</main>",
            f"<footer><p>Made by tandem compare {escape(version())} from "
            f"{escape(', '.join(printable(one.path) for one in self._outcomes))}.</p></footer>",
        ]
        return document(" · ".join(self._titles), body)

    def png(self) -> bytes:
        """The picture.

        Raises:
            UserError: there is nothing to draw.
        """
        if not self._charts:
            raise UserError("none of these runs has logged a step or a score, so there is nothing to draw")
        title = f"{TITLE}: {' · '.join(labels(self._titles))}"
        return raster.png(self._svg("png", WIDE), title if len(title) <= MAX_LETTERS else TITLE)

    def _svg(self, place: str, look: Look) -> str:
        return drawing.draw(f"compared-{place}", TITLE, self._finding(), self._charts, look)

    def _lead(self) -> str:
        told = f"{several(len(self._runs), 'run')} side by side."
        if self._best is not None and (value := self._outcomes[self._best].score) is not None:
            metric = self._outcomes[self._best].metric
            told += f" The best {metric_name(metric)} is {score(metric, value)}, of {self._titles[self._best]}."
        return told

    def _finding(self) -> str:
        """What has to be known to read the picture."""
        said = ["The loss is a running mean. Time counts from the beginning of each run, without its pauses."]
        metrics = list(dict.fromkeys(run.metric for run in self._runs))
        if len(metrics) > 1:
            by = "; ".join(
                f"{metric_name(printable(metric))}: "
                + ", ".join(title for run, title in zip(self._runs, self._titles, strict=True) if run.metric == metric)
                for metric in metrics
            )
            said.append(f"The runs are scored by different metrics, so their scores cannot be compared ({by}).")
        empty = [
            title
            for run, title in zip(self._runs, self._titles, strict=True)
            if not len(run.counted) and not any(one.evaluation for one in run.checkpoints)
        ]
        if empty:
            said.append(f"Without a step or a score so far: {', '.join(empty)}.")
        return " ".join(said)

    def _figure(self) -> str:
        if not self._charts:
            return '<section><p class="finding">None of these runs has logged a step or a score yet.</p></section>'
        return figure(DrawnPicture(TITLE, self._finding(), self._svg("wide", WIDE), self._svg("narrow", NARROW)))

    def _table(self) -> str:
        heads = "".join(f"<th>{self._marked(escape(title), index)}</th>" for index, title in enumerate(self._titles))
        lines = "".join(
            f"<tr><td>{escape(printable(label))}</td>"
            + "".join(
                f"<td{_wraps(value)}>{self._valued(label, escape(printable(value)), index)}</td>"
                for index, value in enumerate(values)
            )
            + "</tr>"
            for label, values in self._rows
        )
        return (
            "<section><h2>Settings that differ, and results</h2>"
            f'<div class="scroll"><table><thead><tr><th></th>{heads}</tr></thead><tbody>{lines}</tbody></table></div>'
            "</section>"
        )

    def _valued(self, label: str, words: str, index: int) -> str:
        """A value of a row; the best score is bold, as the name of its run."""
        is_score = label == best_label(self._outcomes[index].metric)
        return self._marked(words, index) if is_score else words

    def _marked(self, words: str, index: int) -> str:
        """The run with the best score is bold."""
        return f"<b>{words}</b>" if index == self._best else words


def _wraps(value: str) -> str:
    return ' class="long"' if len(value) > LONG else ""


LONG = 30
"""Characters of a value that takes more than one line."""
MAX_LETTERS = 110
"""Of the title of a PNG file, as many as there is room for."""


def write(content: str | bytes, path: Path) -> None:
    """Write a page or a picture, which takes its name at once.

    Raises:
        UserError: it cannot be written.
    """
    try:
        if path.is_dir():
            raise UserError(f"{path} is a folder; give the name of a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as aside:
            aside.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
