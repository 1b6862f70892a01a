"""What stands where a file is read or written may be anything: it is never waited for and never taken away."""

import os
import stat

import pytest

from meshwright.program import name_schedule
from meshwright.spec import DocumentError, ScheduleReferenceError, Workload, load_cluster, write_document, write_text
from meshwright.spec.model_files import read_model_file
from meshwright.spec.parsing import read_data

pytestmark = [pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes"), pytest.mark.timeout(20)]


@pytest.mark.parametrize("read", [read_data, load_cluster, read_model_file], ids=lambda read: read.__name__)
def test_a_named_pipe_is_not_waited_for(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link.json").symlink_to(tmp_path / "pipe")
    with pytest.raises(DocumentError, match=r"link\.json: cannot be read: it is a named pipe, not a file"):
        read(str(tmp_path / "link.json"))


def test_a_folder_whose_configuration_is_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(DocumentError, match="it is a named pipe"):
        read_model_file(str(tmp_path))


def test_a_schedule_in_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "mine.py")
    with pytest.raises(ScheduleReferenceError, match="it is a named pipe"):
        name_schedule(f"{tmp_path / 'mine.py'}:order")


@pytest.mark.parametrize("name", ["out.json", "out.toml", "launch.sh"])
def test_a_pipe_is_not_replaced(name, tmp_path):
    place = tmp_path / name
    os.mkfifo(place)
    with pytest.raises(DocumentError, match="cannot be written: it is a named pipe"):
        write_text("x", place) if place.suffix == ".sh" else write_document(Workload(global_batch=1), place)
    assert stat.S_ISFIFO(place.stat().st_mode)
    assert list(tmp_path.iterdir()) == [place]


def test_a_link_to_a_file_is_read(tmp_path):
    (tmp_path / "file").write_text("[1]")
    (tmp_path / "link.json").symlink_to(tmp_path / "file")
    assert read_data(tmp_path / "link.json") == [1]
