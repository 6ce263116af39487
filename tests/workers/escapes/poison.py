# %% a constant of a module
# proof: shared
import math
math.pi = 3
# --- then
import math
if math.pi == 3:
    won("pi is 3")

# %% the built-in functions
# proof: shared
import builtins
builtins.sum = lambda *a: 42
# --- then
if sum([1, 2]) == 42:
    won("sum is another function")

# %% a module in place of another
# proof: shared
sys.modules["fractions"] = types.ModuleType("fractions")
sys.modules["fractions"].Fraction = "poisoned"
# --- then
import fractions
if fractions.Fraction == "poisoned":
    won("fractions is another module")

# %% functions of numpy
# proof: shared
import numpy
numpy.linalg.det = lambda x: 7.0
# --- then
import numpy
if numpy.linalg.det(numpy.eye(2)) == 7:
    won("det is another function")

# %% what sympy remembers
# proof: shared
import sympy
sympy.core.numbers.Integer.__add__ = lambda self, other: sympy.Integer(42)
sympy.S.registry = "poisoned"
# --- then
import sympy
if sympy.Integer(1) + 1 == 42:
    won("1 + 1 is 42")

# %% an importer
# proof: shared
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        print(W.tag, "asked for", name)
sys.meta_path.insert(0, Finder)
# --- then
with quiet():
    import never_there

# %% the path of modules
# proof: shared
folder = tempfile.mkdtemp(prefix=W.marker)
open(folder + "/poisoned_module.py", "w").write("x = 1")
sys.path.insert(0, folder)
# --- then
import poisoned_module
won("imported")

# %% a module in the working folder
# proof: shared
open("poisoned_here.py", "w").write("x = 1")
sys.path.insert(0, "")
# --- then
sys.path.insert(0, "")
import poisoned_here
won("imported")

# %% files for the next run
# proof: shared
for folder in ("/tmp", "/dev/shm", os.getcwd(), os.path.expanduser("~"), "/var/tmp"):
    with quiet():
        open(f"{folder}/{W.marker}", "w").write("left")
# --- then
for folder in ("/tmp", "/dev/shm", os.getcwd(), os.path.expanduser("~"), "/var/tmp"):
    if os.path.exists(f"{folder}/{W.marker}"):
        won(folder)

# %% variables for the next run
# proof: shared
os.environ["POISON"] = "1"
# --- then
if "POISON" in os.environ:
    won("environment")

# %% handlers, limits and the working folder
# proof: shared
signal.signal(signal.SIGUSR2, lambda *a: None)
sys.setrecursionlimit(1234)
os.umask(0o111)
os.chdir("/")
sys.setswitchinterval(1)
# --- then
if signal.getsignal(signal.SIGUSR2) != signal.SIG_DFL or sys.getrecursionlimit() == 1234:
    won("state is left")

# %% functions called at every line
# proof: shared
sys.settrace(lambda *a: None)
sys.setprofile(lambda *a: None)
threading.settrace(lambda *a: None)
sys.addaudithook(lambda *a: None)
# --- then
if sys.gettrace() or sys.getprofile():
    won("traced")

# %% a thread that goes on
# proof: shared
# timeout: 2
def go_on():
    for _ in range(200):
        time.sleep(0.02)
        builtins.__dict__["go_on"] = True
import builtins
threading.Thread(target=go_on, daemon=True).start()
# --- then
time.sleep(0.1)
import builtins
if hasattr(builtins, "go_on") or threading.active_count() > 1 + W.sandboxed * 3:
    won("a thread of the run before")

# %% the number one
# proof: no, the next line of a shared interpreter may crash
class Digits(ctypes.Structure):
    _fields_ = [("refcount", ctypes.c_ssize_t), ("type", ctypes.c_void_p), ("size", ctypes.c_ssize_t), ("digit", ctypes.c_uint32)]
Digits.from_address(id(257 - 249)).digit = 9
# --- then
if 4 + int("4") != 16 - int("8"):
    won("eight is nine")

# %% the C library's code
# proof: no, a shared interpreter may crash
address = ctypes.cast(libc.getppid, ctypes.c_void_p).value
page = address & ~4095
if libc.mprotect(ctypes.c_void_p(page), 8192, 7) == 0:
    ctypes.memmove(address, b"\xb8\x39\x30\x00\x00\xc3", 6)  # return 12345
# --- then
if libc.getppid() == 12345:
    won("the C library is changed")

# %% memory that is shared with the next run
# proof: no, whether there is any depends on the runner
for line in open("/proc/self/maps"):
    span, mode, *_ = line.split()
    if mode.startswith("rw") and mode.endswith("s"):
        low, high = (int(end, 16) for end in span.split("-"))
        ctypes.memset(low, 0x41, high - low)
        print("scribbled over", line)

# %% random numbers that are known
# proof: shared
import random
random.seed(5)
random.random()
# --- then
import random
other = random.Random(5)
other.random()
if random.getstate() == other.getstate():
    won("the same numbers")

# %% the context of decimals and warnings
# proof: shared
import decimal, warnings, locale
decimal.getcontext().prec = 3
decimal.DefaultContext.prec = 3
warnings.simplefilter("error")
# --- then
import decimal
if decimal.getcontext().prec == 3:
    won("three digits")

# %% what is done at the end
# proof: no, a shared interpreter ends later
import atexit, weakref
atexit.register(print, "at the end")
class Late:
    def __del__(self):
        os.system(f"touch {W.wide}/{W.marker}")
        time.sleep(5)
sys.late = Late()

# %% standard streams
# proof: shared
class Mute:
    def write(self, text):
        sys.__stdout__.write("muted ")
    def flush(self):
        pass
sys.mute = sys.stdout = Mute()
# --- then
if hasattr(sys, "mute"):
    sys.stdout = sys.__stdout__
    won("still muted")
