# %% one large list of bytes
# proof: plain
# timeout: 5
# beside: an ordinary run
held = bytearray(3 * W.memory_mb << 20)
won("three times the memory")

# %% many small objects
# proof: plain
# timeout: 5
held = []
for _ in range(3 * W.memory_mb):
    held.append(b"x" * (1 << 20))
won("three times the memory")

# %% memory from the kernel
# proof: plain
# timeout: 5
held = mmap.mmap(-1, 2 * W.memory_mb << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for start in range(0, len(held), 1 << 22):
    held[start:start + (1 << 22)] = b"x" * (1 << 22)
won("twice the memory")

# %% memory shared with children
# proof: plain
# timeout: 5
held = mmap.mmap(-1, 2 * W.memory_mb << 20)
for start in range(0, len(held), 1 << 22):
    held[start:start + (1 << 22)] = b"x" * (1 << 22)
won("twice the memory")

# %% memory of many children together
# proof: plain
# timeout: 5
# beside: an ordinary run
inside, outside = os.pipe()
def hold():
    kept = bytearray(b"x") * (W.memory_mb * 3 // 4 << 20)
    os.write(outside, b"x")
    time.sleep(3)
    return kept
with quiet():
    for _ in range(4):
        in_child(hold, wait=False)
end, got = time.monotonic() + 3, 0
while got < 3 and time.monotonic() < end:
    if select.select([inside], [], [], 0.1)[0]:
        got += len(os.read(inside, 10))
if got >= 3:
    won("more than twice the memory, in children")

# %% shared memory of many children together
# proof: plain
# timeout: 5
# beside: an ordinary run
inside, outside = os.pipe()
def hold():
    kept = mmap.mmap(-1, W.memory_mb * 3 // 4 << 20)
    for start in range(0, len(kept), 4096):
        kept[start] = 1
    os.write(outside, b"x")
    time.sleep(3)
    return kept
with quiet():
    for _ in range(4):
        in_child(hold, wait=False)
end, got = time.monotonic() + 3, 0
while got < 3 and time.monotonic() < end:
    if select.select([inside], [], [], 0.1)[0]:
        got += len(os.read(inside, 10))
if got >= 3:
    won("more than twice the memory, in children")

# %% files in memory
# proof: plain
# timeout: 5
# beside: an ordinary run
held, block = 0, b"x" * (1 << 22)
with quiet():
    for number in range(2 * W.memory_mb // 16):
        descriptor = os.memfd_create(W.marker)
        for _ in range(4):
            held += os.write(descriptor, block)
if held >= 2 * W.memory_mb << 20:
    won("twice the memory, in files without a name")

# %% large pages in files in memory
# proof: no, a machine has none by default
descriptor = os.memfd_create(W.marker, os.MFD_HUGETLB)
os.ftruncate(descriptor, 1 << 30)
mmap.mmap(descriptor, 1 << 30)[0:1] = b"x"
won("huge pages")

# %% segments that are not attached
# proof: plain
# timeout: 5
libc.shmat.restype = ctypes.c_void_p
held, segments = 0, []
for _ in range(2 * W.memory_mb // 32):
    segment = libc.shmget(0, 32 << 20, 0o1600)
    if segment < 0:
        break
    segments.append(segment)
    address = libc.shmat(segment, None, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        break
    ctypes.memset(address, 1, 32 << 20)
    libc.shmdt(ctypes.c_void_p(address))
    held += 32 << 20
for segment in segments:
    libc.shmctl(segment, 0, None)
if held >= 2 * W.memory_mb << 20:
    won("twice the memory, in segments")

# %% pipes full of data
# proof: root
# timeout: 5
import fcntl
held, block = 0, b"x" * (1 << 20)
with quiet():
    for _ in range(400):
        inside, outside = os.pipe()
        with quiet():
            fcntl.fcntl(outside, 1031, 1 << 20)  # F_SETPIPE_SZ
        os.set_blocking(outside, False)
        held += os.write(outside, block)
if held >= 128 << 20 or held == 0:
    won(f"{held >> 20} MB in pipes")

# %% sockets full of data
# proof: plain
# timeout: 5
held, pairs, block = 0, [], b"x" * (1 << 16)
with quiet():
    for _ in range(500):
        pair = socket.socketpair()
        pairs.append(pair)
        pair[0].setblocking(False)
        pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
        with quiet():
            while held < W.memory_mb << 20:
                held += pair[0].send(block)
won(f"{held >> 20} MB in sockets") if held >= W.memory_mb << 20 else None

# %% sockets full of data, in children
# proof: plain
# timeout: 5
inside, outside = os.pipe()
def fill():
    held, pairs, block = 0, [], b"x" * (1 << 16)
    with quiet():
        for _ in range(120):
            pair = socket.socketpair()
            pairs.append(pair)
            pair[0].setblocking(False)
            with quiet():
                while True:
                    held += pair[0].send(block)
    os.write(outside, struct.pack("=q", held))
    time.sleep(2)
with quiet():
    for _ in range(16):
        in_child(fill, wait=False)
time.sleep(1.5)
os.set_blocking(inside, False)
held = sum(struct.unpack("=q", os.read(inside, 8))[0] for _ in range(16) if select.select([inside], [], [], 0)[0])
won(f"{held >> 20} MB in sockets") if held >= W.memory_mb << 20 else None

# %% memory that is never swapped
# proof: root
held = mmap.mmap(-1, 64 << 20)
if libc.mlock(ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(held))), ctypes.c_size_t(64 << 20)) == 0:
    won("locked 64 MB")

# %% a number with billions of digits
# proof: no, it only tries to outlive its deadline
# timeout: 1
x = 10 ** (10 ** 9)
won(x.bit_length())

# %% a text that grows by itself
# proof: no, Python itself raises MemoryError at last
# timeout: 3
text = "x" * (1 << 20)
for _ in range(12):
    text += text
won(len(text))

# %% an array of numpy that is touched
# proof: plain
# timeout: 5
import numpy
held = numpy.ones((2 * W.memory_mb << 20) // 8)
won("twice the memory")

# %% the limit of memory taken away
# proof: root
with quiet():
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
held = bytearray(b"x") * (3 * W.memory_mb << 20)
won("three times the memory")

# %% exceptions that hold memory while they are shown
# proof: no, it only tries to make the runner fail
# timeout: 3
class Large(Exception):
    def __str__(self):
        return "x" * (1 << 30)
raise Large
