"""Checks the files that `causal-lm` names: a pretrained model's folder, its data, a text, a
tokenizer, folders of shards.

Only their existence is checked. Their contents are read by the task itself, which is asked by
`tandem_coordinator.prerequisites.task`.
"""

from collections.abc import Iterator

from tandem.errors import UnmetRequirement
from tandem.job.causal_lm import PretrainedModel, SmallModel, is_folder_name, parameters_of
from tandem.job.resource import DistributedTrainingJob
from tandem.job.tasks import CAUSAL_LM
from tandem.rundir.store import is_url
from tandem_coordinator.prerequisites.site import Site, fault_of_file, is_folder

FIELD = ("spec", "trainer", "parameters")
CONFIG_FILE = "config.json"
"""The file that makes a folder one of a model."""
INDEX_FILE = "index.json"
"""The file that makes a folder one of shards."""


def language(job: DistributedTrainingJob, site: Site) -> Iterator[UnmetRequirement]:
    """Find missing files of a language model and its data.

    A model or a data set of a hub is not checked: a machine without a network may have it in its cache.
    """
    trainer = job.spec.trainer
    if trainer.task != CAUSAL_LM:
        return
    parameters = trainer.parameters or {}
    config = parameters_of(parameters).parse(parameters)
    files: dict[tuple[str | int, ...], str | None]
    if isinstance(config, SmallModel):
        files = {("text",): config.text, ("tokenizerFile",): config.tokenizer_file}
        yield from _shards(config, site)
    else:
        yield from _model(config, site)
        files = _data(config)
    for field, text in files.items():
        path = None if text is None else site.resolve(text, expands=True)
        if text is not None and path is not None:
            fault, suggestion = fault_of_file(path, str(path) if text.startswith("~") else text)
            if fault:
                yield UnmetRequirement((*FIELD, *field), fault, suggestion=suggestion)


def _shards(config: SmallModel, site: Site) -> Iterator[UnmetRequirement]:
    """Find folders of shards that are not there. Buckets are not checked: only the workers may have
    access to them."""
    for field in ("train", "test") if config.shards is not None else ():
        name = getattr(config.shards, field)
        path = None if is_url(name) else site.resolve(name, expands=True)
        if path is None or (path / INDEX_FILE).is_file():
            continue
        message = f"{name} has no {INDEX_FILE}" if is_folder(path) else f"there is no folder {name}"
        yield UnmetRequirement((*FIELD, "shards", field), message)


def _model(config: PretrainedModel, site: Site) -> Iterator[UnmetRequirement]:
    name = config.pretrained
    path = site.resolve(name, expands=True)
    if path is None:
        return
    if is_folder(path):
        if not (path / CONFIG_FILE).is_file():
            message = f"{name} has no {CONFIG_FILE}, so it is no folder of a model as save_pretrained writes it"
            yield UnmetRequirement((*FIELD, "pretrained"), message)
    elif is_folder_name(name):
        yield UnmetRequirement((*FIELD, "pretrained"), f"there is no folder {name}")


def _data(config: PretrainedModel) -> dict[tuple[str | int, ...], str | None]:
    """The files of the data, by their fields."""
    if config.data is None:
        return {}
    files: dict[tuple[str | int, ...], str | None] = {}
    for number, source in enumerate(config.data.sources):
        inner = ("data", "mixture", number) if config.data.mixture else ("data",)
        files[*inner, "path"] = source.path
        if isinstance(source.test, str) and source.dataset is None:
            files[*inner, "test"] = source.test
    return files
