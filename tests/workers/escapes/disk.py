# %% fill every folder that can be written
# proof: plain
# timeout: 5
# beside: an ordinary run
held, block = 0, os.urandom(1 << 20)
with quiet():
    for place, folder in enumerate(("/tmp", "/dev/shm", "/var/tmp", "/run", os.getcwd(), os.path.expanduser("~"), W.wide)):
        with quiet():
            for number in range(3 * W.disk_mb // 4):
                with open(f"{folder}/{W.marker}-{place}-{number}", "wb", buffering=0) as file:
                    for _ in range(4):
                        held += file.write(block)
if held > 2 * W.disk_mb << 20:
    won(f"{held >> 20} MB")

# %% one large file
# proof: plain
# timeout: 5
folder = tempfile.mkdtemp(prefix=W.marker)
with open(folder + "/large", "wb", buffering=0) as file:
    for _ in range(3 * W.disk_mb):
        file.write(b"x" * (1 << 20))
won("three times the disk")

# %% a file with holes
# proof: plain
folder = tempfile.mkdtemp(prefix=W.marker)
with open(folder + "/holes", "wb") as file:
    os.posix_fallocate(file.fileno(), 0, 3 * W.disk_mb << 20)
won("three times the disk")

# %% files that are removed and stay open
# proof: plain
# timeout: 5
held = []
for number in range(3 * W.disk_mb):
    file = tempfile.TemporaryFile(buffering=0)
    file.write(b"x" * (1 << 20))
    held.append(file)
won("three times the disk")

# %% a hundred thousand empty files
# proof: no, the plain folder would have to be cleaned
# timeout: 5
folder, made = tempfile.mkdtemp(prefix=W.marker), 0
if W.sandboxed:
    with quiet():
        for made in range(100_000):
            os.close(os.open(f"{folder}/{made}", os.O_CREAT | os.O_WRONLY))
    if made > 90_000:
        won(f"{made} files")

# %% folders in folders
# proof: no, the plain folder would have to be cleaned
# timeout: 5
if W.sandboxed:
    os.chdir(tempfile.mkdtemp(prefix=W.marker))
    made = 0
    with quiet():
        for made in range(50_000):
            os.mkdir("d")
            os.chdir("d")
    if made > 45_000:
        won(f"{made} folders")

# %% names without files
# proof: no, the plain folder would have to be cleaned
# timeout: 5
if W.sandboxed:
    folder, made = tempfile.mkdtemp(prefix=W.marker), 0
    open(folder + "/one", "w").close()
    with quiet():
        for made in range(100_000):
            os.link(folder + "/one", f"{folder}/{'x' * 200}{made}")
    if made > 90_000:
        won(f"{made} names")

# %% long symbolic links
# proof: no, the plain folder would have to be cleaned
# timeout: 5
if W.sandboxed:
    folder, made = tempfile.mkdtemp(prefix=W.marker), 0
    with quiet():
        for made in range(60_000):
            os.symlink("x" * 4000, f"{folder}/{made}")
    if made > 55_000:
        won(f"{made} links")

# %% a dump of the memory
# proof: no, a plain program's is written by the machine's rule
with quiet():
    resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
libc.prctl(4, 1, 0, 0, 0)
if W.sandboxed:
    if resource.getrlimit(resource.RLIMIT_CORE)[1] != 0:
        won("a dump would be written")
    os.kill(os.getpid(), signal.SIGQUIT)

# %% attributes in memory
# proof: no, the file system decides
folder, held = tempfile.mkdtemp(prefix=W.marker), 0
with quiet():
    for number in range(3000):
        os.setxattr(folder, f"user.{number}", b"x" * 60_000)
        held += 60_000
if held > 3 * W.disk_mb << 20:
    won(f"{held >> 20} MB of attributes")
