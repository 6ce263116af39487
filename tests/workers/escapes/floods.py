# %% many lines
# proof: plain
# timeout: 3
for _ in range(200_000):
    print("all work and no play")
won("200,000 lines were taken")

# %% one long line
# proof: plain
# timeout: 3
sys.stdout.write("x" * (20 * W.output_bytes))

# %% many errors
# proof: plain
# timeout: 3
for _ in range(20 * W.output_bytes // 100):
    sys.stderr.write("x" * 99 + "\n")

# %% both at once, from threads
# proof: plain
# timeout: 3
def write(descriptor):
    for _ in range(20 * W.output_bytes // 4096):
        os.write(descriptor, b"x" * 4096)
threads = [threading.Thread(target=write, args=(1 + number % 2,)) for number in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()

# %% without an end
# proof: no, it only tries to outlive its deadline
# timeout: 1
while True:
    os.write(1, b"x" * 65536)

# %% without an end, from children
# proof: no, it only tries to outlive its deadline
# timeout: 1
for _ in range(3):
    in_child(lambda: [os.write(2, b"x" * 65536) for _ in range(10**6)], wait=False)
while True:
    os.write(1, b"x" * 65536)

# %% an exception with a long text
# proof: plain
# timeout: 3
raise ValueError("x" * (20 * W.output_bytes))

# %% an exception with many notes
# proof: plain
# timeout: 3
error = ValueError("x")
for _ in range(2000):
    error.add_note("x" * (W.output_bytes // 100))
raise error

# %% a chain of exceptions
# proof: plain
# timeout: 3
def fail(depth):
    try:
        if depth:
            fail(depth - 1)
    finally:
        raise ValueError("x" * 20_000)
sys.setrecursionlimit(10_000)
fail(300)

# %% a group of exceptions
# proof: no, Python shortens it
# timeout: 3
group = ValueError("x" * 1000)
for _ in range(200):
    group = ExceptionGroup("x" * 1000, [group, ValueError("y" * 1000)])
raise group

# %% a reason for the end
# proof: plain
# timeout: 3
sys.exit("x" * (20 * W.output_bytes))

# %% output that waits for its reader
# proof: no, it only tries to make the runner wait
# timeout: 1
import fcntl
with quiet():
    fcntl.fcntl(1, 1031, 4096)
os.set_blocking(1, False)
for _ in range(1000):
    with quiet():
        os.write(1, b"x" * 4096)
os.set_blocking(1, True)
os.write(1, b"x" * (1 << 20))

# %% a syntax error in a long line
# proof: no, Python shortens it
# timeout: 1
exec("x = " + "(" * 90 + "1" * (2 * W.output_bytes) + " ?")
