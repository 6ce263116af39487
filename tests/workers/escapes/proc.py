# %% the environment of the parent
# proof: plain
show_secrets(open(f"/proc/{W.parent}/environ", "rb").read())

# %% the environment of every process
# proof: plain
for path in glob.glob("/proc/[0-9]*/environ"):
    with quiet():
        show_secrets(open(path, "rb").read())

# %% the command line of the parent
# proof: plain
show_secrets(open(f"/proc/{W.parent}/cmdline", "rb").read())

# %% the command lines of every process
# proof: plain
for path in glob.glob("/proc/[0-9]*/cmdline"):
    with quiet():
        show_secrets(open(path, "rb").read())

# %% the root of every process
# proof: plain
for path in ["/proc/self/root", "/proc/1/root", *glob.glob("/proc/[0-9]*/root"), *glob.glob("/proc/[0-9]*/task/*/root")][:300]:
    with quiet():
        show_secrets(open(path + W.secret_file, "rb").read())

# %% the working folder of every process
# proof: plain
for path in ["/proc/self/cwd", *glob.glob("/proc/[0-9]*/cwd")]:
    for climb in ("", "/..", "/../.."):
        with quiet():
            show_secrets(open(f"{path}{climb}/secret.txt", "rb").read())

# %% the descriptors of every process
# proof: plain
for path in [*glob.glob("/proc/[0-9]*/fd/*")][:3000]:
    with quiet():
        if os.path.isfile(path):
            show_secrets(open(path, "rb").read(1 << 16))

# %% the memory of the parent
# proof: ptrace
with open(f"/proc/{W.parent}/mem", "rb", buffering=0) as memory:
    memory.seek(W.address)
    show_secrets(memory.read(128))

# %% the memory of every process
# proof: ptrace
for path in glob.glob("/proc/[0-9]*/mem"):
    with quiet(), open(path, "rb", buffering=0) as memory:
        memory.seek(W.address)
        show_secrets(memory.read(128))

# %% write into the parent's memory
# proof: ptrace
with open(f"/proc/{W.parent}/mem", "r+b", buffering=0) as memory:
    memory.seek(W.scratch)
    memory.write(b"overwritten")

# %% the machine's settings
# proof: root
for name in ("kernel/core_pattern", "kernel/modprobe", "kernel/hostname", "vm/drop_caches", "kernel/randomize_va_space", "fs/suid_dumpable"):
    with quiet():
        os.close(os.open("/proc/sys/" + name, os.O_WRONLY))
        won(name)

# %% the magic key
# proof: machine
os.close(os.open("/proc/sysrq-trigger", os.O_WRONLY))
won("opened sysrq")

# %% the kernel's memory and addresses
# proof: root
for name in ("/proc/kcore", "/proc/kmsg", "/proc/kpagecount", "/proc/iomem", "/dev/mem", "/dev/kmsg", "/sys/kernel/debug/sched"):
    with quiet():
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK)
        if name != "/proc/iomem" or any(line.split("-")[0].strip(" 0") for line in os.read(descriptor, 4096).decode().splitlines()):
            won(name)

# %% protect the program from the killer of memory hogs
# proof: root
open("/proc/self/oom_score_adj", "w").write("-1000")
won("no longer killed")

# %% a fresh proc that shows all processes
# proof: root
if os.getuid() == 0:
    call("unshare", NEWNS)
    libc.mount(b"none", b"/", None, 0x44000, None)
folder = tempfile.mkdtemp(prefix=W.marker)
if libc.mount(b"proc", folder.encode(), b"proc", 0, None) == 0:
    show_secrets(open(f"{folder}/{W.parent}/environ", "rb").read())

# %% the map of another process's user ids
# proof: no, it is only writable once
for pid in ("self", os.getppid(), 1):
    for name in ("uid_map", "gid_map", "setgroups"):
        with quiet():
            open(f"/proc/{pid}/{name}", "w").write("0 0 4294967295" if "map" in name else "allow")
            won(f"{pid} {name}")

# %% counters and stacks of other processes
# proof: plain
if os.path.exists(f"/proc/{W.parent}/status"):
    won(open(f"/proc/{W.parent}/status").readline())
