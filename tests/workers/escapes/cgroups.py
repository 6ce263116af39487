# %% a control group of one's own
# proof: root
for folder in glob.glob("/sys/fs/cgroup/*") + ["/sys/fs/cgroup"]:
    with quiet():
        os.mkdir(f"{folder}/{W.marker}")

# %% leave the control group
# proof: no, it would move the harness's program
for path in glob.glob("/sys/fs/cgroup/**/cgroup.procs")[:50] + glob.glob("/sys/fs/cgroup/*/tasks")[:50] + ["/sys/fs/cgroup/cgroup.procs"]:
    with quiet():
        os.close(os.open(path, os.O_WRONLY))
        won(path)

# %% the limits of the control group
# proof: root
for pattern in ("memory.max", "pids.max", "*/memory.limit_in_bytes", "*/pids.max", "*/notify_on_release", "cpu.max", "*/cpu.shares", "*/cgroup.clone_children"):
    for path in glob.glob("/sys/fs/cgroup/" + pattern):
        with quiet():
            os.close(os.open(path, os.O_WRONLY))
            won(path)

# %% the program that a control group starts when it is empty
# proof: root
for path in glob.glob("/sys/fs/cgroup/*/release_agent"):
    with quiet():
        os.close(os.open(path, os.O_WRONLY))
        won(path)

# %% mount the control groups
# proof: root
def mount():
    call("unshare", NEWNS)
    libc.mount(b"none", b"/", None, 0x44000, None)
    folder = tempfile.mkdtemp(prefix=W.marker)
    for kind, data in ((b"cgroup2", None), (b"cgroup", b"memory"), (b"cgroup", b"pids")):
        if libc.mount(b"none", folder.encode(), kind, 0, data) == 0:
            won(kind)
in_child(mount)

# %% the settings of the kernel's devices
# proof: root
for path in ("/sys/kernel/mm/transparent_hugepage/enabled", "/sys/power/state", "/sys/kernel/uevent_helper", "/sys/module/kernel/parameters/panic", "/sys/devices/system/cpu/cpu1/online", "/sys/kernel/mm/ksm/run"):
    with quiet():
        os.close(os.open(path, os.O_WRONLY))
        won(path)

# %% raise the limits
# proof: root
for name in ("AS", "DATA", "NPROC", "NOFILE", "FSIZE", "CPU", "CORE", "MEMLOCK", "MSGQUEUE"):
    number = getattr(resource, "RLIMIT_" + name, 12)
    low, high = resource.getrlimit(number)
    with quiet():
        resource.setrlimit(number, (high if high == -1 else high + 1,) * 2)
        won(f"{name} from {high}") if high != -1 or name in ("AS", "NPROC") else None

# %% limits that are not there
# proof: plain
missing = [name for name in ("AS", "NPROC", "NOFILE", "FSIZE", "CORE") if resource.getrlimit(getattr(resource, "RLIMIT_" + name))[1] == -1]
if "NPROC" in missing or "FSIZE" in missing or "CORE" in missing:
    won(missing)
