"""The walls, layer by layer, as a program meets them. Attempts that combine them are in test_escapes.py."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import tempfile
import venv
from pathlib import Path

import mpmath
import pytest

import trimtab
from trimtab.workers import Sandbox

PATIENT = 60.0  # seconds, for what ends by itself on a machine of any load


def told(sandbox: Sandbox, code: str) -> object:
    """What a program prints as JSON."""
    result = sandbox.run(f"import ctypes, errno, json, os, sys\n{code}", timeout=PATIENT)
    assert result.kind == "ok", result
    return json.loads(result.stdout)


def test_nothing_of_the_machine_is_visible(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    secret.chmod(0o644)
    paths = [
        "/proc",
        "/sys",
        "/home",
        "/etc/passwd",
        "/etc/hostname",
        "/bin/sh",
        "/var",
        "/run",
        "/dev/kmsg",
        "/dev/tty",
    ]
    paths += [str(secret), str(Path(__file__)), str(Path.home() / ".ssh"), os.getcwd() + "/pyproject.toml"]
    assert told(sandbox, f"print(json.dumps([p for p in {paths} if os.path.exists(p)]))") == []


def test_what_is_there_cannot_be_changed(sandbox: Sandbox) -> None:
    code = """
def fails(function, *arguments):
    try:
        function(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "it worked"
import numpy
found = [fails(open, os.path.dirname(numpy.__file__) + "/x", "w"), fails(open, "/x", "w"), fails(os.mkdir, "/dev/x")]
found += [fails(open, numpy.__file__, "a"), fails(os.chmod, numpy.__file__, 0o777), fails(os.unlink, numpy.__file__)]
print(json.dumps(sorted(set(found))))"""
    assert set(told(sandbox, code)) <= {"EACCES", "EROFS", "EPERM"}  # type: ignore[call-overload]


def test_the_environment_and_the_descriptors_are_clean(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    with Sandbox(workers=1, level="limits") as fresh:
        names = told(fresh, "print(json.dumps(sorted(os.environ)))")
    threads = ["MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"]
    assert set(names) <= {"HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONHASHSEED", "TMPDIR", *threads}  # type: ignore[call-overload]
    code = """
def is_open(descriptor):
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
print(json.dumps([d for d in range(200) if is_open(d)]))"""
    assert told(sandbox, code) == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "number", "arguments"),
    [
        ("socket", 41, (2, 1, 0)),
        ("ptrace", 101, (0, 0, 0)),
        ("mount", 165, (0, 0, 0)),
        ("umount2", 166, (0, 0)),
        ("unshare", 272, (0x1000_0000,)),
        ("setns", 308, (0, 0)),
        ("clone with CLONE_NEWUSER", 56, (0x1000_0011, 0, 0, 0, 0)),
        ("bpf", 321, (0, 0, 0)),
        ("perf_event_open", 298, (0, 0, 0)),
        ("keyctl", 250, (0, 0)),
        ("userfaultfd", 323, (0,)),
        ("memfd_create", 319, (0, 0)),
        ("shmget", 29, (0, 4096, 0o1600)),
        ("process_vm_readv", 310, (1, 0, 0)),
        ("init_module", 175, (0, 0)),
        ("open_by_handle_at", 304, (0, 0, 0)),
        ("io_uring_setup", 425, (8, 0)),
        ("clone3", 435, (0, 0)),
        ("pidfd_open", 434, (1, 0)),
        ("a call that no kernel has", 999, ()),
        ("ioctl TIOCSTI", 16, (0, 0x5412, 0)),
        ("prctl PR_SET_SECCOMP", 157, (22, 0, 0)),
        ("mmap of shared memory", 9, (0, 4096, 3, 0x21, -1, 0)),
        ("fcntl F_SETOWN", 72, (1, 8, 1)),
        ("socketpair of datagrams", 53, (1, 2, 0, 0)),
    ],
)
def test_forbidden_system_calls_fail(sandbox: Sandbox, name: str, number: int, arguments: tuple[int, ...]) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("the numbers are those of x86_64")
    longs = ", ".join(f"ctypes.c_long({value})" for value in (number, *arguments))
    code = f"""
result = ctypes.CDLL(None, use_errno=True).syscall({longs})
print(json.dumps([result, ctypes.get_errno()]))"""
    result, error = told(sandbox, code)  # type: ignore[misc]
    assert result == -1
    assert os.strerror(error) in {os.strerror(n) for n in (1, 25, 38)}, f"{name}: EPERM, ENOTTY or ENOSYS"


def test_the_second_table_of_system_calls_is_closed(sandbox: Sandbox) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("x86_64 alone has one")
    result = sandbox.run("import ctypes\nctypes.CDLL(None).syscall(ctypes.c_long(0x40000027))", timeout=PATIENT)
    assert (result.kind, result.error) == ("killed", "killed by SIGSYS")


def test_no_capability_is_left(sandbox: Sandbox) -> None:
    assert told(sandbox, "print(json.dumps([os.getuid(), os.geteuid(), os.getgid()]))") == [1000, 1000, 1000]
    for call in (
        "os.setuid(0)",
        "os.setgroups([0])",
        "os.chroot('/tmp')",
        "os.mknod('x', 0o20600, 259)",
        "os.nice(-1)",
    ):
        assert "PermissionError" in sandbox.run(f"import os\n{call}", timeout=PATIENT).error, call
    assert "PermissionError" in sandbox.run("import socket\nsocket.sethostname('x')", timeout=PATIENT).error


def test_processes_and_files_are_bounded() -> None:
    try:
        sandbox = Sandbox(workers=1, processes=5, disk_mb=2)
    except OSError as error:
        pytest.skip(str(error))
    code = """
count = 0
try:
    while count < 100 and os.fork():
        count += 1
    else:
        if count < 100:
            import time
            time.sleep(600)
except BlockingIOError:
    print(json.dumps(count), flush=True)
    os._exit(0)"""
    write = """
def until_full(step):
    for n in range(100_000):
        try:
            step(n)
        except OSError as error:
            return errno.errorcode[error.errno]
found = [until_full(lambda n: open(f"f{n}", "w").write("x" * 100_000))]
for name in filter(os.path.isfile, os.listdir()):
    os.unlink(name)
found.append(until_full(lambda n: open(f"g{n}", "w").close()))
print(json.dumps(found))"""
    with sandbox:
        assert told(sandbox, code) == 4
        assert told(sandbox, write) == ["ENOSPC", "ENOSPC"]
        assert told(sandbox, "print(json.dumps([name for name in os.listdir('/tmp') if os.path.isfile(name)]))") == []


def test_an_interpreter_below_tmp_stays_there(sandbox: Sandbox) -> None:
    """An environment and a package where programs have their own folder: all walls hold, and it cannot be changed."""
    code = """
import sys
from trimtab.workers import Sandbox
with Sandbox(workers=1, packages=("mpmath",)) as sandbox:
    print(sandbox.run(sys.argv[1], timeout=60.0))"""
    program = """
import mpmath, os
open("/tmp/own", "w").write("own")
print(os.path.dirname(mpmath.__file__), os.getcwd())
open(mpmath.__file__, "a")"""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        venv.create(folder, symlinks=True)
        packages = sysconfig.get_path("purelib", vars={"base": folder, "platbase": folder})
        for source in Path(mpmath.__file__).parents[1].glob("mpmath*"):
            shutil.copytree(source, Path(packages) / source.name)
        done = subprocess.run(
            [f"{folder}/bin/python", "-c", code, program], capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(Path(trimtab.__file__).parents[1])},
        )  # fmt: skip
    assert f"stdout='{packages}/mpmath /tmp" in done.stdout, done
    assert "Read-only file system" in done.stdout or "Permission denied" in done.stdout, done


def test_no_run_finds_another_in_memory(sandbox: Sandbox) -> None:
    """Earlier programs and those at work now pass the server by; a later one inherits its memory, without them."""
    marks = [f"mark-{os.getpid()}-{n}" for n in range(3)]
    sandbox.run(f"print('{marks[0]}')", timeout=PATIENT)
    with sandbox.session(timeout=PATIENT) as session:
        session.run(f"x = '{marks[1]}'\nprint(x)")
        # The mark in reverse, so that it is not the looking program's own text that is found.
        code = f"""
import gc
wanted = ['{marks[0][::-1]}'[::-1], '{marks[1][::-1]}'[::-1]]
texts = [o for o in gc.get_objects() if isinstance(o, (dict, list, tuple))]
found = [w for w in wanted for o in texts if o is not wanted for v in (o.values() if isinstance(o, dict) else o)
         if isinstance(v, (str, bytes)) and v is not w and (w if isinstance(v, str) else w.encode()) in v]
print(json.dumps(found))"""
        assert told(sandbox, code) == []
