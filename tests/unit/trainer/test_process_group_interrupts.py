"""Operations of a group that nobody completes, and who waits for them."""

import threading
import time

import pytest
import torch
from torch.futures import Future

from tandem_trainer.process_group import Group, GroupLost


def test_who_waits_for_an_operation_that_never_ends_is_freed_by_an_interrupt() -> None:
    group = Group(0, 1, 0, torch.device("cpu"))
    forgotten: Future[int] = Future()
    waiting = group.guarded(forgotten, 1)
    errors: list[Exception] = []

    def wait() -> None:
        try:
            waiting.wait()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert not group.is_lost
    group.interrupt()
    thread.join(10)
    assert [type(error) for error in errors] == [GroupLost]
    assert group.is_lost
    with pytest.raises(GroupLost):
        group.guarded(Future(), 1).wait()
    # gloo may complete it late; nobody is waiting any more.
    forgotten.set_result(1)


def test_an_operation_that_ends_while_it_is_interrupted_has_one_end() -> None:
    for _ in range(300):
        group = Group(0, 1, 0, torch.device("cpu"))
        inner: Future[int] = Future()
        outer = group.guarded(inner, 5)
        thread = threading.Thread(target=group.interrupt)
        thread.start()
        inner.set_result(1)
        thread.join()
        try:
            assert outer.value() == 5
        except GroupLost:
            pass


def test_an_error_of_an_operation_is_raised_where_it_is_waited_for() -> None:
    group = Group(0, 1, 0, torch.device("cpu"))
    inner: Future[int] = Future()
    outer = group.guarded(inner, 1)
    inner.set_exception(RuntimeError("Connection closed by peer"))
    with pytest.raises(RuntimeError, match="closed by peer"):
        outer.value()
    assert group.is_lost
    began = time.monotonic()
    group.abandon()
    assert time.monotonic() - began < 5.0


def test_who_does_not_want_the_error_of_an_operation_gets_the_value_after_it() -> None:
    group = Group(0, 1, 0, torch.device("cpu"))
    errors: list[Exception] = []
    outer = group.guarded(Future(), 5, errors.append)
    outer.add_done_callback(lambda _: errors.append(KeyError("later")))
    group.interrupt()
    assert outer.wait() == 5
    assert [type(error) for error in errors] == [GroupLost, KeyError]
    # A group that is over by then.
    assert group.guarded(Future(), 6, errors.append).wait() == 6
    inner: Future[int] = Future()
    group = Group(0, 1, 0, torch.device("cpu"))
    outer = group.guarded(inner, 7, errors.append)
    inner.set_exception(RuntimeError("Connection closed by peer"))
    assert outer.wait() == 7
    assert [type(error) for error in errors[2:]] == [GroupLost, RuntimeError]
