"""The results of the full tier: of each part the last run that passed, with its commit."""

from tests.full import BEGIN, END, PARTS, mended, recorded, recorded_commit, result

OLD, NEW = "a" * 40, "b" * 40
EMPTY = f"before\n{BEGIN}\n{END}\nafter\n"


def test_each_part_has_a_result_of_its_own() -> None:
    page = result(EMPTY, OLD, "2026-01-01", [(part.name, 60.0) for part in PARTS], {"processes": 7})
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert list(recorded(page)) == [part.name for part in PARTS]
    again = result(page, NEW, "2026-01-02", [("cluster", 120.0)], {"cluster": 3})
    commits = {part.name: recorded_commit(again, part.name) for part in PARTS}
    assert commits == {part.name: NEW if part.name == "cluster" else OLD for part in PARTS}
    assert f"| processes | 7 passed | 1 min | 2026-01-01 | `{OLD}` |" in again
    assert f"| cluster | 3 passed | 2 min | 2026-01-02 | `{NEW}` |" in again
    assert "| soak | passed |" in again


def test_what_was_touched_stands_beside_the_last_whole_result() -> None:
    page = result(EMPTY, OLD, "2026-01-01", [("cluster", 60.0)], {"cluster": 87})
    for day, count in (("2026-01-02", 19), ("2026-01-03", 4)):
        page = result(page, NEW, day, [("cluster", 120.0)], {"cluster": count}, touched=True)
        assert f"| cluster | 87 passed; touched since: {count} passed | 2 min | {day} | `{NEW}` |" in page
    page = result(page, OLD, "2026-01-04", [("cluster", 60.0)], {"cluster": 88})
    assert f"| cluster | 88 passed | 1 min | 2026-01-04 | `{OLD}` |" in page


def test_a_part_that_never_ran_as_a_whole_has_what_was_touched_alone() -> None:
    page = result(EMPTY, NEW, "2026-01-01", [("slurm", 60.0)], {"slurm": 3}, touched=True)
    assert f"| slurm | 3 passed | 1 min | 2026-01-01 | `{NEW}` |" in page


def test_a_part_that_was_mended_has_the_commit_at_which_all_of_it_ran() -> None:
    run: dict[str, str | float] = {"commit": OLD, "passed": 84, "failed": 3, "seconds": 120.0}
    page = mended(EMPTY, "cluster", run, "2026-01-01")
    assert f"| cluster | 84 passed; mended since: 3 passed | 2 min | 2026-01-01 | `{OLD}` |" in page
    assert recorded_commit(page, "cluster") == OLD


def test_a_part_without_a_result_is_touched_by_everything() -> None:
    assert recorded_commit(EMPTY, "cluster") == ""
    assert recorded_commit("no result at all", "cluster") == ""
