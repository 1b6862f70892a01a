"""The commands as a user types them, in a folder of their own."""

import pytest

from meshwright.cli.main import invoke


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Arguments → exit code, standard output and standard error, in an empty folder and on a wide terminal.

    With ``code`` the command has to exit with it.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run_command(*arguments, code=None):
        given = invoke([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert code in (None, given), captured.err
        return given, captured.out, captured.err

    return run_command
