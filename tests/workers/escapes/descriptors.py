# %% read every descriptor that was inherited
# proof: plain
for descriptor in range(3, 4096):
    with quiet():
        os.set_blocking(descriptor, False)
        show_secrets(os.pread(descriptor, 4096, 0))

# %% read pipes and sockets that were inherited
# proof: no, in a plain program the harness's own pipes
for descriptor in range(3, 1024):
    with quiet():
        if os.get_blocking(descriptor):
            os.set_blocking(descriptor, False)
        show_secrets(os.read(descriptor, 65536))

# %% open inherited files again with more rights
# proof: plain
for path in glob.glob("/proc/self/fd/*") + [f"/dev/fd/{n}" for n in range(3, 64)]:
    with quiet():
        if os.path.isfile(path):
            show_secrets(open(path, "rb").read(4096))
            open(path, "a").write("changed")

# %% walk from inherited folders
# proof: plain
for descriptor in range(0, 1024):
    with quiet():
        for up in ("", "../", "../../", "../../../../../../../../.." + os.path.dirname(W.secret_file) + "/"):
            with quiet():
                show_secrets(os.read(os.open(up + "secret.txt", os.O_RDONLY, dir_fd=descriptor), 200))
        os.fchdir(descriptor)

# %% the standard input of the parent
# proof: plain
os.set_blocking(0, False)
show_secrets(os.read(0, 4096))

# %% write into every descriptor
# proof: no, in a plain program the harness's own pipes
for descriptor in range(3, 1024):
    with quiet():
        os.set_blocking(descriptor, False)
        os.write(descriptor, b"\xff" * 4096)

# %% close every descriptor
# proof: no, it only tries to make the runner fail
os.closerange(0, 4096)

# %% shut every socket down
# proof: no, it only tries to make the runner fail
for descriptor in range(0, 1024):
    with quiet():
        socket.socket(fileno=os.dup(descriptor)).shutdown(socket.SHUT_RDWR)

# %% descriptors of other processes
# proof: ptrace
for pid in (W.parent, W.bystander, os.getppid(), 1):
    pidfd = call("pidfd_open", pid, 0)
    for number in range(64) if pidfd >= 0 and pid != os.getpid() else ():
        stolen = call("pidfd_getfd", pidfd, number, 0)
        if stolen >= 0:
            won(f"took descriptor {number} of {pid}")
            break

# %% descriptors sent over an inherited socket
# proof: no, a plain program has none
for descriptor in range(3, 256):
    with quiet():
        link = socket.socket(fileno=os.dup(descriptor))
        link.setblocking(False)
        socket.send_fds(link, [b"x"], [0, 1, 2] * 60)
        link.sendmsg([b"\0" * 70000])

# %% use up the machine's table of open files
# proof: plain
opened = []
with quiet():
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
with quiet():
    for _ in range(5000):
        opened.append(os.open("/", os.O_PATH))
if len(opened) >= 4999:
    won(f"{len(opened)} open files in one process")

# %% files in flight, which no limit counts
# proof: plain
sent = 0
for _ in range(6):
    left, right = socket.socketpair()
    left.setblocking(False)
    with quiet():
        for _ in range(60):
            socket.send_fds(left, [b"x"], [0] * 250)
            sent += 250
    in_child(lambda: None)
won(f"{sent} files in flight") if sent > 4000 else None
