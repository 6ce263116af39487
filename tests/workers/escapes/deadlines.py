# %% wait without an end
# proof: no, even a bare process is killed
# timeout: 0.3
time.sleep(60)

# %% count without an end
# proof: no, even a bare process is killed
# timeout: 0.3
while True:
    pass

# %% ignore the signals that end a program
# proof: plain
# timeout: 0.3
for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU, signal.SIGQUIT, signal.SIGUSR1, signal.SIGVTALRM, signal.SIGPROF):
    signal.signal(number, signal.SIG_IGN)
time.sleep(60)

# %% block the signals that end a program
# proof: plain
# timeout: 0.3
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True:
    pass

# %% take the timer away
# proof: plain
# timeout: 0.3
signal.signal(signal.SIGTERM, lambda *a: None)
for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
    signal.setitimer(timer, 0)
signal.alarm(0)
while True:
    time.sleep(1)

# %% catch every exception
# proof: plain
# timeout: 0.3
def stubborn(*a):
    raise KeyboardInterrupt
signal.signal(signal.SIGTERM, stubborn)
while True:
    try:
        time.sleep(60)
    except BaseException:
        pass

# %% one long step in C
# proof: no, even a bare process is killed
# timeout: 0.3
import re
re.match(r"(a+)+$", "a" * 60 + "b")

# %% one long multiplication
# proof: no, even a bare process is killed
# timeout: 0.3
pow(3, 10**9)

# %% a thread that is waited for
# proof: no, even a bare process is killed
# timeout: 0.3
threading.Thread(target=lambda: time.sleep(60)).start()

# %% never done at the end
# proof: no, even a bare process is killed
# timeout: 0.3
import atexit
atexit.register(time.sleep, 60)

# %% an exception that takes long to show
# proof: no, even a bare process is killed
# timeout: 0.3
class Slow(Exception):
    def __str__(self):
        time.sleep(60)
    __repr__ = __str__
raise Slow

# %% an output that takes long to flush
# proof: no, even a bare process is killed
# timeout: 0.3
class Slow:
    def write(self, text):
        time.sleep(60)
    def flush(self):
        time.sleep(60)
sys.stdout = sys.stderr = Slow()

# %% hooks that never return
# proof: no, even a bare process is killed
# timeout: 0.3
sys.excepthook = lambda *a: time.sleep(60)
sys.unraisablehook = lambda *a: time.sleep(60)
sys.exitfunc = lambda: time.sleep(60)
1 / 0

# %% a lock that is never free
# proof: no, even a bare process is killed
# timeout: 0.3
lock = threading.Lock()
lock.acquire()
lock.acquire()

# %% hold the interpreter's lock
# proof: plain
# timeout: 0.3
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ctypes.PyDLL(None).sleep(60)

# %% read from an empty pipe
# proof: no, even a bare process is killed
# timeout: 0.3
inside, outside = os.pipe()
os.read(inside, 1)

# %% wait for input
# proof: no, the harness's input has an end
# timeout: 0.3
input()
sys.stdin.read()

# %% stop itself
# proof: plain
# timeout: 0.3
os.kill(os.getpid(), signal.SIGSTOP)

# %% stop the whole group
# proof: plain
# timeout: 0.3
os.kill(0, signal.SIGSTOP)

# %% refuse to exit
# proof: no, the filter is only for itself
# timeout: 0.3
# BPF: exit_group and exit return an error.
filter = struct.pack("=HBBI", 0x20, 0, 0, 0) + struct.pack("=HBBI", 0x15, 1, 0, 231) + struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000) + struct.pack("=HBBI", 0x06, 0, 0, 0x00050001)
code = ctypes.create_string_buffer(filter)
program = struct.pack("=HxxxxxxQ", 4, ctypes.addressof(code))
libc.prctl(38, 1, 0, 0, 0)
libc.prctl(22, 2, program, 0, 0)
print("done")

# %% writes that never succeed
# proof: no, the filter is only for itself
# timeout: 0.3
filter = struct.pack("=HBBI", 0x20, 0, 0, 0) + struct.pack("=HBBI", 0x15, 1, 0, 1) + struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000) + struct.pack("=HBBI", 0x06, 0, 0, 0x00050000)
code = ctypes.create_string_buffer(filter)
program = struct.pack("=HxxxxxxQ", 4, ctypes.addressof(code))
libc.prctl(38, 1, 0, 0, 0)
libc.prctl(22, 2, program, 0, 0)
print("done")

# %% a very long program
# proof: no, it only tries to make the runner slow
# timeout: 1
exec("x = 0\n" + "x += 1\n" * 300_000)

# %% a program that is hard to compile
# proof: no, even a bare process is killed
# timeout: 1
exec("x = " + "-" * 30_000 + "1")

# %% a number that is hard to factor
# proof: no, even a bare process is killed
# timeout: 0.3
import sympy
sympy.factorint(2**1277 - 1)
