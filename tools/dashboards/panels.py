"""Panels and variables of the dashboards: a thin layer over Grafana's foundation SDK.

The title of a panel that needs another exporter, GPUs, or a line in the user's script ends with that requirement
(NEEDS). It explains an empty panel to users, and exempts it from the test that expects data from every query.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from grafana_foundation_sdk.builders import bargauge, common, prometheus, stat, table, timeseries, xychart
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import prometheus as queries
from grafana_foundation_sdk.models import xychart as xy

Panel = Builder[model.Panel]

SOURCE = model.DataSourceRef(type_val="prometheus", uid="${datasource}")
GPUS, DCGM, LOGS = "needs GPUs", "needs dcgm-exporter", "needs tandem.log"
NEEDS = (GPUS, DCGM, LOGS)
WIDTH, HEIGHT = 8, 8
"""Default size: columns of 24, and Grafana's rows of 30 pixels."""


@dataclass(frozen=True)
class Query:
    """A query and the legend of its series."""

    expr: str
    legend: str = ""
    right: bool = False
    """Whether it is drawn against the axis on the right."""
    instant: bool = False
    """Whether only its present value is queried, and not its history."""


def graph(
    title: str,
    description: str,
    *query_list: Query,
    unit: str = "short",
    right_unit: str = "short",
    stacked: bool = False,
    width: int = WIDTH,
    signed: bool = False,
    maximum: float | None = None,
    needs: str = "",
) -> timeseries.Panel:
    """Values over time."""
    panel = timeseries.Panel().title(_title(title, needs)).description(description).datasource(SOURCE)
    panel = panel.span(width).height(HEIGHT).unit(unit)
    panel = panel if signed else panel.min(0)
    panel = panel.fill_opacity(25 if stacked else 5).line_width(1 if stacked else 2)
    panel = panel.show_points(options.VisibilityMode.AUTO)
    panel = panel.legend(_legend())
    if maximum is not None:
        panel = panel.max(maximum)
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(options.StackingMode.NORMAL))
    for letter, query in _lettered(query_list):
        panel = panel.with_target(_target(letter, query))
        if query.right:
            placed = [
                model.DynamicConfigValue("custom.axisPlacement", "right"),
                model.DynamicConfigValue("unit", right_unit),
            ]
            panel = panel.override_by_query(letter, placed)
    return panel


def number(
    title: str, description: str, *query_list: Query, unit: str = "short", width: int = 4, decimals: int | None = None
) -> stat.Panel:
    """The present value of each series, large. Not the last one in the time shown: a phase that has ended would
    stay."""
    panel = stat.Panel().title(title).description(description).datasource(SOURCE).span(width).height(4).unit(unit)
    panel = panel.graph_mode(options.BigValueGraphMode.NONE).reduce_options(_last())
    if decimals is not None:
        panel = panel.decimals(decimals)
    for letter, query in _lettered(query_list):
        panel = panel.with_target(_target(letter, replace(query, instant=True)))
    return panel


def word(title: str, description: str, query: Query, width: int = 4) -> stat.Panel:
    """The name of the existing series, large: a state."""
    return number(title, description, query, width=width).text_mode(options.BigValueTextMode.NAME)


def ranking(title: str, description: str, query: Query, width: int = WIDTH) -> bargauge.Panel:
    """The present value of each series as a bar."""
    panel = bargauge.Panel().title(title).description(description).datasource(SOURCE).span(width).height(HEIGHT)
    panel = panel.unit("short").min(0).orientation(options.VizOrientation.HORIZONTAL).reduce_options(_last())
    return panel.with_target(_target("A", replace(query, instant=True)))


def listing(title: str, description: str, columns: Sequence[tuple[str, str, str]], width: int = 24) -> table.Panel:
    """A table with a row for each job.

    Args:
        columns: name, query of one value for each job, and unit of each.
    """
    panel = table.Panel().title(title).description(description).datasource(SOURCE).span(width).height(HEIGHT)
    names = {}
    for letter, (name, expr, unit) in zip(_letters(), columns, strict=False):
        target = _target(letter, Query(expr, instant=True)).format(queries.PromQueryFormat.TABLE)
        panel = panel.with_target(target)
        names[f"Value #{letter}"] = name
        panel = panel.override_by_name(name, [model.DynamicConfigValue("unit", unit)])
    hidden_columns = {"Time": True}
    organized = {"renameByName": names, "excludeByName": hidden_columns, "indexByName": {"namespace": 0, "job": 1}}
    return panel.transformations(
        [
            model.DataTransformerConfig(id_val="merge", options={}),
            model.DataTransformerConfig(id_val="organize", options=organized),
        ]
    )


def scatter(
    title: str, description: str, pairs: Sequence[tuple[str, Query, Query]], width: int = WIDTH
) -> xychart.Panel:
    """Values plotted over other values.

    Args:
        pairs: name, query for x, query for y; each query of one series.
    """
    panel = xychart.Panel().title(title).description(description).datasource(SOURCE).span(width).height(HEIGHT)
    series: list[Builder[xy.XYSeriesConfig]] = []
    axes_queries = [query for _, x, y in pairs for query in (x, y)]
    for letter, query in _lettered(axes_queries):
        panel = panel.with_target(_target(letter, query))
    for name, x, y in pairs:
        config = xy.XYSeriesConfig(
            name=xy.XychartXYSeriesConfigName(name),
            x=xy.XychartXYSeriesConfigX(xy.MatcherConfig("byName", x.legend)),
            y=xy.XychartXYSeriesConfigY(xy.MatcherConfig("byName", y.legend)),
        )
        series.append(_Built(config))
    panel = panel.mapping(xy.SeriesMapping.MANUAL).series(series).legend(_legend())
    panel = panel.override_by_name(pairs[-1][2].legend, [model.DynamicConfigValue("custom.axisPlacement", "right")])
    return panel.transformations([model.DataTransformerConfig(id_val="joinByField", options={"byField": "Time"})])


def source() -> build.DatasourceVariable:
    """The variable for the data source."""
    return build.DatasourceVariable("datasource").label("Data source").type("prometheus")


def choice(name: str, label: str, query: str, several: bool) -> build.QueryVariable:
    """A variable with the values of a label.

    Args:
        several: whether several values may be selected; initially all are.
    """
    variable = build.QueryVariable(name).label(label).datasource(SOURCE).query(query)
    variable = variable.refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
    variable = variable.sort(model.VariableSort.ALPHABETICAL_ASC).multi(several).include_all(several)
    if several:
        everything = model.VariableOption(text=["All"], value=["$__all"])
        variable = variable.all_value(".*").current(everything)
    return variable


def mark(name: str, query: str, color: str) -> build.AnnotationQuery:
    """An annotation: times that are marked in all panels."""
    return build.AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(color).expr(query)


def as_json(dashboard: build.Dashboard) -> str:
    """The file of a dashboard."""
    content = json.loads(json.dumps(dashboard.build(), cls=JSONEncoder))
    # The SDK's model lacks the text formats of Prometheus annotations.
    for annotation in content["annotations"].get("list", []):
        annotation |= {"titleFormat": annotation["name"], "textFormat": "{{reason}}"}
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


class _Built(Builder[xy.XYSeriesConfig]):
    """A finished series, for the SDK's functions that take a builder."""

    def __init__(self, series: xy.XYSeriesConfig) -> None:
        self._series = series

    def build(self) -> xy.XYSeriesConfig:
        return self._series


def _title(title: str, needs: str) -> str:
    return f"{title} ({needs})" if needs else title


def _letters() -> str:
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _lettered(query_list: Sequence[Query]) -> list[tuple[str, Query]]:
    return list(zip(_letters(), query_list, strict=False))


def _target(letter: str, query: Query) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).ref_id(letter).datasource(SOURCE)
    target = target.legend_format(query.legend) if query.legend else target
    return target.instant() if query.instant else target.range()


def _legend() -> common.VizLegendOptions:
    legend = common.VizLegendOptions().show_legend(True).display_mode(options.LegendDisplayMode.LIST)
    return legend.placement(options.LegendPlacement.BOTTOM)


def _last() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"])
