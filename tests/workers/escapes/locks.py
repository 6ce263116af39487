# %% a lock on a file outside
# proof: plain
import fcntl
fcntl.flock(open(os.__file__, "rb"), fcntl.LOCK_EX | fcntl.LOCK_NB)
won("who locks the file outside has to wait")

# %% a lock on a part of a file outside
# proof: plain
import fcntl
fcntl.lockf(open(os.__file__, "rb"), fcntl.LOCK_SH | fcntl.LOCK_NB, 1)
won("who locks the file outside has to wait")

# %% a lock on a part of a file outside that belongs to the descriptor
# proof: plain
import fcntl
fcntl.fcntl(open(os.__file__, "rb"), 37, struct.pack("=hhxxxxqqixxxx", 0, 0, 0, 1, 0))  # F_OFD_SETLK, F_RDLCK
won("who locks the file outside has to wait")

# %% a lease of a file outside
# proof: root
import fcntl
for name in (os.__file__, json.__file__, ctypes.__file__, sys.executable):
    with quiet():
        fcntl.fcntl(os.open(name, os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK)
        won("who writes the file outside has to wait")

# %% be told about changes in a folder outside
# proof: plain
import fcntl
fcntl.fcntl(os.open(W.site_packages, os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_CREATE | fcntl.DN_MULTISHOT)
won("sees what is installed")

# %% hundreds of thousands of locks, which no limit counts
# proof: no, it would be the machine's memory
# timeout: 5
import fcntl
file = tempfile.TemporaryFile()
made = 0
if W.sandboxed:
    for made in range(200_000):  # from the end to the start: each is the first of its list
        fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * (400_000 - made))
    won(f"{made} locks in the kernel's memory")

