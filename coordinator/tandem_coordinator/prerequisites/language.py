"""The files that `causal-lm` names: a pretrained model's folder, its data, a text, a tokenizer.

Only whether they are there is looked at. What is in them is read by the task itself, which is asked by
`tandem_coordinator.prerequisites.task`.
"""

from collections.abc import Iterator

from tandem.causal_lm import PretrainedModel, SmallModel, is_folder_name, parameters_of
from tandem.errors import Unmet
from tandem.job import DistributedTrainingJob
from tandem.tasks import CAUSAL_LM
from tandem_coordinator.prerequisites.site import Site, fault_of_file, is_folder

FIELD = ("spec", "trainer", "parameters")
CONFIGURATION = "config.json"
"""The file by which a folder is one of a model."""


def language(job: DistributedTrainingJob, site: Site) -> Iterator[Unmet]:
    """What is not there of what a language model is made of and trained on.

    A model or a data set of a hub is not looked for: a machine without a network may have it in its cache.
    """
    trainer = job.spec.trainer
    if trainer.task != CAUSAL_LM:
        return
    given = trainer.parameters or {}
    config = parameters_of(given).parse(given)
    files: dict[tuple[str | int, ...], str | None]
    if isinstance(config, SmallModel):
        files = {("text",): config.text, ("tokenizerFile",): config.tokenizer_file}
    else:
        yield from _model(config, site)
        files = _data(config)
    for field, text in files.items():
        path = None if text is None else site.look(text, expands=True)
        if text is not None and path is not None:
            fault, near = fault_of_file(path, str(path) if text.startswith("~") else text)
            if fault:
                yield Unmet((*FIELD, *field), fault, suggestion=near)


def _model(config: PretrainedModel, site: Site) -> Iterator[Unmet]:
    name = config.pretrained
    path = site.look(name, expands=True)
    if path is None:
        return
    if is_folder(path):
        if not (path / CONFIGURATION).is_file():
            message = f"{name} has no {CONFIGURATION}, so it is no folder of a model as save_pretrained writes it"
            yield Unmet((*FIELD, "pretrained"), message)
    elif is_folder_name(name):
        yield Unmet((*FIELD, "pretrained"), f"there is no folder {name}")


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
