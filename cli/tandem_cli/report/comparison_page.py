"""A page and a PNG file that compare several runs, in the manner of a report."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from tandem.errors import UserError
from tandem.formatting import count_noun, metric_name, printable, score
from tandem.processes.distribution import version
from tandem_cli.report import raster
from tandem_cli.report.comparison import ComparisonRow, Outcome, best_label, certainty, warning, winner
from tandem_cli.report.figures.compared import compared, labels
from tandem_cli.report.page import DrawnPicture, document, figure
from tandem_cli.report.run import RunData
from tandem_cli.report.writing import replacing
from tandem_coordinator.charts import drawing
from tandem_coordinator.charts.chart import NARROW, WIDE, Viewport

TITLE = "Training loss and score"


class ComparisonPage:
    """Comparison of several runs, as a page or a picture.

    Args:
        runs: two or more.
        outcomes: result of each.
        rows: settings that differ, and results.
        titles: name of each.
    """

    def __init__(
        self, runs: Sequence[RunData], outcomes: Sequence[Outcome], rows: Sequence[ComparisonRow], titles: Sequence[str]
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
            f"{escape(', '.join(printable(outcome.path) for outcome in self._outcomes))}.</p></footer>",
        ]
        return document(" · ".join(self._titles), body)

    def png(self) -> bytes:
        """The picture.

        Raises:
            UserError: no run has logged anything to draw.
        """
        if not self._charts:
            raise UserError("none of these runs has logged a step or a score, so there is nothing to draw")
        title = f"{TITLE}: {' · '.join(labels(self._titles))}"
        return raster.png(self._svg("png", WIDE), title if len(title) <= MAX_TITLE_LENGTH else TITLE)

    def _svg(self, place: str, style: Viewport) -> str:
        return drawing.draw(f"compared-{place}", TITLE, self._finding(), self._charts, style)

    def _lead(self) -> str:
        text = f"{count_noun(len(self._runs), 'run')} side by side."
        if self._best is not None and (value := self._outcomes[self._best].score) is not None:
            metric = self._outcomes[self._best].metric
            text += f" The best {metric_name(metric)} is {score(metric, value)}, of {self._titles[self._best]}."
            text += f" It {clause}." if (clause := certainty(self._outcomes, self._best)) else ""
        return text

    def _finding(self) -> str:
        """Sentences about how to read the picture."""
        sentences = ["The loss is a running mean. Time counts from the beginning of each run, without its pauses."]
        metrics = list(dict.fromkeys(run.metric for run in self._runs))
        if len(metrics) > 1:
            by = "; ".join(
                f"{metric_name(printable(metric))}: "
                + ", ".join(title for run, title in zip(self._runs, self._titles, strict=True) if run.metric == metric)
                for metric in metrics
            )
            sentences.append(f"The runs are scored by different metrics, so their scores cannot be compared ({by}).")
        elif text := warning(self._runs):
            sentences.append(text)
        empty = [
            title
            for run, title in zip(self._runs, self._titles, strict=True)
            if not len(run.model_steps) and not any(checkpoint.evaluation for checkpoint in run.checkpoints)
        ]
        if empty:
            sentences.append(f"Without a step or a score so far: {', '.join(empty)}.")
        return " ".join(sentences)

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

    def _valued(self, label: str, text: str, index: int) -> str:
        """Mark up a value of a row: the best score is bold, like the name of its run."""
        is_score = label == best_label(self._outcomes[index].metric)
        return self._marked(text, index) if is_score else text

    def _marked(self, text: str, index: int) -> str:
        """Mark up the run with the best score in bold."""
        return f"<b>{text}</b>" if index == self._best else text


def _wraps(value: str) -> str:
    return ' class="long"' if len(value) > LONG else ""


LONG = 30
"""Length above which a value may be wrapped, in characters."""
MAX_TITLE_LENGTH = 110
"""Length of the title of a PNG file that fits above the picture, in characters."""


def write(content: str | bytes, path: Path) -> None:
    """Write a page or a picture, and replace an earlier one in one step.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        if path.is_dir():
            raise UserError(f"{path} is a folder; give the name of a file")
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error
