"""The separation of programs on a node: cores, entrances, cgroups and secrets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.formulation.base.errors import InvalidInput
from tessera.formulation.job.launch import SecretVariable
from tessera.service.agent import isolation
from tessera.service.agent.isolation import (
    MAX_SECRET_BYTES,
    make_cgroup,
    read_secrets,
    remove_cgroup,
    require_entrance,
    share_of_cores,
    visible_devices,
)
from tessera.service.agent.keeper.spec import ProgramUser
from tests.support.laws import examples

SECRET = (SecretVariable(variable="TOKEN", name="token"),)


@examples(300)
@given(
    st.sets(st.integers(0, 300), min_size=1, max_size=64),
    st.integers(1, 16),
    st.data(),
)
def test_gpus_share_the_cores_without_overlap(
    cores: set[int], node_gpus: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(node_gpus)))
    cut = data.draw(st.integers(0, node_gpus))
    gangs = [part for part in (order[:cut], order[cut:]) if part]
    shares = [share_of_cores(list(cores), gang, node_gpus) for gang in gangs]
    assert all(shares)
    assert all(set(share) <= cores for share in shares)
    if len(cores) < node_gpus:
        assert all(set(share) == cores for share in shares)
        return
    together = [core for share in shares for core in share]
    assert sorted(together) == sorted(cores)  # each core once
    for gang, share in zip(gangs, shares, strict=True):
        exact = len(cores) * len(gang) / node_gpus
        assert abs(len(share) - exact) < len(gang)


def test_devices_are_chosen_among_those_that_the_agent_sees() -> None:
    own = {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b,GPU-c"}
    assert visible_devices(own, (2, 0)) == {
        "CUDA_VISIBLE_DEVICES": "GPU-c,GPU-a",
        "HIP_VISIBLE_DEVICES": "2,0",
    }
    for gpus, node_gpus in (((), 4), ((4,), 4), ((0,), 0)):  # it does not have them
        assert share_of_cores(range(8), gpus, node_gpus) == tuple(range(8))


def a_user(uid: int = 4242, *groups: int) -> ProgramUser:
    """Return a user that owns nothing."""
    return ProgramUser(name="u", uid=uid, gid=uid, groups=groups, home="/")


def test_a_directory_that_the_user_cannot_enter_is_named_with_what_to_do(tmp_path: Path) -> None:
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_uid == os.geteuid() and above != Path("/"):
            above.chmod(above.stat().st_mode | 0o011)
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    inner.chmod(0o711)
    outer = inner.parent
    outer.chmod(0o700)
    with pytest.raises(InvalidInput, match=rf"u cannot enter {outer} \(mode 700\).*chmod o\+x"):
        require_entrance(inner, a_user())
    require_entrance(inner, a_user(uid=0))
    outer.chmod(0o710)
    require_entrance(inner, a_user(4242, outer.stat().st_gid))
    outer.chmod(0o701)
    require_entrance(inner, a_user())
    with pytest.raises(InvalidInput, match="cannot enter"):  # the group's mode is the user's
        require_entrance(inner, a_user(4242, outer.stat().st_gid))


class CgroupTree:
    """A tree of files like that of cgroups, with this process in ``service/agent``."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.service = root, root / "service"
        self.own = self.service / "agent"
        self.own.mkdir(parents=True)
        listing = root / "self"
        listing.write_text("1:name=systemd:/x\n0::/service/agent\n")
        monkeypatch.setattr(
            isolation, "Path", lambda path: listing if path == "/proc/self/cgroup" else Path(path)
        )

    def describe(self, group: Path, available: str, passed_on: str) -> None:
        """Write which controllers a group has, and which ones it passes on."""
        (group / "cgroup.controllers").write_text(available)
        (group / "cgroup.subtree_control").write_text(passed_on)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CgroupTree:
    return CgroupTree(tmp_path, monkeypatch)


def test_a_cgroup_is_made_where_memory_is_passed_on(tree: CgroupTree) -> None:
    assert make_cgroup("tessera-m", 1000, tree.root) is None
    tree.describe(tree.own, "cpu", "cpu")
    tree.describe(tree.service, "cpu", "cpu")
    assert make_cgroup("tessera-m", 1000, tree.root) is None
    assert not list(tree.root.glob("**/tessera-m"))
    tree.describe(tree.own, "cpu memory", "cpu memory")
    group = make_cgroup("tessera-m", 1000, tree.root)
    assert group == tree.own / "tessera-m"
    assert (group / "memory.max").read_text() == "1000"


def test_a_cgroup_is_made_next_to_the_agents_if_that_was_delegated(tree: CgroupTree) -> None:
    tree.describe(tree.own, "cpu", "")
    tree.describe(tree.service, "cpu memory", "cpu")
    assert make_cgroup("tessera-m", 1000, tree.root) == tree.service / "tessera-m"
    assert (tree.service / "cgroup.subtree_control").read_text() == "+memory"


def test_a_cgroup_is_removed_at_the_end(tree: CgroupTree, caplog: pytest.LogCaptureFixture) -> None:
    (tree.service / "tessera-m").mkdir()
    remove_cgroup("tessera-m", tree.root)
    remove_cgroup("tessera-m", tree.root)
    assert not (tree.service / "tessera-m").exists()
    assert not caplog.records
    (tree.own / "tessera-n" / "busy").mkdir(parents=True)
    remove_cgroup("tessera-n", tree.root)
    assert "cannot remove" in caplog.text


def test_secrets_are_those_of_the_tenant_without_their_last_newline(tmp_path: Path) -> None:
    for folder in ("blue", "default"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "token").write_text(f"of {folder}\n")
    assert read_secrets(tmp_path, "blue", SECRET) == {"TOKEN": "of blue"}
    assert read_secrets(tmp_path, "", SECRET) == {"TOKEN": "of default"}
    assert read_secrets(None, "blue", ()) == {}
    for tenant in ("..", ".", "a/b", "/etc"):
        with pytest.raises(InvalidInput, match="cannot have secrets, because of its name"):
            read_secrets(tmp_path, tenant, SECRET)


def test_links_and_texts_that_no_variable_can_hold_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "blue"
    folder.mkdir()
    other = tmp_path / "other"
    other.write_text("of red")
    path = folder / "token"
    path.symlink_to(other)
    with pytest.raises(InvalidInput, match="token cannot be read on this node"):
        read_secrets(tmp_path, "blue", SECRET)
    path.unlink()
    for text in ("a\0b", "x" * (MAX_SECRET_BYTES + 1)):
        path.write_text(text)
        with pytest.raises(InvalidInput, match="is no text of at most 64 KiB"):
            read_secrets(tmp_path, "blue", SECRET)
    path.write_bytes(b"\xff")
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_secrets(tmp_path, "blue", SECRET)
