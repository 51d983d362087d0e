"""Which tests a change reaches (tests/support/reach.py), on the tests and the product as they are."""

from pathlib import Path

import pytest

from tests.support import ROOT, reach
from tests.support.reach import PACKAGES, STARTS, TREES, Change

NODE = ROOT / "tests/cluster/test_operator_node.py"
VALIDATE = ROOT / "tests/integration/test_validate.py"
SESSION = ROOT / "tests/integration/test_session.py"
METRICS = ROOT / "tests/integration/test_coordinator_metrics.py"
RECONCILE = ROOT / "tests/unit/operator/test_reconcile.py"
DOCUMENTS = ROOT / "tests/unit/repository/test_documents.py"


@pytest.mark.parametrize(
    ("changed", "test", "touched"),
    [
        ("operator/tandem_operator/reconcile.py", NODE, True),
        ("operator/tandem_operator/reconcile.py", RECONCILE, True),
        ("operator/tandem_operator/reconcile.py", SESSION, False),
        ("operator/tandem_operator/no_more.py", NODE, True),
        ("core/tandem/job/resource.py", NODE, True),
        ("core/tandem/job/resource.py", VALIDATE, True),
        ("trainer/tandem_trainer/data/order.py", SESSION, True),
        ("trainer/tandem_trainer/data/order.py", VALIDATE, False),
        ("coordinator/tandem_coordinator/membership.py", METRICS, True),
        ("evaluator/tandem_evaluator/choice.py", METRICS, False),
        ("coordinator/tandem_coordinator/page/parts.py", RECONCILE, False),
        ("charts/tandem/values.yaml", NODE, True),
        ("docs/guide.md", NODE, False),
        ("docs/guide.md", DOCUMENTS, True),
        ("tests/cluster/test_operator_node.py", NODE, True),
        ("tests/cluster/test_kueue.py", NODE, False),
        ("tests/cluster/conftest.py", NODE, True),
        ("tests/support/waiting.py", SESSION, True),
        ("tests/support/scripts/session_script.py", SESSION, True),
        ("tests/support/scripts/session_script.py", VALIDATE, False),
        ("tests/support/cluster/machine/modules/kubernetes/go.mod", NODE, True),
        ("tests/support/cluster/kueue/module/go.mod", VALIDATE, False),
        ("pyproject.toml", METRICS, True),
    ],
)
def test_a_change_reaches_tests_that_are_made_of_it_or_run_it(changed: str, test: Path, touched: bool) -> None:
    assert test.is_file()
    assert Change([changed]).touches(test) is touched


def test_without_a_change_nothing_runs() -> None:
    assert not Change([]).touches(DOCUMENTS)


def test_a_mark_names_the_rooms_of_a_test_of_the_full_tier() -> None:
    change = Change(["trainer/tandem_trainer/data/order.py"])
    assert change.touches(SESSION, ("core", "trainer"))
    assert not change.touches(METRICS, ("operator",))


def test_a_fixture_counts_where_it_is_used() -> None:
    """tests/integration/conftest.py gives coordinators; a test that asks for none is not about them."""
    change = Change(["coordinator/tandem_coordinator/membership.py"])
    assert change.touches(METRICS)
    assert not change.touches(ROOT / "tests/integration/test_exchange.py")


def test_a_module_reaches_what_imports_it_and_no_more() -> None:
    assert Change(["trainer/tandem_trainer/task.py"]).rooms == {"trainer", "evaluator"}
    assert Change(["operator/tandem_operator/reconcile.py"]).rooms == {"operator"}
    assert Change(["docs/guide.md"]).rooms == {"docs"}
    assert Change(["core/tandem/job/resource.py"]).rooms == set(PACKAGES.values())


def test_every_room_of_the_repository_is_known() -> None:
    packages = {path.parent.parent.name for path in ROOT.glob("*/tandem*/__init__.py")}
    assert packages == set(PACKAGES.values())
    assert all((ROOT / tree).is_dir() for tree in TREES)
    units = {path.name for path in (ROOT / "tests/unit").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert units - {"repository"} <= {*PACKAGES.values(), *TREES}


def test_support_that_starts_processes_is_there() -> None:
    for module, rooms in STARTS.items():
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").is_file() or (place / "__init__.py").is_file(), module
        assert rooms <= {*PACKAGES.values(), *TREES}


def test_the_commit_since_which_a_change_is_judged_is_a_whole_hash() -> None:
    assert len(reach.base()) == 40
    assert set(reach.base()) <= set("0123456789abcdef")


def test_the_changes_since_an_unknown_commit_are_not_known() -> None:
    assert reach.changed_files("0" * 40) is None
    assert reach.changed_files("") is None
