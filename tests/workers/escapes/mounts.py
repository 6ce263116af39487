# %% mount an empty file system
# proof: root
in_child(lambda: call("unshare", NEWNS) == 0 and libc.mount(b"none", b"/", None, 0x44000, None) == 0 and libc.mount(b"tmpfs", b"/mnt", b"tmpfs", 0, None) == 0 and won("mount"))
if W.sandboxed:
    for folder in ("/tmp", "/mnt", os.getcwd(), tempfile.gettempdir()):
        if libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, b"size=64m") == 0:
            won(f"mounted over {folder}")

# %% mount a folder a second time
# proof: no, it would be the machine's
if W.sandboxed:
    folder = tempfile.mkdtemp()
    if libc.mount(b"/", folder.encode(), None, 0x1000 | 0x4000, None) == 0:
        won("bind mount")

# %% make what is read-only writable
# proof: no, it would be the machine's
if W.sandboxed:
    for folder in ("/", "/usr", "/proc", sys.prefix, W.site_packages, os.path.dirname(os.__file__)):
        if libc.mount(b"none", folder.encode(), None, 0x20 | 0x1000, None) == 0:
            won(f"mounted {folder} again")

# %% make what is read-only writable, by the newer call
# proof: no, it would be the machine's
attributes = struct.pack("=QQQQ", 0, 1, 0, 0)  # clear MOUNT_ATTR_RDONLY
if W.sandboxed:
    for folder in ("/", "/usr", sys.prefix, W.site_packages):
        if call("mount_setattr", -100, folder.encode(), 0x8000, attributes, 32) == 0:
            won(folder)

# %% take a mount away to see what is under it
# proof: no, it would be the machine's
if W.sandboxed:
    for line in ["/tmp", "/proc", "/dev", "/usr", "/", os.getcwd()]:
        for flags in (0, 2, 1):
            if call("umount2", line.encode(), flags) == 0:
                won(f"unmounted {line}")

# %% a copy of a tree that can be moved
# proof: root
if call("open_tree", -100, b"/", 1) >= 0:
    won("open_tree")

# %% a file system by the newer calls
# proof: root
context = call("fsopen", b"tmpfs", 0)
if context >= 0 and call("fsconfig", context, 6, None, None, 0) == 0 and call("fsmount", context, 0, 0) >= 0:
    won("fsmount")

# %% the settings of a mounted file system
# proof: root
if call("fspick", -100, b"/", 0) >= 0 or call("fspick", -100, tempfile.gettempdir().encode(), 0) >= 0:
    won("fspick")

# %% move a mount out of the way
# proof: no, it would be the machine's
if W.sandboxed:
    folder = tempfile.mkdtemp()
    for source in ("/tmp", "/usr", "/proc", sys.prefix):
        if libc.mount(source.encode(), folder.encode(), None, 0x2000, None) == 0:
            won(f"moved {source}")

# %% a file system in user space
# proof: root
os.open("/dev/fuse", os.O_RDWR)
won("fuse")

# %% a larger scratch folder
# proof: no, it would be the machine's
if W.sandboxed:
    for folder in ("/tmp", os.getcwd(), "/dev/shm", tempfile.gettempdir(), os.path.expanduser("~")):
        if libc.mount(b"none", folder.encode(), None, 0x20, b"size=8g,nr_inodes=0") == 0:
            won(folder)

# %% a helper that may mount
# proof: no, which are installed differs
for command in (["fusermount", "-V"], ["fusermount3", "-V"], ["newuidmap"], ["su", "-c", "true"], ["sudo", "-n", "true"], ["pkexec", "true"]):
    with quiet():
        path = shutil.which(command[0])
        if path and os.stat(path).st_mode & 0o4000 and libc.prctl(39, 0, 0, 0, 0) == 0:
            won(f"{path} would run with its owner's rights")

# %% rights that a program could gain
# proof: plain
if libc.prctl(39, 0, 0, 0, 0) == 0:  # PR_GET_NO_NEW_PRIVS
    won("a set-user-id program would gain its rights")

# %% rights that the program has
# proof: root
header, data = struct.pack("=II", 0x20080522, 0), ctypes.create_string_buffer(24)
if call("capget", header, data) == 0 and any(struct.unpack("=IIIIII", data.raw)[i] for i in (0, 3)):
    won("holds capabilities")

# %% rights kept for what is started
# proof: root
header, data = ctypes.create_string_buffer(struct.pack("=II", 0x20080522, 0)), ctypes.create_string_buffer(24)
call("capget", header, data)
words = list(struct.unpack("=IIIIII", data.raw))
words[2], words[5] = words[1], words[4]
if any((words[1], words[4])) and call("capset", header, struct.pack("=IIIIII", *words)) == 0:
    won("inheritable capabilities")
