# %% a segment for the next run
# proof: plain
segment = libc.shmget(W.ipc_key, 4096, 0o1666)
if segment >= 0:
    libc.shmat.restype = ctypes.c_void_p
    ctypes.memmove(libc.shmat(segment, None, 0), b"left", 4)
# --- then
if libc.shmget(W.ipc_key, 4096, 0o666) >= 0:
    won("a segment of the run before")

# %% a queue for the next run
# proof: plain
libc.msgget(W.ipc_key, 0o1666)
# --- then
if libc.msgget(W.ipc_key, 0o666) >= 0:
    won("a queue of the run before")

# %% semaphores for the next run
# proof: plain
libc.semget(W.ipc_key, 1, 0o1666)
# --- then
if libc.semget(W.ipc_key, 1, 0o666) >= 0:
    won("semaphores of the run before")

# %% a named semaphore for the next run
# proof: plain
rt = ctypes.CDLL("libpthread.so.0")
rt.sem_open.restype = ctypes.c_void_p
rt.sem_open(b"/" + W.marker.encode(), 0o100, 0o666, 1)
# --- then
rt = ctypes.CDLL("libpthread.so.0")
rt.sem_open.restype = ctypes.c_void_p
if rt.sem_open(b"/" + W.marker.encode(), 0):
    won("a semaphore of the run before")

# %% named shared memory for the next run
# proof: plain
from multiprocessing import resource_tracker, shared_memory
resource_tracker.register = lambda *a: None
memory = shared_memory.SharedMemory(W.marker, create=True, size=4096)
os._exit(0)
# --- then
from multiprocessing import shared_memory
shared_memory.SharedMemory(W.marker)
won("memory of the run before")

# %% a message queue of POSIX
# proof: machine
if call("mq_open", W.marker.encode(), 0o102, 0o666, None) < 0:
    sys.exit()
# --- then
if call("mq_open", W.marker.encode(), 2, 0, None) >= 0:
    won("a queue of the run before")

# %% a segment of the parent
# proof: plain
libc.shmat.restype = ctypes.c_void_p
address = libc.shmat(W.segment, None, 0o10000)
if address and address != ctypes.c_void_p(-1).value:
    show_secrets(ctypes.string_at(address, 200))

# %% remove a segment of the parent
# proof: plain
if libc.shmctl(W.segment, 0, None) == 0:
    won("removed")

# %% shared memory of everyone
# proof: plain
for name in os.listdir("/dev/shm"):
    with quiet():
        show_secrets(open("/dev/shm/" + name, "rb").read(4096))

# %% pools of multiprocessing that go on
# proof: no, they end with a plain program
# timeout: 2
import multiprocessing
context = multiprocessing.get_context("fork")
workers = [context.Process(target=time.sleep, args=(30,)) for _ in range(3)]
for worker in workers:
    worker.start()
os._exit(0)
