# %% write into a folder that anyone may write
# proof: plain
open(f"{W.wide}/{W.marker}", "w").write("x")

# %% write into the shared temporary folders
# proof: plain
for folder in ("/tmp", "/var/tmp", "/dev/shm", tempfile.gettempdir()):
    with quiet():
        open(f"{folder}/{W.marker}", "w").write("x")

# %% write into the working folder that the parent has
# proof: plain
open(f"{W.outside}/{W.marker}", "w").write("x")
open(W.marker, "w").write("x")

# %% overwrite a file outside
# proof: plain
open(W.victim, "w").write("changed")

# %% append to a file outside
# proof: plain
open(W.victim, "a").write("more")

# %% truncate a file outside
# proof: plain
os.truncate(W.victim, 0)

# %% remove a file outside
# proof: plain
os.unlink(W.victim)

# %% rename a file outside
# proof: plain
os.rename(W.victim, W.victim + ".moved")

# %% move a folder over another
# proof: plain
os.mkdir(f"{W.wide}/{W.marker}")
os.rename(f"{W.wide}/{W.marker}", f"{W.outside}/{W.marker}")

# %% change the mode of a file outside
# proof: plain
os.chmod(W.victim, 0o4777)

# %% change the owner of a file outside
# proof: root
os.chown(W.victim, 4321, 4321)

# %% change the times of a file outside
# proof: plain
os.utime(W.victim, (1, 1))

# %% change a file outside through a shared mapping
# proof: plain
with open(W.victim, "r+b") as file:
    mmap.mmap(file.fileno(), 0)[0:1] = b"!"

# %% change a file outside with a shell
# proof: plain
os.system(f"echo changed > {W.victim}")

# %% write into the installed packages
# proof: root
for folder in {*sys.path, W.site_packages, os.path.dirname(os.__file__), sys.prefix, os.path.dirname(sys.executable)}:
    with quiet():
        open(f"{folder}/{W.marker}.py", "w").write("x = 1")

# %% leave compiled code for the next import
# proof: root
for folder in (os.path.dirname(os.__file__), os.path.dirname(json.__file__)):
    with quiet():
        open(f"{folder}/__pycache__/{W.marker}.pyc", "wb").write(b"x")

# %% write into the user's start-up files
# proof: plain
for name in (".profile.d", ".config", ".local/lib"):
    with quiet():
        os.makedirs(f"{W.home}/{name}", exist_ok=True)
        open(f"{W.home}/{name}/{W.marker}", "w").write("x")
with quiet():
    open(f"{W.home}/{W.marker}.sh", "w").write("x")

# %% write into system folders
# proof: root
for folder in ("/", "/etc", "/usr/local/bin", "/var/spool", "/run", "/root", "/home", "/opt", "/srv", "/lib"):
    with quiet():
        open(f"{folder}/{W.marker}", "w").write("x")

# %% an anonymous file linked into place
# proof: plain
descriptor = os.open(W.wide, os.O_TMPFILE | os.O_RDWR, 0o600)
os.write(descriptor, b"x")
libc.linkat(-100, f"/proc/self/fd/{descriptor}".encode(), -100, f"{W.wide}/{W.marker}".encode(), 0x400)

# %% extended attributes outside
# proof: plain
os.setxattr(W.wide, "user.escaped", b"1")
won("set an attribute")

# %% a database outside
# proof: plain
import sqlite3
sqlite3.connect(f"{W.wide}/{W.marker}").execute("create table t (x)")

# %% an archive with paths that climb out
# proof: plain
import io, tarfile
data = io.BytesIO()
with tarfile.open(fileobj=data, mode="w") as tar:
    tar.addfile(tarfile.TarInfo("../" * 30 + f"{W.wide}/{W.marker}".lstrip("/")))
data.seek(0)
tarfile.open(fileobj=data).extractall(tempfile.mkdtemp(prefix=W.marker))

# %% a pipe and a socket file outside
# proof: plain
with quiet():
    os.mkfifo(f"{W.wide}/{W.marker}.fifo")
socket.socket(socket.AF_UNIX).bind(f"{W.wide}/{W.marker}.sock")
