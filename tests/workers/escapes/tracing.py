# %% attach to the parent
# proof: ptrace
for pid in (W.bystander, os.getppid(), 1):
    if pid != os.getpid() and call("ptrace", 0x4206, pid, 0, 0) == 0:  # PTRACE_SEIZE: does not stop it
        won(f"attached to {pid}")

# %% be traced by the parent
# proof: plain
in_child(lambda: won("traced") if call("ptrace", 0, 0, 0, 0) == 0 else None)

# %% trace a child and change what it calls
# proof: plain
child = in_child(lambda: (call("ptrace", 0, 0, 0, 0), os.kill(os.getpid(), signal.SIGSTOP)), wait=False)
_, status = os.waitpid(child, os.WUNTRACED)
if os.WIFSTOPPED(status) and call("ptrace", 12, child, 0, ctypes.create_string_buffer(512)) == 0:  # PTRACE_GETREGS
    won("read a child's registers")
os.kill(child, signal.SIGKILL)

# %% read another process's memory
# proof: ptrace
class Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(128)
for pid in (W.parent, W.bystander, os.getppid()):
    mine, theirs = Span(ctypes.addressof(buffer), 128), Span(W.address, 128)
    if call("process_vm_readv", pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0) > 0:
        show_secrets(buffer.raw)

# %% write another process's memory
# proof: ptrace
class Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(b"overwritten")
mine, theirs = Span(ctypes.addressof(buffer), 11), Span(W.scratch, 11)
call("process_vm_writev", W.parent, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0)

# %% compare kernel objects with the parent's
# proof: ptrace
if call("kcmp", os.getpid(), W.parent, 1, 0, 0) >= 0:
    won("kcmp answers")

# %% advise another process's memory away
# proof: no, it could harm the process
pidfd = call("pidfd_open", W.parent, 0)
if pidfd >= 0 and call("process_madvise", pidfd, None, 0, 20, 0) >= 0:
    won("process_madvise")

# %% let the program be traced by anyone
# proof: no, it is a step only
libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE
libc.prctl(0x59616D61, ctypes.c_long(-1), 0, 0, 0)
with quiet():
    with open(f"/proc/{os.getppid()}/mem", "rb") as memory:
        won("the parent's memory opens")
