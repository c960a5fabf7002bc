"""Who is to blame: where facts of several kinds meet; each kind alone is tested by its reader."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.pure.blame import Finding, RankFacts, Reason, find_culprit
from ringreduce.vocabulary.errors import ErrorRecord


def waiting(rank: int, calls: int = 5, operation: str = "all_reduce") -> RankFacts:
    return RankFacts(rank, calls, operation, 64, 20.0)


def lost(rank: int, peer: int, when_s: float = 0.0) -> RankFacts:
    return RankFacts(
        rank, 5, "all_reduce", error=ErrorRecord("PeerLostError", peer), failed_s=when_s
    )


BUSY = RankFacts(1, 5, None, stood_s=3.0)
SILENT = RankFacts(2, silent_s=2.0)
OWN_ERROR = RankFacts(2, error=ErrorRecord("ValueError"), failed_s=9.0)
IN_BARRIER = waiting(1, operation="barrier")


@pytest.mark.parametrize(
    ("facts", "finding"),
    [
        ([], Finding(Reason.NOBODY, ())),
        ([waiting(0), BUSY, SILENT], Finding(Reason.SILENT, (2,))),
        ([waiting(0), BUSY, waiting(2)], Finding(Reason.BEHIND, (1,), (0, 2))),
        # Rank 2 waits in a call that rank 1 has not begun either.
        ([waiting(0, 6), BUSY, waiting(2)], Finding(Reason.BEHIND, (1,), (0,))),
        ([waiting(0), BUSY, RankFacts(2, 4, "barrier")], Finding(Reason.BEHIND, (2,), (0,))),
        ([lost(0, 2), BUSY, SILENT], Finding(Reason.NAMED, (2,), (0,))),
        ([lost(0, 2), lost(2, 1, 9.0), BUSY], Finding(Reason.NAMED, (1,), (2,))),
        ([lost(0, 2), OWN_ERROR], Finding(Reason.OWN_ERROR, (2,))),
        ([waiting(0), IN_BARRIER, SILENT], Finding(Reason.SILENT, (2,))),
        ([waiting(0), IN_BARRIER], Finding(Reason.OUT_OF_STEP, (0, 1), (0, 1))),
    ],
)
def test_the_culprit_is_found(facts, finding):
    assert find_culprit(facts) == finding
    assert find_culprit(facts[::-1]) == finding


def test_a_rank_of_which_nothing_is_known_is_to_blame_only_when_nobody_else_is():
    assert find_culprit([waiting(0)], unknown=[1]) == Finding(Reason.UNKNOWN, (1,), (0,))
    assert find_culprit([waiting(0), BUSY], unknown=[2]).culprits == (1,)


def test_ranks_at_work_are_not_blamed():
    assert find_culprit([waiting(0), BUSY], still_s=20.5).reason is Reason.NOBODY
    assert find_culprit([waiting(0), BUSY], still_s=20.0).culprits == (1,)


@given(
    st.lists(
        st.builds(
            RankFacts,
            rank=st.integers(0, 4),
            calls=st.integers(0, 2),
            operation=st.sampled_from([None, "barrier", "all_reduce"]),
            silent_s=st.sampled_from([0.0, 2.0]),
            error=st.none()
            | st.builds(
                ErrorRecord,
                st.sampled_from(["PeerLostError", "MismatchError", "RendezvousError", "KeyError"]),
                st.none() | st.integers(0, 6),
                st.none() | st.integers(0, 4),
            ),
            failed_s=st.integers(0, 3).map(float),
        ),
        unique_by=lambda facts: facts.rank,
    )
)
def test_only_ranks_of_the_job_are_blamed_and_only_known_ones_are_witnesses(facts):
    known = {fact.rank for fact in facts}
    unknown = sorted(set(range(5)) - known)
    found = find_culprit(facts, unknown=unknown)
    assert set(found.witnesses) <= known
    # A disagreement may name a rank that is none: it is shown as its finder has it.
    assert found.reason is Reason.DISAGREEMENT or set(found.culprits) <= set(range(5))
