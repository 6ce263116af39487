# %% read at zero
# proof: no, it only tries to take the runner with it
ctypes.string_at(0)

# %% end by each signal
# proof: no, it only tries to take the runner with it
for number in (signal.SIGILL, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS):
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), number)
    os.waitpid(child, 0)
os.abort()

# %% more frames than the stack holds
# proof: no, it only tries to take the runner with it
# timeout: 1
sys.setrecursionlimit(10**9)
def down(n):
    return down(n + 1) + 1
down(0)

# %% more frames than the stack holds, in C
# proof: no, it only tries to take the runner with it
# timeout: 1
sys.setrecursionlimit(10**9)
nested = ()
for _ in range(10**6):
    nested = (nested,)
repr(nested)

# %% a broken object
# proof: no, it only tries to take the runner with it
ctypes.memset(id(type), 0xFF, 64)
type(1)

# %% broken code
# proof: no, it only tries to take the runner with it
def function():
    return 1
function.__code__ = function.__code__.replace(co_code=b"d\xff" * 40, co_stacksize=0)
function()

# %% freed None
# proof: no, it only tries to take the runner with it
ctypes.pythonapi.Py_DecRef.argtypes = [ctypes.py_object]
for _ in range(10**6):
    ctypes.pythonapi.Py_DecRef(None)

# %% a crash while the process ends
# proof: no, it only tries to take the runner with it
import atexit
atexit.register(lambda: ctypes.string_at(0))
print("fine so far")

# %% end without a word
# proof: no, it only tries to confuse the runner
os._exit(0)

# %% end with a code that the runner may use
# proof: no, it only tries to confuse the runner
os._exit(int(os.environ.get("CODE", 137)))

# %% end from a thread
# proof: no, it only tries to confuse the runner
threading.Thread(target=lambda: os._exit(3)).start()
time.sleep(1)

# %% end from a child that is a copy of the runner
# proof: no, it only tries to confuse the runner
# A fork goes on as the program: what the runner does after it is done twice.
if os.fork() == 0:
    raise SystemExit("the child returns into the runner")
print("the parent does too")

# %% eight copies of the runner go on
# proof: no, it only tries to confuse the runner
for _ in range(3):
    os.fork()
print("I am one of eight")

# %% replace the program
# proof: no, it only tries to confuse the runner
os.execv(sys.executable, [sys.executable, "-c", "print('another one')"])

# %% a machine instruction that does not exist
# proof: no, it only tries to take the runner with it
machine_code(b"\x0f\x0b")()

# %% unload the interpreter's memory
# proof: no, it only tries to take the runner with it
libc.munmap(ctypes.c_void_p(id(sys) & ~4095), 1 << 20)
