"""Names of tests say the values of their parameters, where pytest would number them."""

import functools
import re
from pathlib import PurePath
from typing import NamedTuple

import numpy as np
import pytest

from ringreduce.pure.membership import Membership
from ringreduce.pure.watcher_messages import Pending
from ringreduce.vocabulary.types import ReduceOp
from tests.naming import name_of

BOTH = [lambda ranks: ranks + 1, lambda ranks: ranks + 2]


class Place(NamedTuple):
    host: str
    rank: int


NAMES = [
    ({"hosts": "aab", "streams": 2}, "{hosts=aab,streams=2}"),
    ([2, (3, None)], "(2,(3,None))"),
    ({"b", "a"}, "{a,b}"),
    (np.dtype(np.float16), "float16"),
    (np.int64(3), "3"),
    (np.ones(2, np.float32), "float32(1.0,1.0)"),
    (np.ones((2, 3)), "float64(2,3)"),
    (np.array(0.5), "float64(0.5)"),
    (Place("a", 1), "Place(a,1)"),
    (Pending(True, 1, 2), "Pending(True,1,2)"),
    (Membership((0, 2)), "Membership((0,2),0,0)"),
    (ValueError("no"), "ValueError: no"),
    ([ReduceOp.MEAN, re.compile("a+"), int, PurePath("/a/b")], "(MEAN,a+,int,b)"),
    (functools.partial(sorted, reverse=True), "sorted(reverse=True)"),
    (object(), "object"),
    (range(3), "range(0, 3)"),
    ("long" * 50, "long" * 50),
    (b"long" * 50, f"b'{'long' * 50}'"),
    (lambda: 1, "1"),
    (lambda ranks: [each for each in ranks], "ranks: [each for each in ranks]"),
    *((lambda rank=rank: rank, f"rank=rank: rank with ({rank})") for rank in (1, 2)),
    (BOTH[0], "ranks: ranks + 1"),
    (BOTH[1], "ranks: ranks + 2"),
    (list(range(100)), f"({','.join(map(str, range(100)))})"),
]


@pytest.mark.parametrize(("value", "name"), NAMES, ids=range(len(NAMES)))
def test_a_value_is_named_by_what_it_holds(value, name):
    assert name_of(value) == (name if len(name) <= 80 else f"{name[:40]}..{name[-40:]}")


@pytest.mark.parametrize("value", ["text", b"bytes", 1, 2.5, True, None, ReduceOp.SUM, int, len])
def test_what_pytest_names_itself_is_left_to_it(value):
    assert name_of(value) is None


def test_no_test_of_this_run_has_a_number_in_a_value_s_place(request):
    """In `make test` these are all tests."""
    for item in request.session.items:
        call = getattr(item, "callspec", None)
        for argument in () if call is None else call.params:
            numbered = re.search(rf"(^|-){argument}\d+(-|$)", call.id)
            assert not numbered or numbered[0].strip("-") == call.params[argument], item.nodeid
