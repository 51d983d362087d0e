"""The results of the full tier: of each part the last run that passed, with its commit."""

from tests.full import BEGIN, END, PARTS, recorded, recorded_commit, result

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
    assert "| soak | no violation |" in again


def test_a_part_without_a_result_is_touched_by_everything() -> None:
    assert recorded_commit(EMPTY, "cluster") == ""
    assert recorded_commit("no result at all", "cluster") == ""
