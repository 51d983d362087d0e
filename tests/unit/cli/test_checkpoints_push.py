"""A pushed folder, by huggingface_hub's own client against a hub on this machine: what arrives, what is tried again,
and what is said of a refusal."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.errors import UserError
from tandem_cli.checkpoints import hub
from tests.support.hub import TOKEN, Hub, local_hub
from tests.support.language import pretrained

# Of the client's own, which hands over its files as its transport would not have them any more.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO = "me/tuned"


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    from huggingface_hub import constants

    with local_hub() as made:
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        template = made.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "model"
    found.mkdir()
    (found / "config.json").write_text("{}")
    (found / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    return found


class Pushes:
    """Pushes, with what was said and how long it would have waited."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.waits: list[float] = []

    def __call__(self, folder: Path, **more: object) -> str:
        to = hub.Destination(**{"repo": REPO, **more})  # type: ignore[arg-type]
        return hub.push(folder, to, "a message", self.said.append, self.waits.append)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_becomes_one_commit_and_its_second_push_none(there: Hub, folder: Path) -> None:
    address = Pushes()(folder)
    made = there.repositories[REPO]
    assert made.branches["main"] == contents(folder)
    assert made.messages == ["a message"]
    assert not made.private
    assert address.startswith(f"{there.url}/{REPO}/commit/")
    Pushes()(folder)
    assert made.messages == ["a message"]


def test_a_branch_is_made_and_a_private_repository_stays_private(there: Hub, folder: Path) -> None:
    for _ in range(2):
        Pushes()(folder, revision="epoch-1", private=True)
    made = there.repositories[REPO]
    assert made.private
    assert (made.branches["main"], made.branches["epoch-1"]) == ({}, contents(folder))


def test_nothing_private_goes_to_a_repository_that_all_can_see(there: Hub, folder: Path) -> None:
    Pushes()(folder)
    (folder / "config.json").write_text('{"secret": 1}')
    with pytest.raises(UserError, match="me/tuned already exists and is public; nothing was pushed"):
        Pushes()(folder, private=True)
    assert there.repositories[REPO].branches["main"]["config.json"] == b"{}"


def test_a_hub_that_fails_for_a_while_is_tried_again_with_growing_waits(there: Hub, folder: Path) -> None:
    there.failures = [("/commit/", 503), ("/commit/", 502), ("/commit/", 504)]
    pushes = Pushes()
    pushes(folder)
    assert there.repositories[REPO].branches["main"] == contents(folder)
    assert len([one for one in there.requests if one.startswith("PUT /objects/")]) == 1, "large files are sent once"
    assert [round(wait / first) for wait, first in zip(pushes.waits, (2, 4, 8), strict=True)] == [1, 1, 1]
    assert pushes.said[0].startswith("attempt 1 of 5 failed (")


def test_a_hub_that_goes_on_failing_is_given_up(there: Hub, folder: Path) -> None:
    there.failures = [("/commit/", 503)] * 9
    with pytest.raises(UserError, match="the hub answered 503, in 5 attempts"):
        Pushes()(folder)
    assert there.repositories[REPO].branches["main"] == {}


def test_a_hub_that_is_not_there_is_said_so(there: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    pushes = Pushes()
    with pytest.raises(UserError, match=r"the hub could not be reached, in 5 attempts: .*refused"):
        pushes(folder)
    assert len(pushes.waits) == 4


def test_a_wrong_token_is_refused_at_once(there: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    pushes = Pushes()
    with pytest.raises(UserError, match=r"the hub has no token with write access to me/tuned .* Set HF_TOKEN"):
        pushes(folder)
    assert pushes.waits == []
    there.failures = [("/api/repos/create", 403)]
    with pytest.raises(UserError, match="the token may not write me/tuned"):
        pushes(folder)


def test_a_name_that_no_repository_can_have_is_refused_before_anything_is_asked(there: Hub, folder: Path) -> None:
    with pytest.raises(UserError, match="me/my/model is no id of a repository"):
        Pushes()(folder, repo="me/my/model")
    assert there.requests == []


def test_what_comes_back_from_the_hub_writes_the_same_text(there: Hub, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = pretrained(tmp_path / "pretrained")
    Pushes()(folder)
    back = snapshot_download(REPO, cache_dir=tmp_path / "cache")
    assert contents(Path(back)) == contents(folder)
    texts = []
    for place in (folder, back):
        words = AutoTokenizer.from_pretrained(place)
        asked = torch.tensor([words("What is a module?")["input_ids"]])
        model = AutoModelForCausalLM.from_pretrained(place)
        texts.append(words.decode(model.generate(asked, max_new_tokens=20, do_sample=False, pad_token_id=0)[0]))
    assert texts[0] == texts[1]
    assert len(texts[0]) > len("What is a module?")
