# %% three hundred children
# proof: plain
# timeout: 2
# beside: an ordinary run
children = []
with quiet():
    for _ in range(300):
        children.append(in_child(lambda: (name_me(), time.sleep(20)), wait=False))
if len(children) >= 4 * W.processes:
    won(f"{len(children)} children at once")

# %% children that have children
# proof: plain
# timeout: 2
# beside: an ordinary run
inside, outside = os.pipe()
os.set_blocking(inside, False)
def split(depth):
    os.write(outside, b"x")
    name_me()
    for _ in range(2 if depth else 0):
        with quiet():
            if os.fork() == 0:
                split(depth - 1)
                time.sleep(20)
                os._exit(0)
split(7)
time.sleep(0.3)
if len(os.read(inside, 4096)) >= 4 * W.processes:
    won("more processes than allowed")

# %% children by another call
# proof: plain
# timeout: 2
made = 0
for _ in range(200):
    child = call("clone", 0x80000000 | 17, 0, 0, 0, 0)  # CLONE_IO: not the flags that fork uses
    if child == 0:
        name_me()
        time.sleep(20)
        os._exit(0)
    made += child > 0
if made >= 4 * W.processes:
    won(f"{made} children at once")

# %% hundreds of threads
# proof: plain
# timeout: 2
started = 0
with quiet():
    for _ in range(400):
        threading.Thread(target=time.sleep, args=(1.2,), daemon=True).start()
        started += 1
if started >= 8 * W.processes:
    won(f"{started} threads")

# %% children as fast as they die
# proof: no, it only takes processor time until its deadline
# timeout: 0.7
# beside: an ordinary run
end = time.monotonic() + 5
while time.monotonic() < end:
    with quiet():
        if os.fork() == 0:
            os._exit(0)

# %% programs as fast as they start
# proof: no, it only takes processor time until its deadline
# timeout: 0.7
# beside: an ordinary run
end = time.monotonic() + 5
while time.monotonic() < end:
    with quiet():
        subprocess.Popen(["/bin/true"])

# %% raise the limit of processes
# proof: machine
low, high = resource.getrlimit(resource.RLIMIT_NPROC)
with quiet():
    resource.setrlimit(resource.RLIMIT_NPROC, (-1, -1))
if resource.getrlimit(resource.RLIMIT_NPROC)[0] in (-1, resource.RLIM_INFINITY):
    won("unlimited processes")

# %% become another user, who has processes left
# proof: root
for user in (0, 1, 2, 1000, 4321, 65534):
    if user != os.getuid():
        with quiet():
            os.setresuid(user, user, user)
            won(f"is now {user}")
            break
