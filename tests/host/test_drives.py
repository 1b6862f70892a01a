"""What a folder lies on, by the mounts that the kernel tells."""

from pathlib import Path

import pytest

from meshwright.host import Host
from meshwright.host.memory_limits import find_drive
from tests.host.machines import make_host

ROOT = "27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"


def kind_of(tmp_path, folder, *mounts):
    host = make_host(tmp_path / "machine", {"/proc/self/mountinfo": ROOT + "\n".join(mounts)})
    return find_drive(host, folder)


def test_the_innermost_mount_counts_and_of_one_point_the_last(tmp_path):
    inner = tmp_path / "a b"
    inner.mkdir()
    outside = f"31 27 0:23 / {tmp_path} rw - xfs none rw"
    point = str(inner).replace(" ", "\\040")
    first, last = (f"{number} 27 0:23 / {point} rw - {kind} none rw" for number, kind in ((32, "btrfs"), (33, "tmpfs")))
    assert kind_of(tmp_path, inner, first, last, outside).kind == "tmpfs"
    assert kind_of(tmp_path, inner, first, last, outside).is_memory
    assert kind_of(tmp_path, tmp_path, first, last, outside).kind == "xfs"
    assert kind_of(tmp_path, Path("/"), first).kind == "ext4"
    assert not kind_of(tmp_path, Path("/"), first).is_memory


def test_a_name_that_only_begins_alike_is_not_inside(tmp_path):
    (tmp_path / "fastest").mkdir()
    assert kind_of(tmp_path, tmp_path / "fastest", f"31 27 0:23 / {tmp_path}/fast rw - tmpfs none rw").kind == "ext4"


def test_odd_lines_and_systems_that_do_not_tell(tmp_path):
    assert kind_of(tmp_path, tmp_path, "", "31 27 - tmpfs", "no mount at all").kind == "ext4"
    silent = find_drive(make_host(tmp_path / "other", {}), tmp_path)
    assert silent.kind == ""
    assert not silent.is_memory
    assert silent.free_bytes > 0


def test_a_folder_that_is_not_there_raises(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        find_drive(Host(), tmp_path / "none")
