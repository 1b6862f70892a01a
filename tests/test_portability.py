"""What needs no torch works on Linux, macOS and Windows: no name of POSIX alone, no text in the locale's encoding."""

import ast
import os
import subprocess
import sys

import pytest

from tests.marks import left_to_ci
from tests.test_layout import SOURCE, TORCH_FREE

pytestmark = pytest.mark.lint

PACKAGES = (*TORCH_FREE, "cli")
FILES = [SOURCE / "__init__.py", SOURCE / "__main__.py"] + [
    path for name in PACKAGES for path in sorted((SOURCE / name).rglob("*.py"))
]

# "Availability: Unix" in the documentation of Python 3.11's library.
POSIX_MODULES = {
    "crypt",
    "curses",
    "fcntl",
    "grp",
    "nis",
    "posix",
    "pty",
    "pwd",
    "readline",
    "resource",
    "spwd",
    "syslog",
    "termios",
    "tty",
}
POSIX_NAMES = """
os: chown chroot fork forkpty fchmod fchown getegid geteuid getgid getgroups getloadavg getpgid getpgrp getpriority
os: getresgid getresuid getsid getuid killpg lchown mkfifo mknod nice openpty pathconf posix_spawn pread pwrite
os: register_at_fork sched_getaffinity sched_setaffinity sched_getscheduler sched_yield sendfile setegid seteuid setgid
os: setgroups setpgid setpriority setsid setuid statvfs sysconf uname wait wait3 wait4 waitid WEXITSTATUS WIFEXITED
os: WIFSIGNALED WNOHANG memfd_create O_NONBLOCK O_CLOEXEC O_DIRECTORY O_NOFOLLOW
signal: SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGUSR2 SIGWINCH alarm pause
signal: setitimer getitimer pthread_kill pthread_sigmask sigwait siginterrupt
socket: AF_UNIX AF_PACKET AF_NETLINK SO_REUSEPORT SO_BINDTODEVICE socketpair
time: tzset pthread_getcpuclockid CLOCK_MONOTONIC_RAW clock_gettime clock_gettime_ns
"""
POSIX_ATTRIBUTES = {
    f"{line.split(':')[0]}.{name}" for line in POSIX_NAMES.strip().splitlines() for name in line.split(": ")[1].split()
}


def guarded_names(tree):
    """What a file asks for before it uses it: names in hasattr(...) and getattr(...) calls."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return {
        item.value
        for call in calls
        if call.func.id in ("hasattr", "getattr")
        for item in call.args
        if isinstance(item, ast.Constant)
    }


def posix_names(text):
    """Module imports that no try surrounds, and attributes that the file never asks for."""
    tree = ast.parse(text)
    tried = {
        id(item)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        for part in node.body
        for item in ast.walk(part)
    }
    guarded = guarded_names(tree)
    for node in ast.walk(tree):
        names = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
        names |= {node.module} if isinstance(node, ast.ImportFrom) else set()
        if names & POSIX_MODULES and id(node) not in tried:
            yield node.lineno, (names & POSIX_MODULES).pop()
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and id(node) not in tried:
            name = f"{node.value.id}.{node.attr}"
            if name in POSIX_ATTRIBUTES and node.attr not in guarded:
                yield node.lineno, name


def texts_without_encoding(text):
    """Calls that read or write text without saying in which encoding."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or any(item.arg in ("encoding", None) for item in node.keywords):
            continue
        if isinstance(node.func, ast.Name):
            name, owner = node.func.id, None
        elif isinstance(node.func, ast.Attribute):
            name, owner = node.func.attr, getattr(node.func.value, "id", None)
        else:
            continue
        modes = [item.value for item in node.args if isinstance(item, ast.Constant) and isinstance(item.value, str)]
        binary = any(set(mode) <= set("rwxab+") and "b" in mode for mode in modes)
        methods = name in ("read_text", "write_text") and isinstance(node.func, ast.Attribute)
        opens = name in ("open", "fdopen", "NamedTemporaryFile") and owner not in ("webbrowser", "gzip", "os")
        opened = opens and not binary
        piped = owner == "subprocess" and any(item.arg in ("text", "universal_newlines") for item in node.keywords)
        if methods or opened or piped:
            yield node.lineno, name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_name_that_only_posix_has(path):
    found = list(posix_names(path.read_text(encoding="utf-8")))
    assert not found, f"{path}: ask for it first (hasattr, or try around the import)"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_text_names_its_encoding(path):
    assert not list(texts_without_encoding(path.read_text(encoding="utf-8"))), path


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import fcntl", ["fcntl"]),
        ("from resource import getrlimit", ["resource"]),
        ("try:\n    import resource\nexcept ImportError:\n    resource = None", []),
        ("import os\nos.sched_getaffinity(0)", ["os.sched_getaffinity"]),
        ("import os\nif hasattr(os, 'sched_getaffinity'):\n    os.sched_getaffinity(0)", []),
        ("import signal\nsignal.SIGHUP", ["signal.SIGHUP"]),
        ("import signal\nsignal.SIGTERM", []),
    ],
)
def test_the_check_for_names_finds_what_it_should(text, found):
    assert [name for _, name in posix_names(text)] == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("open('x')", ["open"]),
        ("open('x', 'rb')", []),
        ("open('x', encoding='utf-8')", []),
        ("path.open()", ["open"]),
        ("path.open('w')", ["open"]),
        ("path.read_text()", ["read_text"]),
        ("write_text(text, path)", []),
        ("subprocess.run(command, text=True)", ["run"]),
    ],
)
def test_the_check_for_encodings_finds_what_it_should(text, found):
    assert [name for _, name in texts_without_encoding(text)] == found


# --- consoles ---

CONSOLES = {
    "cp1252": {"PYTHONIOENCODING": "cp1252"},
    "cp437": {"PYTHONIOENCODING": "cp437"},
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "no locale": {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("console")


@pytest.mark.parametrize("console", ["ascii", *left_to_ci("cp1252", "cp437", "no locale")])
def test_every_table_can_be_printed_on_a_console_with_few_characters(console, folder):
    """Planning, simulating and showing, with a file name that only a console in UTF-8 knows."""
    # Without a locale, files cannot have such names.
    file = "plan.json" if "LC_ALL" in CONSOLES[console] else "plän→.json"
    commands = [
        ["plan", "gpt2-small", "--cluster", "4xA100", "--top", "2", "--out", file],
        ["simulate", file, "--out", "timeline.json"],
        ["show", file, "--program"],
        ["show", "4xL40S"],
        ["capture", "gpt-tiny"],
        ["plan", "→.toml", "--cluster", "4xA100"],
        ["--help"],
    ]
    code = f"""
import sys
sys.modules["torch"] = None
from meshwright.cli.output import accept_any_character
from meshwright.cli.main import invoke
accept_any_character()
for command in {commands!a}:
    print("code", invoke(command), flush=True)
"""
    environment = {**os.environ, "COLUMNS": "120", **CONSOLES[console]}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=100, check=False)
    codes = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith(b"code ")]
    assert (done.returncode, codes) == (0, [0, 0, 0, 0, 0, 1, 0]), done.stderr.decode("latin-1")
    if console == "ascii":
        done.stdout.decode("ascii")
        assert b"'>.toml' has to be captured" in done.stderr


def test_stand_ins_keep_columns():
    code = "from meshwright.cli.output import accept_any_character as a; a(); print('a → b − c × d é │─ 漢')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=60, check=True)
    assert done.stdout.split(b"\n")[0].strip() == b"a > b - c x d e |- ?"


def test_documents_are_the_same_bytes_on_every_system(tmp_path):
    """No line ends are translated: a script that is written on Windows starts on Linux."""
    from meshwright.spec import files

    written = []

    class File:
        def __init__(self, handle, mode, **options):
            os.close(handle)
            written.append((mode, options))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def writelines(self, pieces):
            written.append(b"".join(pieces))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files.os, "fdopen", File)
        files.write_text("one\ntwo\n", tmp_path / "x.sh")
    assert written == [("wb", {}), b"one\ntwo\n"]
