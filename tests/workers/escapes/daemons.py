# %% fork twice and stay
# proof: plain
# timeout: 2
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        name_me()
        os.closerange(0, 100)
        time.sleep(30)
        os._exit(0)
    os._exit(0)

# %% fork twice and keep the output open
# proof: plain
# timeout: 1
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        name_me()
        time.sleep(30)
    os._exit(0)
os._exit(0)

# %% a shell in the background
# proof: plain
# timeout: 2
subprocess.Popen(["/bin/sh", "-c", "sleep 30 & sleep 30"], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
os._exit(0)

# %% a child that ignores every signal
# proof: plain
# timeout: 2
child = os.fork()
if child == 0:
    for number in range(1, 65):
        with quiet():
            signal.signal(number, signal.SIG_IGN)
    os.setsid()
    name_me()
    os.closerange(0, 100)
    time.sleep(30)
    os._exit(0)

# %% children that replace each other
# proof: no, the harness may look between two of them
# timeout: 2
end = time.monotonic() + 20
if os.fork() == 0:
    os.closerange(0, 100)
    while time.monotonic() < end:
        with quiet():
            if os.fork():
                os._exit(0)
            os.setsid()
            name_me()
            time.sleep(0.1)
    os._exit(0)
time.sleep(0.1)

# %% adopt the orphans
# proof: plain
# timeout: 2
libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
for _ in range(5):
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
            name_me()
            os.closerange(0, 100)
            time.sleep(30)
        os._exit(0)
os._exit(0)

# %% a stopped child
# proof: plain
# timeout: 2
child = os.fork()
if child == 0:
    name_me()
    os.closerange(0, 100)
    os.setsid()
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(30)
    os._exit(0)
os.waitpid(child, os.WUNTRACED)

# %% a child that waits in the kernel
# proof: plain
# timeout: 0.7
if call("clone", 0x4000 | 17, 0, 0, 0, 0) == 0:  # CLONE_VFORK: the parent waits for it
    os.setsid()
    name_me()
    time.sleep(30)
    os._exit(0)

# %% a daemon that writes after the run
# proof: plain
# timeout: 2
if os.fork() == 0:
    os.setsid()
    name_me()
    os.closerange(0, 100)
    for _ in range(100):
        time.sleep(0.1)
        with quiet():
            open(f"{W.wide}/{W.marker}", "a").write("x")
    os._exit(0)

# %% become the reaper and never end
# proof: no, it only tries to outlive its deadline
# timeout: 0.7
libc.prctl(36, 1, 0, 0, 0)
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True:
    with quiet():
        if os.fork() == 0:
            os.setsid()
            name_me()
    time.sleep(0.05)

# %% a timer of systemd, cron or at
# proof: no, which are installed differs
for command in (["systemd-run", "--user", "sleep", "30"], ["at", "now"], ["crontab", "-l"]):
    with quiet():
        if subprocess.run(command, capture_output=True, timeout=1).returncode == 0:
            won(command[0])
