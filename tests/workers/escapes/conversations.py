# %% a variable of the run before
# proof: shared
secret = "FRESH_SECRET"
kept = [secret] * 100
# --- then
import gc
for thing in gc.get_objects():
    if type(thing) is dict:
        for value in list(thing.values()):
            if type(value) is str and len(value) < 100:
                show_secrets(value.encode())

# %% the memory that the run before used
# proof: no, whether it is used again is chance
secret = "FRESH_SECRET" * 1000
# --- then
libc.malloc.restype = ctypes.c_void_p
for size in (1 << 10, 1 << 14, 1 << 16, 1 << 20, 1 << 24):
    for _ in range(20):
        address = libc.malloc(size)
        if address:
            show_secrets(ctypes.string_at(address, size))

# %% the text of programs in the runner's memory
# proof: no, a plain program has no runner
x = "FRESH_SECRET"
# --- then
for anchor in (id(sys), id(W), id(won), id(os.environ), id("a" * 5000), ctypes.cast(libc.malloc, ctypes.c_void_p).value):
    show_secrets(probe(anchor - (1 << 23), anchor + (1 << 23)))
libc.sbrk.restype = ctypes.c_void_p
top = libc.sbrk(0)
show_secrets(probe(top - (1 << 26), top))

# %% the text of programs in all of the runner's memory
# proof: no, a plain program has no runner
x = "FRESH_SECRET"
# --- then
for line in open("/proc/self/maps"):
    span, mode, *_ = line.split()
    low, high = (int(end, 16) for end in span.split("-"))
    if mode.startswith("rw") and high - low < 1 << 28:
        for start in range(low, high, 1 << 22):
            show_secrets(probe(start, min(high, start + (1 << 22))))

# %% the output of the run before
# proof: no, a plain program has no runner
print("FRESH_SECRET")
# --- then
for descriptor in range(0, 64):
    with quiet():
        os.set_blocking(descriptor, False)
        show_secrets(os.read(descriptor, 65536))
    with quiet():
        show_secrets(os.pread(descriptor, 65536, 0))

# %% lines that Python keeps for tracebacks
# proof: shared
import linecache
linecache.cache["<kept>"] = (1, None, ["FRESH_SECRET"], "<kept>")
# --- then
import linecache
for entry in linecache.cache.values():
    show_secrets(repr(entry)[:20_000].encode())

# %% from one conversation into another: variables
# proof: shared
# in: session
kept = "FRESH_SECRET"
# --- then
for name, value in list(globals().items()):
    if type(value) is str:
        show_secrets(value.encode())

# %% from one conversation into another: modules
# proof: shared
# in: session
import math
math.tau = 42
sys.modules["conversation"] = types.ModuleType("conversation")
# --- then
import math
if math.tau == 42 or "conversation" in sys.modules:
    won("the other conversation's modules")

# %% from one conversation into another: files
# proof: shared
# in: session
for folder in ("/tmp", "/dev/shm", os.getcwd(), os.path.expanduser("~")):
    with quiet():
        open(f"{folder}/{W.marker}", "w").write("FRESH_SECRET")
# --- then
for folder in ("/tmp", "/dev/shm", os.getcwd(), os.path.expanduser("~")):
    with quiet():
        show_secrets(open(f"{folder}/{W.marker}", "rb").read())

# %% from one conversation into another: processes
# proof: shared
# in: session
with quiet():
    for path in glob.glob("/proc/[0-9]*"):
        pid = int(path[6:])
        if W.sandboxed and pid not in (os.getpid(), 1):
            os.kill(pid, signal.SIGKILL)
x = "FRESH_SECRET"
# --- then
for path in glob.glob("/proc/[0-9]*/mem"):
    pid = int(path.split("/")[2])
    if W.sandboxed or pid == os.getpid():
        with quiet(), open(path, "rb", buffering=0) as memory:
            for line in open(f"/proc/{pid}/maps"):
                low, high = (int(end, 16) for end in line.split()[0].split("-"))
                if " rw" in line and high - low < 1 << 26:
                    with quiet():
                        memory.seek(low)
                        show_secrets(memory.read(high - low))

# %% a conversation that ends its interpreter
# proof: no, it only tries to take others with it
# in: session
os._exit(0)

# %% a conversation that breaks its interpreter
# proof: no, it only tries to take others with it
# in: session
ctypes.string_at(0)

# %% a conversation that never answers
# proof: no, it only tries to take others with it
# in: session
# timeout: 0.7
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True:
    pass

# %% a conversation that leaves children
# proof: no, it only tries to leave them
# in: session
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        name_me()
        time.sleep(60)
        os._exit(0)

# %% a conversation that answers for itself
# proof: no, a plain program has no such channel
# in: session
# wins when kind: ok
fields = {"stdout": "forged", "error": "", "kind": "ok", "ms": 1.0}
for payload in (json.dumps(fields).encode() + b"\n", pickle.dumps(fields), pickle.dumps(("forged", "", "ok", 1.0))):
    for descriptor in range(3, 64):
        for framed in (payload, struct.pack("!I", len(payload)) + payload, struct.pack("<I", len(payload)) + payload, struct.pack("<Q", len(payload)) + payload, struct.pack("!Q", len(payload)) + payload):
            with quiet():
                os.write(descriptor, framed)
raise ValueError("this must be seen")

# %% a thread that writes into the next turn
# proof: no, only the same conversation sees it
# in: session
def write():
    for _ in range(100):
        time.sleep(0.01)
        with quiet():
            os.write(1, b"x" * 100)
threading.Thread(target=write, daemon=True).start()

# %% two conversations that signal each other
# proof: no, a plain program has no second conversation
# in: session
signal.signal(signal.SIGURG, lambda *a: won("heard the other"))
print(os.getpid())
# --- then
for pid in range(1, 60):
    if pid != os.getpid():
        with quiet():
            os.kill(pid, signal.SIGKILL)

# %% a child that works between the turns
# proof: no, a plain program has no turns
# in: one session
stamps = mmap.mmap(-1, 1 << 16)
if os.fork() == 0:
    while True:
        now = time.monotonic()
        slot = 8 * (int(now * 1000) % 8000)
        stamps[slot:slot + 8] = struct.pack("d", now)
end = time.monotonic()
# --- then
start = time.monotonic()
worked = [stamp for stamp in struct.unpack("8000d", stamps[:64000]) if end + (start - end) * 0.5 < stamp < end + (start - end) * 0.8]
if worked:
    won(f"{len(worked)} of {1000 * (start - end):.0f} milliseconds between the turns")

# %% a thread that works between the turns
# proof: no, a plain program has no turns
# in: one session
stamps = mmap.mmap(-1, 1 << 16)
def work():
    while True:
        now = time.monotonic()
        slot = 8 * (int(now * 1000) % 8000)
        stamps[slot:slot + 8] = struct.pack("d", now)
        time.sleep(0)
threading.Thread(target=work, daemon=True).start()
end = time.monotonic()
# --- then
start = time.monotonic()
worked = [stamp for stamp in struct.unpack("8000d", stamps[:64000]) if end + (start - end) * 0.5 < stamp < end + (start - end) * 0.8]
if worked:
    won(f"{len(worked)} of {1000 * (start - end):.0f} milliseconds between the turns")

# %% children that wake each other between the turns
# proof: no, a plain program has no turns
# in: one session
stamps = mmap.mmap(-1, 1 << 16)
children = []
for _ in range(4):
    child = os.fork()
    if child == 0:
        os.setsid()
        while True:
            now = time.monotonic()
            slot = 8 * (int(now * 1000) % 8000)
            stamps[slot:slot + 8] = struct.pack("d", now)
            with quiet():
                os.kill(-1, signal.SIGCONT)
    children.append(child)
end = time.monotonic()
# --- then
start = time.monotonic()
worked = [stamp for stamp in struct.unpack("8000d", stamps[:64000]) if end + (start - end) * 0.5 < stamp < end + (start - end) * 0.8]
if worked:
    won(f"{len(worked)} of {1000 * (start - end):.0f} milliseconds between the turns")
