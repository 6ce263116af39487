# %% a user namespace
# proof: machine
if call("unshare", NEWUSER) == 0:
    won("unshare")

# %% a user namespace for a child
# proof: machine
child = call("clone", NEWUSER | 17, 0, 0, 0, 0)
if child == 0:
    won("clone")
    os._exit(0)

# %% a user namespace by the newer call
# proof: machine
class Arguments(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack", "stack_size", "tls")]
child = call("clone3", ctypes.byref(Arguments(flags=NEWUSER, exit_signal=17)), 64)
if child == 0:
    won("clone3")
    os._exit(0)

# %% each other kind of namespace
# proof: root
for kind in (NEWNS, NEWNET, NEWIPC, NEWUTS, NEWCGROUP, NEWPID):
    in_child(lambda: won(hex(kind)) if call("unshare", kind) == 0 else None)

# %% many nested user namespaces
# proof: machine
depth = 0
while depth < 8 and call("unshare", NEWUSER) == 0:
    depth += 1
if depth:
    won(f"{depth} deep")

# %% join the namespaces of another process
# proof: root
for pid in (W.parent, os.getppid(), 1):
    for kind in ("user", "mnt", "net", "ipc", "uts", "pid", "cgroup"):
        with quiet():
            descriptor = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
            if call("setns", descriptor, 0) == 0:
                won(f"joined {kind} of {pid}")

# %% join the namespaces by a descriptor of the process
# proof: root
pidfd = call("pidfd_open", W.parent, 0)
if pidfd >= 0 and call("setns", pidfd, NEWNET | NEWUTS) == 0:
    won("setns")

# %% the owner of the user namespace
# proof: no, a plain program has none above it
import fcntl
for kind in ("user", "mnt", "net", "pid"):
    with quiet():
        descriptor = os.open(f"/proc/self/ns/{kind}", os.O_RDONLY)
        for request in (0xB701, 0xB702):  # NS_GET_USERNS, NS_GET_PARENT
            with quiet():
                above = fcntl.ioctl(descriptor, request)
                if call("setns", above, 0) == 0:
                    won(f"climbed from {kind}")

# %% change the root folder
# proof: root
folder = tempfile.mkdtemp(prefix=W.marker)
in_child(lambda: won("chroot") if call("chroot", folder.encode()) == 0 else None)

# %% leave a changed root folder
# proof: no, a plain program is not in one
folder = tempfile.mkdtemp(prefix=W.marker)
kept = os.open("/", os.O_RDONLY)
call("chroot", folder.encode())
os.fchdir(kept)
for _ in range(60):
    os.chdir("..")
call("chroot", b".")
print(open(W.secret_file).read())

# %% exchange the root folder
# proof: no, it would be the machine's
if W.sandboxed:
    folder = tempfile.mkdtemp()
    libc.mount(folder.encode(), folder.encode(), None, 0x1000, None)
    if call("pivot_root", folder.encode(), folder.encode()) == 0:
        won("pivot_root")
