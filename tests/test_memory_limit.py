"""A memory limit of one's own, on a planted tree of control groups: where it may be made, and what says no."""

import mmap
import os

import pytest

from flashstudy.measure import memory_limit, page_cache


@pytest.fixture
def tree(tmp_path):
    """A version 2 tree with this process in /user/job; memory is handed on by /user only."""
    mount = tmp_path / "cgroup"
    (mount / "user" / "job").mkdir(parents=True)
    (mount / "cgroup.controllers").write_text("cpu memory\n")
    (mount / "user" / "cgroup.subtree_control").write_text("cpu memory\n")
    (mount / "user" / "job" / "cgroup.subtree_control").write_text("\n")
    (tmp_path / "membership").write_text("0::/user/job\n")
    return dict(mount=mount, membership=tmp_path / "membership")


def test_a_group_is_made_beside_the_own_one_with_its_limit_and_takes_this_process(tree):
    with memory_limit.limited_group(300_000_000, **tree) as group:
        assert group == tree["mount"] / "user" / f"flashstudy-{os.getpid()}"
        assert (group / "memory.max").read_text() == "300000000"
        memory_limit.join(group)
        assert (group / "cgroup.procs").read_text() == str(os.getpid())


def test_the_own_group_comes_first_where_it_hands_memory_on(tree):
    own = tree["mount"] / "user" / "job"
    (own / "cgroup.subtree_control").write_text("memory\n")
    with memory_limit.limited_group(1, **tree) as group:
        assert group.parent == own


def test_nothing_is_made_where_no_group_hands_memory_on(tree):
    (tree["mount"] / "user" / "cgroup.subtree_control").write_text("cpu\n")
    refused = pytest.raises(memory_limit.NoLimitError, match="no control group at hand hands memory limits on")
    with refused, memory_limit.limited_group(1, **tree):
        pass
    assert not list(tree["mount"].rglob("flashstudy-*"))


def test_other_control_groups_are_left_alone(tree):
    (tree["mount"] / "cgroup.controllers").unlink()  # as where version 1 is in use
    refused = pytest.raises(memory_limit.NoLimitError, match="need control groups of version 2")
    with refused, memory_limit.limited_group(1, **tree):
        pass


def test_a_page_read_from_the_disk_is_a_major_fault(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(4 * mmap.PAGESIZE))
    if not page_cache.drop(path).is_gone:
        pytest.skip("files are always in memory here")
    before = memory_limit.major_faults()
    with path.open("rb") as handle, mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        first, after = mapped[0], memory_limit.major_faults()
        again = mapped[1]
    assert after - before >= 1 and memory_limit.major_faults() == after and first >= 0 and again >= 0
