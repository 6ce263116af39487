# %% a signal to a process outside
# proof: plain
os.kill(W.bystander, signal.SIGURG)

# %% kill a process outside
# proof: plain
os.kill(W.bystander, signal.SIGKILL)

# %% a signal to everyone
# proof: plain
os.kill(-1, signal.SIGURG)

# %% a signal to the own group, which reaches the parent's
# proof: no, the plain program has its own group
os.kill(0, signal.SIGURG)

# %% a signal to the group of the parent
# proof: plain
os.killpg(W.parent_group, signal.SIGURG)

# %% join the parent's group
# proof: plain
os.setpgid(0, W.parent_group)
os.kill(0, signal.SIGURG)

# %% kill the own group
# proof: no, the plain program has its own group
os.kill(0, signal.SIGKILL)

# %% stop who started the program
# proof: no, that is the harness
if W.sandboxed:
    for pid in {os.getppid(), 1, *range(2, 40)} - {os.getpid(), W.parent}:
        with quiet():
            os.kill(pid, signal.SIGSTOP)

# %% kill who started the program
# proof: no, that is the harness
if W.sandboxed:
    for pid in {os.getppid(), 1, *range(2, 40)} - {os.getpid(), W.parent, 0}:
        with quiet():
            os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

# %% a signal by descriptor
# proof: plain
pidfd = call("pidfd_open", W.bystander, 0)
if pidfd >= 0:
    signal.pidfd_send_signal(pidfd, signal.SIGURG)

# %% signals with forged senders
# proof: plain
information = (ctypes.c_int * 32)(int(signal.SIGURG), 0, -1)
call("rt_sigqueueinfo", W.bystander, int(signal.SIGURG), information)

# %% a signal that the kernel sends for a file
# proof: plain
import fcntl
left, right = socket.socketpair()
fcntl.fcntl(left, fcntl.F_SETOWN, W.bystander)
fcntl.fcntl(left, 10, int(signal.SIGURG))  # F_SETSIG
fcntl.fcntl(left, fcntl.F_SETFL, fcntl.fcntl(left, fcntl.F_GETFL) | os.O_ASYNC)
right.send(b"x")

# %% a signal for out-of-band data to the parent's group
# proof: no, IPv4 is needed
import fcntl
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
left, _ = server.accept()
fcntl.fcntl(left, fcntl.F_SETOWN, -W.parent_group)
client.send(b"x", socket.MSG_OOB)

# %% a signal when the program dies
# proof: no, only the program itself is asked
libc.prctl(1, int(signal.SIGURG), 0, 0, 0)  # PR_SET_PDEATHSIG
os.kill(os.getpid(), signal.SIGKILL)

# %% the priority of the parent's group
# proof: plain
os.setpriority(os.PRIO_PGRP, 0, 3)
os.setpriority(os.PRIO_PGRP, W.parent_group, 3)

# %% the priority of all processes of the user
# proof: plain
os.setpriority(os.PRIO_PROCESS, W.bystander, 6)

# %% the processors of a process outside
# proof: plain
os.sched_setaffinity(W.bystander, {0})

# %% the limits of a process outside
# proof: plain
resource.prlimit(W.bystander, resource.RLIMIT_NOFILE, (200, 200))

# %% the input and output priority of the parent's group
# proof: no, it is not seen from outside
if call("ioprio_set", 2, W.parent_group, 3 << 13) == 0:
    won("set the parent's group to idle")
