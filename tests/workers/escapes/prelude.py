import base64, contextlib, ctypes, errno, glob, json, mmap, os, pickle, platform, resource, select, shutil, signal, socket
import struct, subprocess, sys, tempfile, threading, time, types
W = types.SimpleNamespace(**WORLD)  # an attacker knows where everything is
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
quiet = lambda: contextlib.suppress(Exception)
X86_64 = dict(read=0, write=1, mmap=9, mprotect=10, ioctl=16, shmget=29, shmat=30, shmctl=31, socket=41, clone=56, fork=57, vfork=58,
    execve=59, kill=62, semget=64, shmdt=67, msgget=68, chroot=161, ptrace=101, syslog=103, setuid=105, capget=125, capset=126, personality=135,
    sched_setscheduler=144, pivot_root=155, prctl=157, adjtimex=159, settimeofday=164, mount=165, umount2=166, swapon=167,
    reboot=169, sethostname=170, iopl=172, ioperm=173, init_module=175, delete_module=176, quotactl=179, tkill=200, io_setup=206,
    clock_settime=227, mbind=237, mq_open=240, kexec_load=246, add_key=248, request_key=249, keyctl=250, ioprio_set=251,
    inotify_add_watch=254, migrate_pages=256, unshare=272, move_pages=279, signalfd=282, perf_event_open=298, fanotify_init=300,
    prlimit64=302, name_to_handle_at=303, open_by_handle_at=304, clock_adjtime=305, setns=308, process_vm_readv=310,
    process_vm_writev=311, kcmp=312, finit_module=313, seccomp=317, memfd_create=319, kexec_file_load=320, bpf=321, execveat=322,
    userfaultfd=323, pidfd_send_signal=424, io_uring_setup=425, open_tree=428, move_mount=429, fsopen=430, fsconfig=431,
    fsmount=432, fspick=433, pidfd_open=434, clone3=435, openat2=437, pidfd_getfd=438, process_madvise=440, mount_setattr=442,
    landlock_create_ruleset=444, memfd_secret=447, process_mrelease=448, rt_tgsigqueueinfo=297, rt_sigqueueinfo=129)
NEWNS, NEWUSER, NEWPID, NEWNET, NEWIPC, NEWUTS, NEWCGROUP = 0x20000, 0x10000000, 0x20000000, 0x40000000, 0x8000000, 0x4000000, 0x2000000


def won(why):
    print(W.tag, why, flush=True)


def call(name, *args):
    if platform.machine() != "x86_64":
        sys.exit("the numbers are those of x86-64")
    ctypes.set_errno(0)
    number = name if isinstance(name, int) else X86_64[name]
    return libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])


def name_me():
    libc.prctl(15, W.marker.encode(), 0, 0, 0)  # PR_SET_NAME: found by the harness wherever it hides


def in_child(function, wait=True):
    child = os.fork()
    if child == 0:
        with quiet():
            function()
        sys.stdout.flush()
        os._exit(0)
    return os.waitpid(child, 0) if wait else child


def show_secrets(data):
    start = data.find(b"plan" + b"ted-")
    for _ in range(200):
        if start < 0:
            return
        print(bytes(data[start:start + 64]).decode("latin1").replace("\0", " "), flush=True)
        start = data.find(b"plan" + b"ted-", start + 8)


def machine_code(code, restype=ctypes.c_long, *argtypes):
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    machine_code.pages = [*getattr(machine_code, "pages", []), page]
    return ctypes.CFUNCTYPE(restype, *argtypes)(ctypes.addressof(ctypes.c_char.from_buffer(page)))


def probe(start, end, pipe=[]):
    """Reads memory without a fault: the kernel copies a page into a pipe, or says EFAULT."""
    pipe = pipe or os.pipe()
    found = bytearray()
    for page in range(start & ~4095, end, 4096):
        if libc.write(pipe[1], ctypes.c_void_p(page), 4096) == 4096:
            found += os.read(pipe[0], 4096)
    return bytes(found)
