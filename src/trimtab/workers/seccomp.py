"""The system calls that a program may make: a seccomp filter that allows what Python and numpy need, and no more.

A list of what is allowed, since a list of what is not would be out of date with the next kernel. pyseccomp (0.1.2)
needs libseccomp, which Alpine and distroless images lack; for one filter, forty lines are less than that.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from dataclasses import dataclass

from trimtab.workers.linux import PR_SET_SECCOMP, call

# name=x86_64/aarch64
_ALLOWED = """
read=0/63 write=1/64 readv=19/65 writev=20/66 pread64=17/67 pwrite64=18/68 preadv=295/69 pwritev=296/70
preadv2=327/286 pwritev2=328/287 open=2/- openat=257/56 openat2=437/437 close=3/57 close_range=436/436
creat=85/- stat=4/- fstat=5/80 lstat=6/- newfstatat=262/79 statx=332/291 access=21/- faccessat=269/48
faccessat2=439/439 lseek=8/62 mmap=9/222 mprotect=10/226 munmap=11/215 mremap=25/216 madvise=28/233 msync=26/227
mincore=27/232 brk=12/214 rt_sigaction=13/134 rt_sigprocmask=14/135 rt_sigreturn=15/139 rt_sigpending=127/136
rt_sigsuspend=130/133 rt_sigtimedwait=128/137 sigaltstack=131/132 pipe=22/- pipe2=293/59 select=23/-
pselect6=270/72 poll=7/- ppoll=271/73 epoll_create=213/- epoll_create1=291/20 epoll_ctl=233/21 epoll_wait=232/-
epoll_pwait=281/22 epoll_pwait2=441/441 eventfd=284/- eventfd2=290/19 timerfd_create=283/85
timerfd_settime=286/86 timerfd_gettime=287/87 dup=32/23 dup2=33/- dup3=292/24 fcntl=72/25
fsync=74/82 fdatasync=75/83 truncate=76/45 ftruncate=77/46 fallocate=285/47 fadvise64=221/223 getdents=78/-
getdents64=217/61 getcwd=79/17 chdir=80/49 fchdir=81/50 mkdir=83/- mkdirat=258/34 rmdir=84/- unlink=87/-
unlinkat=263/35 rename=82/- renameat=264/38 renameat2=316/276 link=86/- linkat=265/37 symlink=88/-
symlinkat=266/36 readlink=89/- readlinkat=267/78 chmod=90/- fchmod=91/52 fchmodat=268/53 umask=95/166
utimensat=280/88 utime=132/- utimes=235/- futimesat=261/- getuid=102/174 geteuid=107/175 getgid=104/176
getegid=108/177 getresuid=118/148 getresgid=120/150 getgroups=115/158 getpid=39/172 getppid=110/173
gettid=186/178 getpgrp=111/- getpgid=121/155 getsid=124/156 setpgid=109/154 setsid=112/157
set_tid_address=218/96 set_robust_list=273/99 get_robust_list=274/100 futex=202/98 rseq=334/293 arch_prctl=158/-
fork=57/- vfork=58/- execve=59/221 wait4=61/260 waitid=247/95 exit=60/93 exit_group=231/94 nanosleep=35/101
clock_nanosleep=230/115 clock_gettime=228/113 clock_getres=229/114 gettimeofday=96/169 time=201/- times=100/153
getrusage=98/165 getrlimit=97/163 setrlimit=160/164 sysinfo=99/179 uname=63/160 sched_yield=24/124
sched_getaffinity=204/123 sched_getparam=143/121 sched_getscheduler=145/120 sched_get_priority_max=146/125
sched_get_priority_min=147/126 getcpu=309/168 getrandom=318/278 alarm=37/- pause=34/- getitimer=36/102
setitimer=38/103 timer_create=222/107 timer_settime=223/110 timer_gettime=224/108 timer_getoverrun=225/109
timer_delete=226/111 sendto=44/206 recvfrom=45/207 sendmsg=46/211 recvmsg=47/212 shutdown=48/210
getsockopt=55/209 getsockname=51/204 getpeername=52/205 sendfile=40/71 copy_file_range=326/285
statfs=137/43 fstatfs=138/44 restart_syscall=219/128 membarrier=324/283 getpriority=140/141 kill=62/129
tgkill=234/131 tkill=200/130 prlimit64=302/261 sched_setaffinity=203/122 clone=56/220 ioctl=16/29 prctl=157/167
socketpair=53/199 clone3=435/435 setpriority=141/140
"""
_FORKS = ("fork", "vfork")
_SIGNALS = ("kill", "tkill")
_PRIORITIES = ("setpriority",)

_LOAD, _JUMP, _EQUAL, _MORE_THAN, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x05, 0x15, 0x25, 0x35, 0x45, 0x54, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF_0000, 0x0005_0000, 0x8000_0000
_NUMBER, _ARCH = 0, 4  # offsets in struct seccomp_data
_ARCHITECTURES = {"x86_64": (0xC000_003E, 0), "aarch64": (0xC000_00B7, 1)}
_X32 = 0x4000_0000  # x86_64's second table of system calls
# The C library asks for newer calls and falls back only if they are unknown, not if they are forbidden.
_FIRST_WITH_FALLBACK = 424
_NEW_NAMESPACES = 0x7E02_0080  # all CLONE_NEW*
_CLONE_THREAD = 0x0001_0000
# What Python asks of descriptors: a terminal or not, window size, bytes to read, non-blocking, inherited or not.
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# Copies and flags of descriptors, sizes of pipes. No locks and leases, which hold up who uses the same file outside,
# no notices of what changes outside (F_NOTIFY), no signals to other processes (F_SETOWN).
_FCNTLS = (0, 1, 2, 3, 4, 1030, 1032)
_SHARED_ANONYMOUS = 0x21  # MAP_SHARED, MAP_ANONYMOUS
_PRCTLS = (1, 2, 3, 15, 16, 39)  # signal at the parent's death, dumpable?, name, no_new_privs?


@dataclass(frozen=True)
class _Instruction:
    code: int
    value: int
    yes: int = 0
    no: int = 0

    def pack(self) -> bytes:
        return struct.pack("HBBI", self.code, self.yes, self.no, self.value)


def build_filter(*, processes: bool, pid: int = 0, priorities: bool = False) -> bytes:
    """Return the filter's program for this machine.

    Without `processes`, a program can start threads and nothing else. With a `pid`, signals and limits of others than
    this process are out of reach, for runs without a PID namespace. With `priorities`, they can be changed.
    """
    machine, column = _ARCHITECTURES[platform.machine()]
    numbers = {}
    for entry in _ALLOWED.split():
        name, _, both = entry.partition("=")
        if (number := both.split("/")[column]) != "-":
            numbers[name] = int(number)
    program = [_Instruction(_LOAD, _ARCH), _Instruction(_EQUAL, machine, 1), _Instruction(_RETURN, _KILL)]
    program += [_Instruction(_LOAD, _NUMBER), _Instruction(_AT_LEAST, _X32, 0, 1), _Instruction(_RETURN, _KILL)]
    checks = {
        "clone": _check_bits(0, _NEW_NAMESPACES if processes else _CLONE_THREAD, wanted=not processes),
        "clone3": [_error(errno.ENOSYS)],  # its flags lie in memory, which a filter cannot read
        "fcntl": _one_of(1, _FCNTLS, errno.EPERM),
        # Pages that are shared and belong to no file are in no process's count once they are unmapped from it.
        "mmap": _not_all_bits(3, _SHARED_ANONYMOUS),
        "ioctl": _one_of(1, _IOCTLS, errno.ENOTTY),
        "prctl": _one_of(0, _PRCTLS, errno.EPERM),
        # A datagram socket could be pointed at any address later, one of a connected stream cannot.
        "socketpair": [*_one_of(0, (1,), errno.EPERM)[:-1], *_one_of(1, (1,), errno.EPERM, mask=0xF)],
    }
    if pid:
        checks |= {name: _one_of(0, (0, pid), errno.EPERM) for name in ("tgkill", "prlimit64", "sched_setaffinity")}
    refused = (*(() if processes else _FORKS), *(_SIGNALS if pid else ()), *(() if priorities else _PRIORITIES))
    plain = sorted(number for name, number in numbers.items() if name not in checks and name not in refused)
    for name, body in checks.items():
        program += [_Instruction(_EQUAL, numbers[name], 0, len(body)), *body]
    # In order and as ranges: the kernel walks this program for every system call there is when it is applied, and the
    # time of that is a part of every run's (0.8 ms with a comparison for each allowed call).
    older = _allow_ranges([n for n in plain if n < _FIRST_WITH_FALLBACK], errno.EPERM)
    program += [_Instruction(_AT_LEAST, _FIRST_WITH_FALLBACK, 0, 1), _Instruction(_JUMP, len(older)), *older]
    program += _allow_ranges([n for n in plain if n >= _FIRST_WITH_FALLBACK], errno.ENOSYS)
    return b"".join(instruction.pack() for instruction in program)


def _allow_ranges(numbers: list[int], otherwise: int) -> list[_Instruction]:
    """Allow sorted numbers."""
    program: list[_Instruction] = []
    start = numbers[0]
    for number, following in zip(numbers, [*numbers[1:], -1], strict=True):
        if following != number + 1:
            allow = _Instruction(_RETURN, _ALLOW)
            program += [
                _Instruction(_MORE_THAN, number, 3),
                _Instruction(_AT_LEAST, start, 0, 1),
                allow,
                _error(otherwise),
            ]
            start = following
    return [*program, _error(otherwise)]


def _error(number: int) -> _Instruction:
    return _Instruction(_RETURN, _ERROR | number)


def _argument(index: int) -> _Instruction:
    return _Instruction(_LOAD, 16 + 8 * index)  # the lower half: all arguments looked at have 32 bits


def _check_bits(index: int, bits: int, *, wanted: bool) -> list[_Instruction]:
    """Allow an argument that has any of the bits, or that has none of them."""
    check = _Instruction(_ANY_BIT, bits, int(wanted), int(not wanted))
    return [_argument(index), check, _error(errno.EPERM), _Instruction(_RETURN, _ALLOW)]


def _not_all_bits(index: int, bits: int) -> list[_Instruction]:
    compare = [_Instruction(_AND, bits), _Instruction(_EQUAL, bits, 0, 1)]
    return [_argument(index), *compare, _error(errno.EPERM), _Instruction(_RETURN, _ALLOW)]


def _one_of(index: int, values: tuple[int, ...], otherwise: int, mask: int = 0) -> list[_Instruction]:
    """Allow some values of an argument; the last instruction is reached if it has one of them."""
    masked = [_Instruction(_AND, mask)] if mask else []
    jumps = [_Instruction(_EQUAL, value, len(values) - i) for i, value in enumerate(values)]
    return [_argument(index), *masked, *jumps, _error(otherwise), _Instruction(_RETURN, _ALLOW)]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def apply_filter(program: bytes) -> None:
    """Apply a filter to this process and all it starts; it needs no_new_privs, and cannot be taken back."""
    structure = _Program(len(program) // 8, program)
    call("prctl", PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.byref(structure), ctypes.c_ulong(0), ctypes.c_ulong(0))
